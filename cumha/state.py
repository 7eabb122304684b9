"""The partial result of attention over some of the keys, and how two of them become one.

For one query row and a set of keys with scores ``s[j]``, any reference ``m`` (usually the largest
score) gives the triple

    l = sum_j e^(s[j] - m)                  o = sum_j e^(s[j] - m) * v[j]

from which ``out = o / l`` and ``lse = m + ln l`` follow, whatever ``m`` was. Disjoint sets merge by
bringing both to one reference:

    m = max(m1, m2)      l = l1*e^(m1-m) + l2*e^(m2-m)      o = o1*e^(m1-m) + o2*e^(m2-m)

``o`` stays *unnormalised* throughout. A formula in circulation multiplies each ``o`` by its ``l``
as well, ``(o1*l1*e^(m1-m) + o2*l2*e^(m2-m)) / l``: that belongs to normalised outputs, and with
unnormalised ones it counts every weight twice. `State.from_normalized` turns normalised outputs
into a State instead.

A row that saw no key is *empty*: ``l == 0`` says so, and nothing else does. Its ``o`` and ``m`` are
never read, and merging it with any other state returns that state bit for bit.

The same code serves NumPy and CuPy. Only metadata is checked; no value is read on the host.
"""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

_DTYPES = frozenset(
    np.dtype(kind) for kind in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
)
_LN2 = math.log(2.0)


def array_module(array: Any) -> Any:
    """Return the module (numpy or cupy) that `array` belongs to, without importing cupy."""
    if isinstance(array, np.ndarray):
        return np
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        return cupy
    raise TypeError(
        f"got {type(array).__module__}.{type(array).__qualname__}; need a numpy.ndarray or a "
        "cupy.ndarray; try numpy.asarray(x) or cupy.asarray(x)"
    )


@dataclass(frozen=True, eq=False, repr=False)
class State:
    """Unnormalised attention over some of the keys: ``out = o / l``, ``lse = m + ln l``.

    Parameters
    ----------
    o : ndarray, float32 (float64 for float64 problems), [batch, heads_q, len_q, head_dim_v]
        Sum of ``e^(score - m) * v``; not read where ``l == 0``. NumPy or CuPy.
    m : ndarray, dtype of `o`, [batch, heads_q, len_q]
        The reference that was subtracted from the scores, natural units; not read where ``l == 0``.
    l : ndarray, dtype of `o`, [batch, heads_q, len_q]
        Sum of ``e^(score - m)``. Exactly 0 marks a row that saw no key.
    dtype : dtype or str, optional
        What `finish` rounds to: float16, bfloat16, float32 or float64. None: the dtype of `o`.

    Raises
    ------
    TypeError
        Arrays of different libraries, or of another dtype than float32 or float64.
    ValueError
        Shapes that do not belong together, or arrays on different devices.
    """

    o: Any
    m: Any
    l: Any  # noqa: E741  (the name that the formula has everywhere)
    dtype: Any = None

    def __post_init__(self) -> None:
        library = array_module(self.o)
        if array_module(self.m) is not library or array_module(self.l) is not library:
            raise TypeError(
                f"State got o from {library.__name__}, m from {array_module(self.m).__name__}, l "
                f"from {array_module(self.l).__name__}; need one library"
            )
        if self.o.dtype not in (np.float32, np.float64) or not (
            self.o.dtype == self.m.dtype == self.l.dtype
        ):
            raise TypeError(
                f"State got o {self.o.dtype}, m {self.m.dtype}, l {self.l.dtype}; need all "
                "float32 or all float64"
            )
        if self.o.ndim != 4 or self.m.shape != self.o.shape[:3] or self.l.shape != self.m.shape:
            raise ValueError(
                f"State got o {self.o.shape}, m {self.m.shape}, l {self.l.shape}; need o [batch, "
                "heads_q, len_q, head_dim_v] and m, l [batch, heads_q, len_q]"
            )
        if not _device(self.o) == _device(self.m) == _device(self.l):
            raise ValueError(
                f"State got o on {_device(self.o)}, m on {_device(self.m)}, l on "
                f"{_device(self.l)}; need one device"
            )
        object.__setattr__(self, "dtype", _rounding_dtype(self.dtype, self.o.dtype))

    def __repr__(self) -> str:
        batch, heads_q, len_q, head_dim_v = self.o.shape
        return (
            f"State({array_module(self.o).__name__} {self.o.dtype}, batch={batch}, "
            f"heads_q={heads_q}, len_q={len_q}, head_dim_v={head_dim_v}, dtype={self.dtype})"
        )

    @classmethod
    def empty(
        cls,
        batch: int,
        heads_q: int,
        len_q: int,
        head_dim_v: int,
        *,
        dtype: Any = "float32",
        library: str = "numpy",
    ) -> State:
        """Return the state that saw no key: the identity of `merge`.

        Parameters
        ----------
        batch, heads_q, len_q, head_dim_v : int
            The shape of the output.
        dtype : dtype or str, optional
            What `finish` rounds to. The state itself is float64 for float64, else float32.
        library : {"numpy", "cupy"}, optional
            Where the arrays live; "cupy" takes the current device.

        Raises
        ------
        TypeError
            Another dtype.
        ValueError
            Another library.
        RuntimeError
            "cupy" before cupy was imported.
        """
        if library not in ("numpy", "cupy"):
            raise ValueError(f"library is {library!r}; need 'numpy' or 'cupy'")
        xp = np if library == "numpy" else sys.modules.get("cupy")
        if xp is None:
            raise RuntimeError("library='cupy' needs cupy; import cupy first")
        dtype = _rounding_dtype(dtype, None)
        compute = np.dtype(np.float64 if dtype == np.float64 else np.float32)
        rows = (batch, heads_q, len_q)
        return cls(
            xp.zeros((*rows, head_dim_v), compute),
            xp.full(rows, -np.inf, compute),
            xp.zeros(rows, compute),
            dtype,
        )

    @classmethod
    def from_normalized(cls, o: Any, lse: Any, *, base: Any = "e", dtype: Any = None) -> State:
        """Return the state of a finished output and its log-sum-exp.

        Parameters
        ----------
        o : ndarray, float16|bfloat16|float32|float64, [batch, heads_q, len_q, head_dim_v]
            Normalised output; not read in rows whose `lse` is -inf.
        lse : ndarray, float32|float64, [batch, heads_q, len_q]
            Log-sum-exp of the scaled scores; -inf marks a row that saw no key.
        base : {"e", 2}, optional
            Base of the logarithm in `lse`.
        dtype : dtype or str, optional
            What `finish` rounds to. None: the dtype of `o`.

        Returns
        -------
        State
            With ``l == 1`` and ``m == lse`` in the rows that saw a key.

        Raises
        ------
        TypeError, ValueError
            As the constructor; also another `base`.
        """
        xp = array_module(o)
        if array_module(lse) is not xp:
            raise TypeError(
                f"from_normalized got o from {xp.__name__}, lse from "
                f"{array_module(lse).__name__}; need one library"
            )
        if o.ndim != 4 or lse.shape != o.shape[:3]:
            raise ValueError(
                f"from_normalized got o {o.shape}, lse {lse.shape}; need o [batch, heads_q, "
                "len_q, head_dim_v] and lse [batch, heads_q, len_q]"
            )
        dtype = _rounding_dtype(dtype, _rounding_dtype(o.dtype, None))
        compute = np.dtype(np.float64 if o.dtype == np.float64 else np.float32)
        empty = lse == -np.inf
        with np.errstate(all="ignore"):
            m = (lse.astype(np.float64) * _LN2 if _is_base_2(base) else lse).astype(compute)
            values = o.astype(compute)
        values = xp.where(empty[..., None], compute.type(0), values)
        return cls(values, m, (~empty).astype(compute), dtype)

    def to_normalized(self, *, base: Any = "e") -> tuple[Any, Any]:
        """Return ``(o / l, log-sum-exp)`` in the state's own precision; the inverse converter.

        Parameters
        ----------
        base : {"e", 2}, optional
            Base of the logarithm that is returned.

        Returns
        -------
        o : ndarray, float32|float64, [batch, heads_q, len_q, head_dim_v]
            Exactly 0 in rows that saw no key.
        lse : ndarray, dtype of `o`, [batch, heads_q, len_q]
            -inf in rows that saw no key.
        """
        to_base_2 = _is_base_2(base)
        xp = array_module(self.o)
        empty = self.l == 0
        kind = self.o.dtype.type
        with np.errstate(all="ignore"):
            o = xp.where(empty[..., None], kind(0), self.o / self.l[..., None])
            lse = xp.where(empty, kind(-np.inf), self.m + xp.log(self.l))
            return o, lse * kind(1 / _LN2) if to_base_2 else lse

    def finish(self, layout: str = "BHLD") -> tuple[Any, Any]:
        """Return the attention output and the log-sum-exp.

        Parameters
        ----------
        layout : {"BHLD", "BLHD"}, optional
            Axis order of the output.

        Returns
        -------
        out : ndarray, `State.dtype`, [batch, heads_q, len_q, head_dim_v] ("BLHD": heads and len
            change places)
            Rounded once; exactly 0 in rows that saw no key.
        lse : ndarray, float32, [batch, heads_q, len_q]
            Natural logarithm; -inf in rows that saw no key.

        Raises
        ------
        ValueError
            Another layout.
        """
        if layout not in ("BHLD", "BLHD"):
            raise ValueError(f"layout is {layout!r}; need 'BHLD' or 'BLHD'")
        o, lse = self.to_normalized()
        if layout == "BLHD":
            o = o.swapaxes(1, 2)
        with np.errstate(all="ignore"):
            return o.astype(self.dtype, order="C", copy=False), lse.astype(np.float32, copy=False)


def merge(*states: State) -> State:
    """Return the state over the keys of all `states` together.

    Folded from left to right, so that the same states in the same order give the same bits. A
    single state is returned as it is.

    Parameters
    ----------
    *states : State
        At least one; equal shapes, dtypes, library and device. Their keys must be disjoint.

    Returns
    -------
    State
        Rows that are empty in one state have the bits of the other; rows that are empty in all
        have ``o == 0``, ``m == -inf``, ``l == 0``.

    Raises
    ------
    TypeError
        Something else than a State, or states of different libraries or dtypes.
    ValueError
        No state at all, or states of different shapes or devices.
    """
    if not states:
        raise ValueError("merge got no state; need at least one; State.empty(…) is the identity")
    for state in states:
        if not isinstance(state, State):
            raise TypeError(f"merge got {type(state).__qualname__}; need cumha.State")
        _check_like(state, states[0])
    return functools.reduce(_merge_two, states)


def _merge_two(a: State, b: State) -> State:
    xp = array_module(a.o)
    kind = a.o.dtype.type
    no_a, no_b = a.l == 0, b.l == 0

    def choose(if_both: Any, of_a: Any, of_b: Any, if_none: float) -> Any:
        # Selects instead of multiplying by 0: the values of an empty state may be NaN, and the
        # other state must come back with every bit, -0.0 included.
        absent_a, absent_b = (x[..., None] if of_a.ndim == 4 else x for x in (no_a, no_b))
        alone_b = xp.where(absent_b, kind(if_none), of_b)
        return xp.where(absent_a, alone_b, xp.where(absent_b, of_a, if_both))

    with np.errstate(all="ignore"):
        m = choose(xp.maximum(a.m, b.m), a.m, b.m, -np.inf)
        weight_a, weight_b = xp.exp(a.m - m), xp.exp(b.m - m)
        l_both = a.l * weight_a + b.l * weight_b
        o_both = a.o * weight_a[..., None] + b.o * weight_b[..., None]
        return State(choose(o_both, a.o, b.o, 0), m, choose(l_both, a.l, b.l, 0), a.dtype)


def _check_like(state: State, first: State) -> None:
    if array_module(state.o) is not array_module(first.o):
        raise TypeError(f"merge got {first} and {state}; need states of one library")
    if state.o.dtype != first.o.dtype or state.dtype != first.dtype:
        raise TypeError(f"merge got {first} and {state}; need states of one dtype")
    if state.o.shape != first.o.shape:
        raise ValueError(f"merge got {first} and {state}; need states of one shape")
    if _device(state.o) != _device(first.o):
        raise ValueError(
            f"merge got states on {_device(first.o)} and {_device(state.o)}; need one device"
        )


def _rounding_dtype(dtype: Any, default: Any) -> np.dtype[Any]:
    wanted = dtype if dtype is not None else default
    try:
        known: np.dtype[Any] = np.dtype(wanted)
    except TypeError:
        known = np.dtype(object)
    if wanted is None or known not in _DTYPES:
        raise TypeError(f"dtype is {wanted!r}; need 'float16', 'bfloat16', 'float32' or 'float64'")
    return known


def _is_base_2(base: Any) -> bool:
    if base == 2:
        return True
    if base == "e":
        return False
    raise ValueError(f"base is {base!r}; need 'e' (natural logarithm) or 2")


def _device(array: Any) -> Any:
    return getattr(array, "device", "cpu")
