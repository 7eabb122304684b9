"""Which arrays the examples compute with: CuPy's where a GPU is usable, else NumPy's."""

from __future__ import annotations

import argparse
import sys
from types import ModuleType

import numpy as np


def choose(description: str) -> ModuleType:
    """Read ``--gpu`` and ``--cpu`` from the command line; return cupy or numpy."""
    parser = argparse.ArgumentParser(description=description)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--gpu", action="store_true", help="CuPy, or fail where it does not work")
    where.add_argument("--cpu", action="store_true", help="NumPy, also where there is a GPU")
    args = parser.parse_args()
    return np if args.cpu else _cupy(needed=args.gpu) or np


def _cupy(*, needed: bool) -> ModuleType | None:
    try:
        import cupy

        cupy.ones(2).sum().item()  # compiles and runs a kernel
    except Exception as error:  # a missing package, driver, GPU or NVRTC: each fails its own way
        if needed:
            sys.exit(
                f"CuPy does not work here ({type(error).__name__}: {error}); "
                "`python -m cumha doctor` says what is missing"
            )
        return None
    return cupy


def to_numpy(x: np.ndarray) -> np.ndarray:
    """Copy a result to host memory; `x` is a NumPy or a CuPy array."""
    return x if isinstance(x, np.ndarray) else x.get()
