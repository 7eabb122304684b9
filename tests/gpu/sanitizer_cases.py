"""Small calls that reach every branch of every kernel, to be run under compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 9 python tests/gpu/sanitizer_cases.py

Every array is allocated without a pool, so that memcheck sees each array's own end, and the
results are compared with the reference.
"""

from __future__ import annotations

import itertools

import cupy
import ml_dtypes
import numpy as np

import cumha
from cumha import masks, testing, tuning

SHAPES = [  # heads_q, heads_kv, len_q, len_k, head_dim, head_dim_v
    (1, 1, 1, 1, 1, 1),
    (4, 2, 5, 33, 33, 31),
    (3, 1, 1, 70, 64, 64),
    (2, 2, 7, 4, 300, 8),
    (2, 1, 3, 0, 16, 16),
]
TILED_SHAPES = [(4, 2, 5, 333, 33, 31), (3, 1, 1, 200, 64, 64), (2, 2, 40, 150, 128, 64)]
TILED_PATHS = [  # splits reach split_reduce
    ("gemv", {}),
    ("gemv", {"splits": 2}),
    ("tiled", {}),
    ("tiled", {"splits": 2, "split_by": "length"}),
    ("tiled", {"keys_per_split": 96}),
]
SETTINGS = [  # what the planner does not choose by itself
    ("gemv", {"ring_slots": 1}),
    ("gemv", {"ring_slots": 4, "block_rows": 1}),
    ("tiled", {"ring_slots": 1, "tile_keys": 96}),
    ("tiled", {"ring_slots": 4, "stage_mask": 0}),
    ("tiled", {"columns": 32, "padding": 0}),
]
DTYPES = ["float16", ml_dtypes.bfloat16, "float32", "float64"]


def mask_kinds(batch: int, heads: int, len_q: int, len_k: int, rng: np.random.Generator):
    yield "none", None
    yield "causal window", masks.causal() & masks.window(3, 1)
    if len_k:
        yield "dense", masks.dense(rng.random((batch, heads, len_q, len_k)) < 0.5)
        ids = masks.array(rng.integers(0, 3, (batch, len_k)))
        importance = masks.array(rng.random((batch, len_k)).astype(np.float32))
        yield (
            "function",
            masks.where(lambda b, h, q, k: (ids[b, k] == h % 3) | (importance[b, k] > 0.7)),
        )
        # indices far outside: clamped on the device, so only run, never compared
        yield "wild", masks.where(lambda b, h, q, k: ids[b, k * 1000 - 500] == 1)


def run(shape, dtype, batch: int = 2, seed: int = 0) -> int:
    heads_q, heads_kv, len_q, len_k, dim, dim_v = shape
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, heads_q, len_q, dim)).astype(dtype)
    k = rng.standard_normal((batch, heads_kv, len_k, dim)).astype(dtype)
    v = rng.standard_normal((batch, heads_kv, len_k, dim_v)).astype(dtype)
    lengths = rng.integers(0, len_k + 1, batch)
    calls = 0
    for name, mask in mask_kinds(batch, heads_q, len_q, len_k, rng):
        for n in (None, lengths):
            device = None if mask is None else masks.map_arrays(mask, cupy.asarray)
            arrays = [cupy.asarray(x) for x in (q, k, v)]
            options = {"mask": device, "key_lengths": None if n is None else cupy.asarray(n)}
            out, lse = cumha.attention(*arrays, return_lse=True, path="naive", **options)
            state = cumha.partial_attention(*arrays, path="naive", **options)
            again, _ = state.finish()
            calls += 2
            if name == "wild":
                continue
            want, want_lse = cumha.reference.attention(
                q, k, v, mask=mask, key_lengths=n, return_lse=True
            )
            step = 2.0 ** {"float16": -10, "bfloat16": -7}.get(np.dtype(dtype).name, -20)
            for got in (out, again):
                np.testing.assert_allclose(got.get().astype(np.float64), want, rtol=step, atol=1e-5)
            np.testing.assert_allclose(lse.get(), want_lse, rtol=1e-5, atol=1e-5)
    return calls


def run_tiled(shape, dtype, path: str, options: dict, batch: int = 2) -> int:
    """The paths that share keys over a block, with a mask that makes every class of tile."""
    heads_q, heads_kv, len_q, len_k, dim, dim_v = shape
    rng = np.random.default_rng(1)
    q = rng.standard_normal((batch, heads_q, len_q, dim)).astype(dtype)
    k = rng.standard_normal((batch, heads_kv, len_k, dim)).astype(dtype)
    v = rng.standard_normal((batch, heads_kv, len_k, dim_v)).astype(dtype)
    lengths = np.array([len_k, len_k // 2])
    ids = masks.array(np.repeat(np.arange(len_k), 20)[:len_k][None].repeat(batch, 0))
    mask = masks.where(lambda b, h, q, k: (ids[b, k] != 1) & (k <= q + masks.len_k - masks.len_q))
    device = {"mask": masks.map_arrays(mask, cupy.asarray), "key_lengths": cupy.asarray(lengths)}
    arrays = [cupy.asarray(x) for x in (q, k, v)]
    out, lse = cumha.attention(*arrays, return_lse=True, path=path, **device, **options)
    again, _ = cumha.partial_attention(*arrays, path=path, **device, **options).finish()
    expected = testing.expect(q, k, v, mask=mask, key_lengths=lengths)
    expected.check(out.get(), lse.get())
    expected.check(again.get())
    return 2


if __name__ == "__main__":
    cupy.cuda.set_allocator(None)
    total = sum(run(s, d) for s, d in itertools.product(SHAPES, DTYPES))
    total += sum(
        run_tiled(shape, dtype, *how)
        for shape, dtype, how in itertools.product(TILED_SHAPES, DTYPES[:3], TILED_PATHS)
    )
    for path, settings in SETTINGS:
        with tuning.using(**settings):
            total += run_tiled((3, 1, 5, 200, 64, 40), "float16", path, {})
    cupy.cuda.get_current_stream().synchronize()
    print(f"{total} calls agree with the reference")
