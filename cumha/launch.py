"""Run a choice: allocate what the caller did not give, fill the parameter struct, launch.

Everything happens on the device and the current stream of the arrays; nothing waits for the device.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from cumha import host, params
from cumha.masks import Expr
from cumha.plan import Choice, kernel_spec, reduce_step, workspace_parts
from cumha.problem import (
    WORKSPACE_ALIGNMENT,
    Arrays,
    Problem,
    address,
    check_whole_strides,
    check_workspace_size,
    element_strides,
    extent,
)
from cumha.state import State, array_module


def execute(choice: Choice, problem: Problem, arrays: Arrays) -> tuple[Any, tuple[Any, ...]]:
    """Run a choice.

    Returns
    -------
    result : array, (array, array) or State
        ``out``, ``(out, lse)`` in the caller's layout, or the State of a partial call.
    used : tuple
        Everything the device may still read, to be kept while a captured graph lives.
    """
    check_workspace_size(arrays.workspace, choice.workspace_bytes)
    if choice.backend == "host":
        return _run_host(choice, problem, arrays), (arrays,)
    if choice.backend == "emulate":
        return _run_emulated(choice, problem, arrays), (arrays,)
    return _run_cuda(choice, problem, arrays)


def _with_outputs(problem: Problem, arrays: Arrays) -> tuple[Arrays, Any]:
    """Allocate ``out`` and ``lse`` where the caller gave none; return what he gets back."""
    xp = array_module(arrays.q)
    out, view, lse = arrays.out_given, arrays.out, arrays.lse
    batch, heads, rows, dim = problem.batch, problem.heads_q, problem.len_q, problem.head_dim_v
    if out is None:
        if problem.layout == "BHLD":
            out = view = xp.empty((batch, heads, rows, dim), arrays.q.dtype)
        else:
            out = xp.empty((batch, rows, heads, dim), arrays.q.dtype)
            view = out.transpose(0, 2, 1, 3)
    if problem.return_lse:
        lse = xp.empty((batch, heads, rows), np.float32) if lse is None else lse
        return arrays._replace(out=view, lse=lse), (out, lse)
    return arrays._replace(out=view), out


def _run_host(choice: Choice, problem: Problem, arrays: Arrays) -> Any:
    options: dict[str, Any] = {
        "tile_q": choice.tile_q,
        "tile_k": choice.tile_k,
        "splits": choice.splits,
        "split_by": choice.split_by,
        "keys_per_split": choice.keys_per_split,
    }
    if problem.store_state:
        return host.partial(problem, arrays, **options)
    arrays, result = _with_outputs(problem, arrays)
    host.forward(problem, arrays, **options)
    return result


def _prepared(choice: Choice, problem: Problem, arrays: Arrays) -> tuple[Arrays, State | None, Any]:
    """Allocate what the caller did not give: arrays with outputs, a State or None, the result."""
    if choice.workspace_bytes and arrays.workspace is None:
        arrays = arrays._replace(workspace=aligned_bytes(arrays.q, choice.workspace_bytes))
    if problem.store_state:
        state = _empty_state(problem, array_module(arrays.q))
        return arrays, state, state
    arrays, result = _with_outputs(problem, arrays)
    return arrays, None, result


def _run_cuda(choice: Choice, problem: Problem, arrays: Arrays) -> tuple[Any, tuple[Any, ...]]:
    import cupy

    assert problem.device is not None
    if cupy.cuda.runtime.getDevice() != problem.device:
        with cupy.cuda.Device(problem.device):
            return _run_cuda(choice, problem, arrays)
    steps = _steps(choice, problem, arrays.mask)
    kernels = [_kernel(*step) for step in steps]
    arrays, state, result = _prepared(choice, problem, arrays)
    if choice.grid:
        for (step, _, mask), kernel in zip(steps, kernels, strict=True):
            packed = np.void(pack(choice, problem, arrays, state, mask))
            blocks, threads = (step.grid, 1, 1), (step.threads, 1, 1)
            kernel(blocks, threads, (packed,), step.shared_bytes)
    return result, (arrays, result)


DEFAULT_SHARED = 48 * 1024  # bytes of shared memory that need no permission
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
SHARED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, percent

Step: TypeAlias = tuple[Choice, Problem, Expr | None]


def _steps(choice: Choice, problem: Problem, mask: Expr | None) -> list[Step]:
    """The kernels to launch one after the other: the path's, and the merge of its splits."""
    steps: list[Step] = [(choice, problem, mask)]
    reduce = reduce_step(choice, problem)
    return steps if reduce is None else [*steps, (*reduce, None)]


def _run_emulated(choice: Choice, problem: Problem, arrays: Arrays) -> Any:
    from cumha import emulate
    from cumha.device import architecture

    assert choice.device is not None
    for name, x in (("q", arrays.q), ("k", arrays.k), ("v", arrays.v)):
        check_whole_strides(name, x)
    capability = choice.device.compute_capability
    arch = architecture(capability, [10 * capability[0] + capability[1]])
    steps = _steps(choice, problem, arrays.mask)
    arrays, state, result = _prepared(choice, problem, arrays)
    if choice.grid:
        memory = [emulate.Memory(*m) for m in _memory(arrays, state)]
        for step, facts, mask in steps:
            kernel = emulate.load(kernel_spec(step, facts, mask, arch=arch, build=_build()))
            blocks, threads = (step.grid, 1, 1), (step.threads, 1, 1)
            packed = pack(choice, problem, arrays, state, mask)
            emulate.run(kernel, blocks, threads, packed, memory, step.shared_bytes)
    return result


def _memory(arrays: Arrays, state: State | None) -> Iterator[tuple[str, int, int, bool]]:
    """Name, first and end address, and whether it may be written, of all that a kernel touches."""
    inputs = {"q": arrays.q, "k": arrays.k, "v": arrays.v, "key_lengths": arrays.key_lengths}
    sources = () if arrays.mask is None else arrays.mask.arrays
    inputs.update({f"mask array {i}": s.data for i, s in enumerate(sources)})
    outputs = {"out": arrays.out, "lse": arrays.lse, "workspace": arrays.workspace}
    if state is not None:
        states = {"state o": state.o, "state m": state.m, "state l": state.l}
        outputs = {**states, "workspace": arrays.workspace}
    for writable, group in ((False, inputs), (True, outputs)):
        for name, x in group.items():
            if x is not None:
                yield (name, *extent(x), writable)


def _build() -> str:
    """Release builds, unless the environment variable CUMHA_BUILD asks for another."""
    return os.environ.get("CUMHA_BUILD", "release")


def _kernel(choice: Choice, problem: Problem, mask: Expr | None) -> Any:
    """The loaded function; built and loaded at the first call of its structure."""
    from cumha import compile as compiler

    assert choice.device is not None
    arch = compiler.target_architecture(choice.device)
    spec = kernel_spec(choice, problem, mask, arch=arch, build=_build())
    found = compiler.loaded(spec, choice.device.index)
    if found is None:
        import cupy

        if cupy.cuda.get_current_stream().is_capturing():
            raise RuntimeError(
                f"the kernel {spec.path} for this problem is not loaded yet and cannot be while a "
                "CUDA graph is captured: run it once before, after `python -m cumha compile` if "
                "compiling takes too long then"
            )
        found = compiler.load(spec, choice.device.index)
    if choice.shared_bytes > DEFAULT_SHARED and (spec, choice.device.index) not in _permitted:
        _permit(found.function, choice.device.index, choice.shared_bytes)
        _permitted.add((spec, choice.device.index))  # after it, so that no thread launches before
    return found.function


_permitted: set[tuple[Any, int]] = set()


def _permit(function: Any, device_index: int, shared_bytes: int) -> None:
    """Let a kernel have more dynamic shared memory than any may have by default.

    The rest of a multiprocessor's memory is cache: kernels want as many blocks there as fit.
    """
    import cupy

    with cupy.cuda.Device(device_index):
        cupy.cuda.driver.funcSetAttribute(function.ptr, MAX_DYNAMIC_SHARED, shared_bytes)
        cupy.cuda.driver.funcSetAttribute(function.ptr, SHARED_CARVEOUT, 100)


def aligned_bytes(like: Any, size: int) -> Any:
    """Uninitialised bytes, aligned as a workspace must be; CuPy's pool aligns by itself."""
    data = array_module(like).empty(size + WORKSPACE_ALIGNMENT, np.uint8)
    start = -address(data) % WORKSPACE_ALIGNMENT
    return data[start : start + size]


def _empty_state(problem: Problem, xp: Any) -> State:
    rows = (problem.batch, problem.heads_q, problem.len_q)
    dtype = np.dtype(problem.accumulator)
    return State(
        xp.empty((*rows, problem.head_dim_v), dtype),
        xp.empty(rows, dtype),
        xp.empty(rows, dtype),
        dtype=problem.dtype,
    )


def pack(
    choice: Choice, problem: Problem, arrays: Arrays, state: State | None, mask: Expr | None
) -> bytes:
    """The parameter struct of kernels_cu/params.cuh for one launch.

    ``mask`` is the mask of the launched kernel: None for `split_reduce`.
    """
    out, lse, lengths = arrays.out, arrays.lse, arrays.key_lengths
    if state is not None:
        outputs = (0, 0, address(state.o), address(state.m), address(state.l))
    else:
        outputs = (address(out), 0 if lse is None else address(lse), 0, 0, 0)
    splits = (0, 0, 0)
    if choice.workspace_bytes:
        start = address(arrays.workspace)
        o, m, l, _ = workspace_parts(problem, choice.splits)  # noqa: E741
        splits = (start + o, start + m, start + l)
    pointers = params.pack_pointers(
        address(arrays.q),
        address(arrays.k),
        address(arrays.v),
        *outputs,
        *splits,
        0 if lengths is None else address(lengths),
    )
    sizes = _packed_sizes(
        problem,
        _NONE if state is not None else element_strides(out),
        _NONE if lse is None else (*element_strides(lse), 0),
        0 if lengths is None else element_strides(lengths)[0],
        choice.splits,
        choice.keys_per_split or 0,
    )
    return pointers + sizes + params.pack_mask(mask)


_NONE = (0, 0, 0, 0)


@functools.lru_cache(maxsize=1024)
def _packed_sizes(
    problem: Problem,
    out: tuple[int, ...],
    lse: tuple[int, ...],
    key_length_stride: int,
    splits: int,
    keys_per_split: int,
) -> bytes:
    fields = {
        "q_stride": problem.q_strides,
        "k_stride": problem.k_strides,
        "v_stride": problem.v_strides,
        "out_stride": out,
        "lse_stride": lse,
        "key_length_stride": key_length_stride,
        "splits": splits,
        "keys_per_split": keys_per_split,
    }
    rest = params.CORE_FIELDS.keys() - fields.keys() - set(params.POINTERS)
    return params.pack_sizes({**fields, **{name: getattr(problem, name) for name in rest}})
