"""One measurement as plain data, and the work that any kernel must do for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cumha import masks
from cumha.problem import element_size
from cumha.testing import to_host

MOST_PAIRS = 2**29  # (row, key) pairs of one head that a mask is evaluated on to count
CHUNK_PAIRS = 2**22  # of them at a time


@dataclass(frozen=True)
class Case:
    """What is timed: a call's sizes, mask and options, and what its time is compared with.

    Attributes
    ----------
    name : str
        Unique in a run.
    mask : Mask, optional
        With NumPy arrays; moved to where the case runs. ``mask_name`` is its text in reports.
    key_lengths : int, optional
        Valid keys of every batch entry; ``length_dtype`` is that of the array.
    settings : tuple of (name, value)
        As for `cumha.tuning.using`.
    claim : str
        What the comparison is about.
    against : str, optional
        Name of an earlier case; the report gives this case's time over that one's.
    """

    name: str
    batch: int = 1
    heads_q: int = 32
    heads_kv: int = 32
    len_q: int = 1
    len_k: int = 4096
    head_dim: int = 128
    head_dim_v: int = 128
    dtype: str = "float16"
    layout: str = "BHLD"
    causal: bool = False
    mask: Any = None
    mask_name: str = ""
    key_lengths: int | None = None
    length_dtype: str = "int64"
    return_lse: bool = False
    path: str | None = None
    splits: int | None = None
    split_by: str = "tiles"
    keys_per_split: int | None = None
    settings: tuple[tuple[str, int], ...] = ()
    claim: str = ""
    against: str | None = None

    @property
    def numpy_dtype(self) -> Any:
        return np.dtype(ml_dtypes.bfloat16 if self.dtype == "bfloat16" else self.dtype)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of q, k, v and out in the case's layout."""
        shapes: dict[str, tuple[int, ...]] = {
            "q": (self.batch, self.heads_q, self.len_q, self.head_dim),
            "k": (self.batch, self.heads_kv, self.len_k, self.head_dim),
            "v": (self.batch, self.heads_kv, self.len_k, self.head_dim_v),
            "out": (self.batch, self.heads_q, self.len_q, self.head_dim_v),
        }
        if self.layout == "BLHD":
            return {name: (s[0], s[2], s[1], s[3]) for name, s in shapes.items()}
        return shapes

    @property
    def array_bytes(self) -> int:
        """Bytes of one set of q, k, v and out."""
        return sum(math.prod(s) for s in self.shapes.values()) * element_size(self.dtype)

    def shape_text(self) -> str:
        """Sizes as tables give them: batch, heads, len_q, len_k, head_dim."""
        heads, dim = f"{self.heads_q}:{self.heads_kv}", f"{self.head_dim}"
        dim += "" if self.head_dim == self.head_dim_v else f"->{self.head_dim_v}"
        return f"{self.batch}, {heads}, {self.len_q}, {self.len_k}, {dim}"

    def mask_text(self) -> str:
        """What restricts the keys, in short."""
        parts = ["causal"] if self.causal else []
        parts += [self.mask_name] if self.mask_name else []
        parts += [] if self.key_lengths is None else [f"key_lengths {self.key_lengths}"]
        return " & ".join(parts) or "none"

    def settings_text(self) -> str:
        """What is asked for beside the problem: path, splits, settings of the build."""
        parts = [] if self.path is None else [self.path]
        parts += [] if self.splits is None else [f"splits={self.splits}"]
        parts += [] if self.keys_per_split is None else [f"keys_per_split={self.keys_per_split}"]
        parts += [] if self.split_by == "tiles" else [f"split_by={self.split_by}"]
        parts += [f"{name}={value}" for name, value in self.settings]
        return " ".join(parts) or "the plan's choice"


@dataclass(frozen=True)
class Work:
    """What a case costs at least.

    Attributes
    ----------
    pairs : int
        Visible (row, key) pairs over all batch entries and query heads.
    keys : float
        Share of the keys that some row sees.
    kv_bytes : int
        K and V of those keys, once.
    bytes : int
        ``kv_bytes`` and all of q and out, once.
    operations : int
        ``2 * pairs * (head_dim + head_dim_v)``.
    """

    pairs: int
    keys: float
    kv_bytes: int
    bytes: int
    operations: int


def work_of(case: Case) -> Work:
    """Count from the mask's values; where those are too many, pairs from a sample of the rows.

    All keys count as seen then.
    """
    valid = case.len_k if case.key_lengths is None else case.key_lengths
    share, seen = _visible(case, valid) if valid and case.len_q else (0.0, 0)
    pairs = round(share * case.batch * case.heads_q * case.len_q * valid)
    keys = seen / (case.batch * case.len_k) if case.batch * case.len_k else 0.0
    size, dims = element_size(case.dtype), case.head_dim + case.head_dim_v
    kv_bytes = round(keys * case.batch * case.heads_kv * case.len_k * dims * size)
    rows_bytes = case.batch * case.heads_q * case.len_q * dims * size
    return Work(pairs, keys, kv_bytes, kv_bytes + rows_bytes, 2 * pairs * dims)


def _visible(case: Case, valid: int) -> tuple[float, int]:
    """Share of the valid pairs that are visible, and how many keys of all entries are."""
    mask = case.mask
    if case.causal:
        mask = masks.causal() if mask is None else masks.causal() & mask
    mask = None if mask is None else masks.specialise(mask, len_q=case.len_q)
    if mask is None:
        return 1.0, case.batch * valid
    mask = masks.map_arrays(mask, to_host)
    used = {node.value for node in mask.program.nodes if node.op == "index"}
    entries = range(case.batch if "b" in used else 1)
    heads = np.arange(case.heads_q if "h" in used else 1)[:, None, None]
    pairs = len(entries) * len(heads) * case.len_q * valid
    step = -(-pairs // MOST_PAIRS)
    rows = np.arange(step // 2, case.len_q, step)  # from the middle: the average of a diagonal
    chunk = max(1, CHUNK_PAIRS // (len(heads) * valid))
    counted = seen = 0
    for b in entries:
        any_row = np.zeros(valid, bool)
        for start in range(0, len(rows), chunk):
            q = rows[start : start + chunk, None]
            values = masks.evaluate(
                mask, b=b, h=heads, q=q, k=np.arange(valid), len_q=case.len_q, len_k=valid
            )
            keep = np.broadcast_to(values, (len(heads), len(q), valid))
            counted += int(np.count_nonzero(keep))
            any_row |= keep.any(axis=(0, 1))
        seen += int(np.count_nonzero(any_row)) if step == 1 else valid
    share = counted / (len(entries) * len(heads) * len(rows) * valid)
    return share, seen * case.batch // len(entries)
