"""Emulated kernels agree with a GPU on 200 random problems, without the GPU.

``tests/data/random_h200.json`` was made on the GPU it names, by the driver, NVRTC and sources that
it names, with ``python -m tests.gpu.record_random``: there path naive ran the problems that
`tests.gpu.random_problems` draws from the seeds 0 to 199, each result was within the criterion of
the float64 reference, and checksums (for information), sums and values at some places were kept.
Here the same problems run on the same path, emulated, planned for the same GPU.

Both results are rounded once from sums that err by what the criterion calls computing, in another
order and with other roundings of products: they may differ by that and by one unit in the last
place. A sum over n elements may differ by four times the root of the sum of those squares: the
errors of rows have no common sign.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cumha import testing
from tests.gpu.random_problems import COUNT, draw

FILE = Path(__file__).resolve().parents[1] / "data" / "random_h200.json"


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    if not FILE.is_file():
        pytest.skip(f"{FILE.name} is missing: tests/gpu/record_random.py makes it on a GPU")
    made: dict[str, Any] = json.loads(FILE.read_text())
    assert made["gpu"], "the record was not made on a GPU"
    assert [p["seed"] for p in made["problems"]] == list(range(COUNT))
    return made


def allowed_difference(values: np.ndarray, stored: Any, **sizes: Any) -> np.ndarray:
    """By how much two results may differ that are both right: computing and a unit of rounding."""
    half_unit_and_computing = testing.allowed_error(values, stored=stored, **sizes)
    computing = testing.allowed_error(values, stored=np.float64, **sizes)
    return 2 * half_unit_and_computing - computing


def check(name: str, x: np.ndarray, kept: dict[str, Any], **sizes: Any) -> None:
    """Compare a result with what a record keeps of the GPU's."""
    wide = x.astype(np.float64)
    finite = np.isfinite(wide)
    allowed = allowed_difference(np.where(finite, wide, 0.0), x.dtype, **sizes)
    assert int(finite.sum()) == kept["finite"], f"{name}: other elements are finite"
    for place, text in zip(kept["places"], kept["values"], strict=True):
        at, value = tuple(place), float.fromhex(text)
        same = wide[at] == value  # also both -inf
        assert same or abs(wide[at] - value) <= allowed[at], (
            f"{name}{place} is {wide[at]:.9g}, on the GPU {value:.9g}; {allowed[at]:.3g} allowed"
        )
    total, recorded = float(wide[finite].sum()), float.fromhex(kept["sum"])
    limit = 4 * float(np.sqrt((allowed[finite] ** 2).sum()))
    assert abs(total - recorded) <= limit, (
        f"{name} sums to {total:.9g}, on the GPU to {recorded:.9g}; {limit:.3g} allowed"
    )


@pytest.mark.parametrize("seed", range(COUNT))
def test_recorded_results_of_a_gpu_emulated(
    emulation: None, record: dict[str, Any], seed: int
) -> None:
    problem, kept = draw(seed), record["problems"][seed]
    assert problem.digest == kept["inputs"], (
        f"NumPy {np.__version__} does not draw the inputs that {record['numpy']} drew"
    )
    out, lse = problem.run("emulate")
    expected = problem.expected()
    expected.check(out, lse)
    score, value = expected.max_score[..., None], expected.max_value[..., None]
    if problem.options["layout"] == "BLHD":
        score, value = score.swapaxes(1, 2), value.swapaxes(1, 2)
    check("out", out, kept["out"], dtype=out.dtype, max_score=score, max_value=value)
    check("lse", lse, kept["lse"], dtype=out.dtype, max_score=expected.max_score)
