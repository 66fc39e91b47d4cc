"""What a report, and `forebay top`, say about a loader besides its trace."""

from __future__ import annotations

import os
import sys
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from forebay.buffer import capacity_shown, low_mark_of
from forebay.live.live_page import LivePage
from forebay.live.recent_work import RecentWork
from forebay.loading.settings import Settings
from forebay.observe.diagnosis import LEAST_STEPS
from forebay.observe.trace import Trace
from forebay.options import cluster_of
from forebay.reports.environment import environment
from forebay.reports.loader_report import loader_html
from forebay.reports.loader_summary import loader_summary
from forebay.reports.report_file import write_report

# The verdict for `forebay top` is renewed so often, and takes at most this share of the time.
VERDICT_S = 10.0
VERDICT_SHARE = 0.001


def report_of(loader: Any, trace: Trace, failures: int, path: str | os.PathLike[str]) -> Path:
    """Write the report of a loader; see `DataLoader.report`."""
    settings = Settings(loader)
    summary = loader_summary(
        trace,
        title=settings.described(),
        settings=_arguments(settings),
        environment=environment(),
        verdict=verdict_of(loader),
        marks=marks_of(loader),
        failures=failures,
        replays=loader.seed is not None and not settings.is_iterable,
        now=time.perf_counter(),
        wall=time.time(),
    )
    return write_report(loader_html(summary), path)


def verdict_of(loader: Any) -> str:
    """Return why training waits, in sentences."""
    return str(loader.diagnose())


def marks_of(loader: Any) -> dict[str, int | None]:
    """Return the high marks of a loader's buffer."""
    buffer = loader.buffer
    return {
        "max_bytes": None if buffer is None else buffer.nbytes,
        "max_batches": None if buffer is None else buffer.max_batches,
    }


def _arguments(settings: Settings) -> dict[str, str]:
    """Return a loader's arguments as strings."""
    loader, length = settings.loader, settings.length
    name = type(loader.dataset).__name__
    shown: dict[str, object] = {
        "dataset": name if length is None else f"{name}, {length:,} samples",
        "batch_size": settings.batch_size,
        "shuffle": settings.shuffle,
        "num_workers": loader.num_workers,
        "buffer": None if loader.buffer is None else capacity_shown(loader.buffer),
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        "backend": "ray" if cluster_of(loader.backend) is not None else loader.backend,
        "seed": loader.seed,
        "collate_fn": _name_of(loader.collate_fn),
        "in_order": loader.in_order,
        "pin_memory": loader.pin_memory,
        "drop_last": settings.drop_last,
        "timeout": loader.timeout,
        "on_error": loader.on_error,
    }
    if loader.device is not None:
        transform = loader.device_transform
        shown |= {"device": loader.device, "device_transform": _name_of(transform)}
    if loader._ranks is not None:
        shown |= {"rank": loader._ranks.rank, "world_size": loader._ranks.world_size}
    return {name: str(value) for name, value in shown.items()}


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__)) if function else "None"


class LiveLoader:
    """Publishes a loader to `forebay top`, while its trace records something.

    Args:
        loader: The loader, which is not kept alive.
    """

    def __init__(self, loader: Any) -> None:
        self._page, self._recent = LivePage(), RecentWork()
        self._loader = weakref.ref(loader)
        self._verdict, self._verdict_due = "", 0.0
        weakref.finalize(loader, self._page.remove)

    def __call__(self, trace: Trace) -> None:
        """Write the present state of the loader; never raises."""
        loader = self._loader()
        if loader is not None:
            with suppress(Exception):  # showing something must not end a training
                self._page.publish(self._state(loader, trace, time.perf_counter()))

    def remove(self) -> None:
        """Remove what is shown, until something is recorded again."""
        self._page.remove()

    def _state(self, loader: Any, trace: Trace, now: float) -> dict[str, Any]:
        if now >= self._verdict_due:
            found = loader.diagnose()
            self._verdict = str(found)
            if found.evidence["steps"] >= LEAST_STEPS:  # otherwise it is cheap, and soon outdated
                took = time.perf_counter() - now
                self._verdict_due = now + max(VERDICT_S, took / VERDICT_SHARE)
        pipeline, buffer = loader._pipeline, loader.buffer
        planner = None if pipeline is None else pipeline.planner
        feed = None if pipeline is None else pipeline.feed
        return {
            "kind": "loader",
            "title": Settings(loader).described(),
            "program": os.path.basename(sys.argv[0]) if sys.argv else "",
            "at": time.time(),
            "began": time.time() - (now - trace.began_at),
            "epoch": -1 if planner is None else planner.epoch,
            "batch": 0 if planner is None else planner.batch,
            "taken": trace.taken_count,
            "ready": 0 if feed is None else len(feed.ready),
            "held_bytes": trace.held_bytes,
            **marks_of(loader),
            "refill_below": None if buffer is None else low_mark_of(buffer),
            "num_workers": trace.num_workers,
            "restarts": trace.restarts,
            "verdict": self._verdict[:1000],
            **self._recent.update(trace, now),
        }
