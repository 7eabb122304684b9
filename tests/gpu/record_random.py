"""Record what a GPU computes for 200 random problems, for a test that needs no GPU.

    python -m tests.gpu.record_random [--output tests/data/random_h200.json]

The record holds, for each problem, its seed, checksums, the sums of out and lse, and their values
at a few places. ``tests/kernels/test_recorded.py`` makes the problems again from their seeds, runs
the same kernels on the CPU and compares. With ``--backend emulate`` the CPU makes the record too,
to try this script where there is no GPU; such a record says so and the test refuses it.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np

import cumha
from cumha.cli import verified_digest
from tests.gpu.random_problems import COUNT, draw, summary

ROOT = Path(__file__).resolve().parents[2]


def origin(backend: str) -> dict[str, Any]:
    """Where and when a record was made."""
    if backend == "emulate":
        where = {"gpu": None}
    else:
        import cupy

        from cumha.compile import nvrtc_version
        from tests.gpu.verify import driver_version as driver_version

        where = {
            "gpu": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
            "driver": driver_version(),
            "nvrtc": "{}.{}".format(*nvrtc_version()),
            "cupy": cupy.__version__,
        }
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {
        **where,
        "numpy": np.__version__,
        "version": cumha.__version__,
        "digest": verified_digest(),
        "date": today,
    }


def record(seed: int, backend: str) -> dict[str, Any]:
    problem = draw(seed)
    out, lse = problem.run(backend)
    problem.expected().check(out, lse)
    results = {
        name: summary(x, problem.places(name, x.shape)) for name, x in (("out", out), ("lse", lse))
    }
    return {"seed": seed, "inputs": problem.digest, **results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "tests/data/random_h200.json")
    parser.add_argument("--backend", choices=["cuda", "emulate"], default="cuda")
    options = parser.parse_args()
    head = origin(options.backend)
    problems = [record(seed, options.backend) for seed in range(COUNT)]
    lines = ",\n".join("  " + json.dumps(p, separators=(",", ":")) for p in problems)
    text = json.dumps(head, indent=1)[:-2] + f',\n "problems": [\n{lines}\n ]\n}}\n'
    json.loads(text)
    options.output.write_text(text)
    print(f"{len(problems)} problems, {len(text)} bytes: {options.output}")


if __name__ == "__main__":
    main()
