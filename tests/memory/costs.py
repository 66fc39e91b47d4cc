"""What a slab costs the process and the system."""

from __future__ import annotations

import os

from forebay.memory.slab import Slab


def descriptors() -> int:
    """Return how many files this process has open."""
    return len(os.listdir("/proc/self/fd"))


def blocks(slab: Slab) -> int:
    """Return how much memory the slab really has, in 512 bytes."""
    return os.fstat(slab.fileno()).st_blocks
