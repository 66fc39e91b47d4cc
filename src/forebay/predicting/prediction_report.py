"""The report of a run of predict."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.failures import Failure
from forebay.observe.diagnosis import Diagnosis
from forebay.observe.notebook_html import summary
from forebay.reports.run_report import save
from forebay.units import duration


@dataclass(frozen=True, slots=True, repr=False)
class PredictionReport:
    """The result of `predict`; its `repr` is a summary.

    Attributes:
        output: The folder of the parts, or its URL: one dataset for pyarrow, pandas and others.
        done: Samples with a prediction, including those of earlier runs.
        failed: Samples without one.
        resumed: Samples of parts that were done by earlier runs.
        failures: The samples without a prediction, in order: the first 1,000.
        elapsed_s: Duration of this run in seconds.
        diagnosis: What the model waited for or, if a factory makes models, what their workers
            waited for; rates are in batches or, there, in parts per second.
        decisions: Of `num_workers="auto"`: why the number was changed, the last 256 times.
        details: What `save` shows besides these: what took how long, and when.
    """

    output: Path | str
    done: int
    failed: int
    resumed: int
    failures: tuple[Failure, ...]
    elapsed_s: float
    diagnosis: Diagnosis
    decisions: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the report to a self-contained HTML file: throughput, durations, failures.

        See `save` of `forebay.reports.run_report`.
        """
        return save(path, self)

    def __repr__(self) -> str:
        """Return the summary."""
        resumed = f" ({self.resumed:,} samples were done earlier)" if self.resumed else ""
        ran = self.done + self.failed - self.resumed
        rate = f", {ran / self.elapsed_s:,.1f} samples/s" if ran and self.elapsed_s else ""
        lines = [
            f"{self.done:,} predicted, {self.failed:,} failed "
            f"in {duration(self.elapsed_s)}{rate}{resumed}",
            f"output    {self.output}",
        ]
        if self.failures:
            lines.append("failures")
            lines += [f"  {failure}" for failure in self.failures[:10]]
            if self.failed > 10:
                lines.append(f"  … and {self.failed - 10:,} more")
            command = shlex.join(["forebay", "failures", str(self.output), "--traceback"])
            lines.append(f"  What happened to each, and what to do: {command}")
            lines.append(
                "  They have no row. To try them again, use retry_failed=True or `forebay retry`."
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the summary for a notebook."""
        facts = {
            "predicted": self.done,
            "samples done earlier": self.resumed,
            "failed": self.failed,
            "time": duration(self.elapsed_s),
            "output": self.output,
        }
        return summary("predict", facts, self.failures, self.failed)
