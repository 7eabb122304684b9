"""The named suites: plain lists of cases.

A case that is ``against`` an earlier one is compared with it in the same run.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cumha import masks
from cumha.bench.cases import Case
from cumha.bench.measure import PARTS

MOST_BYTES = 8e9  # of one set of inputs in `splits`


@dataclass(frozen=True)
class Suite:
    """Cases that are measured and reported together.

    Attributes
    ----------
    cases : callable
        Gives the cases.
    table : str
        How `cumha.bench.report` shows them: "cases", "splits" or "claims".
    repeats, warmups : int
        Unless the caller says otherwise.
    parts : tuple of str
        What is measured beside the kernel time.
    """

    name: str
    about: str
    cases: Callable[[], Iterator[Case]]
    table: str = "cases"
    warmups: int = 10
    repeats: int = 100
    parts: tuple[str, ...] = PARTS


def sized(
    name: str, batch: int, heads: tuple[int, int], len_q: int, len_k: int, dim: int, dtype: str
) -> Case:
    """A case of equal head dims; ``heads`` are query heads and KV heads."""
    return Case(
        name, batch, heads[0], heads[1], len_q, len_k, head_dim=dim, head_dim_v=dim, dtype=dtype
    )


# batch, (heads_q, heads_kv), len_k, head_dim
DECODE = [
    (8, (32, 32), 8192, 128),
    (1, (8, 8), 16384, 128),
    (1, (32, 8), 2048, 128),
    (1, (32, 8), 8192, 128),
    (1, (32, 8), 32768, 128),
    (1, (32, 8), 131072, 128),
    (8, (32, 8), 2048, 128),
    (8, (32, 8), 8192, 128),
    (8, (32, 8), 32768, 128),
    (64, (32, 8), 1024, 128),
    (64, (32, 8), 4096, 128),
    (64, (32, 8), 16384, 128),
    (1, (32, 32), 8192, 128),
    (32, (32, 32), 4096, 128),
    (16, (64, 8), 8192, 128),
    (16, (16, 1), 8192, 128),
    (16, (32, 8), 8192, 64),
    (4, (8, 1), 65536, 256),
]


def decode() -> Iterator[Case]:
    """One query per sequence."""
    for dtype in ("float16", "bfloat16"):
        for batch, heads, len_k, dim in DECODE:
            name = f"decode {dtype} {batch} {heads[0]}:{heads[1]} {len_k} {dim}"
            yield sized(name, batch, heads, 1, len_k, dim, dtype)


def prefill() -> Iterator[Case]:
    """As many queries as keys."""
    for dtype in ("float32", "float16"):
        for dim in (64, 128):
            case = sized(f"full {dtype} {dim}", 4, (16, 16), 2048, 2048, dim, dtype)
            yield case
            causal = f"causal {dtype} {dim}"
            yield dataclasses.replace(case, name=causal, causal=True, against=case.name)


MASKED_LEN = 16384
DOCUMENT = 512
WINDOW = 1024


def mask_cases() -> Iterator[Case]:
    """What a mask saves."""
    full = sized("full", 1, (16, 16), MASKED_LEN, MASKED_LEN, 128, "float16")
    document = np.repeat(np.arange(MASKED_LEN // DOCUMENT, dtype=np.int32), DOCUMENT)[None]
    half = np.arange(MASKED_LEN)[None] < MASKED_LEN // 2
    yield full
    for name, against, changes in (
        ("causal", "full", {"causal": True}),
        (
            "segments", "full",
            {
                "mask": masks.segments(document, document),
                "mask_name": f"segments of {DOCUMENT}",
            },
        ),
        (
            "key_padding", "full",
            {"mask": masks.key_padding(half), "mask_name": "key_padding, half"},
        ),
        ("key_lengths", "full", {"key_lengths": MASKED_LEN // 2}),
        (
            "window", "causal",
            {"mask": masks.window(WINDOW - 1, 0), "mask_name": f"window({WINDOW - 1}, 0)"},
        ),
    ):  # fmt: skip
        yield dataclasses.replace(full, name=name, against=against, **changes)


SPLIT_BATCHES = (1, 2, 4, 8, 16, 32, 64)
SPLIT_LENGTHS = tuple(2**n for n in range(9, 17))
SPLIT_HEADS = ((8, 8), (32, 8))
SPLIT_QUERIES = (32, 256)
FORCED_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def splits() -> Iterator[Case]:
    """The plan's number of splits against forced ones: in decode, and for more rows."""
    decoding = itertools.product(SPLIT_BATCHES, (1,), SPLIT_LENGTHS)
    more_rows = itertools.product((1,), SPLIT_QUERIES, SPLIT_LENGTHS[1::2])
    for heads, (batch, len_q, len_k) in itertools.product(SPLIT_HEADS, [*decoding, *more_rows]):
        name = f"splits {batch} {heads[0]}:{heads[1]} {len_q} {len_k}"
        case = sized(name, batch, heads, len_q, len_k, 128, "float16")
        if case.array_bytes > MOST_BYTES:
            continue
        yield case
        for n in FORCED_SPLITS:
            yield dataclasses.replace(case, name=f"{name} S {n}", splits=n, against=name)


FEW_QUERIES = (1, 2, 4, 8, 16, 32, 64)
FEW_QUERIES_OF = ((1, 4096), (8, 8192))  # batch, len_k


def thresholds() -> Iterator[Case]:
    """Up to how many queries `gemv` is faster than `tiled`."""
    shapes = itertools.product(FEW_QUERIES_OF, ((32, 8), (32, 32)), FEW_QUERIES)
    for (batch, len_k), heads, len_q in shapes:
        name = f"{batch} {heads[0]}:{heads[1]} {len_k} len_q {len_q}"
        case = sized(f"{name} gemv", batch, heads, len_q, len_k, 128, "float16")
        case = dataclasses.replace(case, path="gemv")
        yield case
        yield dataclasses.replace(
            case, name=f"{name} tiled", path="tiled", against=case.name, claim="S15"
        )


Settings = dict[str, Any]

#: Claim, what it says, the bases it is tried on, and pairs of settings: A, then B.
#: "splits" and "split_by" are options of the call, all others those of `cumha.tuning`.
CLAIMS: list[tuple[str, str, str, list[tuple[Settings, Settings]]]] = [
    ("S2", "a warp per row, or a register tile", "prefill",
     [({"columns": 32, "block_rows": 4}, {}), ({"columns": 8}, {"columns": 16})]),
    ("S6", "look-ups of the mask staged", "masked",
     [({"stage_mask": 0}, {"stage_mask": 1})]),
    ("S9", "double buffering", "prefill",
     [({"ring_slots": 1}, {"ring_slots": 2}), ({"ring_slots": 1}, {"ring_slots": 4})]),
    ("S10", "rows padded against bank conflicts", "prefill",
     [({"padding": 0}, {"padding": 16})]),
    ("S12", "keys of a tile", "prefill",
     [({"tile_keys": 128}, {"tile_keys": 64}), ({"tile_keys": 128}, {"tile_keys": 96})]),
    ("S13", "one block per head", "decode",
     [({"block_rows": 1, "splits": 1}, {})]),
    ("S13", "loads in flight", "decode",
     [({"ring_slots": n}, {}) for n in (1, 2, 4)]),
    ("S16", "keys split or not", "decode",
     [({"splits": 1}, {})]),
    ("S21", "parts of equal length, or of equal tiles", "few queries",
     [({"split_by": "length"}, {})]),
    ("S22", "K and V each with two buffers, or sharing two", "prefill",
     [({"ring_slots": 4}, {"ring_slots": 2})]),
]  # fmt: skip


def _claim_bases(kind: str) -> Iterator[Case]:
    if kind == "prefill":
        for dtype in ("float16", "float32"):
            for dim in (64, 128):
                case = sized(f"{dtype} {dim}", 4, (16, 16), 2048, 2048, dim, dtype)
                yield dataclasses.replace(case, path="tiled")
    elif kind == "masked":
        for case in mask_cases():
            if case.name in ("segments", "key_padding"):
                yield dataclasses.replace(case, path="tiled")
    elif kind == "decode":
        for batch, heads, len_k in ((1, (8, 8), 16384), (1, (32, 8), 8192), (8, (32, 32), 8192)):
            name = f"decode {batch} {heads[0]}:{heads[1]} {len_k}"
            yield dataclasses.replace(
                sized(name, batch, heads, 1, len_k, 128, "float16"), path="gemv"
            )
    else:
        for len_q in (256, 1024):
            case = sized(f"causal len_q {len_q}", 1, (8, 8), len_q, 8192, 128, "float16")
            yield dataclasses.replace(case, path="tiled", causal=True)
            case = sized(f"causal square {len_q}", 1, (8, 8), len_q, len_q, 128, "float16")
            yield dataclasses.replace(case, path="tiled", causal=True, splits=4)


def _with(case: Case, settings: Settings) -> Case:
    """A case with settings, options of the call among them."""
    call = {name: x for name, x in settings.items() if name in ("splits", "split_by")}
    rest = tuple((name, x) for name, x in settings.items() if name not in call)
    changed = dataclasses.replace(case, settings=rest, **call)
    text = changed.settings_text()
    return dataclasses.replace(changed, name=f"{case.name}: {text}")


def claims() -> Iterator[Case]:
    """The settings whose effect the two articles claim, each alone against its counterpart."""
    for claim, what, kind, pairs in CLAIMS:
        for base in _claim_bases(kind):
            for a, b in pairs:
                first = dataclasses.replace(_with(base, a), against=None)
                second = _with(base, b)
                text = f"{claim} {what}"
                yield dataclasses.replace(first, name=f"{claim} {first.name} | A")
                yield dataclasses.replace(
                    second,
                    name=f"{claim} {first.name} | {second.name}",
                    claim=text,
                    against=f"{claim} {first.name} | A",
                )


SUITES = {
    suite.name: suite
    for suite in (
        Suite("decode", "one query per sequence, at the read ceiling at best", decode),
        Suite("prefill", "as many queries as keys, in float32 and float16", prefill),
        Suite("masks", "what masks save over a full call", mask_cases),
        Suite("splits", "the plan's splits against forced ones", splits, "splits", 10, 20, ()),
        Suite("thresholds", "gemv against tiled for few queries", thresholds, "cases", 5, 20, ()),
        Suite("claims", "settings of the build and of splits, pair by pair", claims, "claims",
              parts=()),
    )
}  # fmt: skip
