"""Time the kernels of this version on the GPU at hand; prints Markdown for docs/performance.md.

    python tests/gpu/timing.py [path]

Kernel time: median over 20 replays of a CUDA graph with 10 launches, inputs rotated past the L2.
Floor: bytes that must move (q, k, v, out once) at the bandwidth on the GPU's data sheet.
Host time: an eager call without waiting for the device.
"""

from __future__ import annotations

import statistics
import sys
import time

import cupy
import numpy as np

import cumha
from cumha.compile import nvrtc_version
from cumha.device import Device

CASES = [  # name, batch, heads_q, heads_kv, len_q, len_k, head_dim, causal
    ("decode", 1, 32, 8, 1, 4096, 128, True),
    ("decode, batch 64", 64, 32, 8, 1, 4096, 128, True),
    ("prefill", 1, 16, 16, 1024, 1024, 64, False),
    ("prefill, causal", 1, 16, 16, 1024, 1024, 64, True),
    ("prefill, causal", 1, 16, 16, 2048, 2048, 128, True),
]
PATH = sys.argv[1] if len(sys.argv) > 1 else None  # by default the planner's choice
ROTATED_BYTES = 256e6  # several times the L2
LAUNCHES = 10


def seconds(stream: cupy.cuda.Stream, graph: object, repeats: int = 20) -> float:
    times = []
    for _ in range(repeats + 3):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        graph.launch(stream)  # type: ignore[attr-defined]
        stop.record(stream)
        stop.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, stop) * 1e-3 / LAUNCHES)
    return statistics.median(times[3:])


def captured(stream: cupy.cuda.Stream, calls: list) -> object:
    with stream:
        for call in calls:
            call()
        stream.synchronize()
        stream.begin_capture()
        for i in range(LAUNCHES):
            calls[i % len(calls)]()
        return stream.end_capture()


def attention_times(stream, case) -> tuple[str, float, float, int]:
    _, batch, heads_q, heads_kv, len_q, len_k, dim, causal = case
    generator = cupy.random.default_rng(0)

    def array(*shape):
        return generator.standard_normal(shape, dtype=np.float32).astype(np.float16)

    q, out = array(batch, heads_q, len_q, dim), array(batch, heads_q, len_q, dim)
    one = 2 * batch * heads_kv * len_k * dim * 2
    sets = [
        (array(batch, heads_kv, len_k, dim), array(batch, heads_kv, len_k, dim))
        for _ in range(min(LAUNCHES, max(1, int(ROTATED_BYTES // one))))
    ]
    options = {"causal": causal, "out": out, "path": PATH}
    calls = [lambda k=k, v=v: cumha.attention(q, k, v, **options) for k, v in sets]
    plan = cumha.plan(q, *sets[0], **options)
    how = f"{plan.path}, {plan.choice.splits} splits" if plan.choice.splits > 1 else plan.path
    kernel = seconds(stream, captured(stream, calls))
    stream.synchronize()
    started = time.perf_counter()
    for _ in range(20):
        calls[0]()
    host = (time.perf_counter() - started) / 20
    stream.synchronize()
    return how, kernel, host, one + q.nbytes + out.nbytes


def main() -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    device = Device.current()
    bandwidth = device.memory_bandwidth or float("nan")
    version = "{}.{}".format(*nvrtc_version())
    print(f"{device.name}, {bandwidth / 1e12:.2f} TB/s, NVRTC {version}, float16\n")
    columns = "batch, heads, len_q, len_k, dim | path | kernel | memory floor | ratio | host"
    print(f"| case | {columns} |")
    print("|---|---|---|---|---|---|---|")
    for case in CASES:
        how, kernel, host, moved = attention_times(stream, case)
        floor = moved / bandwidth
        title, batch, heads_q, heads_kv, len_q, len_k, dim, _ = case
        shape = f"{batch}, {heads_q}:{heads_kv}, {len_q}, {len_k}, {dim}"
        print(
            f"| {title} | {shape} | {how} | {kernel * 1e6:.0f} us | {floor * 1e6:.1f} us "
            f"| {kernel / floor:.0f} | {host * 1e6:.0f} us |"
        )


if __name__ == "__main__":
    main()
