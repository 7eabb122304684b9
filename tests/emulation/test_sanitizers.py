"""``checks="sanitizers"``: a sound kernel is clean, planted faults end the process with a report.

The sanitizers' runtime must be loaded before Python: every call is a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cumha import emulate

ROOT = Path(__file__).parents[2]

SOUND = """
import itertools
import ml_dtypes
import numpy as np
import cumha
from cumha import masks, testing

rng = np.random.default_rng(0)
keep = rng.random((2, 40)) < 0.5
for dtype, masked in ((np.float32, False), (ml_dtypes.bfloat16, True)):
    for len_q, len_k in itertools.product((1, 5), (40, 33)):
        q, k, v = (
            rng.standard_normal((2, heads, length, 33)).astype(dtype)
            for heads, length in ((4, len_q), (2, len_k), (2, len_k))
        )
        options = {}
        if masked:
            padding = masks.key_padding(keep[:, :len_k])
            options = {
                "mask": masks.causal() & masks.window(5, 1) | padding,
                "key_lengths": np.array([len_k, 7]),
            }
        out, lse = cumha.attention(
            q, k, v, return_lse=True, path="naive", backend="emulate", **options
        )
        testing.expect(q, k, v, **options).check(out, lse)
print("clean")
"""

PLANTED = '''
import struct
import sys
import numpy as np
from cumha import emulate

SOURCE = """#include "emulate.hpp"
struct Params { float* x; long long which; long long n; };
#line 100 "kernels_cu/planted.cu"
static void planted(const Params& p) {
  int i = threadIdx.x;
  float* s = static_cast<float*>(cumha_emulate::dynamic_shared());
  s[i] = i;
  __syncthreads();
  if (p.which == 1) p.x[i + p.n - 63] = s[i];
  if (p.which == 2) p.x[0] += p.x[i - 64];
  if (p.which == 3) i += 0x7fffffff - 62;
  if (p.which == 4) i = 1 << (i + p.n / 32);
  if (p.which == 5) *reinterpret_cast<float4*>(p.x + 1) = float4{1, 2, 3, 4};
  __syncthreads();
  if (threadIdx.x == 63) p.x[0] = i + s[threadIdx.x ^ 1];
}
extern "C" void cumha_emulate_entry(const void* params) {
  planted(*static_cast<const Params*>(params));
}
"""
which = int(sys.argv[1])
x = np.zeros(2048, np.float32)
lo = x.ctypes.data
with emulate.using(checks="sanitizers", workers=1):
    kernel = emulate.load_source("planted", SOURCE, "sanitizers")
    emulate.run(kernel, (3, 1, 1), (64, 1, 1), struct.pack("Qqq", lo, which, x.size),
                [emulate.Memory("x", lo, lo + x.nbytes, True)], 256)
print("clean")
'''
FAULTS = [
    (1, "AddressSanitizer: heap-buffer-overflow", "planted.cu:105"),
    (2, "AddressSanitizer: heap-buffer-overflow", "planted.cu:106"),
    (3, "signed integer overflow", "planted.cu:107"),
    (4, "shift exponent", "planted.cu:108"),
    (5, "misaligned address", "planted.cu:109"),
]


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """What a process needs that runs kernels under the sanitizers."""
    try:
        library = emulate.preload()
    except RuntimeError as error:
        pytest.skip(str(error))
    if not all(Path(file).is_file() for file in library.split(":")):
        pytest.skip(f"the compiler has no AddressSanitizer: {library} is not there")
    return {
        **os.environ,
        "LD_PRELOAD": library,
        "ASAN_OPTIONS": "detect_leaks=0",
        "CUMHA_EMULATE_CHECKS": "sanitizers",
    }


def python(environment: dict[str, str], text: str, *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and messages of a script."""
    done = subprocess.run(
        [sys.executable, "-c", text, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_sound_kernel_is_clean(environment: dict[str, str]) -> None:
    code, output, messages = python(environment, SOUND)
    assert (code, output) == (0, "clean\n"), messages


def test_sound_case_is_clean(environment: dict[str, str]) -> None:
    code, output, messages = python(environment, PLANTED, "0")
    assert (code, output) == (0, "clean\n"), messages


@pytest.mark.parametrize(("which", "message", "place"), FAULTS, ids=lambda x: str(x))
def test_planted_fault_is_caught(
    environment: dict[str, str], which: int, message: str, place: str
) -> None:
    code, output, messages = python(environment, PLANTED, str(which))
    assert code != 0
    assert not output
    assert message in messages
    assert place in messages
