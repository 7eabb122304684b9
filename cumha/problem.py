"""What is asked, checked: the first stage of every call.

`describe` turns the caller's arrays and options into a `Problem` (metadata, hashable: what plans
are known by) and `Arrays` (the arrays themselves as [batch, heads, len, dim] views). Every check
that a user can fail is here. Checks read metadata and host values; device memory is never read.
"""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from cumha import masks
from cumha.masks import NARROW_LIMIT, Expr

DTYPES = ("float16", "bfloat16", "float32", "float64")
LAYOUTS = ("BHLD", "BLHD")
WORKSPACE_ALIGNMENT = 128  # bytes
_AXES = {"BHLD": "[batch, heads, len, dim]", "BLHD": "[batch, len, heads, dim]"}


def element_size(dtype: str) -> int:
    """Bytes of one element of a problem's dtype."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


@dataclass(frozen=True)
class Problem:
    """Metadata of one call. Strides are in elements and axis order [batch, heads, len, dim]."""

    library: str  # "numpy" or "cupy"
    device: int | None  # CuPy device index
    dtype: str
    layout: str
    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_k: int  # keys of this call
    head_dim: int
    head_dim_v: int
    scale: float
    mask: str | None  # structure of the mask expression, causal included
    key_lengths: str | None  # dtype of the lengths
    return_lse: bool
    store_state: bool  # a partial call: gives (o, m, l)
    key_offset: int
    total_keys: int
    wide_index: bool  # some index passes 2**28: index arithmetic in 64 bits
    q_strides: tuple[int, ...]
    k_strides: tuple[int, ...]
    v_strides: tuple[int, ...]
    vector: int  # bytes of the widest aligned access to rows of k and v, up to 16
    out_vector: int  # the same for out
    staged_bytes: int = 0  # of the mask's look-ups in k alone, per key

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads_q // max(self.heads_kv, 1)

    @property
    def rows(self) -> int:
        """Softmax rows: batch x heads_q x len_q."""
        return self.batch * self.heads_q * self.len_q

    @property
    def accumulator(self) -> str:
        """Dtype of scores, sums and states."""
        return "float64" if self.dtype == "float64" else "float32"

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in fields(Problem)))

    def __repr__(self) -> str:
        heads = f"{self.heads_q}" if self.group == 1 else f"{self.heads_q}:{self.heads_kv}"
        dim = f"{self.head_dim}"
        dim += "" if self.head_dim == self.head_dim_v else f"->{self.head_dim_v}"
        text = (
            f"Problem({self.library} {self.dtype} {self.layout}, batch {self.batch}, "
            f"heads {heads}, len_q {self.len_q}, len_k {self.len_k}, head_dim {dim}"
        )
        if self.store_state:
            text += f", keys {self.key_offset}… of {self.total_keys}"
        text += ", masked" if self.mask else ""
        return text + (", key_lengths" if self.key_lengths else "") + ")"


class Arrays(NamedTuple):
    """The arrays of one call, as [batch, heads, len, dim] views whatever the caller's layout."""

    q: Any
    k: Any
    v: Any
    out: Any  # None until allocated
    lse: Any
    workspace: Any
    key_lengths: Any  # host: int64 array; device: the caller's array
    mask: Expr | None
    out_given: Any  # what the caller passed as out=, in his layout; returned as it is


def describe(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any = None,
    causal: bool = False,
    key_lengths: Any = None,
    scale: float | None = None,
    layout: str = "BHLD",
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    workspace: Any = None,
    store_state: bool = False,
    key_offset: int = 0,
    total_keys: int | None = None,
) -> tuple[Problem, Arrays]:
    """Check a call and describe it; see `cumha.attention` for the arguments.

    What depends on metadata alone is remembered, so that a repeated call costs little.

    Raises
    ------
    TypeError
        Arrays that are not NumPy or CuPy arrays of one supported dtype, options of a wrong type.
    ValueError
        Shapes, heads, lengths or values that do not fit.
    """
    _check_flags(layout=layout, causal=causal, return_lse=return_lse)
    library, device = _library_and_device(q, k, v)
    dtype = _common_dtype(q.dtype, k.dtype, v.dtype)
    sizes = _sizes(layout, q.shape, k.shape, v.shape)
    total = _check_slice(sizes.len_k, key_offset, total_keys)
    expr = _mask_expression(mask, causal, library, q, sizes, total)
    lengths = _check_key_lengths(key_lengths, library, q, sizes.batch, total)
    views = (q, k, v) if layout == "BHLD" else tuple(x.transpose(0, 2, 1, 3) for x in (q, k, v))
    problem = _problem(
        library,
        device,
        dtype,
        layout,
        sizes,
        _check_scale(scale, sizes.head_dim),
        None if expr is None else expr.structure,
        None if lengths is None else _dtype_name(lengths.dtype),
        bool(return_lse),
        store_state,
        int(key_offset),
        total,
        *(input_strides(n, x, library) for n, x in zip("qkv", views, strict=True)),
        min(vector_bytes(views[1]), vector_bytes(views[2])),
        dense_vector_bytes(sizes.head_dim_v, q.itemsize)
        if out is None
        else _out_vector(out, layout),
        masks.staged_bytes(expr),
    )
    view_out = None if out is None else _check_out(out, problem, (q, k, v))
    if lse is not None:
        _check_lse(lse, problem, (q, k, v, out))
    if workspace is not None:
        _check_workspace(workspace, problem, (q, k, v, out, lse))
    arrays = Arrays(
        q=views[0],
        k=views[1],
        v=views[2],
        out=view_out,
        lse=lse,
        workspace=workspace,
        key_lengths=lengths,
        mask=expr,
        out_given=out,
    )
    return problem, arrays


# -- arrays ----------------------------------------------------------------------------------------


def library_of(x: Any) -> str | None:
    """``"numpy"``, ``"cupy"`` or None; never imports cupy."""
    if isinstance(x, np.ndarray):
        return None if isinstance(x, np.ma.MaskedArray) else "numpy"
    cupy = sys.modules.get("cupy")
    return "cupy" if cupy is not None and isinstance(x, cupy.ndarray) else None


def _describe_type(x: Any) -> str:
    """A type for messages, with the way to convert it where there is one."""
    if isinstance(x, np.ma.MaskedArray):
        return "a numpy.ma.MaskedArray (pass x.filled(...) and a boolean mask)"
    if isinstance(x, (list, tuple)):
        return f"a {type(x).__name__} (use numpy.asarray or cupy.asarray)"
    name = f"{type(x).__module__}.{type(x).__name__}"
    array_like = hasattr(x, "__dlpack__") or hasattr(x, "__array__") or isinstance(x, memoryview)
    if array_like and library_of(x) is None:
        return f"{name} (cupy.from_dlpack(x) or numpy.asarray(x) may convert it)"
    return name


def _library_and_device(q: Any, k: Any, v: Any) -> tuple[str, int | None]:
    if type(q) is type(k) is type(v) is np.ndarray:
        return "numpy", None
    libraries = {n: library_of(x) for n, x in (("q", q), ("k", k), ("v", v))}
    for name, x in (("q", q), ("k", k), ("v", v)):
        if libraries[name] is None:
            raise TypeError(f"{name} must be a NumPy or CuPy array, got {_describe_type(x)}")
    if len(set(libraries.values())) > 1:
        got = ", ".join(f"{n} is {lib}" for n, lib in libraries.items())
        raise TypeError(
            f"q, k and v must come from one library, got {got}: move them with cupy.asarray "
            "or .get()"
        )
    if libraries["q"] == "numpy":
        return "numpy", None
    devices = (q.device.id, k.device.id, v.device.id)
    if len(set(devices)) > 1:
        raise ValueError(f"q, k and v must be on one device, got q, k, v on {devices}")
    return "cupy", devices[0]


@functools.cache
def _dtype_name(dtype: Any) -> str:
    return str(dtype)


@functools.lru_cache(maxsize=64)
def _common_dtype(*dtypes: Any) -> str:
    for name, dtype in zip("qkv", dtypes, strict=True):
        if str(dtype) not in DTYPES or not dtype.isnative:
            raise TypeError(
                f"{name} has dtype {dtype!s}: attention takes {', '.join(DTYPES)} in native byte "
                "order"
            )
    if len(set(dtypes)) > 1:
        got = ", ".join(f"{n} {d!s}" for n, d in zip("qkv", dtypes, strict=True))
        raise TypeError(f"q, k and v must have one dtype, got {got}: cast with .astype")
    return str(dtypes[0])


class _Sizes(NamedTuple):
    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_k: int
    head_dim: int
    head_dim_v: int


@functools.lru_cache(maxsize=1024)
def _sizes(layout: str, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> _Sizes:
    """Sizes from the shapes, which are in the caller's layout."""
    shapes = f"q {q}, k {k}, v {v} as {_AXES[layout]}"
    for name, shape in (("q", q), ("k", k), ("v", v)):
        if len(shape) != 4:
            raise ValueError(f"{name} needs 4 axes {_AXES[layout]}, got shape {shape}")
    if layout == "BLHD":
        q, k, v = ((s[0], s[2], s[1], s[3]) for s in (q, k, v))
    if not q[0] == k[0] == v[0]:
        raise ValueError(f"q, k and v need the same batch, got {shapes}")
    if k[1] != v[1]:
        raise ValueError(f"k and v need the same number of heads, got {shapes}")
    if k[2] != v[2]:
        raise ValueError(f"k and v need the same number of keys, got {shapes}")
    if q[3] != k[3]:
        raise ValueError(f"q and k need the same head_dim, got {shapes}")
    if q[3] == 0 or v[3] == 0:
        raise ValueError(f"head_dim and head_dim_v must be at least 1, got {shapes}")
    if (k[1] == 0 and q[1] != 0) or (k[1] and q[1] % k[1]):
        raise ValueError(
            f"the number of query heads must be a multiple of the KV heads, got {q[1]} and "
            f"{k[1]} ({shapes})"
        )
    return _Sizes(q[0], q[1], k[1], q[2], k[2], q[3], v[3])


@functools.lru_cache(maxsize=1024)
def _problem(
    library: str,
    device: int | None,
    dtype: str,
    layout: str,
    sizes: _Sizes,
    scale: float,
    mask: str | None,
    key_lengths: str | None,
    return_lse: bool,
    store_state: bool,
    key_offset: int,
    total_keys: int,
    q_strides: tuple[int, ...],
    k_strides: tuple[int, ...],
    v_strides: tuple[int, ...],
    vector: int,
    out_vector: int,
    staged_bytes: int,
) -> Problem:
    packed_rows = sizes.heads_q // max(sizes.heads_kv, 1) * sizes.len_q
    largest = max(sizes.batch, sizes.heads_q, packed_rows, sizes.len_q, total_keys)
    return Problem(
        library=library,
        device=device,
        dtype=dtype,
        layout=layout,
        **sizes._asdict(),
        scale=scale,
        mask=mask,
        key_lengths=key_lengths,
        return_lse=return_lse,
        store_state=store_state,
        key_offset=key_offset,
        total_keys=total_keys,
        wide_index=largest > NARROW_LIMIT,
        q_strides=q_strides,
        k_strides=k_strides,
        v_strides=v_strides,
        vector=vector,
        out_vector=out_vector,
        staged_bytes=staged_bytes,
    )


@functools.lru_cache(maxsize=4096)
def _element_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> tuple[int, ...]:
    return tuple(0 if n <= 1 else s // itemsize for n, s in zip(shape, strides, strict=True))


def element_strides(x: Any) -> tuple[int, ...]:
    """Strides in elements; 0 where an axis has at most one element (its stride means nothing)."""
    return _element_strides(x.shape, x.strides, x.itemsize)


def input_strides(name: str, x: Any, library: str) -> tuple[int, ...]:
    """Strides of an input in elements; NumPy views may have strides between elements."""
    if library == "cupy":
        check_whole_strides(name, x)
    return _element_strides(x.shape, x.strides, x.itemsize)


def check_whole_strides(name: str, x: Any) -> None:
    """Raise ValueError where a kernel could not count x's strides in elements."""
    if any(s % x.itemsize for s in x.strides):
        raise ValueError(
            f"{name} has byte strides {x.strides} that are no multiples of its item size "
            f"{x.itemsize}: make a contiguous copy"
        )


def extent(x: Any) -> tuple[int, int]:
    """Addresses of the first and one past the last byte of an array."""
    lo, hi = _reach(x.shape, x.strides, x.itemsize)
    return address(x) + lo, address(x) + hi


def address(x: Any) -> int:
    """Address of element 0, in host or device memory."""
    if isinstance(x, np.ndarray):
        return int(x.__array_interface__["data"][0])
    return int(x.data.ptr)


@functools.lru_cache(maxsize=4096)
def _vector_bytes(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, misalignment: int
) -> int:
    if shape[-1] > 1 and strides[-1] != itemsize:
        return itemsize
    steps = [s for s, n in zip(strides[:-1], shape[:-1], strict=True) if n > 1]
    width = 16
    while width > itemsize and any(x % width for x in (shape[-1] * itemsize, misalignment, *steps)):
        width //= 2
    return width


def vector_bytes(x: Any) -> int:
    """Bytes of the widest access, 16 at most, with which every row of x can be read whole."""
    return _vector_bytes(x.shape, x.strides, x.itemsize, address(x) % 16)


def dense_vector_bytes(dim: int, itemsize: int) -> int:
    """`vector_bytes` of a dense array that is still to be allocated."""
    return _vector_bytes((dim,), (itemsize,), itemsize, 0)


def _out_vector(out: Any, layout: str) -> int:
    """`vector_bytes` of what was given as out=; nothing is known of it yet."""
    if library_of(out) is None or out.ndim != 4:
        return 1  # refused later, with a message
    return vector_bytes(out)


# -- options ---------------------------------------------------------------------------------------


def _check_flags(*, layout: Any, causal: Any, return_lse: Any) -> None:
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}: use one of {', '.join(LAYOUTS)}")
    for name, flag in (("causal", causal), ("return_lse", return_lse)):
        if not isinstance(flag, (bool, np.bool_)):
            raise TypeError(f"{name} must be True or False, got {flag!r}")


def check_integer(name: str, value: Any, least: int) -> int:
    """An integer option, or a clear error."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)


def _check_scale(scale: Any, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, (bool, np.bool_)) or not isinstance(
        scale, (int, float, np.integer, np.floating)
    ):
        raise TypeError(f"scale must be a real number, got {_describe_type(scale)}")
    try:
        value = float(scale)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise ValueError(f"scale must be finite, got {scale}")
    return value


def _check_slice(len_k: int, key_offset: Any, total_keys: Any) -> int:
    check_integer("key_offset", key_offset, 0)
    if total_keys is None:
        return int(key_offset) + len_k
    total = check_integer("total_keys", total_keys, 0)
    if key_offset + len_k > total:
        raise ValueError(
            f"keys {key_offset}…{key_offset + len_k} of this call pass total_keys {total}: "
            "need key_offset + len_k <= total_keys"
        )
    return total


def _mask_expression(
    mask: Any, causal: bool, library: str, q: Any, sizes: _Sizes, total: int
) -> Expr | None:
    if mask is None:
        if not causal:
            return None
        mask = masks.causal()
    elif causal:
        mask = masks.causal() & _as_expression(mask)
    else:
        mask = _as_expression(mask)
    masks.check_arrays(
        mask, batch=sizes.batch, heads_q=sizes.heads_q, len_q=sizes.len_q, len_k=total
    )
    for source in mask.arrays:
        _check_companion("a mask array", source.data, library, q)
    simple = masks.specialise(mask, len_q=sizes.len_q)
    return None if simple.op == "const" and simple.value else simple


def _as_expression(mask: Any) -> Expr:
    if not isinstance(mask, Expr):
        if isinstance(mask, masks.ArrayInput):
            raise TypeError("mask is masks.array(…) without indices: use masks.dense(keep)")
        if library_of(mask) is None:
            hint = "masks.where(function)" if callable(mask) else "a boolean array"
            raise TypeError(
                f"mask must be a mask of cumha.masks or a boolean array, got "
                f"{_describe_type(mask)}: use {hint}"
            )
        return masks.dense(mask)
    if mask.kind != "bool":
        raise TypeError(f"mask must be a boolean expression, got the {mask.kind} {mask!r}")
    return mask


def _check_companion(name: str, x: Any, library: str, q: Any) -> None:
    """An array that goes with q must be of its library and on its device."""
    found = library_of(x)
    if found is None:
        raise TypeError(f"{name} must be a NumPy or CuPy array, got {_describe_type(x)}")
    if found != library:
        move = "cupy.asarray(x)" if library == "cupy" else "x.get()"
        raise TypeError(f"{name} is a {found} array but q, k and v are {library}: use {move}")
    if library == "cupy" and x.device.id != q.device.id:
        raise ValueError(f"{name} is on device {x.device.id}, q on {q.device.id}")


def _check_key_lengths(lengths: Any, library: str, q: Any, batch: int, total: int) -> Any:
    if lengths is None:
        return None
    if library_of(lengths) == "cupy":
        _check_companion("key_lengths", lengths, library, q)
        if str(lengths.dtype) not in ("int32", "int64"):
            raise TypeError(
                f"key_lengths on a device must be int32 or int64, got {lengths.dtype!s}"
            )
        _check_length_shape(lengths, batch)
        return lengths
    try:
        values = np.asarray(lengths)
    except ValueError as error:
        raise TypeError(f"key_lengths must hold integers, got {lengths!r}") from error
    if isinstance(lengths, (list, tuple)) and values.size == 0:
        values = values.astype(np.int64)  # NumPy makes floats of an empty list
    if isinstance(lengths, np.ma.MaskedArray) or values.dtype.kind not in "iu":
        raise TypeError(f"key_lengths must hold integers, got {lengths!r}")
    _check_length_shape(values, batch)
    for b, n in enumerate(values.tolist()):
        if not 0 <= n <= total:
            raise ValueError(f"key_lengths[{b}] = {n} is outside 0…{total}, the number of keys")
    values = values.astype(np.int64)
    if library == "cupy":
        return _upload(values, q)
    return values


def _check_length_shape(lengths: Any, batch: int) -> None:
    if tuple(lengths.shape) != (batch,):
        raise ValueError(
            f"key_lengths needs shape [batch] = ({batch},), got {tuple(lengths.shape)}"
        )


def _upload(values: np.ndarray, q: Any) -> Any:
    import cupy

    with cupy.cuda.Device(q.device.id):
        if cupy.cuda.get_current_stream().is_capturing():
            raise RuntimeError(
                "key_lengths in host memory cannot be copied while a CUDA graph is captured: "
                "pass a CuPy array"
            )
        return cupy.asarray(values)


# -- outputs ---------------------------------------------------------------------------------------


def _check_out(out: Any, problem: Problem, inputs: tuple[Any, ...]) -> Any:
    shape = (problem.batch, problem.heads_q, problem.len_q, problem.head_dim_v)
    if problem.layout == "BLHD":
        shape = (shape[0], shape[2], shape[1], shape[3])
    _check_output("out", out, shape, problem.dtype, problem, inputs[0])
    _refuse_overlap("out", out, ("q", "k", "v"), inputs)
    return out if problem.layout == "BHLD" else out.transpose(0, 2, 1, 3)


def _check_lse(lse: Any, problem: Problem, others: tuple[Any, ...]) -> None:
    if not problem.return_lse:
        raise ValueError("lse= was given but return_lse is False: pass return_lse=True")
    shape = (problem.batch, problem.heads_q, problem.len_q)
    _check_output("lse", lse, shape, "float32", problem, others[0])
    _refuse_overlap("lse", lse, ("q", "k", "v", "out"), others)


def _check_workspace(workspace: Any, problem: Problem, others: tuple[Any, ...]) -> None:
    _check_companion("workspace", workspace, problem.library, others[0])
    if str(workspace.dtype) != "uint8" or workspace.ndim != 1:
        raise TypeError(
            f"workspace must be a 1-d uint8 array, got {workspace.dtype!s} {tuple(workspace.shape)}"
        )
    _check_writable("workspace", workspace)
    if workspace.size and workspace.strides != (1,):
        raise ValueError(f"workspace must be contiguous, got strides {workspace.strides}")
    if workspace.size and address(workspace) % WORKSPACE_ALIGNMENT:
        raise ValueError(
            f"workspace must be aligned to {WORKSPACE_ALIGNMENT} bytes, its address is "
            f"{address(workspace) % WORKSPACE_ALIGNMENT} past a multiple"
        )
    _refuse_overlap("workspace", workspace, ("q", "k", "v", "out", "lse"), others)


def check_workspace_size(workspace: Any, needed: int) -> None:
    """Raise ValueError where a given workspace is smaller than the plan's."""
    if workspace is not None and workspace.size < needed:
        raise ValueError(f"workspace has {workspace.size} bytes, the plan needs {needed}")


def _check_output(
    name: str, x: Any, shape: tuple[int, ...], dtype: str, problem: Problem, q: Any
) -> None:
    _check_companion(name, x, problem.library, q)
    if str(x.dtype) != dtype or not x.dtype.isnative:
        raise TypeError(f"{name} needs dtype {dtype}, got {x.dtype!s}")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} needs shape {shape}, got {tuple(x.shape)}")
    _check_writable(name, x)
    if address(x) % x.itemsize or any(s % x.itemsize for s in x.strides):
        raise ValueError(f"{name} is not aligned to its item size of {x.itemsize} bytes")
    if _overlaps_itself(x.shape, x.strides, x.itemsize):
        raise ValueError(f"{name} has elements that share memory (strides {x.strides})")


def _check_writable(name: str, x: Any) -> None:
    if isinstance(x, np.ndarray) and not x.flags.writeable:
        raise ValueError(f"{name} is read-only")


@functools.lru_cache(maxsize=1024)
def _overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether two elements share memory; exact for axes that nest, as all usual views do."""
    if 0 in shape:
        return False
    covered = itemsize
    for stride, n in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride < covered:
            return True
        covered += stride * (n - 1)
    return False


@functools.lru_cache(maxsize=4096)
def _reach(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """First and one past the last byte of an array, relative to element 0."""
    if 0 in shape:
        return 0, 0
    spans = [s * (n - 1) for s, n in zip(strides, shape, strict=True)]
    return sum(s for s in spans if s < 0), sum(s for s in spans if s > 0) + itemsize


def _refuse_overlap(name: str, x: Any, names: tuple[str, ...], others: tuple[Any, ...]) -> None:
    where = address(x)
    lo, hi = _reach(x.shape, x.strides, x.itemsize)
    for other_name, other in zip(names, others, strict=True):
        if other is None:
            continue
        distance = address(other) - where
        other_lo, other_hi = _reach(other.shape, other.strides, other.itemsize)
        if other_lo + distance < hi and lo < other_hi + distance and _share_memory(x, other):
            raise ValueError(f"{name} shares memory with {other_name}: use separate arrays")


def _share_memory(x: Any, y: Any) -> bool:
    """Exact, or True where NumPy finds the question too hard."""
    try:
        return np.shares_memory(_shadow(x), _shadow(y), max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _shadow(x: Any) -> np.ndarray:
    """A NumPy array with x's addresses, for address arithmetic only: its memory is never read."""
    if isinstance(x, np.ndarray):
        return x
    return np.asarray(_DeviceAddresses(x))


class _DeviceAddresses:
    def __init__(self, x: Any) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(x.shape),
            "strides": tuple(x.strides),
            "typestr": f"|V{x.dtype.itemsize}",
            "data": (int(x.data.ptr), False),
        }


def first_difference(a: Problem, b: Problem) -> str | None:
    """Name and values of the first field in which two problems differ, for messages."""
    for field in fields(Problem):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if field.name in ("vector", "out_vector"):
            if y < x:
                return f"rows allow accesses of {y} bytes, planned for {x}"
        elif x != y:
            return f"{field.name} is {y!r}, planned for {x!r}"
    return None
