"""Time one decode and one prefill call, and see what warm-ups, graphs and rotation change.

    python examples/timing.py [--gpu | --cpu]

`python -m cumha bench` does all of this and more; here it is spelled out.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import array_library
import numpy as np

import cumha

CASES = {"decode": (8, 1, 2048, 64), "prefill": (8, 256, 256, 64)}  # heads, len_q, len_k, head_dim
WARMUPS, REPEATS, SETS, ROUNDS = 3, 11, 4, 10
Runs = list[Callable[[], Any]]


def host_seconds(runs: Runs) -> list[float]:
    """Wall clock of each run; a NumPy call is done when it returns."""
    times = [time.perf_counter()]
    for run in runs:
        run()
        times.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(times)]


def gpu_seconds(runs: Runs) -> list[float]:
    """Events before and after each run: the device notes the time when it gets there."""
    from cupy.cuda import Event, get_elapsed_time

    pairs = [(Event(), Event()) for _ in runs]
    for run, (start, stop) in zip(runs, pairs, strict=True):
        start.record()
        run()
        stop.record()
    pairs[-1][1].synchronize()  # calls only queue work: wait for the last event before reading any
    return [get_elapsed_time(*pair) * 1e-3 for pair in pairs]  # from milliseconds


def graph_of(calls: Runs) -> Callable[[], Any]:
    """The calls' launches, many times over, as one unit: Python is no longer in the time."""
    from cupy.cuda import get_current_stream

    stream = get_current_stream()  # not the default one, which cannot be captured
    stream.begin_capture()  # from here on launches are noted, not run
    for call in calls * ROUNDS:
        call()
    return stream.end_capture().launch


def measure(title: str, shape: tuple[int, int, int, int], xp: Any) -> None:
    heads, len_q, len_k, dim = shape
    rng = np.random.default_rng(0)

    def call() -> Callable[[], Any]:
        drawn = (rng.standard_normal((1, heads, n, dim), np.float32) for n in (len_q, len_k, len_k))
        q, k, v = (xp.asarray(x) for x in drawn)
        plan = cumha.plan(q, k, v, out=xp.empty_like(q))
        size = plan.workspace_bytes  # given beforehand: a capture should not allocate
        scratch = xp.empty(size, xp.uint8) if size else None
        return lambda: plan.run(q, k, v, workspace=scratch)

    seconds = host_seconds if xp is np else gpu_seconds
    calls = [call() for _ in range(SETS)]
    first = seconds(calls[:1])[0]
    seconds(calls * WARMUPS)
    same = statistics.median(seconds(calls[:1] * REPEATS))
    turns = statistics.median(seconds(calls * REPEATS))
    print(f"{title}: {first * 1e6:.0f} us at first, then {same * 1e6:.0f} us over the same arrays,")
    print(f"  {turns * 1e6:.0f} us with {SETS} sets in turn, which a cache may not hold together")
    if xp is not np:
        replays = seconds([graph_of(calls)] * REPEATS)
        turns = statistics.median(replays) / (SETS * ROUNDS)
        print(f"  {turns * 1e6:.1f} us in a graph of {SETS * ROUNDS} calls: the kernel's own time")
    moved = 4 * heads * dim * (2 * len_q + 2 * len_k)  # bytes: q, out, k and v once
    operations = 4 * heads * len_q * len_k * dim  # two products; to multiply and to add
    print(f"  {moved / turns * 1e-9:.3g} GB/s, {operations / turns * 1e-12:.3g} TFLOP/s")


def main() -> None:
    xp = array_library.choose(__doc__.splitlines()[0])
    with contextlib.nullcontext() if xp is np else xp.cuda.Stream(non_blocking=True):
        for title, shape in CASES.items():
            measure(title, shape, xp)
    print("The first call compiles its kernel, or makes plans and touches memory: warm up first.")
    print("A median forgives what disturbs a few runs; compare only within one run.")


if __name__ == "__main__":
    main()
