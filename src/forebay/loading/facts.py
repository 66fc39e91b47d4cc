"""What a loader is asked: why training waits, its report and its page.

arguments ── kind ──> Setup  ─┬─> diagnosis ──> report, page of `forebay top`
what it did ────────────> Trace ─┘

Functions import what only they need: most loaders are never asked, and each module takes time.
"""

from __future__ import annotations

import copy
import json
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod, ref

from forebay.base.machine import memory_for_files, pressure, read_limit, usable_cores
from forebay.buffer import Buffer, capacity_shown, low_mark_of
from forebay.loading.kind import LoaderKind
from forebay.loading.progress import LoaderProgress
from forebay.observe.figures import numeric_values
from forebay.observe.measurements import Setup
from forebay.observe.record import Trace
from forebay.options import AutoWorkers, backend_name
from forebay.ranks import ranks_sharing_cores
from forebay.show.live_page import LivePage, RecentWork

if TYPE_CHECKING:
    from forebay.observe.diagnosis import Diagnosis

# How often what `forebay top` makes a diagnosis of is renewed on the page.
MEASURED_PAGE_S = 10.0


def setup_now(fixed: Setup, trace: Trace) -> Setup:
    """Return how a loader is set up, with what changes meanwhile: limits, and what was tried."""
    is_local = fixed.backend != "ray"
    return replace(
        fixed,
        num_workers=fixed.num_workers if fixed.most_workers is None else trace.num_workers,
        auto_workers=int(AutoWorkers()),
        cores=usable_cores() / ranks_sharing_cores() if is_local else None,
        tried=dict(trace.tried),
        read_limit=read_limit() if is_local else None,
        free_memory=memory_for_files() if is_local else None,
        fetched=copy.copy(trace.fetched) if trace.fetched.requests else None,
    )


def diagnosis_of(
    trace: Trace, setup: Setup, dataset: Any = None, audit_note: str = ""
) -> Diagnosis:
    """Return why the user of a loader waits, which objects its workers copy, and what the audit is.

    Args:
        audit_note: What was found when samples were made a second time.
    """
    from forebay.observe.diagnosis import diagnose

    memory: dict[str, float] = {}
    if trace.memory is not None:
        memory = {"worker_bytes": trace.memory.nbytes, "worker_growth": trace.memory.rate}
    found = diagnose(trace.measured(), setup, {**pressure(), **memory})
    notes = " ".join(filter(None, (found.verdict, memory_note(trace, dataset), audit_note)))
    return replace(found, verdict=notes)


def memory_note(trace: Trace, dataset: Any) -> str:
    """Return which objects of the dataset workers copy, as sentences; "" if they copy little."""
    if trace.memory is None or not trace.memory.is_large:
        return ""
    from forebay.loading.held_objects import largest_objects, note_on_memory

    return note_on_memory(trace.memory, largest_objects(dataset))


def report_of(kind: LoaderKind, progress: LoaderProgress, path: str | os.PathLike[str]) -> Path:
    """Write the report of a loader; see `DataLoader.report`."""
    from forebay.show.html import write_report
    from forebay.show.report import loader_summary

    setup = setup_now(progress.setup or kind.setup, progress.trace)
    summary = loader_summary(
        progress.trace,
        title=kind.described(),
        settings=_arguments(kind),
        verdict=str(diagnosis_of(progress.trace, setup, kind.dataset, progress.audit.note())),
        failures=progress.failures.total,
        replays=kind.replays,
    )
    return write_report(summary, path)


def trace_of(kind: LoaderKind, trace: Trace, path: str | os.PathLike[str]) -> Path:
    """Write what was recorded one by one as a trace; see `DataLoader.save_trace`."""
    from forebay.base.files import atomic_file
    from forebay.observe.exports import chrome_trace

    offset_s, target = time.time() - time.perf_counter(), Path(os.path.realpath(path))
    found = chrome_trace(list(trace.steps), list(trace.batches), kind.described(), offset_s)
    with atomic_file(target, is_ours=False) as file:
        file.write(json.dumps(found, separators=(",", ":")).encode())
    return target


def _marks_of(buffer: Buffer | None) -> dict[str, int | None]:
    """Return the high marks of a buffer."""
    return {
        "max_bytes": None if buffer is None else buffer.nbytes,
        "max_batches": None if buffer is None else buffer.max_batches,
    }


def _arguments(kind: LoaderKind) -> dict[str, str]:
    """Return a loader's arguments as strings."""
    length = kind.length
    name = type(kind.dataset).__name__
    shown: dict[str, object] = {} if kind.name is None else {"name": kind.name}
    shown |= {
        "dataset": name if length is None else f"{name}, {length:,} samples",
        "batch_size": kind.batch_size,
        "shuffle": kind.shuffle,
        "num_workers": kind.num_workers,
        "buffer": None if kind.buffer is None else capacity_shown(kind.buffer),
        "prefetch_factor": kind.prefetch_factor,
        "persistent_workers": kind.persistent_workers,
        "backend": backend_name(kind.backend),
        "seed": kind.seed,
        "collate_fn": _name_of(kind.collate_fn),
        "in_order": kind.in_order,
        "pin_memory": kind.pin_memory,
        "drop_last": kind.drop_last,
        "timeout": kind.timeout,
        "on_error": kind.on_error,
    }
    if kind.device is not None:
        transform = kind.device_transform
        shown |= {"device": kind.device, "device_transform": _name_of(transform)}
    if kind.ranks is not None:
        shown |= {"rank": kind.ranks.rank, "world_size": kind.ranks.world_size}
    return {name: str(value) for name, value in shown.items()}


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__)) if function else "None"


class LiveLoader(LivePage):
    """The page of a loader in `forebay top`, renewed while its trace records something."""

    def __init__(
        self, kind: WeakMethod[Callable[[], LoaderKind]], progress: ref[LoaderProgress]
    ) -> None:
        """Show a loader while it exists.

        Args:
            kind: The loader's method that returns its present kind.
        """
        super().__init__()
        self._recent = RecentWork()
        self._kind, self._progress = kind, progress
        self._measured: dict[str, Any] | None = None
        self._measured_due = 0.0
        self._memory_note = ""
        method: Any = kind()
        if method is not None:
            weakref.finalize(method.__self__, self.remove)

    def state_of(self, trace: Trace) -> dict[str, Any] | None:
        """Return the present state of the loader."""
        own, progress, now = self._kind(), self._progress(), time.perf_counter()
        if own is None or progress is None:
            return None
        kind = own()
        if now >= self._measured_due:
            from forebay.observe.page_numbers import ON_PAGE, as_numbers

            found = trace.measured()
            self._measured = as_numbers(found, setup_now(progress.setup or kind.setup, trace))
            self._memory_note = memory_note(trace, kind.dataset)
            if len(found.steps) >= ON_PAGE:  # with fewer it takes little, and is soon outdated
                self._measured_due = now + MEASURED_PAGE_S
        buffer, pipeline = kind.buffer, progress.pipeline
        planner = None if pipeline is None else pipeline.planner
        feed = None if pipeline is None else pipeline.feed
        return {
            **numeric_values(trace.snapshot()),
            "kind": "loader",
            "title": kind.described(),
            "began": time.time() - (now - trace.began_at),
            "epoch": -1 if planner is None else planner.epoch,
            "batch": 0 if planner is None else planner.batch,
            "ready": 0 if feed is None else len(feed.ready),
            **_marks_of(buffer),
            "refill_below": None if buffer is None else low_mark_of(buffer),
            "measured": self._measured,
            "memory_note": self._memory_note,
            **self._recent.update(trace, now),
        }
