"""Times of workers for tests."""

from __future__ import annotations

from typing import Any

from forebay.observe.measurements import Timing


def timing(worker_id: int, ended_at: float, seconds: float, **spent: Any) -> Timing:
    """Return the timing of one batch that took so many seconds."""
    given = {"fetch_s": 0.0, "collate_s": 0.0, **spent}
    return Timing(worker_id, ended_at, seconds, 1, seconds, **given)
