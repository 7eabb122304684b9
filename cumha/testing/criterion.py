"""How near a result must be to the float64 reference, and a report of where it is not.

The criterion of the CUDA cores and of the host path, element by element:

    |actual - reference| <= rounding + computing

rounding
    Half a unit in the last place of the stored dtype, at the reference value: the result is
    rounded once.
computing, float16 and bfloat16
    The larger of 1e-5 and 4 * eps * max|score| * max|v|, eps that of float32, which computes. A
    score is off by its own rounding, which changes a weight by as much relative to itself; 1e-5
    covers everything else and is a fiftieth of a float16 rounding at 1.
computing, float32
    1e-5 + 4 * eps * max|score| * max|v|: the same two errors, added up, because neither hides
    behind the rounding.
computing, float64
    1e-13 + 4 * eps * max|score| * max|v| with the eps of float64: the rule of float32 in the
    other precision; the reference errs as much.
LSE
    As a value with max|v| = 1: the sum of exponentials is off by as much as a weight, relative
    to itself. It is stored as float32 whatever computed it.

``max|score|`` is that of ``|scale| * |q| . |k|``, because a sum that cancels errs by its terms. It
is taken per row over the keys that the row sees, and as at least 1 because sums err even if every
score is 0; ``max|v|`` likewise. NaN must stand where the reference has NaN, then infinities where
it has those, then values are compared: a maximum over errors would drop NaN, and a NaN is a fault
of another kind than an inexact value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cumha import masks, reference
from cumha.state import State
from cumha.testing.transfer import to_host

_Float64 = NDArray[np.float64]
_AXES = {
    "BHLD": ("batch", "head", "query", "dim"),
    "BLHD": ("batch", "query", "head", "dim"),
    "lse": ("batch", "head", "query"),
}
_MOST_SHOWN = 6


def _half_ulp(values: Any, dtype: Any) -> _Float64:
    """Half the distance between neighbours in ``dtype`` at the given values."""
    info: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    _, exponent = np.frexp(np.abs(values))
    exponent = np.maximum(exponent - 1, int(info.minexp))  # below it, subnormals are equally spaced
    return np.asarray(np.ldexp(0.5, exponent - int(info.nmant)), np.float64)


def allowed_error(
    expected: Any, *, stored: Any, dtype: Any, max_score: Any = 1.0, max_value: Any = 1.0
) -> _Float64:
    """The error that each element may have; the rules are those of this module.

    Parameters
    ----------
    expected : numpy.ndarray, float64
        Finite reference values.
    stored : dtype
        What the result is stored as.
    dtype : dtype
        The problem's; float64 problems compute in float64, all others in float32.
    max_score, max_value : float or numpy.ndarray that broadcasts to ``expected``
        Largest finite ``|scale| * |q| . |k|`` and ``|v|`` that an element depends on.

    Returns
    -------
    numpy.ndarray, float64, shape of ``expected``
    """
    dtype = np.dtype(dtype)
    double = dtype == np.float64
    eps = float(np.finfo(np.float64 if double else np.float32).eps)
    score_error = 4 * eps * np.maximum(max_score, 1.0) * np.maximum(max_value, 1.0)
    if double:
        computing = 1e-13 + score_error
    elif dtype == np.float32:
        computing = 1e-5 + score_error
    else:
        computing = np.maximum(1e-5, score_error)
    # The computed value, not the reference, is rounded: it may lie in the next binade.
    return np.asarray(_half_ulp(np.abs(expected) + computing, stored) + computing)


@dataclass(frozen=True)
class Difference:
    """One wrong element."""

    at: tuple[int, ...]
    actual: float
    expected: float
    allowed: float  # largest error allowed, NaN where values are not compared


@dataclass(frozen=True)
class Mismatch:
    """What is wrong with a result, worst first."""

    name: str
    kind: str  # "NaN", "infinity" or "value": the first kind that differs, in this order
    counts: dict[str, int]  # wrong elements of each kind
    total: int
    axes: tuple[str, ...]
    pattern: str
    worst: tuple[Difference, ...]

    @property
    def wrong(self) -> int:
        """Number of wrong elements of all kinds."""
        return sum(self.counts.values())

    def __str__(self) -> str:
        title = {
            "NaN": "NaN where there should be none, or none where there should be one",
            "infinity": "infinities differ",
            "value": "values differ",
        }[self.kind]
        counted = ", ".join(f"{n} by {kind}" for kind, n in self.counts.items() if n)
        lines = [
            f"{self.name}: {title}",
            f"  wrong    {self.wrong} of {self.total} elements ({counted})",
            f"  where    {self.pattern}",
        ]
        for i, one in enumerate(self.worst):
            place = ", ".join(f"{a} {x}" for a, x in zip(self.axes, one.at, strict=True))
            text = f"[{place}] actual {one.actual:.9g}, expected {one.expected:.9g}"
            if not math.isnan(one.allowed):
                error = abs(one.actual - one.expected)
                text += f", error {error:.3g} of {one.allowed:.3g} allowed"
            lines.append(("  worst    " if i == 0 else "           ") + text)
        return "\n".join(lines)


def _describe_indices(axis: str, wrong: NDArray[np.bool_]) -> str | None:
    """Which indices along an axis hold wrong elements; None where all do."""
    at = np.flatnonzero(wrong).tolist()
    size, first, last = wrong.size, at[0], at[-1]
    if len(at) == size:
        return None
    if len(at) == 1:
        return f"only {axis} {first}"
    steps = set(np.diff(at).tolist())
    if steps == {1}:
        if last == size - 1:
            return f"only {axis} >= {first}"
        return f"only {axis} < {last + 1}" if first == 0 else f"only {axis} {first} to {last}"
    if len(steps) == 1 and len(at) > 2:
        return f"only every {steps.pop()}. {axis}, {first} to {last}"
    if len(at) <= 8:
        return f"only {axis} {', '.join(map(str, at))}"
    return f"{len(at)} of {size} indices of {axis}, {first} to {last}"


def _pattern(wrong: NDArray[np.bool_], axes: Sequence[str]) -> str:
    """Where wrong elements lie, axis by axis, and whether they fill what that describes."""
    hints = []
    box = 1
    for i, axis in enumerate(axes):
        others = tuple(a for a in range(wrong.ndim) if a != i)
        along = np.asarray(wrong.any(axis=others))
        box *= int(along.sum())
        hint = _describe_indices(axis, along)
        if hint is not None:
            hints.append(hint)
    share = f"{int(wrong.sum())} of the {box} elements there"
    return f"{'; '.join(hints) or 'everywhere'} ({share if box > wrong.sum() else 'all there'})"


def _faults(
    actual: Any, expected: _Float64, dtype: Any, max_score: Any, max_value: Any
) -> tuple[dict[str, NDArray[np.bool_]], _Float64, _Float64]:
    """Wrong elements of each kind, how far each error is above what is allowed, and what is."""
    with np.errstate(all="ignore"):
        rounded = expected.astype(actual.dtype).astype(np.float64)
        got = actual.astype(np.float64)
        nan = np.isnan(got) != np.isnan(rounded)
        infinite = (np.isinf(got) | np.isinf(rounded)) & (got != rounded) & ~nan
        finite = np.isfinite(got) & np.isfinite(rounded)
        safe = np.where(finite, expected, 0.0)
        allowed = allowed_error(
            safe, stored=actual.dtype, dtype=dtype, max_score=max_score, max_value=max_value
        )
        excess = np.where(finite, np.abs(got - safe) - allowed, -np.inf)
    return {"NaN": nan, "infinity": infinite, "value": excess > 0}, excess, allowed


def compare(
    actual: Any,
    expected: Any,
    *,
    dtype: Any = None,
    max_score: Any = 1.0,
    max_value: Any = 1.0,
    name: str = "out",
    axes: Sequence[str] | None = None,
) -> Mismatch | None:
    """Compare a result with float64 values by the criterion of this module.

    Parameters
    ----------
    actual : numpy.ndarray or cupy.ndarray
        The result; its dtype is the one it was rounded to.
    expected : numpy.ndarray, float64, shape of ``actual``
        The reference.
    dtype : dtype, optional
        The problem's, default that of ``actual``. An LSE is float32 also for other problems.
    max_score, max_value : float or numpy.ndarray that broadcasts to ``expected``
        Largest finite ``|scale| * |q| . |k|`` and ``|v|`` that an element depends on.
    name : str
        What the report calls the result.
    axes : sequence of str, optional
        Names of the axes, default those of layout "BHLD".

    Returns
    -------
    Mismatch or None
        None if everything is as near as it must be.

    Raises
    ------
    AssertionError
        If the shapes differ.
    """
    actual = to_host(actual)
    expected = np.asarray(expected, np.float64)
    if actual.shape != expected.shape:
        raise AssertionError(f"{name} has shape {actual.shape}, expected {expected.shape}")
    axes = tuple(axes or (_AXES["BHLD"] if actual.ndim == 4 else _AXES["lse"])[: actual.ndim])
    dtype = np.dtype(actual.dtype if dtype is None else dtype)
    by_kind, excess, allowed = _faults(actual, expected, dtype, max_score, max_value)
    kind = next((kind for kind, wrong in by_kind.items() if wrong.any()), None)
    if kind is None:
        return None
    wrong = by_kind[kind]
    badness = np.where(wrong, excess if kind == "value" else 0.0, -np.inf)
    order = np.argsort(-badness, axis=None, kind="stable")[: min(_MOST_SHOWN, int(wrong.sum()))]
    limits = allowed if kind == "value" else np.full(wrong.shape, np.nan)
    worst = tuple(
        Difference(tuple(map(int, at)), float(actual[at]), float(expected[at]), float(limits[at]))
        for at in (np.unravel_index(i, wrong.shape) for i in order)
    )
    counts = {k: int(w.sum()) for k, w in by_kind.items()}
    return Mismatch(name, kind, counts, wrong.size, axes, _pattern(wrong, axes), worst)


def assert_close(
    actual: Any,
    expected: Any,
    *,
    dtype: Any = None,
    max_score: Any = 1.0,
    max_value: Any = 1.0,
    name: str = "out",
    axes: Sequence[str] | None = None,
) -> None:
    """Raise an AssertionError with a report where `compare`, called likewise, finds a mismatch."""
    mismatch = compare(
        actual, expected, dtype=dtype, max_score=max_score, max_value=max_value, name=name,
        axes=axes,
    )  # fmt: skip
    if mismatch is not None:
        raise AssertionError(str(mismatch))


@dataclass(frozen=True, eq=False)
class Expected:
    """What a call must give: the reference's result and what its errors are measured by."""

    out: _Float64  # [batch, heads_q, len_q, head_dim_v], axes as layout says
    lse: _Float64  # [batch, heads_q, len_q]
    max_score: _Float64  # [batch, heads_q, len_q], largest finite |q| . |k|, visible keys
    max_value: _Float64  # [batch, heads_q, len_q], largest finite |v| among visible keys
    dtype: np.dtype[Any]
    layout: str = "BHLD"

    def mismatch(self, out: Any, lse: Any = None) -> Mismatch | None:
        """The first thing that is wrong with a result, None if nothing is."""
        score, value = self.max_score[..., None], self.max_value[..., None]
        if self.layout == "BLHD":
            score, value = score.swapaxes(1, 2), value.swapaxes(1, 2)
        found = compare(
            out, self.out, dtype=self.dtype, max_score=score, max_value=value,
            axes=_AXES[self.layout],
        )  # fmt: skip
        if found is not None or lse is None:
            return found
        return compare(
            lse, self.lse, dtype=self.dtype, max_score=self.max_score, name="lse", axes=_AXES["lse"]
        )

    def check(self, out: Any, lse: Any = None) -> None:
        """Raise an AssertionError unless a result is near enough and of the right dtype."""
        if out.dtype != self.dtype:
            raise AssertionError(f"out has dtype {out.dtype}, expected {self.dtype}")
        if lse is not None and lse.dtype != np.float32:
            raise AssertionError(f"lse has dtype {lse.dtype}, expected float32")
        found = self.mismatch(out, lse)
        if found is not None:
            raise AssertionError(str(found))


def expect(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any = None,
    causal: bool = False,
    key_lengths: Any = None,
    scale: float | None = None,
    layout: str = "BHLD",
    key_offset: int | None = None,
    total_keys: int | None = None,
) -> Expected:
    """The reference's answer to a call, with the sizes that its errors are measured by.

    Parameters
    ----------
    q, k, v, mask, causal, key_lengths, scale, layout
        As in `cumha.attention`, NumPy arrays.
    key_offset, total_keys : int, optional
        As in `cumha.partial_attention`.
    """
    options: dict[str, Any] = {
        "mask": mask, "causal": causal, "key_lengths": key_lengths, "scale": scale,
        "layout": layout,
    }  # fmt: skip
    if key_offset is None and total_keys is None:
        out, lse = reference.attention(q, k, v, return_lse=True, **options)
    else:
        options.update(key_offset=key_offset or 0, total_keys=total_keys)
        out, lse = State(*reference.partial_attention(q, k, v, **options)).to_normalized()
        out = out if layout == "BHLD" else out.swapaxes(1, 2)
    q, k, v = (x if layout == "BHLD" else x.swapaxes(1, 2) for x in (q, k, v))
    keep = masks.materialize(
        expression(mask, causal),
        batch=q.shape[0],
        heads_q=q.shape[1],
        len_q=q.shape[2],
        len_k=k.shape[2],
        key_lengths=None if key_lengths is None else np.asarray(key_lengths, np.int64),
        key_offset=key_offset or 0,
        total_keys=total_keys,
    )
    factor = 1 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    score, value = _largest_seen(q, k, v, keep, factor)
    return Expected(out, lse, score, value, np.dtype(q.dtype), layout)


def expression(mask: Any, causal: bool) -> masks.Expr | None:
    """The one expression that ``mask=`` and ``causal=`` of a call mean together."""
    if mask is None:
        return masks.causal() if causal else None
    found: masks.Expr = mask if isinstance(mask, masks.Expr) else masks.dense(mask)
    return masks.causal() & found if causal else found


def _largest_seen(
    q: Any, k: Any, v: Any, keep: NDArray[np.bool_], scale: float
) -> tuple[_Float64, _Float64]:
    """Largest finite |score| and |v| among the keys that each row sees, 0 where it sees none."""
    score, value = np.zeros(q.shape[:3]), np.zeros(q.shape[:3])
    group = q.shape[1] // max(k.shape[1], 1)
    for b, h in np.ndindex(*q.shape[:2]):
        with np.errstate(all="ignore"):
            queries, keys = (np.abs(x.astype(np.float64)) for x in (q[b, h], k[b, h // group]))
            scores = queries @ keys.T * abs(scale)
            sizes = np.abs(v[b, h // group].astype(np.float64))
            sizes = np.max(sizes, axis=1, where=np.isfinite(sizes), initial=0.0)
            seen = keep[b, h]
            score[b, h] = np.max(scores, axis=1, where=seen & np.isfinite(scores), initial=0.0)
            sizes = np.broadcast_to(sizes, seen.shape)
            value[b, h] = np.max(sizes, axis=1, where=seen, initial=0.0)
    return score, value
