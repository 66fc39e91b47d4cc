"""How often Python's garbage collector looks for reference cycles during a run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# New objects after which it looks for them during a run; Python's default is 700.
_COLLECT_EVERY = 10_000


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Let Python look for reference cycles less often, while no user code runs in this thread."""
    before = gc.get_threshold()
    is_ours = 0 < before[0] < _COLLECT_EVERY  # not if it is off, or another run has done this
    if is_ours:
        gc.set_threshold(_COLLECT_EVERY, *before[1:])
    try:
        yield
    finally:
        if is_ours:
            gc.set_threshold(*before)
