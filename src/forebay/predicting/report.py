"""What a run of predict came to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forebay.observe.progress import duration
from forebay.predicting.records import LostSample


@dataclass(frozen=True, slots=True, repr=False)
class PredictionReport:
    """What `predict` came to; its `repr` is a summary.

    Attributes:
        output: The folder of the parts, or its URL: one dataset for pyarrow, pandas and others.
        done: Samples with a prediction, those of earlier runs included.
        failed: Samples without one.
        resumed: Samples of parts that an earlier run had done already.
        failures: The samples without a prediction, in order.
        elapsed_s: Seconds this run took.
    """

    output: Path | str
    done: int
    failed: int
    resumed: int
    failures: tuple[LostSample, ...]
    elapsed_s: float

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
            if len(self.failures) > 10:
                lines.append(f"  … and {len(self.failures) - 10:,} more: see .failures")
            lines.append("  They stay without a row. To try them again, start over: resume=False.")
        return "\n".join(lines)
