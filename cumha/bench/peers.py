"""Other libraries on the same arrays: torch's scaled_dot_product_attention.

Only here is torch imported, and only when asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cumha import masks
from cumha.bench.cases import MOST_PAIRS, Case
from cumha.bench.clock import Call, Clock, first_line, replayed
from cumha.bench.measure import Inputs, Peer

MOST_LAUNCHES = 256  # torch keeps an output for each launch of a graph

#: Backends of torch, and for which dtypes they are tried.
BACKENDS = {
    "EFFICIENT_ATTENTION": ("float16", "bfloat16", "float32"),
    "FLASH_ATTENTION": ("float16", "bfloat16"),
    "CUDNN_ATTENTION": ("float16", "bfloat16"),
    "MATH": ("float32",),
}


def named(names: list[str], clock: Clock) -> dict[str, Peer]:
    """Peers by name.

    Raises
    ------
    ValueError
        Unknown names, or a clock of the host.
    RuntimeError
        The library is missing.
    """
    unknown = sorted(set(names) - {"torch"})
    if unknown:
        raise ValueError(f"unknown peer {unknown[0]!r}: known is torch")
    if names and clock.library != "cupy":
        raise ValueError("peers are timed on a GPU: leave --host or --peers out")
    return {name: torch_peer() for name in names}


def torch_peer() -> Peer:
    """Time every backend of torch's attention that takes a case.

    Raises
    ------
    RuntimeError
        torch is missing or sees no GPU.
    """
    try:
        import torch
    except ImportError as error:
        raise RuntimeError(f"torch cannot be imported ({error}): leave --peers out") from error
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU: leave --peers out")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False

    def measure(case: Case, inputs: Inputs, warmups: int, repeats: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        with torch.inference_mode():
            for backend, dtypes in BACKENDS.items():
                if case.dtype not in dtypes:
                    continue
                try:
                    found[backend] = _measured(torch, backend, case, inputs, warmups, repeats)
                except Exception as error:  # whatever a backend raises that does not take the case
                    found[backend] = first_line(error)
        torch.cuda.empty_cache()
        return found

    return measure


def _measured(
    torch: Any, backend: str, case: Case, inputs: Inputs, warmups: int, repeats: int
) -> dict[str, Any] | str:
    """Times of one backend, or why it was not asked."""
    mask, is_causal, refused = _torch_mask(torch, case)
    if refused or (backend == "MATH" and not _math_fits(torch, case)):
        return refused or "its matrix of scores does not fit"
    calls = _calls(torch, backend, case, inputs, mask, is_causal)
    return _times(torch, calls, warmups, repeats)


def _torch_mask(torch: Any, case: Case) -> tuple[Any, bool, str]:
    """``attn_mask``, ``is_causal``, and why torch cannot be asked."""
    plain = case.mask is None and case.key_lengths is None
    if plain and (not case.causal or case.len_q == 1):
        return None, False, ""
    if plain and case.len_q == case.len_k:  # torch's diagonal starts at the upper left corner
        return None, True, ""
    if case.len_q * case.len_k > MOST_PAIRS:
        return None, False, "its mask would be too large"
    return torch.from_numpy(dense_mask(case)).cuda(), False, ""


def dense_mask(case: Case) -> np.ndarray:
    """The mask as booleans [batch or 1, heads or 1, len_q, len_k]."""
    valid = case.len_k if case.key_lengths is None else case.key_lengths
    mask = masks.causal() if case.causal else None
    if case.mask is not None:
        mask = case.mask if mask is None else mask & case.mask
    keep = np.zeros((1, 1, case.len_q, case.len_k), bool)
    if mask is None:
        keep[..., :valid] = True
        return keep
    used = {node.value for node in mask.program.nodes if node.op == "index"}
    batch, heads = case.batch if "b" in used else 1, case.heads_q if "h" in used else 1
    keep = np.zeros((batch, heads, case.len_q, case.len_k), bool)
    for b in range(batch):
        keep[b, ..., :valid] = masks.evaluate(
            mask,
            b=b,
            h=np.arange(heads)[:, None, None],
            q=np.arange(case.len_q)[:, None],
            k=np.arange(valid),
            len_q=case.len_q,
            len_k=valid,
        )
    return keep


def _math_fits(torch: Any, case: Case) -> bool:
    """Scores, their softmax and one more copy, in half of the free memory."""
    scores = case.batch * case.heads_q * case.len_q * case.len_k * 4
    return bool(3 * scores < torch.cuda.mem_get_info()[0] / 2)


def _calls(
    torch: Any, backend: str, case: Case, inputs: Inputs, mask: Any, is_causal: bool
) -> list[Callable[[], Any]]:
    """A call over each input set."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    attend = torch.nn.functional.scaled_dot_product_attention
    chosen = getattr(SDPBackend, backend)

    def call(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(chosen):
            return attend(
                q, k, v, attn_mask=mask, is_causal=is_causal,
                enable_gqa=case.heads_q != case.heads_kv,
            )  # fmt: skip

    def bound(arrays: tuple[Any, ...]) -> Callable[[], Any]:
        q, k, v = (torch.from_dlpack(x) for x in arrays)
        if case.layout == "BLHD":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return lambda: call(q, k, v)

    return [bound(arrays[:3]) for arrays in inputs.sets]


def _times(
    torch: Any, calls: list[Callable[[], Any]], warmups: int, repeats: int
) -> dict[str, Any]:
    """As `cumha.bench.gpu.GpuClock.kernel`, with torch's graphs."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # what torch asks for before a capture
        for call in calls:
            call()
    torch.cuda.synchronize()

    def capture(launches: int) -> Call:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(launches):
                calls[i % len(calls)]()
        return graph.replay  # type: ignore[no-any-return]

    def timed(replay: Call, times: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
        for start, stop in events:
            start.record()
            replay()
            stop.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) * 1e-3 for start, stop in events]

    return vars(replayed(capture, timed, len(calls), MOST_LAUNCHES, warmups, repeats))
