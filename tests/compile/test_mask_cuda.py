"""The device code of masks, built by the host's C++ compiler: same keys, sound classes and ranges.

Many expressions share one build. Skipped where there is no g++ or clang++.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from cumha import emulate, masks, params, sources
from cumha.masks import TileClass
from cumha.testing.strategies import MaskSizes, mask_sizes
from cumha.testing.strategies import masks as mask_strategy
from tests.macros import define_lines


def host_compiler() -> emulate.HostCompiler:
    try:
        return emulate.host_compiler()
    except RuntimeError as error:
        pytest.skip(str(error))


CALL = """
extern "C" void run_%(i)d(const MaskArgs* args, const long long* at, unsigned char* keep,
                          int* classes, int* found) {
  using Mask = Mask%(i)d;
  const Index b = at[0], len_q = at[7], len_k = at[8];
  const Span h{Index(at[1]), Index(at[2])};
  const Span q{Index(at[3]), Index(at[4])};
  const Span k{Index(at[5]), Index(at[6])};
  for (Index x = h.lo; x < h.hi; ++x)
    for (Index y = q.lo; y < q.hi; ++y)
      for (Index z = k.lo; z < k.hi; ++z)
        *keep++ = Mask::keep(*args, b, x, y, z, len_q, len_k,
                             Mask::stage(*args, b, z, len_q, len_k));
  const auto rows = Mask::row_bounds(*args, b, h, q, len_q, len_k);
  for (Index z = k.lo; z < k.hi; ++z) {
    const auto at_key = Mask::stage(*args, b, z, len_q, len_k);
    *classes++ = int(Mask::tile_class(*args, b, h, q, Span{z, z + 1}, len_q, len_k, rows, at_key));
  }
  if (!Mask::kReadsKeys)
    found[0] = int(Mask::tile_class(*args, b, h, q, k, len_q, len_k, rows, {}));
  const Span seen = Mask::key_range(*args, b, h, q, len_q, len_k);
  found[1] = int(seen.lo);
  found[2] = int(seen.hi);
  found[3] = Mask::kStagedBytes;
}
"""


def build(expressions, directory: Path, wide: bool) -> ctypes.CDLL:
    """One shared object with run_0, run_1, … for the expressions."""
    kernels = sources.root()
    (directory / "mask_emitted.cuh").write_text("")
    defines = define_lines(
        WIDE_INDEX=int(wide),
        MASK_NUMBERS=masks.MAX_NUMBERS,
        MASK_ARRAYS=masks.MAX_ARRAYS,
        PARAMS_BYTES=params.CORE_BYTES + 8 * masks.MAX_NUMBERS + 72 * masks.MAX_ARRAYS,
    )
    text = [defines, '#include "emulate.hpp"\n#include "mask.cuh"\nusing namespace cumha;']
    text.append("void cumha_emulate::expect_inside(long long, long long) {}")
    for i, expr in enumerate(expressions):
        emitted = masks.cuda_source(expr, wide=wide).replace("struct Mask ", f"struct Mask{i} ")
        text.append(emitted.replace("#pragma once", "") + CALL % {"i": i})
    source = directory / "masks.cpp"
    source.write_text("\n".join(text))
    library = directory / "masks.so"
    compiler = host_compiler()
    folders = [directory, kernels, *compiler.includes]
    command = [compiler.command, "-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC"]
    command += ["-Wno-attributes", "-Wno-unknown-pragmas", *(f"-I{folder}" for folder in folders)]
    command += [str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(library))


def packed(expr) -> bytes:
    """MaskArgs at its full size: numbers, then arrays, each in slot order."""
    exact = params.pack_mask(expr)
    numbers = 8 * max(len(expr.numbers), 1)
    return exact[:numbers].ljust(8 * masks.MAX_NUMBERS, b"\0") + exact[numbers:].ljust(
        72 * masks.MAX_ARRAYS, b"\0"
    )


def check(library, i, expr, sizes, b, valid, h, q, k) -> bool:
    """Compare one tile; return whether the device's classes and range are as sharp as Python's."""
    shape = (h[1] - h[0], q[1] - q[0], k[1] - k[0])
    keep = np.full(shape, 7, dtype=np.uint8)
    classes = np.full(shape[2], 7, dtype=np.int32)
    found = (ctypes.c_int * 4)(-1)
    at = (ctypes.c_longlong * 9)(b, *h, *q, *k, sizes.len_q, valid)
    outputs = (x.ctypes.data_as(ctypes.c_void_p) for x in (keep, classes))
    getattr(library, f"run_{i}")(packed(expr), at, *outputs, found)
    lengths = [valid if j == b else 0 for j in range(sizes.batch)]
    wanted = masks.materialize(
        expr,
        batch=sizes.batch,
        heads_q=sizes.heads_q,
        len_q=sizes.len_q,
        len_k=sizes.len_k,
        key_lengths=lengths,
    )[b, h[0] : h[1], q[0] : q[1]]
    np.testing.assert_array_equal(keep, wanted[:, :, k[0] : k[1]], err_msg=repr(expr))
    where = {"b": b, "h": h, "q": q, "len_q": sizes.len_q, "len_k": valid}
    told = [(TileClass(c), (j, j + 1)) for j, c in enumerate(classes, k[0])]
    if found[0] >= 0:  # no look-up depends on the key: a class of all keys at once
        told.append((TileClass(found[0]), k))
    for tile, (first, end) in told:
        inside = keep[:, :, first - k[0] : end - k[0]]
        assert tile is not TileClass.SKIP or not inside.any(), expr
        assert tile is not TileClass.FULL or inside.all(), expr
    lo, hi = found[1], found[2]
    assert 0 <= lo <= hi <= valid, expr
    outside = np.delete(np.arange(sizes.len_k), np.arange(lo, hi))
    assert not wanted[:, :, outside].any(), expr
    assert found[3] == masks.staged_bytes(expr)
    same = all(tile is masks.tile_class(expr, k=span, **where) for tile, span in told)
    return same and (lo, hi) == masks.key_range(expr, **where)


@st.composite
def cases(draw, most):
    sizes = draw(mask_sizes(most))
    expr = draw(mask_strategy(sizes))
    points = []
    for _ in range(3):
        valid = draw(st.integers(1, sizes.len_k))
        spans = []
        for n in (sizes.heads_q, sizes.len_q, valid):
            lo = draw(st.integers(0, n - 1))
            spans.append((lo, draw(st.integers(lo + 1, n))))
        points.append((draw(st.integers(0, sizes.batch - 1)), valid, *spans))
    return sizes, expr, points


@pytest.mark.parametrize(
    ("wide", "most"), [(False, 12), (True, 12), (False, 90)], ids=["int32", "int64", "large"]
)
def test_emitted_masks_agree(wide, most, tmp_path_factory):
    """Large: more rows and keys than a look-up is scanned over."""

    @settings(max_examples=2, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(st.lists(cases(most), min_size=100, max_size=100))
    def run(drawn):
        library = build([c[1] for c in drawn], tmp_path_factory.mktemp("masks"), wide)
        sharp = [
            check(library, i, expr, sizes, *point)
            for i, (sizes, expr, points) in enumerate(drawn)
            for point in points
        ]
        # Static bounds on the device, and those of what is not scanned, may say less.
        assert np.mean(sharp) > (0.9 if most < 32 else 0.5)

    run()


LEN_Q, LEN_K = 80, 150  # more rows than a look-up is scanned over


def arithmetic_on(dtype: str) -> list[masks.Expr]:
    """Sums with what an array holds, where the ends of its type would leave 32 or 64 bits."""
    rng = np.random.default_rng(1)
    kind = "int32" if dtype == "bool" else dtype
    table = masks.array(rng.integers(0, 2, (LEN_Q, LEN_K)).astype(kind))
    ends = masks.array(rng.integers(0, 100, 200).astype(kind))
    return [
        masks.where(lambda b, h, q, k: table[q, k] + 5 > 5),
        masks.where(lambda b, h, q, k: 3 - table[q, k] * 2 < 3),
        masks.where(lambda b, h, q, k: k <= ends[(q * 37) % 200] + 1),
        masks.where(lambda b, h, q, k: k >= 2 * ends[(q * 37) % 200] - 1),
    ]


def test_look_ups_too_many_to_scan_are_bounded_by_their_type(tmp_path: Path) -> None:
    sizes = MaskSizes(1, 1, LEN_Q, LEN_K)
    expressions = [x for dtype in masks.expression.ARRAY_TYPES for x in arithmetic_on(dtype)]
    library = build(expressions, tmp_path, wide=False)
    for i, expr in enumerate(expressions):
        for q in ((0, LEN_Q), (3, 70), (5, 6)):
            check(library, i, expr, sizes, 0, LEN_K, (0, 1), q, (0, LEN_K))
