"""What a run came to: the report that `preprocess` returns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.failures import Failure
from forebay.jobs.fetch import fetched
from forebay.observe.progress import duration

if TYPE_CHECKING:
    import pyarrow


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """What `preprocess` came to; its `repr` is a summary.

    Attributes:
        output: The output folder, or its URL.
        done: Inputs whose outputs and metadata are there, those of earlier runs included.
        failed: Inputs that failed.
        resumed: How many of `done` an earlier run had done already.
        failures: The first 1,000 failed inputs, in input order; `forebay failures` lists all.
        elapsed_s: Seconds this run took.
        metadata_path: The metadata table; a URL, as text, if the output is one.
    """

    output: str
    done: int
    failed: int
    resumed: int
    failures: tuple[Failure, ...]
    elapsed_s: float
    metadata_path: Path | str

    @property
    def metadata(self) -> pyarrow.Table:
        """The metadata table, read afresh: one row an output, in input order."""
        from forebay.jobs.metadata import read_table

        if isinstance(self.metadata_path, Path):
            return read_table(self.metadata_path)
        with fetched(self.metadata_path) as path:
            return read_table(path)

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
                lines.append(f"  … and {self.failed - 10:,} more: see `forebay failures`")
            lines.append("  The same call, or `forebay retry`, tries them again.")
        return "\n".join(lines)
