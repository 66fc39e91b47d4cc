"""Read small files of /proc, also at times when Ctrl-C is likely to come."""

from __future__ import annotations

import os

# More than nearly all of the files that are read have.
_MAX_BYTES = 4096


def read_proc(path: str, most: int = _MAX_BYTES) -> bytes:
    """Return the content of a file of /proc, or its first `most` bytes.

    Raises:
        OSError: There is no such file, or it cannot be read.
    """
    # Not open(): Ctrl-C between it and its `with` would be reported as an unclosed file.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, most)
    finally:
        os.close(descriptor)


def read_long_proc(path: str) -> bytes:
    """Return the content of a file of /proc of any length, of which one call reads a page.

    Raises:
        OSError: There is no such file, or it cannot be read.
    """
    parts = []
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while part := os.read(descriptor, _MAX_BYTES):
            parts.append(part)
    finally:
        os.close(descriptor)
    return b"".join(parts)
