"""What a loader is asked: why training waits, its report and page; one batch, or samples, again.

arguments ── setup_of ──> Setup ─┬─> diagnosis ──> report, page of `forebay top`
what it did ────────────> Trace ─┘

Functions import what only they need: most loaders are never asked, and each module takes time.
"""

from __future__ import annotations

import copy
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forebay.base.batches import differing
from forebay.base.formatting import counted
from forebay.base.libraries import one_thread
from forebay.base.open_files import moved_since, read_positions
from forebay.base.process import memory_for_files, pressure, read_limit, usable_cores
from forebay.base.randomness import generators_kept
from forebay.buffer import Buffer, capacity_shown, low_mark_of
from forebay.errors import OptionError
from forebay.loading.batch_job import BatchJob
from forebay.loading.epochs import LoaderProgress, Pipeline
from forebay.loading.messages import BatchError, BatchRequest, BatchResult
from forebay.loading.planner import Planner
from forebay.loading.position import Position
from forebay.loading.samplers import holds_position, set_states
from forebay.loading.settings import Settings
from forebay.loading.sources import PlanSource, SamplerSource, Source, Start
from forebay.observe.figures import numeric_values
from forebay.observe.measurements import Setup
from forebay.observe.record import Trace
from forebay.observe.worker_memory import LEAST_BYTES
from forebay.options import AutoWorkers, backend_name
from forebay.ranks import ranks_sharing_cores
from forebay.show.live_page import LivePage, RecentWork

if TYPE_CHECKING:
    from forebay.loader import DataLoader
    from forebay.observe.diagnosis import Diagnosis

# How often what `forebay top` makes a diagnosis of is renewed on the page.
MEASURED_PAGE_S = 10.0


def setup_of(settings: Settings, trace: Trace) -> Setup:
    """Return how a loader is set up, as far as its speed depends on it."""
    loader, depth = settings.loader, settings.depth()
    limits, workers = settings.limits(depth), max(loader.num_workers, 1)
    marks: dict[str, Any] = {"prefetch_factor": max(depth.usual // workers, 1)}
    if loader.buffer is not None:
        counts = limits.slots, limits.refill_below
        if not depth.fills_by_itself:
            counts = depth.usual, depth.refill_below
        marks = dict(zip(("buffer_batches", "refill_below"), counts, strict=True))
    cluster, is_auto = settings.cluster, isinstance(loader.num_workers, AutoWorkers)
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
        fetched=copy.copy(trace.fetched) if trace.fetched.requests else None,
        **marks,
    )


def diagnosis_of(trace: Trace, setup: Setup, dataset: Any = None) -> Diagnosis:
    """Return why the user of a loader waits, and which objects its workers copy."""
    from forebay.observe.diagnosis import diagnose

    found = diagnose(trace.measured(), setup, pressure() | trace.memory.evidence())
    note = memory_note(trace, dataset)
    return replace(found, verdict=f"{found.verdict} {note}") if note else found


def memory_note(trace: Trace, dataset: Any) -> str:
    """Return which objects of the dataset workers copy, as sentences; "" if they copy little."""
    if trace.memory.each < LEAST_BYTES:
        return ""
    from forebay.loading.held_objects import largest_objects

    return trace.memory.note(largest_objects(dataset))


def report_of(settings: Settings, progress: LoaderProgress, path: str | os.PathLike[str]) -> Path:
    """Write the report of a loader; see `DataLoader.report`."""
    from forebay.show.html import write_report
    from forebay.show.report import loader_summary

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
    return write_report(summary, path)


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
    shown: dict[str, object] = {} if loader.name is None else {"name": loader.name}
    shown |= {
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
        self._measured: dict[str, Any] | None = None
        self._measured_due = 0.0
        self._memory_note = ""
        weakref.finalize(loader, self.remove)

    def state_of(self, trace: Trace) -> dict[str, Any] | None:
        """Return the present state of the loader."""
        loader, progress, now = self._loader(), self._progress(), time.perf_counter()
        if loader is None or progress is None:
            return None
        if now >= self._measured_due:
            from forebay.observe.page_numbers import ON_PAGE, as_numbers

            found = trace.measured()
            self._measured = as_numbers(found, setup_of(Settings(loader), trace))
            self._memory_note = memory_note(trace, loader.dataset)
            if len(found.steps) >= ON_PAGE:  # with fewer it takes little, and is soon outdated
                self._measured_due = now + MEASURED_PAGE_S
        buffer, pipeline = loader.buffer, progress.pipeline
        planner = None if pipeline is None else pipeline.planner
        feed = None if pipeline is None else pipeline.feed
        return {
            **numeric_values(trace.snapshot()),
            "kind": "loader",
            "title": Settings(loader).described(),
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


# ---- replay --------------------------------------------------------------------------------------
# Rebuild one batch in the trainer's thread, for a debugger.


def replayed(settings: Settings, progress: LoaderProgress, epoch: int, batch: int) -> Any:
    """Return one batch, made again in this thread; see `DataLoader.replay`."""
    loader, resumed = settings.loader, progress.resumed
    pipeline = progress.pipeline or Pipeline(settings, progress.trace)
    is_seeded = loader.seed is not None or loader.backend != "thread"
    if settings.by_torchs_rules or pipeline.seed is None or not is_seeded:
        raise OptionError(
            "replay() needs a seed: without one, batches depend on more than their number\n"
            "  Make the loader with seed=0, for example."
        )
    if epoch < 0 or batch < 0:
        raise IndexError(f"epoch {epoch}, batch {batch}: both count from 0")
    planner = pipeline.planner_for(settings)
    source: Source = planner.source
    order, skip = planner.order_of(epoch), 0
    start = Start(epoch, batch)
    if isinstance(source, PlanSource):
        source, start = _plan_source(source, planner, resumed, start)
    elif source.sampler_states() is not None:
        source, start, skip = _sampler_source(pipeline, settings, start)
    with generators_kept(), one_thread():
        found = source.open(start, order).read(skip + 1)
        if len(found) <= skip:
            raise IndexError(f"epoch {epoch} has no batch {batch}")
        index, position, repeated, _ = found[-1]
        request = BatchRequest(index, epoch, batch, position, repeated)
        spec = replace(settings.spec(seed=pipeline.seed), concurrency=1)  # in this thread
        result = BatchJob(spec).make(request)
    if isinstance(result, BatchError):
        raise result.error
    assert isinstance(result, BatchResult), "the dataset is a map-style one"
    if result.is_empty:
        raise IndexError(f"every sample of epoch {epoch}, batch {batch} is bad")
    return pipeline.hand_out(request, result, pipeline.seed)


def _plan_source(
    source: PlanSource, planner: Planner, resumed: Position | None, start: Start
) -> tuple[PlanSource, Start]:
    """Return a source of a planned batch, and where to open it."""
    plan, begun = source.plan, planner.start
    origin = planner.origin_of(start.epoch)
    if resumed is not None:
        begun, later = resumed.start, start.epoch - resumed.epoch
        origin = resumed.origin + later * plan.end()
        if plan.mixture is not None and resumed.mixture is not None:
            plan = replace(plan, mixture=replace(plan.mixture, **resumed.mixture))
    sample = start.batch * plan.global_batch_size
    if begun.epoch == start.epoch and (begun.by_sample or begun.length is not None):
        sample = begun.sample + (start.batch - begun.batch) * plan.global_batch_size
        start = start._replace(length=begun.length)
    mixture = plan.mixture
    is_before = begun.epoch == start.epoch and begun.by_sample and start.batch < begun.batch
    if is_before or (mixture is not None and origin + sample < mixture.since):
        raise OptionError(
            f"epoch {start.epoch}, batch {start.batch} was made before the weights, or the batch "
            "size, changed\n  Nothing was changed. Make a loader with the earlier weights and "
            "batch size to replay it."
        )
    source = PlanSource(plan, source.auto_collation, source.as_tensors)
    return source, start._replace(sample=sample, origin=origin)


def _sampler_source(
    pipeline: Pipeline, settings: Settings, start: Start
) -> tuple[Source, Start, int]:
    """Return a source with a copy of the sampler, where to open it, and the batches to skip."""
    planned = pipeline.planner_for(settings).planned(start.epoch)
    sampler = settings.index_sampler
    follows = holds_position(sampler)
    if planned is None or (
        follows and (start.batch < planned.start.batch or planned.sampler_states is None)
    ):
        raise OptionError(
            f"the sampler has a state, and its state before epoch {start.epoch}, batch "
            f"{start.batch} is not known, or so large that it is not kept\n"
            "  Load a state that was taken in this epoch and start iterating, or use "
            "shuffle=True, whose order is a function of seed and epoch."
        )
    # A copy, because the iteration reads the original.
    dataset = settings.loader.dataset
    sampler = copy.deepcopy(sampler, {id(dataset): dataset})
    set_states(sampler, planned.sampler_states)
    source = SamplerSource(sampler, pipeline.seed, settings)
    if follows:  # it continues from its own position
        return source, planned.start, start.batch - planned.start.batch
    return source, start, 0


# ---- sample check --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """A part of a sample that is not the same each time."""

    index: Any
    field: str
    between: str


@dataclass(frozen=True, slots=True)
class SampleCheck:
    """What `DataLoader.check` found; false if samples differ.

    Attributes:
        samples: How many were compared.
        seed: The loader's seed; None if it has none.
        differences: The first difference of each sample and field.
        shared_files: Files that this process has open and that workers read from the position that
            all of them share, so that one may get what another asked for.
    """

    samples: int
    seed: int | None
    differences: tuple[Difference, ...]
    shared_files: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Return whether all samples were the same each time, and no file is shared."""
        return not self.differences and not self.shared_files

    def __str__(self) -> str:
        """Return the answer as sentences."""
        what = counted(self.samples, "sample")
        seed = "without a seed" if self.seed is None else f"with seed={self.seed}"
        if self:
            return f"{what}, made twice here and twice in workers {seed}, were the same each time."
        lines = [
            f"  sample {each.index!r}{each.field and ', ' + each.field}: {each.between} differ"
            for each in self.differences
        ]
        advice = (
            "Set seed= for samples that are functions of the seed."
            if self.seed is None
            else "They draw from a generator that forebay cannot reach, one made in __getitem__ "
            "for example, or depend on earlier samples, the time or the process."
        )
        if not self.differences:
            advice = ""
        if self.shared_files:
            lines.append(f"  {_shared(*self.shared_files)}")
        heading = f"{what}, made twice here and twice in workers {seed}:"
        return "\n".join(filter(None, [heading, *lines, advice]))


def _shared(*paths: str) -> str:
    return (
        f"{', '.join(paths)}: open before the workers began, which read from one shared position. "
        "Two that read at once get each other's bytes, without an error. Open it in each worker, "
        "when the first sample is read"
    )


def apart(dataset: Any, depth: int = 8) -> Any:
    """Return a copy of a dataset, and of those within it, that shares all that they have.

    What it opens when a sample is read, it opens for itself: workers that begin later do not share
    that file.
    """
    own = getattr(dataset, "__dict__", None)
    if type(own) is not dict or isinstance(dataset, torch.Tensor) or not depth:
        return dataset
    try:
        other = copy.copy(dataset)
        if "dataset" in own and own["dataset"] is not dataset:
            vars(other)["dataset"] = apart(own["dataset"], depth - 1)
    except Exception:  # noqa: BLE001 - the user's class may refuse
        return dataset
    return other


def spread(count: int, length: int) -> list[int]:
    """Return at most so many indices below `length`, from the first to the last."""
    count = max(min(count, length), 1)
    return [number * (length - 1) // max(count - 1, 1) for number in range(count)]


def compared(
    indices: Sequence[Any], made: Callable[[int], Sequence[Any]], seed: int | None
) -> SampleCheck:
    """Make samples in several ways, and compare them."""
    before, moved = read_positions(), set[str]()
    try:
        worker, other = made(2), made(2)
    except Exception as error:
        moved = moved_since(before)
        if moved:
            error.add_note(f"forebay: {_shared(*sorted(moved))}")
        raise
    moved = moved_since(before)  # now, when only workers have read
    here, again = made(0), made(0)
    pairs = (
        ("two results in this process", here, again),
        ("two results in workers", worker, other),
        ("this process and a worker", here, worker),
    )
    found: dict[tuple[int, str], Difference] = {}
    for between, ones, twos in pairs:
        for number, (one, two) in enumerate(zip(ones, twos, strict=True)):
            for field in differing(one, two):
                difference = Difference(indices[number], field, between)
                found.setdefault((number, field), difference)
    return SampleCheck(len(indices), seed, tuple(found.values()), tuple(sorted(moved)))
