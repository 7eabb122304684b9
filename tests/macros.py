"""What config.cuh wants to know, for tests that write sources of their own around its headers."""

from __future__ import annotations

DEFAULTS = {
    "CUMHA_ELEMENT": "float",
    "CUMHA_HEAD_DIM": "1",
    "CUMHA_HEAD_DIM_V": "1",
    "CUMHA_WIDE_INDEX": "0",
    "CUMHA_KEY_LENGTH_BITS": "0",
    "CUMHA_STORE_STATE": "0",
    "CUMHA_STORE_LSE": "0",
    "CUMHA_SPLIT_BY": "0",
    "CUMHA_THREADS": "32",
    "CUMHA_BLOCK_ROWS": "1",
    "CUMHA_TILE_KEYS": "1",
    "CUMHA_COLUMNS": "0",
    "CUMHA_RING_SLOTS": "0",
    "CUMHA_PADDING": "0",
    "CUMHA_STAGE_MASK": "0",
    "CUMHA_VECTOR_BYTES": "4",
    "CUMHA_OUT_VECTOR_BYTES": "4",
    "CUMHA_MASK_NUMBERS": "0",
    "CUMHA_MASK_ARRAYS": "0",
    "CUMHA_PARAMS_BYTES": "0",
}


def define_lines(**changes: object) -> str:
    """Return a ``#define`` line for every macro; changes by name, without ``CUMHA_``."""
    changed = {f"CUMHA_{name}": str(value) for name, value in changes.items()}
    assert changed.keys() <= DEFAULTS.keys()
    return "".join(f"#define {name} {value}\n" for name, value in {**DEFAULTS, **changed}.items())
