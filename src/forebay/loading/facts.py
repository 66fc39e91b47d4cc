"""What `diagnose`, a report and `forebay top` say about a loader.

arguments ── setup_of ──> Setup ─┬─> diagnosis ──> report, page of `forebay top`
what it did ────────────> Trace ─┘

Functions import what only they need: most loaders are never asked, and each module takes time.
"""

from __future__ import annotations

import os
import time
import weakref
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.base.process import memory_for_files, pressure, read_limit, usable_cores
from forebay.loading.epochs import LoaderProgress
from forebay.loading.settings import Settings
from forebay.observe.figures import numbers_in
from forebay.observe.record import Trace
from forebay.options import (
    AutoWorkers,
    Buffer,
    backend_name,
    capacity_shown,
    cluster_of,
    low_mark_of,
)
from forebay.ranks import ranks_sharing_cores
from forebay.show.top import LivePage, RecentWork

if TYPE_CHECKING:
    from forebay.loader import DataLoader
    from forebay.observe.diagnosis import Diagnosis
    from forebay.observe.simulation import Setup

# The verdict for `forebay top` is renewed so often, and takes at most this share of the time.
VERDICT_S = 10.0
VERDICT_SHARE = 0.001


def setup_of(settings: Settings, trace: Trace) -> Setup:
    """Return how a loader is set up, as far as its speed depends on it."""
    from forebay.observe.simulation import Setup

    loader, depth = settings.loader, settings.depth()
    limits, workers = settings.limits(depth), max(loader.num_workers, 1)
    marks: dict[str, Any] = {"prefetch_factor": max(depth.usual // workers, 1)}
    if loader.buffer is not None:
        counts = limits.slots, limits.refill_below
        if not depth.fills_by_itself:
            counts = depth.usual, depth.refill_below
        marks = dict(zip(("buffer_batches", "refill_below"), counts, strict=True))
    cluster, is_auto = cluster_of(loader.backend), isinstance(loader.num_workers, AutoWorkers)
    return Setup(
        num_workers=trace.num_workers if is_auto else loader.num_workers,
        most_workers=int(loader.num_workers) if is_auto else None,
        auto_workers=int(AutoWorkers()),
        concurrency=None if settings.one_at_a_time else settings.concurrency,
        backend=backend_name(loader.backend),
        cores=usable_cores() / ranks_sharing_cores() if cluster is None else None,
        takes_turns=settings.by_torchs_rules,
        in_order=settings.in_order,
        keeps_workers=settings.keeps_workers,
        crosses_epochs=settings.runs_ahead,
        buffer_bytes=limits.max_bytes,
        batch_size=settings.batch_size,
        is_iterable=settings.is_iterable,
        is_sliced=settings.is_sliced,
        prefetches_tiny=depth.most // workers,
        tried=dict(trace.tried),
        samples=settings.length,
        read_limit=read_limit() if cluster is None else None,
        free_memory=memory_for_files() if cluster is None else None,
        fetched=copy(trace.fetched) if trace.fetched.requests else None,
        **marks,
    )


def diagnosis_of(trace: Trace, setup: Setup) -> Diagnosis:
    """Return why the user of a loader waits."""
    from forebay.observe.diagnosis import diagnose

    steps, batches = list(trace.steps), list(trace.batches)  # another thread may add to them
    since = ""
    if trace.decisions:  # with another number of workers before
        since, began = " since the number of workers changed", trace.decisions[-1][0]
        steps = [each for each in steps if each.asked_at >= began]
        batches = [each for each in batches if each.ended_at - each.seconds >= began]
    slowest = next(iter(trace.slowest), None)
    run_rate = trace.snapshot()["rate"]
    return diagnose(steps, batches, setup, slowest, pressure(), since, run_rate)


def report_of(settings: Settings, progress: LoaderProgress, path: str | os.PathLike[str]) -> Path:
    """Write the report of a loader; see `DataLoader.report`."""
    from forebay.show.html import write_report
    from forebay.show.report import loader_summary, report_html

    loader = settings.loader
    summary = loader_summary(
        progress.trace,
        title=settings.described(),
        settings=_arguments(settings),
        verdict=str(loader.diagnose()),
        marks=_marks_of(loader.buffer),
        failures=progress.failures.total,
        replays=loader.seed is not None and not settings.is_iterable,
    )
    return write_report(report_html(summary), path)


def _marks_of(buffer: Buffer | None) -> dict[str, int | None]:
    """Return the high marks of a buffer."""
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
        "backend": backend_name(loader.backend),
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
    if settings.ranks is not None:
        shown |= {"rank": settings.ranks.rank, "world_size": settings.ranks.world_size}
    return {name: str(value) for name, value in shown.items()}


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__)) if function else "None"


class LiveLoader(LivePage):
    """The page of a loader in `forebay top`, renewed while its trace records something."""

    def __init__(self, loader: DataLoader[Any], progress: LoaderProgress) -> None:
        super().__init__()
        self._recent = RecentWork()
        self._loader, self._progress = weakref.ref(loader), weakref.ref(progress)
        self._verdict, self._verdict_due = "", 0.0
        weakref.finalize(loader, self.remove)

    def state_of(self, trace: Trace) -> dict[str, Any] | None:
        """Return the present state of the loader."""
        loader, progress, now = self._loader(), self._progress(), time.perf_counter()
        if loader is None or progress is None:
            return None
        if now >= self._verdict_due:
            from forebay.observe.diagnosis import LEAST_STEPS

            found = loader.diagnose()
            self._verdict = str(found)
            if found.evidence["steps"] >= LEAST_STEPS:  # otherwise it is cheap, and soon outdated
                took = time.perf_counter() - now
                self._verdict_due = now + max(VERDICT_S, took / VERDICT_SHARE)
        buffer, pipeline = loader.buffer, progress.pipeline
        planner = None if pipeline is None else pipeline.planner
        feed = None if pipeline is None else pipeline.feed
        return {
            **numbers_in(trace.snapshot()),
            "kind": "loader",
            "title": Settings(loader).described(),
            "began": time.time() - (now - trace.began_at),
            "epoch": -1 if planner is None else planner.epoch,
            "batch": 0 if planner is None else planner.batch,
            "ready": 0 if feed is None else len(feed.ready),
            **_marks_of(buffer),
            "refill_below": None if buffer is None else low_mark_of(buffer),
            "verdict": self._verdict[:1000],
            **self._recent.update(trace, now),
        }
