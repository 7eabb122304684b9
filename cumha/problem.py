"""What is asked, checked: the first stage of every call.

`describe` turns the caller's arrays and options into a `Problem` (metadata, hashable: what plans are known
by) and `Arrays` (the arrays themselves as [batch, heads, len, dim] views). Every check that a user can fail
is here. Checks read metadata and host values; device memory is never read.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from cumha import masks
from cumha.masks import NARROW_LIMIT, Expr

DTYPES = ("float16", "bfloat16", "float32", "float64")
LAYOUTS = ("BHLD", "BLHD")
WORKSPACE_ALIGNMENT = 128  # bytes
_SIZES = {"BHLD": "[batch, heads, len, dim]", "BLHD": "[batch, len, heads, dim]"}


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
    alignment: int  # bytes, a power of two up to 16 that divides every input's address

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

    def __repr__(self) -> str:
        heads = f"{self.heads_q}" if self.group == 1 else f"{self.heads_q}:{self.heads_kv}"
        dim = f"{self.head_dim}"
        dim += "" if self.head_dim == self.head_dim_v else f"->{self.head_dim_v}"
        text = (
            f"Problem({self.library} {self.dtype} {self.layout}, batch {self.batch}, heads {heads}, "
            f"len_q {self.len_q}, len_k {self.len_k}, head_dim {dim}"
        )
        if self.store_state:
            text += f", keys {self.key_offset}… of {self.total_keys}"
        text += ", masked" if self.mask else ""
        return text + (", key_lengths" if self.key_lengths else "") + ")"


@dataclass(frozen=True)
class Arrays:
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

    Raises
    ------
    TypeError
        Arrays that are not NumPy or CuPy arrays of one supported dtype, options of a wrong type.
    ValueError
        Shapes, heads, lengths or values that do not fit.
    """
    _check_flags(layout=layout, causal=causal, return_lse=return_lse)
    library = _common_library({"q": q, "k": k, "v": v})
    dtype = _common_dtype({"q": q, "k": k, "v": v})
    view_q, view_k, view_v = (_as_bhld(n, x, layout) for n, x in (("q", q), ("k", k), ("v", v)))
    shape = _check_shapes(view_q, view_k, view_v, layout)
    total = _check_slice(view_k.shape[2], key_offset, total_keys)
    sizes = {"batch": shape[0], "heads_q": shape[1], "len_q": view_q.shape[2], "len_k": total}
    expr = _mask_expression(mask, causal, library, view_q, sizes)
    lengths = _check_key_lengths(key_lengths, library, view_q, shape[0], total)
    wide = max(*sizes.values(), key_offset) > NARROW_LIMIT
    problem = Problem(
        library=library,
        device=view_q.device.id if library == "cupy" else None,
        dtype=dtype,
        layout=layout,
        batch=shape[0],
        heads_q=shape[1],
        heads_kv=view_k.shape[1],
        len_q=view_q.shape[2],
        len_k=view_k.shape[2],
        head_dim=view_q.shape[3],
        head_dim_v=view_v.shape[3],
        scale=_check_scale(scale, view_q.shape[3]),
        mask=None if expr is None else expr.structure,
        key_lengths=None if lengths is None else str(lengths.dtype),
        return_lse=return_lse,
        store_state=store_state,
        key_offset=key_offset,
        total_keys=total,
        wide_index=wide,
        q_strides=element_strides(view_q),
        k_strides=element_strides(view_k),
        v_strides=element_strides(view_v),
        alignment=min(_alignment(x) for x in (view_q, view_k, view_v)),
    )
    view_out = _check_out(out, problem, (q, k, v))
    _check_lse(lse, problem, (q, k, v, out))
    _check_workspace(workspace, problem, (q, k, v, out, lse))
    arrays = Arrays(view_q, view_k, view_v, view_out, lse, workspace, lengths, expr, out)
    return problem, arrays


# -- arrays -------------------------------------------------------------------------------------------


def library_of(x: Any) -> str | None:
    """``"numpy"``, ``"cupy"`` or None; never imports cupy."""
    if isinstance(x, np.ndarray):
        return None if isinstance(x, np.ma.MaskedArray) else "numpy"
    cupy = sys.modules.get("cupy")
    return "cupy" if cupy is not None and isinstance(x, cupy.ndarray) else None


def _describe_type(x: Any) -> str:
    if isinstance(x, np.ma.MaskedArray):
        return "a numpy.ma.MaskedArray (pass x.filled(...) and a boolean mask)"
    if isinstance(x, (list, tuple)):
        return f"a {type(x).__name__} (use numpy.asarray or cupy.asarray)"
    hint = " (cupy.from_dlpack(x) or numpy.asarray(x) may convert it)" if x is not None else ""
    return f"{type(x).__module__}.{type(x).__name__}{hint}"


def _common_library(arrays: dict[str, Any]) -> str:
    libraries = {}
    for name, x in arrays.items():
        libraries[name] = library_of(x)
        if libraries[name] is None:
            raise TypeError(f"{name} must be a NumPy or CuPy array, got {_describe_type(x)}")
    if len(set(libraries.values())) > 1:
        got = ", ".join(f"{n} is {lib}" for n, lib in libraries.items())
        raise TypeError(
            f"q, k and v must come from one library, got {got}: move them with cupy.asarray or .get()"
        )
    if libraries["q"] == "cupy":
        devices = {n: x.device.id for n, x in arrays.items()}
        if len(set(devices.values())) > 1:
            raise ValueError(f"q, k and v must be on one device, got {devices}")
    return str(libraries["q"])


def _common_dtype(arrays: dict[str, Any]) -> str:
    for name, x in arrays.items():
        if str(x.dtype) not in DTYPES or not x.dtype.isnative:
            raise TypeError(
                f"{name} has dtype {x.dtype!s}: attention takes {', '.join(DTYPES)} in native byte order"
            )
    dtypes = {n: str(x.dtype) for n, x in arrays.items()}
    if len(set(dtypes.values())) > 1:
        raise TypeError(f"q, k and v must have one dtype, got {dtypes}: cast with .astype")
    return dtypes["q"]


def _as_bhld(name: str, x: Any, layout: str) -> Any:
    if x.ndim != 4:
        raise ValueError(f"{name} needs 4 axes {_SIZES[layout]}, got shape {tuple(x.shape)}")
    if library_of(x) == "cupy" and any(s % x.itemsize for s in x.strides):
        raise ValueError(
            f"{name} has byte strides {x.strides} that are no multiples of its item size {x.itemsize}: "
            "make a contiguous copy"
        )
    return x if layout == "BHLD" else x.transpose(0, 2, 1, 3)


def element_strides(x: Any) -> tuple[int, ...]:
    """Strides in elements; 0 where an axis has at most one element (its stride means nothing)."""
    size = x.dtype.itemsize
    return tuple(0 if n <= 1 else s // size for n, s in zip(x.shape, x.strides, strict=True))


def address(x: Any) -> int:
    """Address of element 0, in host or device memory."""
    return int(x.data.ptr if library_of(x) == "cupy" else x.ctypes.data)


def _alignment(x: Any) -> int:
    where = address(x)
    return min(where & -where, 16) if where else 16


def _check_shapes(q: Any, k: Any, v: Any, layout: str) -> tuple[int, int]:
    shapes = ", ".join(f"{n} {tuple(x.shape)}" for n, x in (("q", q), ("k", k), ("v", v)))
    if layout != "BHLD":
        shapes += " (as [batch, heads, len, dim])"
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"q, k and v need the same batch, got {shapes}")
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"k and v need the same number of heads, got {shapes}")
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"k and v need the same number of keys, got {shapes}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k need the same head_dim, got {shapes}")
    if q.shape[3] == 0 or v.shape[3] == 0:
        raise ValueError(f"head_dim and head_dim_v must be at least 1, got {shapes}")
    heads_q, heads_kv = q.shape[1], k.shape[1]
    if (heads_kv == 0 and heads_q != 0) or (heads_kv and heads_q % heads_kv):
        raise ValueError(
            f"the number of query heads must be a multiple of the KV heads, got {heads_q} and "
            f"{heads_kv} ({shapes})"
        )
    return q.shape[0], heads_q


# -- options ------------------------------------------------------------------------------------------


def _check_flags(*, layout: Any, causal: Any, return_lse: Any) -> None:
    if layout not in LAYOUTS:
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
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    return float(scale)


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
    mask: Any, causal: bool, library: str, q: Any, sizes: dict[str, int]
) -> Expr | None:
    if mask is not None and not isinstance(mask, Expr):
        if isinstance(mask, masks.ArrayInput):
            raise TypeError("mask is masks.array(…) without indices: use masks.dense(keep)")
        if library_of(mask) is None:
            hint = "masks.where(function)" if callable(mask) else "a boolean array"
            raise TypeError(
                f"mask must be a mask of cumha.masks or a boolean array, got "
                f"{_describe_type(mask)}: use {hint}"
            )
        mask = masks.dense(mask)
    if mask is not None and mask.kind != "bool":
        raise TypeError(f"mask must be a boolean expression, got the {mask.kind} {mask!r}")
    if causal:
        mask = masks.causal() if mask is None else masks.causal() & mask
    if mask is None:
        return None
    masks.check_arrays(mask, **sizes)
    for source in mask.arrays:
        _check_companion("a mask array", source.data, library, q)
    simple = masks.specialise(mask, len_q=sizes["len_q"])
    return None if simple.op == "const" and simple.value else simple


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
            raise TypeError(f"key_lengths on a device must be int32 or int64, got {lengths.dtype!s}")
        _check_length_shape(lengths, batch)
        return lengths
    values = np.asarray(lengths)
    if isinstance(lengths, np.ma.MaskedArray) or (
        values.dtype.kind not in "iu" and not (values.size == 0 and isinstance(lengths, (list, tuple)))
    ):
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


# -- outputs ------------------------------------------------------------------------------------------


def _check_out(out: Any, problem: Problem, inputs: tuple[Any, ...]) -> Any:
    if out is None:
        return None
    shape = (problem.batch, problem.heads_q, problem.len_q, problem.head_dim_v)
    if problem.layout == "BLHD":
        shape = (shape[0], shape[2], shape[1], shape[3])
    _check_output("out", out, shape, problem.dtype, problem, inputs[0])
    _refuse_overlap("out", out, ("q", "k", "v"), inputs)
    return _as_bhld("out", out, problem.layout)


def _check_lse(lse: Any, problem: Problem, others: tuple[Any, ...]) -> None:
    if lse is None:
        return
    if not problem.return_lse:
        raise ValueError("lse= was given but return_lse is False: pass return_lse=True")
    shape = (problem.batch, problem.heads_q, problem.len_q)
    _check_output("lse", lse, shape, "float32", problem, others[0])
    _refuse_overlap("lse", lse, ("q", "k", "v", "out"), others)


def _check_workspace(workspace: Any, problem: Problem, others: tuple[Any, ...]) -> None:
    if workspace is None:
        return
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
    if address(x) % x.dtype.itemsize or any(s % x.dtype.itemsize for s in x.strides):
        raise ValueError(f"{name} is not aligned to its item size of {x.dtype.itemsize} bytes")
    if _overlaps_itself(x):
        raise ValueError(f"{name} has elements that share memory (strides {x.strides})")


def _check_writable(name: str, x: Any) -> None:
    if isinstance(x, np.ndarray) and not x.flags.writeable:
        raise ValueError(f"{name} is read-only")


def _overlaps_itself(x: Any) -> bool:
    """Whether two elements share memory; exact for axes that nest, as all usual views do."""
    covered = x.dtype.itemsize
    for stride, n in sorted((abs(s), n) for s, n in zip(x.strides, x.shape, strict=True) if n > 1):
        if stride < covered:
            return True
        covered = stride * (n - 1) + covered
    return False


def _refuse_overlap(name: str, x: Any, names: tuple[str, ...], others: tuple[Any, ...]) -> None:
    for other_name, other in zip(names, others, strict=True):
        if other is not None and np.shares_memory(_shadow(x), _shadow(other), max_work=10_000):
            raise ValueError(f"{name} shares memory with {other_name}: use separate arrays")


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
        if field.name == "alignment":
            if y < x:
                return f"alignment is {y} bytes, planned for {x}"
        elif x != y:
            return f"{field.name} is {y!r}, planned for {x!r}"
    return None
