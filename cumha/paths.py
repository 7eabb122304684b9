"""The ways to compute attention, one record each, in the order in which the planner tries them.

A path's name is its ``.cu`` file's stem, its kernel's entry, `Plan.path` and its tests' id.
``host`` has no kernel: it is the NumPy path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cumha import tilings, tuning
from cumha.problem import DTYPES, Problem, check_integer
from cumha.tuning import UNTUNED, Tuning

if TYPE_CHECKING:
    from cumha.device import Device

MAX_HEAD_DIM = 512
BACKENDS = ("cuda", "host", "emulate")
SPLIT_BY = ("tiles", "length")


@dataclass(frozen=True)
class Request:
    """What the caller overrides; None leaves the choice to the planner."""

    splits: int | None = None
    split_by: str = "tiles"
    keys_per_split: int | None = None
    path: str | None = None
    backend: str | None = None
    tuning: Tuning = UNTUNED

    @classmethod
    def checked(
        cls, splits: Any, split_by: Any, keys_per_split: Any, path: Any, backend: Any
    ) -> Request:
        """Check the overrides of `cumha.attention`.

        Raises
        ------
        TypeError, ValueError
            Unknown names, numbers below 1, or ``splits`` together with ``keys_per_split``.
        """
        if splits is not None and keys_per_split is not None:
            raise ValueError(
                f"got splits={splits!r} and keys_per_split={keys_per_split!r}: one of the two "
                "fixes the splits, leave the other out"
            )
        for name, value, known, optional in (
            ("split_by", split_by, SPLIT_BY, False),
            ("path", path, tuple(p.name for p in PATHS), True),
            ("backend", backend, BACKENDS, True),
        ):
            if optional and value is None:
                continue
            if not isinstance(value, str) or value not in known:
                names = ", ".join(repr(k) for k in known)
                raise ValueError(f"unknown {name} {value!r}: use one of {names}")
        splits = None if splits is None else check_integer("splits", splits, 1)
        if keys_per_split is not None:
            keys_per_split = check_integer("keys_per_split", keys_per_split, 1)
        return cls(splits, split_by, keys_per_split, path, backend, tuning.current())

    @property
    def wants_splits(self) -> bool:
        return self.keys_per_split is not None or (self.splits or 1) > 1


def _none(problem: Problem) -> str:
    return ""


@dataclass(frozen=True)
class Path:
    """One way to compute attention.

    Of the paths that serve a call the first one without a drawback is taken, else the first one.
    """

    name: str
    backend: str  # what it runs on: "cuda" or "host"
    dtypes: tuple[str, ...]
    max_head_dim: int
    limits: Callable[[Problem, Request, Device | None], list[str]]  # reasons of this path alone
    settings: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # and their values
    drawback: Callable[[Problem], str] = _none  # why others are faster; "" if they are not

    def rejects(self, problem: Problem, request: Request, device: Device | None) -> list[str]:
        """Every reason why this path cannot serve the call; empty if it can.

        Parameters
        ----------
        device : Device or None
            The GPU of a CuPy problem; None for NumPy arrays.
        """
        reasons = []
        if request.path not in (None, self.name):
            reasons.append(f"path={request.path!r} was asked for")
        reasons += self._backend_reasons(problem, request)
        if problem.dtype not in self.dtypes:
            reasons.append(f"dtype {problem.dtype} is not one of {', '.join(self.dtypes)}")
        for name, value in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
            if value > self.max_head_dim:
                reasons.append(f"{name} {value} is above its limit of {self.max_head_dim}")
        for name, chosen in request.tuning.given().items():
            values = self.settings.get(name)
            if values is None:
                reasons.append(f"it has no setting {name}")
            elif chosen not in values:
                listed = ", ".join(map(str, values))
                reasons.append(f"{name}={chosen} is not one of its values {listed}")
        return reasons + self.limits(problem, request, device)

    def _backend_reasons(self, problem: Problem, request: Request) -> list[str]:
        if request.backend == "emulate" and self.backend == "cuda":
            wrong = problem.library != "numpy"
            return (
                ["emulation takes NumPy arrays, got cupy: move them with .get()"] if wrong else []
            )
        needed = {"numpy": "host", "cupy": "cuda"}[problem.library]
        if request.backend not in (None, self.backend):
            return [f"it runs on backend {self.backend!r}, {request.backend!r} was asked for"]
        if needed != self.backend:
            wants = "CuPy" if self.backend == "cuda" else "NumPy"
            move = "cupy.asarray" if self.backend == "cuda" else ".get()"
            return [f"it takes {wants} arrays, got {problem.library}: move them with {move}"]
        return []


def _naive_limits(problem: Problem, request: Request, device: Device | None) -> list[str]:
    if request.wants_splits:
        asked = "keys_per_split" if request.keys_per_split is not None else "splits"
        return [f"{asked}: one warp walks over all keys of its row, it has nothing to split"]
    return []


def _naive_drawback(problem: Problem) -> str:
    return "each row reads its keys by itself: simple rather than fast"


def _gemv_limits(problem: Problem, request: Request, device: Device | None) -> list[str]:
    return tilings.gemv_reasons(problem, request.tuning, device)


GEMV_ROWS = 16  # packed rows of a KV head up to which gemv is faster than tiled


def _gemv_drawback(problem: Problem) -> str:
    if problem.group * problem.len_q <= GEMV_ROWS:
        return ""
    return (
        f"{problem.group} query heads per KV head x len_q {problem.len_q} are above {GEMV_ROWS} "
        "rows: every few of them cost a pass over K and V"
    )


def _tiled_limits(problem: Problem, request: Request, device: Device | None) -> list[str]:
    return tilings.tiled_reasons(problem, request.tuning, device)


def _no_limits(problem: Problem, request: Request, device: Device | None) -> list[str]:
    return []


PATHS = (
    Path("gemv", "cuda", DTYPES[:3], 256, _gemv_limits, tilings.GEMV_SETTINGS, _gemv_drawback),
    Path("tiled", "cuda", DTYPES[:3], 256, _tiled_limits, tilings.TILED_SETTINGS),
    Path("naive", "cuda", DTYPES, MAX_HEAD_DIM, _naive_limits, drawback=_naive_drawback),
    Path("host", "host", DTYPES, MAX_HEAD_DIM, _no_limits),
)
