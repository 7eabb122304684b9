"""Tools to test attention kernels and masks with: what cumha's own tests use, and its users may.

    expected = testing.expect(q, k, v, causal=True)     # float64 reference and the error allowed
    expected.check(out, lse)                            # or an AssertionError that says where
    print(testing.diagnose(q, k, v, causal=True))       # which part of a call goes wrong

`criterion` holds the error rules and the mismatch report, `inputs` makes arrays that find faults,
`transfer` moves views between NumPy and CuPy as they are. `cumha.testing.strategies` (needs
hypothesis) draws masks and whole calls. Importing this package imports neither hypothesis nor CuPy.
"""

from cumha.testing.criterion import (
    Difference,
    Expected,
    Mismatch,
    allowed_error,
    assert_close,
    compare,
    expect,
    expression,
)
from cumha.testing.diagnosis import Diagnosis, Stage, diagnose
from cumha.testing.inputs import (
    EXTREMES,
    VIEWS,
    extreme_scores,
    identity,
    key_index,
    normal,
    poisoned,
    qkv,
    view,
)
from cumha.testing.transfer import read_back, to_device, to_host

__all__ = [
    "EXTREMES",
    "VIEWS",
    "Diagnosis",
    "Difference",
    "Expected",
    "Mismatch",
    "Stage",
    "allowed_error",
    "assert_close",
    "compare",
    "diagnose",
    "expect",
    "expression",
    "extreme_scores",
    "identity",
    "key_index",
    "normal",
    "poisoned",
    "qkv",
    "read_back",
    "to_device",
    "to_host",
    "view",
]
