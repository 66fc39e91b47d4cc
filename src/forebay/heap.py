"""Tune the C library's heap for a worker that allocates similar objects again and again."""

from __future__ import annotations

import ctypes

# mallopt(3) constants; glibc's maximum mmap threshold.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_IN_HEAP = 32 << 20
_KEPT = 256 << 20


def keep_freed() -> None:
    """Make this process keep up to 256 MiB of freed heap memory for later allocations.

    glibc gives the pages of a freed image back to the system and takes new ones for the next image,
    which the system has to clear first: with JPEGs of 500x400 that is a tenth of a worker's time.
    Other C libraries are not changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
        mallopt(_M_TRIM_THRESHOLD, _KEPT)
