"""What would run where: plans for GPUs that are not in this machine, and for the host.

    python examples/explain_plan.py

Planning is pure Python over a Problem and a Device value; no CUDA, no CuPy. For shapes of your own
there is `python -m cumha explain`.
"""

from __future__ import annotations

import dataclasses

import numpy as np

import cumha
from cumha.device import Device
from cumha.paths import Request
from cumha.plan import Choice, decide, explain
from cumha.problem import Arrays, Problem, describe

SHAPES = {  # batch, heads_q, heads_kv, len_q, len_k, head_dim
    "prefill": (1, 32, 8, 4096, 4096, 128),
    "decode": (8, 32, 8, 1, 8192, 128),
}


def described(
    batch: int, heads_q: int, heads_kv: int, len_q: int, len_k: int, dim: int
) -> tuple[Problem, Arrays]:
    """The problem of a causal call in float16; the arrays are never touched."""
    q = np.empty((batch, heads_q, len_q, dim), np.float16)
    k, v = (np.empty((batch, heads_kv, len_k, dim), np.float16) for _ in range(2))
    return describe(q, k, v, causal=True)


def on_device(problem: Problem, device: Device, request: Request) -> Choice:
    """Decide as if the arrays were CuPy arrays on `device`."""
    return decide(dataclasses.replace(problem, library="cupy", device=0), request, device)


def main() -> None:
    for title, shape in SHAPES.items():
        problem, arrays = described(*shape)
        print(f"\n=== {title}\n")
        choice = decide(problem, Request(), None)
        print(explain(choice, problem, arrays.mask))
        assert choice.path == "host"
        # Decode needs no causal test: the only query is the last position and sees every key.
        assert (arrays.mask is None) == (title == "decode")

        for name in ("h200", "rtx4090", "t4"):
            device = Device.named(name)
            choice = on_device(problem, device, Request())
            print(f"\n{explain(choice, problem, arrays.mask)}")
            assert choice.path == {"prefill": "tiled", "decode": "gemv"}[title]
            assert choice.grid * choice.tile_q >= problem.rows
            # Decode has few rows: their keys are divided until at least half of the multiprocessors
            # have work.
            assert choice.grid >= device.sm_count / 2

    print("\n=== asked for what a path cannot do\n")
    problem, _ = described(*SHAPES["decode"])
    try:
        on_device(problem, Device.named("h200"), Request(splits=8, path="naive"))
    except cumha.UnsupportedError as error:
        print(error)
    else:
        raise AssertionError("naive takes all keys of a row one after the other")


if __name__ == "__main__":
    main()
