"""The report that `preprocess` returns."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.failures import Failure
from forebay.observe.diagnosis import Diagnosis
from forebay.observe.notebook_html import summary
from forebay.reports.run_report import save
from forebay.units import duration

if TYPE_CHECKING:
    import pyarrow


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """The result of `preprocess`; its `repr` is a summary.

    Attributes:
        output: The output folder, or its URL.
        done: Inputs that succeeded, including those of earlier runs.
        failed: Inputs that failed.
        resumed: How many of `done` were done by earlier runs.
        failures: The first 1,000 failed inputs, in input order; `forebay failures` lists all.
        elapsed_s: Seconds this run took.
        metadata_path: The metadata table; a URL, as a string, if the output is one.
        decisions: Of `num_workers="auto"`: why the number was changed, the last 256 times.
        diagnosis: What the workers of this run waited for; its `wait_share` is the part of the time
            that they were idle, and its `rate` is in inputs per second.
        details: What `save` shows besides these: what took how long, and when.
    """

    output: str
    done: int
    failed: int
    resumed: int
    failures: tuple[Failure, ...]
    elapsed_s: float
    metadata_path: Path | str
    diagnosis: Diagnosis
    decisions: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def metadata(self) -> pyarrow.Table:
        """The metadata table, read again at each access: one row per output, in input order."""
        from forebay.jobs.table.table_reader import read_table

        return read_table(self.metadata_path)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the report to a self-contained HTML file: throughput, durations, failures.

        See `save` of `forebay.reports.run_report`.
        """
        return save(path, self)

    def __repr__(self) -> str:
        """Return the summary."""
        resumed = f" ({self.resumed:,} of them earlier)" if self.resumed else ""
        ran = self.done - self.resumed + self.failed
        rate = f", {ran / self.elapsed_s:,.1f} inputs/s" if ran and self.elapsed_s else ""
        lines = [
            f"{self.done:,} done{resumed}, {self.failed:,} failed "
            f"in {duration(self.elapsed_s)}{rate}",
            f"outputs   {self.output}",
            f"metadata  {self.metadata_path}",
        ]
        if self.failures:
            lines.append("failures")
            lines += [f"  {failure}" for failure in self.failures[:10]]
            if self.failed > 10:
                lines.append(f"  … and {self.failed - 10:,} more")
            command = shlex.join(["forebay", "failures", self.output, "--traceback"])
            lines.append(f"  What happened to each, and what to do: {command}")
            lines.append("  To try them again, repeat the call or use `forebay retry`.")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the summary for a notebook."""
        facts = {
            "done": self.done,
            "of them earlier": self.resumed,
            "failed": self.failed,
            "time": duration(self.elapsed_s),
            "outputs": self.output,
            "metadata": self.metadata_path,
        }
        return summary("preprocess", facts, self.failures, self.failed)
