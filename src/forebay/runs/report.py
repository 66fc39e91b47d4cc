"""What is said of a run: its report, notes on it, and the errors that end it."""

from __future__ import annotations

import os
import re
import shlex
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.base.formatting import byte_size, counted, duration, summary
from forebay.base.output_names import path_elsewhere
from forebay.engine.commands import ReportFailure
from forebay.errors import (
    FailuresError,
    ForebayError,
    InputError,
    OutputError,
    SampleTimeoutError,
    WorkerDiedError,
    shortened,
    shown_location,
)
from forebay.failures import Failure, Group, grouped, short_tracebacks, shown_error
from forebay.outputs.places import snapshot_of
from forebay.pools.worker import SealedError

if TYPE_CHECKING:  # what few reports are asked for is imported when it is
    import pyarrow

    from forebay.ledger.enrolment import Enrolment
    from forebay.observe.diagnosis import Diagnosis


def diagnosed(times: dict[str, Any]) -> Diagnosis:
    """Return what a run waited for, given the arguments of `RunTimes`."""
    from forebay.observe.diagnosis import RunTimes, diagnose_run

    return diagnose_run(RunTimes(**times))


# ---- notes ---------------------------------------------------------------------------------------
# What is said of a run that is probably not as it was meant.

# How many inputs a note names.
NAMED = 5
# Metadata of an input that may be an image by mistake, in characters of JSON, and the fewest
# numbers of that image. An embedding is smaller.
LARGE_METADATA, MANY_NUMBERS = 1 << 16, 1000
_NUMBERS = re.compile(r"[-+.\deE,\[\]]+")


def note_on_gone(enrolment: Enrolment, kind: str) -> str:
    """Return what to say of inputs of an earlier run that are not listed now."""
    gone, kept = enrolment.gone, enrolment.same + enrolment.changed
    if enrolment.new and not kept and kind == "rows":
        return (
            f"of the {gone:,} rows of the earlier run none is in the manifest now, so each is "
            "processed. A row with another value, or with other columns, is another input."
        )
    noun = {"rows": "row", "indices": "sample"}.get(kind, "input")
    return (
        f"{gone:,} of the {counted(gone + kept, noun)} of the earlier run "
        f"{'is' if gone == 1 else 'are'} not listed now, so the table is without them; their files "
        "stay in the folder. For one table of all, list them too; for two tables, use another "
        "output folder."
    )


def notes_on_inputs(enrolment: Enrolment, kind: str) -> Iterator[str]:
    """Yield what to say of done inputs that cannot be seen now, or that changed."""
    noun = {"rows": "row", "indices": "sample"}.get(kind, unit_of(kind))
    total = enrolment.same + enrolment.changed
    if enrolment.unseen:
        names = ", ".join(map(shortened, enrolment.unseen_names[:NAMED]))
        more = f" and {enrolment.unseen - NAMED:,} more" if enrolment.unseen > NAMED else ""
        them = "it" if enrolment.unseen == 1 else "them"
        yield (
            f"{enrolment.unseen:,} of {counted(total, noun)} done earlier cannot be seen now: "
            f"{names}{more}. What was made of {them} stays as it is, with its rows. Mount the "
            "folder, or reach the server, and the same call tells whether anything changed."
        )
    if enrolment.kept:
        yield (
            f"{enrolment.kept:,} of {counted(total, noun)} have other times and the content that "
            "they had: they stay done."
        )
    if enrolment.changed and kind not in ("predict", "cache"):
        only = " (only their times)" if enrolment.retimed == enrolment.changed else ""
        yield (
            f"{enrolment.changed:,} of {counted(total, noun)} changed{only}: each is done again, "
            "and its outputs stay until then."
        )


def unit_of(verb: str) -> str:
    """Return what an input of the ledger is called in messages, given the entry point."""
    return {"predict": "part", "cache": "shard"}.get(verb, "input")


def note_on_missing(again: int, done: int, name: str) -> str:
    """Return what to say of done inputs whose outputs, such as this one, are not in the folder."""
    return (
        f"{again:,} of {counted(done, 'done input')} {'is' if again == 1 else 'are'} done again: "
        f"outputs are no longer in the folder, such as {shortened(name)}."
    )


@contextmanager
def saying_what_stays(output: str | os.PathLike[str]) -> Iterator[None]:
    """Add to an InputError of the block what an earlier run has done: nothing was changed yet."""
    try:
        yield
    except InputError as error:
        done, noun = 0, "input"
        with suppress(ForebayError, OSError):
            found = snapshot_of(output)
            done, noun = found.counts.done, unit_of(found.meta.get("verb", ""))
        if not done:
            raise
        shown = shortened(shown_location(os.fspath(output)))
        raise InputError(
            f"{error}\n  What earlier runs made in {shown} stays as it is: {counted(done, noun)} "
            "done. If the inputs are only away, make the same call again when they are back."
        ) from error.__cause__


def note_on_strays(names: Sequence[str], folder: str, function: str, call: str) -> str:
    """Return what to say of files that were written into the output folder directly.

    Args:
        call: What returns the path to write to instead, such as "out.file".
    """
    first = names[0]
    was = "file was" if len(names) == 1 else "files were"
    return (
        f"{len(names):,} {was} written to {folder} without {call}(), such as {first!r}\n"
        "  A kill leaves such a file incomplete, nothing removes it when its input changes, and "
        "`forebay verify` counts it as an orphan.\n"
        f"  In {function}, write to {call}({first!r}) instead of {os.path.join(folder, first)!r}, "
        "and remove what is there."
    )


def note_on_unstaged(count: int, name: str, folder: str, function: str) -> str:
    """Return what to say of outputs that a function wrote by itself.

    Args:
        name: The first of them, as the ledger has it.
    """
    path = path_elsewhere(name) or os.path.join(folder, name)
    was = "output was" if count == 1 else "outputs were"
    return (
        f"{count:,} {was} written by {function} itself, such as {path!r}\n"
        "  They are in the table, and `forebay verify` checks them. But a kill can leave such a "
        "file incomplete, and it stays so until its input is done again.\n"
        f"  Take a second argument, as in {function}(source, out), and write to "
        f"out / {os.path.basename(path)!r}: then a file appears once it is whole."
    )


def note_on_arrays(metadata: Sequence[str], total: int, function: str, call: str) -> str | None:
    """Return what to say if one of these metadata, as JSON, is large and has an array.

    Args:
        total: How many inputs there are.
        call: As for `note_on_strays`.
    """
    largest = max(metadata, key=len, default="")
    if len(largest) < LARGE_METADATA or not any(
        found.group().count(",") >= MANY_NUMBERS for found in _NUMBERS.finditer(largest)
    ):
        return None
    way = f"{function} writes it to {call}(), with numpy.save for example, and returns a dict"
    if call != "out.file":
        way = (
            f"pass save=, a function(sample, out) that writes what {function} returns to out.file()"
        )
    return (
        f"the metadata of one input have {byte_size(len(largest))}, with an array of numbers; for "
        f"all {total:,} that may be {byte_size(len(largest) * total)}\n"
        "  The table keeps them as lists, which is slow. It is meant for what describes a file: "
        f"{way}."
    )


# ---- errors --------------------------------------------------------------------------------------
# What a run raises that stops because of failures.


def too_many(reason: str, name: str, failure: Failure) -> FailuresError:
    """Return the error that ends a run in which too many inputs fail."""
    return FailuresError(
        f"stopped early: {reason}\n"
        f"  The last of them, {name}: {failure.error}: {failure.message}\n"
        "  See `forebay failures`, fix the cause, and make the same call again.\n"
        f"{failure.traceback}"
    )


def no_more_space(failure: Failure) -> OutputError:
    """Return the error that ends a run whose outputs cannot be written."""
    return OutputError(
        f"the outputs can no longer be written: {failure.error}: {failure.message}\n"
        "  The run was stopped, and no input counts as failed.\n"
        "  Free some space (or make the folder writable), then make the same call again."
    )


def first_failure(outcome: ReportFailure, name: str) -> BaseException:
    """Return what ends a run at its first failure: the user's exception, if it could be sent."""
    failure = outcome.failure
    own = failure.exception
    if isinstance(own, SealedError):
        own = own.opened()
    error: BaseException
    if isinstance(own, Exception):
        error = shown_error(own)
    elif failure.kind == "timeout":
        error = SampleTimeoutError(f"{name} {failure.message}")
    elif failure.kind == "crash":
        error = WorkerDiedError(f"{name}: {failure.message}")
    else:
        error = FailuresError(f"{name} failed: {failure.error}: {failure.message}")
    if failure.traceback and error.__traceback__ is None:  # it was raised in another process
        error.add_note(f"In the worker:\n{failure.traceback.rstrip()}")
    error.add_note(
        f"forebay: the input was {name}, number {outcome.task}, attempt {outcome.attempt}."
    )
    return error


# ---- report --------------------------------------------------------------------------------------

# Failures that a report lists in the terminal; more of them are grouped by their errors.
SHOWN = 10


def lines_by_error(groups: Iterable[Group], examples: int | None = None) -> list[str]:
    """Return what shows groups of failures, with so many examples of each; None for all."""
    lines: list[str] = []
    for group in groups:
        count = f"{group.count:,}"
        lines.append(f"{count}  {group.error}")
        lines += (f"{' ' * len(count)}  {each}" for each in group.examples[:examples])
    return lines


@dataclass(frozen=True, repr=False)
class RunReport:
    """What a run returns. Counts are of inputs or of samples.

    Attributes:
        later: Functions by the names of what few reports are asked for.
    """

    output: Path | str
    done: int
    failed: int
    resumed: int
    failures: tuple[Failure, ...]
    elapsed_s: float
    later: Mapping[str, Callable[[], Any]] = field(compare=False)
    decisions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """What the run waited for; made when it is asked for, or when the report is pickled."""
        found: Diagnosis = self.later["diagnosis"]()
        return found

    @cached_property
    def details(self) -> Mapping[str, Any]:
        """What `save` shows besides the counts; made as `diagnosis` is."""
        found: Mapping[str, Any] = self.later["details"]()
        return found

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"diagnosis": self.diagnosis, "details": self.details, "later": {}}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the report to a self-contained HTML file: throughput, durations, failures.

        The file opens without a network, stays below 300 KB, and can be read by `forebay.compare`.
        It names the slowest inputs and up to three failed inputs for each error.
        """
        from forebay.show.html import write_report
        from forebay.show.report import report_html, run_summary

        return write_report(report_html(run_summary(self)), path)

    def _took(self, unit: str) -> str:
        ran = self.done - self.resumed + self.failed
        rate = f", {ran / self.elapsed_s:,.1f} {unit}s/s" if ran and self.elapsed_s else ""
        return f"{duration(self.elapsed_s)}{rate}"

    def _failure_lines(self, again: str) -> list[str]:
        if not self.failures:
            return []
        if self.failed <= SHOWN:
            lines = ["failures", *(f"  {failure}" for failure in self.failures)]
        else:
            groups, known = grouped(self.failures), len(self.failures)
            first = f", of the first {known:,}" if known < self.failed else ""
            lines = [f"failures by error{first}, with an example of each"]
            lines += (f"  {line}" for line in lines_by_error(groups[:SHOWN], 1))
            if len(groups) > SHOWN:
                lines.append(f"  … and {counted(len(groups) - SHOWN, 'other error')}")
        output = shown_location(str(self.output))
        command = shlex.join(["forebay", "failures", output, "--traceback"])
        return [*lines, f"  What happened to each, and what to do: {command}", f"  {again}"]

    def _html(self, title: str, done: str, places: Mapping[str, str]) -> str:
        facts = {
            done: self.done,
            "done by earlier runs": self.resumed,
            "failed": self.failed,
            "time": duration(self.elapsed_s),
            **{name: shown_location(place) for name, place in places.items()},
        }
        return summary(title, facts, self.failures, self.failed)


@dataclass(frozen=True, repr=False)
class Report(RunReport):
    """The result of `preprocess`; its `repr` is a summary.

    Attributes:
        output: The output folder, or its URL.
        done: Inputs that succeeded, including those of earlier runs.
        failed: Inputs that failed.
        resumed: How many of `done` were done by earlier runs.
        failures: The first 1,000 failed inputs, in input order; `forebay failures` lists all.
        elapsed_s: Seconds this run took.
        metadata_path: The metadata table; a URL, as a string, if the output is one.
        without_rows: How many of `done` made no file and no metadata, so that the table has no row
            of them.
        decisions: Of `num_workers="auto"`: why the number was changed, the last 256 times.
        notes: What is probably not as it was meant, such as files that were written into the output
            folder without `out.file`.
        unseen: Inputs done by earlier runs that could not be seen, such as files in a folder that
            is not mounted: the names of the first 1,000. What was made of them stays.
        diagnosis: What the workers of this run waited for; its `wait_share` is the part of the time
            that they were idle, and its `rate` is in inputs per second.
        details: What `save` shows besides these: what took how long, and when.
    """

    output: str
    metadata_path: Path | str = field(kw_only=True)
    without_rows: int = 0

    @property
    @short_tracebacks
    def metadata(self) -> pyarrow.Table:
        """The metadata table, read again at each access: one row per output, in input order."""
        from forebay.inputs.tables import read_table

        return read_table(self.metadata_path)

    def __repr__(self) -> str:
        """Return the summary."""
        resumed = f" ({self.resumed:,} by earlier runs)" if self.resumed else ""
        metadata = f"metadata  {shown_location(str(self.metadata_path))}"
        if self.without_rows:
            metadata += f", without {self.without_rows:,} that made no file and no metadata"
        lines = [
            f"{self.done:,} done{resumed}, {self.failed:,} failed in {self._took('input')}",
            f"outputs   {shown_location(self.output)}",
            metadata,
        ]
        lines += (f"note      {each}" for each in self.notes)
        again = "To try them again, repeat the call or use `forebay retry`."
        return "\n".join([*lines, *self._failure_lines(again)])

    def _repr_html_(self) -> str:
        """Return the summary for a notebook."""
        places = {"outputs": self.output, "metadata": str(self.metadata_path)}
        return self._html("preprocess", "done", places)


@dataclass(frozen=True, repr=False)
class PredictionReport(RunReport):
    """The result of `predict`; its `repr` is a summary.

    Attributes:
        output: The folder of the parts, or its URL: one dataset for pyarrow, pandas and others.
        done: Samples with a prediction, including those of earlier runs.
        failed: Samples without one.
        resumed: Samples that were done by earlier runs.
        failures: The samples without a prediction, in order: the first 1,000. `source` is the name
            of one, or else its index, which `index` always is.
        elapsed_s: Duration of this run in seconds.
        diagnosis: What the model waited for or, if a factory makes models, what their workers
            waited for; rates are in batches or, there, in parts per second.
        decisions: Of `num_workers="auto"`: why the number was changed, the last 256 times.
        notes: What happened to earlier predictions, if not all of them stay as they were.
        unseen: Samples done by earlier runs whose files cannot be seen now, such as files in a
            folder that is not mounted: the names of the first 1,000. Their predictions stay.
        details: What `save` shows besides these: what took how long, and when.
    """

    def __repr__(self) -> str:
        """Return the summary."""
        resumed = f" ({self.resumed:,} samples were done earlier)" if self.resumed else ""
        lines = [
            f"{self.done:,} predicted, {self.failed:,} failed in {self._took('sample')}{resumed}",
            f"output    {shown_location(str(self.output))}",
        ]
        lines += (f"note      {each}" for each in self.notes)
        again = "They have no row. To try them again, use retry_failed=True or `forebay retry`."
        return "\n".join([*lines, *self._failure_lines(again)])

    def _repr_html_(self) -> str:
        """Return the summary for a notebook."""
        return self._html("predict", "predicted", {"output": str(self.output)})


# ---- failure budget ------------------------------------------------------------------------------
# When to stop early: too many failures, or a cause that fails one input after the other. PURE.

# If the first inputs all fail with the same error, that many are enough to stop.
ALIKE = 20
# Later, that many in a row: the cause is probably not in the inputs, but some may be beside others
# that are as damaged. Outputs that are refused have names that other inputs took, which a function
# does again and again.
ALIKE_LATER = 100
REFUSED = 20


class FailureBudget:
    """Counts failures against the number that the user allows.

    Args:
        max_failures: How many inputs may fail: a count, or a fraction of all (0 < x < 1);
            None for any number that are not in a row.
        known: The inputs that failed in earlier runs, in order: they are in no row.
        counts_rows: Whether many failures in a row are enough to stop.
    """

    def __init__(
        self,
        max_failures: int | float | None,
        total: int,
        watch: bool = True,
        unit: str = "input",
        known: Sequence[int] = (),
        counts_rows: bool = True,
    ) -> None:
        self._max_failures, self._unit, self._known = max_failures, unit, known
        # Whoever says how many may fail means the first ones and those in a row, too.
        self._has_limit = max_failures is not None
        self._counts_rows = counts_rows and not self._has_limit
        self.set_total(total)
        self._failed = 0
        self._tried: set[int] = set()  # the first inputs, until one of them differs
        self._alike: str | None = None
        self._watching = watch and not self._has_limit
        self._row, self._row_error, self._refused = 0, "", 0

    def set_total(self, total: int) -> None:
        """Set the number of inputs, once more of them are known."""
        allowed = self._max_failures
        self._limit = int(allowed * total) if isinstance(allowed, float) else allowed
        self._total = total

    def succeeded(self) -> None:
        """Begin a new row, and stop watching the first inputs: one of them succeeded."""
        self._watching, self._row = False, 0

    def attempt_failed(self, ordinal: int, error: str) -> str | None:
        """Return why to stop if the first inputs all failed with this `error`; else None."""
        if not self._watching:
            return None
        if self._alike not in (None, error):
            self._watching = False
            return None
        self._alike = error
        self._tried.add(ordinal)
        if len(self._tried) < ALIKE:
            return None
        return self._allowing(f"the first {ALIKE} {self._unit}s all failed alike, with {error}")

    def failed(self, error: str, ordinal: int = 0) -> str | None:
        """Count an input that failed for good; return why to stop, if it is one too many."""
        if reason := self._counted():
            return reason
        if self._is_known(ordinal):
            return None
        self._row = self._row + 1 if error == self._row_error else 1
        self._row_error = error
        if not self._counts_rows or self._row < ALIKE_LATER:
            return None
        return self._allowing(
            f"{ALIKE_LATER} {self._unit}s in a row all failed alike, with {error}"
        )

    def refused(self, published: Iterable[int], refused: Collection[int]) -> str | None:
        """Count inputs whose outputs were refused; return why to stop, if they are too many.

        Args:
            published: Inputs whose outputs were to be published, in the order in which they ended.
        """
        if not refused:  # the usual case
            self._refused = 0
            return None
        reasons = [self._counted() for _ in refused]
        for ordinal in published:
            if ordinal not in refused:
                self._refused = 0
            elif not self._is_known(ordinal):
                self._refused += 1
            if self._counts_rows and self._refused >= REFUSED:
                what = f"the outputs of {REFUSED} {self._unit}s in a row were refused"
                reasons.append(self._allowing(what))
        return next(filter(None, reasons), None)

    def _counted(self) -> str | None:
        self._failed += 1
        if self._limit is None or self._failed <= self._limit:
            return None
        return (
            f"{self._failed} input{'s' * (self._failed != 1)} failed, more than "
            f"max_failures allows ({self._limit} of {self._total})"
        )

    def _is_known(self, ordinal: int) -> bool:
        at = bisect_left(self._known, ordinal)
        return at < len(self._known) and self._known[at] == ordinal

    def _allowing(self, what: str) -> str:
        """Return a reason to stop, with the argument that allows more failures, if there is one."""
        if not self._counts_rows:
            return what
        return (
            f"{what}\n  If more of them may fail, say how many: max_failures=, or --max-failures."
        )
