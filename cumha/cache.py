"""The disk cache of compiled kernels: one checksummed file per entry, safe for many processes.

An entry is written to a file of its own and then renamed: a reader sees all of it or nothing. What
a reader cannot verify (cut short, overwritten, made by another version) counts as missing and is
built and written again. A directory that cannot be written costs time, never the result.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENTRY_SUFFIX = ".kernel"

# magic, format version, bytes of metadata, bytes of image, SHA-256 of metadata + image
_HEADER = struct.Struct("<8sIIQ32s")
_MAGIC = b"cumha\r\n\0"
_FORMAT = 1

_warned = threading.Event()


@dataclass(frozen=True)
class CacheInfo:
    """What the disk cache holds: its `directory`, number of `entries` and their size in `bytes`."""

    directory: Path
    entries: int
    bytes: int


def cache_directory() -> Path:
    """Return the directory of compiled kernels (it need not exist yet).

    ``CUMHA_CACHE_DIR`` if set; else ``cumha`` below the user's cache directory:
    ``XDG_CACHE_HOME`` or ``~/.cache``, on macOS ``~/Library/Caches``, on Windows ``LOCALAPPDATA``.

    Raises
    ------
    RuntimeError
        The home directory of the user cannot be found.
    """
    chosen = os.environ.get("CUMHA_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser().absolute()
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        base = Path(local) if local else Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
        # The XDG rules say that a relative path is invalid and to be ignored.
        base = xdg if xdg.is_absolute() else Path.home() / ".cache"
    return base / "cumha"


def cache_info() -> CacheInfo:
    """Return directory, number of entries and bytes of the disk cache."""
    directory = cache_directory()
    sizes = []
    for entry in _entries(directory):
        try:
            sizes.append(entry.stat().st_size)
        except OSError:  # removed by another process since it was listed
            continue
    return CacheInfo(directory, len(sizes), sum(sizes))


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.glob(f"*{ENTRY_SUFFIX}"))
    except OSError:
        return []


def read_entry(name: str) -> tuple[dict[str, Any], bytes] | None:
    """Return metadata and image of the entry `name`; None where there is no sound one."""
    try:
        data = (cache_directory() / name).read_bytes()
    except (OSError, RuntimeError):
        return None
    return unpack(data)


def write_entry(name: str, metadata: dict[str, Any], image: bytes) -> None:
    """Write an entry in one step; warn, once per process, where that is not possible."""
    try:
        directory = cache_directory()
        directory.mkdir(parents=True, exist_ok=True)
        _replace(directory / name, pack(metadata, image))
    except (OSError, RuntimeError) as error:
        if not _warned.is_set():
            _warned.set()
            warnings.warn(
                f"compiled kernels cannot be kept ({error}): every process will compile its own; "
                "set CUMHA_CACHE_DIR to a directory that can be written",
                RuntimeWarning,
                stacklevel=2,
            )


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        # Not tempfile: its files are private, and a shared cache is to be read by other users.
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def pack(metadata: dict[str, Any], image: bytes) -> bytes:
    """Return the bytes of an entry."""
    text = json.dumps(metadata, sort_keys=True).encode()
    checksum = hashlib.sha256(text + image).digest()
    return _HEADER.pack(_MAGIC, _FORMAT, len(text), len(image), checksum) + text + image


def unpack(data: bytes) -> tuple[dict[str, Any], bytes] | None:
    """Return metadata and image of an entry; None if the bytes are not those of a sound one."""
    if len(data) < _HEADER.size:
        return None
    magic, version, text_bytes, image_bytes, checksum = _HEADER.unpack_from(data)
    body = data[_HEADER.size :]
    if (magic, version) != (_MAGIC, _FORMAT) or len(body) != text_bytes + image_bytes:
        return None
    if hashlib.sha256(body).digest() != checksum:
        return None
    metadata: dict[str, Any] = json.loads(body[:text_bytes])
    return metadata, body[text_bytes:]
