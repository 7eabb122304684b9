"""What the machine reaches in the same run: a plain read of the same bytes, a matrix product.

The read is timed as kernels are. A floor is the work over a ceiling; a time below the larger floor
is a mistake in the measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cumha.bench.cases import Case, Work
from cumha.bench.clock import Clock, first_line

#: Sides of the square matrices of the product; the largest one that is no more work than the case,
#: but never less than the first.
MATMUL_SIZES = (4096, 6144, 8192)


@dataclass(frozen=True)
class Ceilings:
    """Rates measured beside a case; None where there is none.

    Attributes
    ----------
    read : float or None
        Bytes per second of a kernel that reads K and V and nothing else.
    matmul : float or None
        Operations per second of a float32 product; for float32 cases only.
    note : str
        Why one is missing.
    """

    read: float | None = None
    matmul: float | None = None
    note: str = ""

    def floor(self, work: Work) -> float | None:
        """Seconds below which the work cannot be done at these rates."""
        floors = [work.bytes / self.read] if self.read else []
        floors += [work.operations / self.matmul] if self.matmul else []
        return max(floors, default=None)


class Store:
    """Measures each ceiling once."""

    def __init__(self, clock: Clock, warmups: int, repeats: int) -> None:
        self.clock, self.warmups, self.repeats = clock, warmups, repeats
        self._read: dict[Any, float | None] = {}
        self._matmul: dict[int, tuple[float | None, str]] = {}

    def forget_arrays(self) -> None:
        """The next inputs are others: their reads are measured again."""
        self._read.clear()

    def of(self, case: Case, work: Work, key: Any, sets: Sequence[tuple[Any, ...]]) -> Ceilings:
        """The ceilings for a case over these input sets."""
        share = work.keys
        if (key, share) not in self._read:
            self._read[key, share] = self._measure_read(sets, share, work.kv_bytes)
        matmul, note = None, ""
        if case.dtype == "float32":
            matmul, note = self._matmul_rate(work.operations)
        return Ceilings(self._read[key, share], matmul, note)

    def _measure_read(
        self, sets: Sequence[tuple[Any, ...]], share: float, size: int
    ) -> float | None:
        readers = self.clock.readers([(k, v) for _, k, v, _ in sets], share)
        if readers is None or size == 0:
            return None
        return size / self.clock.kernel(readers, self.warmups, self.repeats).median

    def _matmul_rate(self, operations: int) -> tuple[float | None, str]:
        side = max([n for n in MATMUL_SIZES if 2 * n**3 <= operations], default=MATMUL_SIZES[0])
        if side not in self._matmul:
            rate, note = None, ""
            try:
                sample = self.clock.matmul(side, self.warmups, self.repeats)
                rate = None if sample is None else 2 * side**3 / sample.median
            except (ImportError, OSError, RuntimeError, MemoryError) as error:
                # CuPy's product needs cuBLAS, which attention does not bring.
                note = f"no matrix product: {first_line(error)}"
            self._matmul[side] = rate, note
        return self._matmul[side]
