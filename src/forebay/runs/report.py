"""What a run returns: its counts, failures and notes, and what is worked out when asked for."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.base.formatting import counted, duration, summary
from forebay.errors import (
    short_tracebacks,
    shown_location,
)
from forebay.failures import Failure, Group, grouped

if TYPE_CHECKING:  # what few reports are asked for is imported when it is
    import pyarrow

    from forebay.observe.diagnosis import Diagnosis
    from forebay.observe.measurements import RunTimes


def run_diagnosis(times: RunTimes) -> Diagnosis:
    """Return what a run waited for."""
    from forebay.observe.run_diagnosis import diagnose_run

    return diagnose_run(times)


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
        """Write the report to a self-contained HTML file: rate, durations, failures.

        The file opens without a network, stays below 300 KB, and holds its data as JSON.
        It names the slowest inputs and up to three failed inputs for each error.
        """
        from forebay.show.html import write_report
        from forebay.show.report import run_summary

        return write_report(run_summary(self), path)

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
        again = "They have no row. To try them again, use redo='failed' or `forebay retry`."
        return "\n".join([*lines, *self._failure_lines(again)])

    def _repr_html_(self) -> str:
        """Return the summary for a notebook."""
        return self._html("predict", "predicted", {"output": str(self.output)})
