"""Random problems that a GPU's results are recorded for, made again from their seeds.

    problem = draw(7)                               the problem of seed 7
    out, lse = problem.run(backend="emulate")       or "cuda"
    summary(out, problem.places(out.shape))         what a record keeps of an array

Used by `tests.gpu.record_random` and by ``tests/kernels/test_recorded.py``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import cumha
from cumha import masks, testing
from tests.kernels.structures import STRUCTURES

COUNT = 200
SAMPLES = {"out": 8, "lse": 3}

NAMES = (
    "none", "causal", "window", "causal_window", "padding", "dense", "segments", "prefix", "floats",
    "dilated", "chunks", "heads",
)  # fmt: skip
DTYPES = ("float16", "bfloat16", "float32", "float64")
HEAD_DIMS = ((16, 16), (33, 33), (64, 64), (160, 160), (64, 24), (7, 40), (128, 128))


class Variant(NamedTuple):
    """What a kernel is built for."""

    mask: str
    dtype: str
    head_dims: tuple[int, int]
    key_lengths: bool
    partial: bool
    decode: bool  # one query


def _variant(i: int) -> Variant:
    round_ = i // len(NAMES)
    return Variant(
        mask=NAMES[i % len(NAMES)],
        dtype=DTYPES[(i + round_) % len(DTYPES)],
        head_dims=HEAD_DIMS[(i + 3 * round_) % len(HEAD_DIMS)],
        key_lengths=(i // 2 + round_) % 2 == 1,
        partial=i % 5 == 4,
        decode=i % 7 == 3,
    )


VARIANTS = tuple(_variant(i) for i in range(2 * len(NAMES)))


class Sizes(NamedTuple):
    batch: int
    heads_q: int
    len_q: int
    len_k: int  # of the whole sequence


@dataclass(frozen=True)
class RandomProblem:
    """One call: NumPy arrays in the layout of the options, views as they were drawn."""

    seed: int
    variant: Variant
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    options: dict[str, Any]  # of cumha.attention, or of cumha.partial_attention
    digest: str  # SHA-256 of all values

    def run(self, backend: str) -> tuple[np.ndarray, np.ndarray]:
        """(out, lse) of path naive as NumPy arrays, a State's after finish()."""
        move = testing.to_device if backend == "cuda" else lambda x: x
        arrays = [move(x) for x in (self.q, self.k, self.v)]
        options = {**self.options, "path": "naive", "backend": backend}
        if options["mask"] is not None:
            options["mask"] = masks.map_arrays(options["mask"], move)
        if self.variant.partial:
            state = cumha.partial_attention(*arrays, **options)
            results = state.finish(options["layout"])
        else:
            results = cumha.attention(*arrays, return_lse=True, **options)
        out, lse = (np.array(testing.to_host(x), order="C") for x in results)
        return out, lse

    def expected(self) -> testing.Expected:
        return testing.expect(self.q, self.k, self.v, **self.options)

    def places(self, name: str, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Where a record samples a result; indices along its own axes."""
        rng = np.random.default_rng([self.seed, len(shape)])
        return [tuple(int(rng.integers(n)) for n in shape) for _ in range(SAMPLES[name])]


def draw(seed: int) -> RandomProblem:
    """The problem of a seed; seeds that differ by a multiple of len(VARIANTS) share a kernel."""
    rng = np.random.default_rng(seed)
    variant = VARIANTS[seed % len(VARIANTS)]
    batch, heads_kv = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    heads_q = heads_kv * int(rng.integers(1, 6 // heads_kv + 1))
    len_q = 1 if variant.decode else int(rng.integers(2, 41))
    len_k = int(rng.integers(1, 151))
    options: dict[str, Any] = {
        "scale": rng.choice([None, None, 1.0, 0.25, -0.5]),
        "layout": str(rng.choice(["BHLD", "BLHD"])),
    }
    total = len_k
    if variant.partial:
        options["key_offset"] = int(rng.integers(0, 30))
        options["total_keys"] = total = options["key_offset"] + len_k + int(rng.integers(0, 30))
    if variant.key_lengths:
        options["key_lengths"] = rng.integers(0, total + 1, batch).tolist()
    mask = STRUCTURES[variant.mask](rng, Sizes(batch, heads_q, len_q, total))
    dim, dim_v = variant.head_dims
    shapes = (
        (batch, heads_q, len_q, dim), (batch, heads_kv, len_k, dim), (batch, heads_kv, len_k, dim_v)
    )  # fmt: skip
    arrays = [_values(rng, shape, variant.dtype, options["layout"]) for shape in shapes]
    looked_up = () if mask is None else (s.data for s in mask.arrays)
    numbers = () if mask is None else mask.numbers
    digest = hashlib.sha256(repr((variant, options, numbers)).encode())
    for x in (*arrays, *looked_up):
        digest.update(np.array(x, order="C").tobytes())
    options["mask"] = mask
    return RandomProblem(seed, variant, *arrays, options, digest.hexdigest())


def _values(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: str, layout: str
) -> np.ndarray:
    values = rng.standard_normal(shape) * float(rng.choice([0.5, 1.0, 3.0]))
    x = values.astype(testing.normal(1, dtype=dtype).dtype)
    if layout == "BLHD":
        x = x.swapaxes(1, 2)
    return testing.view(x, str(rng.choice(list(testing.VIEWS))))


def summary(x: np.ndarray, places: list[tuple[int, ...]]) -> dict[str, Any]:
    """What a record keeps of a result: checksum, sum of what is finite, values at some places."""
    wide = x.astype(np.float64)
    finite = np.isfinite(wide)
    return {
        "sha256": hashlib.sha256(x.tobytes()).hexdigest(),
        "finite": int(finite.sum()),
        "sum": short_hex(wide[finite].sum()),
        "places": [list(p) for p in places],
        "values": [short_hex(wide[p]) for p in places],
    }


def short_hex(value: Any) -> str:
    """`float.hex` without the zeros at its end; `float.fromhex` reads it."""
    digits, p, exponent = float(value).hex().partition("p")
    return digits.rstrip("0").rstrip(".") + p + exponent if p else digits
