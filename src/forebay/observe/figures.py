"""The figures of loaders and runs. A new one is a key of a snapshot and a line in `FIGURES`.

Trace, RunTrace ── snapshot ──> totals by key ──> statistics, report, `forebay top`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from forebay.base.formatting import byte_size, counted, duration, preformatted, short_number
from forebay.errors import one_line, printable
from forebay.observe.record import Trace

# A larger number in a file is damaged.
LARGEST_NUMBER = 1e15
# Characters of a string in one that are shown.
LONGEST_TEXT = 400


def _count(value: float) -> str:
    return f"{value:,.0f}"


def percent(share: float) -> str:
    """Return a share without digits behind the point."""
    return f"{share:.0%}"


class Figure(NamedTuple):
    """One number of a loader or a run."""

    key: str
    label: str  # "{unit}" is what a run counts
    shown: Callable[[float], str]
    kind: str  # "loader" or "run"
    one: str = ""  # the name of a count if it is 1
    is_rare: bool = False  # only shown where it is not 0
    in_top: bool = False  # shown by `forebay top`, too

    def name(self, value: float, unit: str) -> str:
        """Return what the value is called."""
        return self.one if self.one and value == 1 else self.label.format(unit=unit)


# In the order in which they are shown.
FIGURES = (
    Figure("rate", "batches/s", short_number, "loader"),
    Figure("wait_share", "share of the run spent waiting", percent, "loader"),
    Figure("taken", "batches taken", _count, "loader"),
    Figure("wait_p50_s", "median wait", duration, "loader"),
    Figure("wait_p99_s", "99% of waits are shorter", duration, "loader"),
    Figure("num_workers", "workers", _count, "loader", "worker"),
    Figure("restarts", "restarts", _count, "loader", "restart", is_rare=True, in_top=True),
    Figure("failures", "skipped samples", _count, "loader", "skipped sample", is_rare=True),
    Figure("fetched_bytes", "fetched from the bucket", byte_size, "loader", is_rare=True),
    Figure("fetch_rate", "fetched per second", byte_size, "loader", is_rare=True, in_top=True),
    Figure("fetch_p95_s", "95% of requests are shorter", duration, "loader", is_rare=True),
    Figure("disk_bytes", "of the dataset on disk", byte_size, "loader", is_rare=True),
    Figure("worker_bytes", "workers' own memory", byte_size, "loader", is_rare=True, in_top=True),
    Figure("worker_growth", "growth of that per second", byte_size, "loader", is_rare=True),
    Figure("rate", "{unit}s/s", short_number, "run"),
    Figure("done", "done", _count, "run"),
    Figure("failed", "failed", _count, "run"),
    Figure("resumed", "done by earlier runs", _count, "run", is_rare=True),
    Figure("elapsed_s", "total time", duration, "run"),
    Figure("num_workers", "workers", _count, "run", "worker", is_rare=True),
    Figure("busy_share", "worker utilisation", percent, "run", is_rare=True),
    Figure("retries", "retries", _count, "run", "retry", is_rare=True, in_top=True),
)


def figures_of(kind: str) -> Iterator[Figure]:
    """Return the figures of a loader, or of any kind of run."""
    is_loader = kind == "loader"
    return (each for each in FIGURES if (each.kind == "loader") == is_loader)


def shown_figures(
    kind: str, totals: Mapping[str, float], unit: str = ""
) -> Iterator[tuple[Figure, str, str]]:
    """Yield the figures to show, each with its value and its name."""
    for each in figures_of(kind):
        value = totals.get(each.key, 0)
        if value or not each.is_rare:
            yield each, each.shown(value), each.name(value, unit)


def top_figures(kind: str, totals: Mapping[str, float]) -> list[str]:
    """Return the figures that `forebay top` adds to the others."""
    return [
        f"{value} {name}" if each.one else f"{name} {value}"
        for each, value, name in shown_figures(kind, totals)
        if each.in_top
    ]


def numeric_values(values: Mapping[str, Any]) -> dict[str, int | float]:
    """Return those values that are numbers."""
    known = {name: value for name, value in values.items() if isinstance(value, int | float)}
    return {name: value for name, value in known.items() if not isinstance(value, bool)}


def checked_number(value: Any) -> float | None:
    """Return a number of a file that anybody may have written; None for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= LARGEST_NUMBER else None


def checked_text(value: Any) -> str:
    """Return a string of such a file in one line; "" for what is none."""
    return one_line(value, LONGEST_TEXT) if isinstance(value, str) else ""


# ---- statistics ----------------------------------------------------------------------------------
# The statistics of a loader, as an immutable record.


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """A snapshot of a loader: `loader.statistics()`. Its `str` is a summary.

    Attributes:
        epoch: The epoch of the last batch returned; -1 before the first.
        batch: How many batches of that epoch were returned.
        ready_batches: Batches that are ready to be returned, including those that raised.
        ready_bytes: Size of these batches in bytes.
        ready_from: Epoch and number of the first ready batch; None if there is none, or with
            `in_order=False`.
        ready_to: Epoch and number of the last ready batch, likewise.
        in_flight: Batches that were sent to workers and are not ready.
        waited_s: Seconds that the training loop waited for batches, in total.
        wait_share: The share of the time since the first epoch began in which training waited.
        recent_wait_share: The same for the 30 seconds before the last batch; 0 until there are
            two batches.
        recent_rate: Batches per second in that time.
        wait_p50_s: The median of the last 4,096 waits for one batch, in seconds.
        wait_p95_s: The 95th percentile of these waits.
        wait_p99_s: The 99th percentile of these waits.
        fetch_s: Seconds that workers spent getting samples, in wall time.
        collate_s: Seconds that workers spent collating samples and packing batches, in wall time.
        cpu_s: Seconds of processor time that workers used. If it is far less than
            `fetch_s + collate_s`, they waited for a disk, a network or a core.
        queued_s: Seconds that workers waited for a core; 0 if the system does not report it.
        idle_s: Seconds that workers had no batch to make, because enough were prefetched, or
            between epochs; 0 without workers.
        restarts: Attempts to make a batch that ended with the death of a worker.
        failures: Samples that were skipped (`on_error="skip"`).
        audited: With `seed=`: samples that were made a second time, and compared.
        differences: What was not the same then: sample, part and values, in words.
        num_workers: The current number of workers; 0 before the first iteration.
        decisions: For `num_workers="auto"`: the reasons of the last 256 changes of the number.
        copied_batches: Batches of worker processes whose copy to the device was started.
        copied_bytes: Bytes of these copies.
        copy_s: Seconds that they took on the device.
        staged_bytes: Bytes of them that were first copied to page-locked memory, because their own
            memory is not.
        pinned_bytes: Bytes of the memory of batches that are page-locked now.
        pinned_reason: Why not all of that memory is page-locked: what refused it, or the limit; ""
            if all of it is.
        fetched_bytes: For a cache or shards in a bucket: bytes that were fetched since the loader
            began, for all loaders and workers of this process, as the following numbers are.
            Updated once per second.
        fetch_requests: Requests for them; one that is tried again counts once.
        fetch_hits: Blocks that were there already when they were needed for a window.
        fetch_rate: Bytes per second while any request was under way.
        fetch_p50_s: The median time of the last 256 requests, in seconds.
        fetch_p95_s: The 95th percentile of these times.
        disk_bytes: Bytes of their blocks that are on disk.
        worker_bytes: Bytes of memory that workers have of their own, all together, which they do
            not share with the trainer or each other; 0 until a worker has at least 32 MiB of new
            pages and has run for 10 seconds, and without worker processes.
        worker_growth: Bytes per second by which that grows.
        sources: For a mixture: by name, how many samples of each source were returned over all
            ranks, and how many epochs of the source that is.
        tokens: For rows of `pack_sequences`, and batches of `batch_by_length`: by name of the
            source ("dataset" without a mixture), the tokens in those that were returned over all
            ranks, and the share of their size that is filled. Within an epoch, rows count with
            their mean.
    """

    epoch: int
    batch: int
    ready_batches: int
    ready_bytes: int
    ready_from: tuple[int, int] | None
    ready_to: tuple[int, int] | None
    in_flight: int
    waited_s: float
    wait_p50_s: float
    wait_p95_s: float
    wait_p99_s: float
    fetch_s: float
    collate_s: float
    cpu_s: float
    queued_s: float
    idle_s: float
    restarts: int
    failures: int
    audited: int = 0
    differences: tuple[str, ...] = ()
    wait_share: float = 0.0
    recent_wait_share: float = 0.0
    recent_rate: float = 0.0
    num_workers: int = 0
    decisions: tuple[str, ...] = ()
    copied_batches: int = 0
    copied_bytes: int = 0
    copy_s: float = 0.0
    staged_bytes: int = 0
    pinned_bytes: int = 0
    pinned_reason: str = ""
    fetched_bytes: int = 0
    fetch_requests: int = 0
    fetch_hits: int = 0
    fetch_rate: float = 0.0
    fetch_p50_s: float = 0.0
    fetch_p95_s: float = 0.0
    disk_bytes: int = 0
    worker_bytes: int = 0
    worker_growth: float = 0.0
    sources: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    tokens: Mapping[str, tuple[int, float]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, int | float]:
        """Return all numbers in a flat, JSON-serializable dict, for a logger of metrics.

        Returns:
            The attributes by name, with the same keys in each call. `ready_from` and `ready_to`
            are two numbers each: `ready_from_epoch` and `ready_from_batch`, -1 if there is no
            such batch. Each source of a mixture adds `sources/NAME/samples` and
            `sources/NAME/epochs`, from the first batch on, and if it is of rows `tokens/NAME` and
            `tokens/NAME/filled`.
        """
        flat = numeric_values({each.name: getattr(self, each.name) for each in fields(self)})
        for name, first in (("ready_from", self.ready_from), ("ready_to", self.ready_to)):
            flat[f"{name}_epoch"], flat[f"{name}_batch"] = first or (-1, -1)
        for source, (samples, epochs) in self.sources.items():
            flat[f"sources/{source}/samples"] = samples
            flat[f"sources/{source}/epochs"] = epochs
        for source, (tokens, filled) in self.tokens.items():
            flat[f"tokens/{source}"] = tokens
            flat[f"tokens/{source}/filled"] = filled
        return flat

    def to_prometheus(self, **labels: str) -> str:
        """Return all numbers as metrics in Prometheus' text format, `forebay_loader_…`.

        Args:
            labels: Added to each metric, such as `loader="train", rank="0"`. The numbers of a
                source have the label `source`.
        """
        from forebay.observe.exports import prometheus_text

        return prometheus_text(self.to_dict(), labels)

    def __str__(self) -> str:
        """Return a summary, one line for each part of the loader that did something."""
        where = f"epoch {self.epoch}, batch {self.batch:,}"
        p50, p95, p99 = map(duration, (self.wait_p50_s, self.wait_p95_s, self.wait_p99_s))
        lines = [
            f"position   {where if self.epoch >= 0 else 'before the first batch'}",
            f"batches    {self.ready_batches:,} ready, {byte_size(self.ready_bytes)}; "
            f"{self.in_flight:,} in flight",
            f"waits      {duration(self.waited_s)} in total; 50% within {p50}, 95% within {p95}, "
            f"99% within {p99}",
            f"workers    {self.num_workers:,}; in total {duration(self.fetch_s)} fetching, "
            f"{duration(self.collate_s)} collating, {duration(self.idle_s)} idle",
            f"processor  {duration(self.cpu_s)}, and {duration(self.queued_s)} waiting for a core",
        ]
        if self.restarts or self.failures:
            skipped = counted(self.failures, "skipped sample")
            lines.append(f"failures   {counted(self.restarts, 'restart')}, {skipped}")
        if self.copied_batches:
            lines.append(
                f"copies     {self.copied_batches:,}, {byte_size(self.copied_bytes)} in "
                f"{duration(self.copy_s)}; {byte_size(self.pinned_bytes)} pinned, "
                f"{byte_size(self.staged_bytes)} staged"
            )
        if self.fetch_requests:
            p50, p95 = map(duration, (self.fetch_p50_s, self.fetch_p95_s))
            lines.append(
                f"bucket     {byte_size(self.fetched_bytes)} in "
                f"{counted(self.fetch_requests, 'request')}, {byte_size(self.fetch_rate)}/s; 50% "
                f"within {p50}, 95% within {p95}; {byte_size(self.disk_bytes)} on disk"
            )
        if self.worker_bytes:
            own, grows = byte_size(self.worker_bytes), byte_size(self.worker_growth)
            lines.append(f"memory     {own} of the workers' own, {grows}/s more")
        for name, (samples, epochs) in self.sources.items():
            lines.append(f"source     {name}: {counted(samples, 'sample')}, {epochs:.3g} epochs")
        for name, (tokens, filled) in self.tokens.items():
            lines.append(f"tokens     {name}: {tokens:,}, {filled:.1%} filled")
        lines += [f"decision   {reason}" for reason in self.decisions[-1:]]
        return "\n".join(map(printable, lines))

    def _repr_html_(self) -> str:
        """Return the summary for a notebook, as it is printed."""
        return preformatted("Statistics", str(self))


def statistics_of(trace: Trace, **others: Any) -> Statistics:
    """Return the statistics of a loader, with what its trace does not have."""
    known = {each.name for each in fields(Statistics)}
    totals = {name: value for name, value in trace.snapshot().items() if name in known}
    return Statistics(**totals, **others)
