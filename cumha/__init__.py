"""Masked multi-head attention for NumPy and CuPy, from readable CUDA kernels compiled at run time.

    import cumha
    out = cumha.attention(q, k, v, causal=True)        # [batch, heads, len, head_dim]

`attention` and `plan` compute, `partial_attention` and `merge` split a call over its keys,
`masks` says who sees whom, `reference` is the formula in float64, `testing` helps to test kernels.
"""

from cumha import masks, reference
from cumha.api import attention, partial_attention, plan
from cumha.errors import UnsupportedError
from cumha.plan import Plan
from cumha.state import State, merge

__version__ = "0.1.0"

__all__ = [
    "Plan",
    "State",
    "UnsupportedError",
    "attention",
    "masks",
    "merge",
    "partial_attention",
    "plan",
    "reference",
]
