"""The public calls: describe, decide, execute."""

from __future__ import annotations

from typing import Any

from cumha.paths import Request
from cumha.plan import Plan, decide, device_of
from cumha.problem import describe
from cumha.state import State


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any = None,
    causal: bool = False,
    key_lengths: Any = None,
    scale: float | None = None,
    layout: str = "BHLD",
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    workspace: Any = None,
    splits: int | None = None,
    split_by: str = "tiles",
    keys_per_split: int | None = None,
    path: str | None = None,
    backend: str | None = None,
) -> Any:
    """Masked multi-head attention, ``softmax(scale * q @ k^T where the mask keeps) @ v``.

    Parameters
    ----------
    q : numpy.ndarray or cupy.ndarray, [batch, heads_q, len_q, head_dim]
        float16, bfloat16 (`ml_dtypes`), float32 or float64; any strides. head_dim 1…512.
    k : array like q, [batch, heads_kv, len_k, head_dim]
        ``heads_q`` must be a multiple of ``heads_kv``; query head h reads KV head
        ``h // (heads_q // heads_kv)``.
    v : array like q, [batch, heads_kv, len_k, head_dim_v]
    mask : Mask or boolean array, optional
        An expression of `cumha.masks`, or a boolean array (True = attend) that broadcasts to
        [batch, heads_q, len_q, len_k].
    causal : bool, default False
        And `masks.causal()` to the mask: the last query sees the last valid key.
    key_lengths : array of int, [batch], optional
        Valid keys of each batch entry; default all. On a device: int32 or int64, clamped, never
        read by the host.
    scale : float, optional
        Factor of the scores, default ``1 / sqrt(head_dim)``.
    layout : {"BHLD", "BLHD"}
        Axis order of q, k, v and out: [batch, heads, len, dim] or [batch, len, heads, dim].
    return_lse : bool, default False
        Also return the logarithm of the sum of exponentials.
    out : array like q, [batch, heads_q, len_q, head_dim_v] in ``layout``, optional
        Where to write the result.
    lse : array, float32, [batch, heads_q, len_q], optional
        Where to write the logarithms; needs ``return_lse=True``.
    workspace : array, uint8, 1-d, optional
        Scratch memory of at least ``Plan.workspace_bytes``, aligned to 128 bytes.
    splits : int, optional
        Number of parts that each row block's keys are divided into; clamped to its tiles.
    split_by : {"tiles", "length"}
        Whether parts hold equal numbers of visible tiles or of keys.
    keys_per_split : int, optional
        Fix the parts' boundaries at multiples instead, so that a request's bits do not depend on
        its batch.
    path : str, optional
        Name of the path to take, as in `Plan.path`.
    backend : {"cuda", "host", "emulate"}, optional
        Where to run; by default CuPy arrays on their GPU, NumPy arrays on the host.

    Returns
    -------
    out : array like q, [batch, heads_q, len_q, head_dim_v] in ``layout``
        A row that sees no key is exactly 0.
    lse : array, float32, [batch, heads_q, len_q]
        Natural logarithm, -inf for a row that sees no key; only with ``return_lse``.

    Raises
    ------
    TypeError, ValueError
        Arguments that do not fit; the message says what was given and what is needed.
    UnsupportedError
        If no path can run the call; every path's reasons are listed.
    RuntimeError
        If CuPy, NVRTC or a GPU is missing, or a kernel would have to be compiled inside a graph
        capture.
    """
    return plan(
        q, k, v, mask=mask, causal=causal, key_lengths=key_lengths, scale=scale, layout=layout,
        return_lse=return_lse, out=out, lse=lse, workspace=workspace, splits=splits,
        split_by=split_by, keys_per_split=keys_per_split, path=path, backend=backend,
    ).execute()  # fmt: skip


def plan(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any = None,
    causal: bool = False,
    key_lengths: Any = None,
    scale: float | None = None,
    layout: str = "BHLD",
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    workspace: Any = None,
    splits: int | None = None,
    split_by: str = "tiles",
    keys_per_split: int | None = None,
    path: str | None = None,
    backend: str | None = None,
) -> Plan:
    """Decide how `attention` would run, without running it; arguments as there.

    Returns
    -------
    Plan
        ``run(q, k, v)`` computes, ``explain()`` says what and why.
    """
    request = Request.checked(splits, split_by, keys_per_split, path, backend)
    options = {
        "mask": mask, "causal": causal, "key_lengths": key_lengths, "scale": scale,
        "layout": layout, "return_lse": return_lse, "out": out, "lse": lse, "workspace": workspace,
    }  # fmt: skip
    problem, arrays = describe(q, k, v, **options)
    return Plan(problem, decide(problem, request, device_of(problem, request)), arrays, options)


def partial_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    key_offset: int = 0,
    total_keys: int | None = None,
    mask: Any = None,
    causal: bool = False,
    key_lengths: Any = None,
    scale: float | None = None,
    layout: str = "BHLD",
    workspace: Any = None,
    splits: int | None = None,
    split_by: str = "tiles",
    keys_per_split: int | None = None,
    path: str | None = None,
    backend: str | None = None,
) -> State:
    """Attention over a slice of the keys, as a `State` that `merge` combines with others.

    Parameters
    ----------
    key_offset : int, default 0
        Position of this call's first key in its sequence.
    total_keys : int, optional
        Keys of the whole sequence, default ``key_offset + len_k``. Masks see true positions: key
        ``j`` of this call is ``k = key_offset + j``, ``key_lengths`` count keys of the whole
        sequence, and mask arrays cover it.
    q, k, v, mask, causal, key_lengths, scale, layout
        As in `attention`.
    workspace, splits, split_by, keys_per_split, path, backend
        As in `attention`.

    Returns
    -------
    State
        Unnormalised; axes [batch, heads_q, len_q, head_dim_v] whatever ``layout`` says.
    """
    request = Request.checked(splits, split_by, keys_per_split, path, backend)
    options = {
        "mask": mask, "causal": causal, "key_lengths": key_lengths, "scale": scale,
        "layout": layout, "workspace": workspace, "store_state": True, "key_offset": key_offset,
        "total_keys": total_keys,
    }  # fmt: skip
    problem, arrays = describe(q, k, v, **options)
    result = Plan(
        problem, decide(problem, request, device_of(problem, request)), arrays, options
    ).execute()
    assert isinstance(result, State)
    return result
