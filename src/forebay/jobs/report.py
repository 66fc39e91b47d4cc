"""What a run came to: the report that `preprocess` returns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.jobs.fetch import fetched
from forebay.jobs.records import Failed
from forebay.observe.progress import duration

if TYPE_CHECKING:
    import pyarrow


@dataclass(frozen=True, slots=True)
class Failure:
    """One input that failed.

    Attributes:
        source: The input: its path, or its manifest row as JSON.
        kind: "exception", "timeout", "crash", "input" (missing, or a folder) or "output" (a
            name that escapes or is claimed twice).
        error: The error's type, such as "ValueError".
        message: The error's own words.
        traceback: The user's frames, or the stack of a hang or crash; "" if there are none.
        attempts: Tries it took.
        seconds: Wall time of the last try.
    """

    source: str
    kind: str
    error: str
    message: str
    traceback: str
    attempts: int
    seconds: float

    @classmethod
    def of(cls, source: str, failed: Failed) -> Failure:
        """Return a ledger's record as a person wants it."""
        return cls(
            source,
            failed.kind,
            failed.error,
            failed.message,
            failed.traceback,
            failed.attempts,
            failed.seconds,
        )

    def __str__(self) -> str:
        """Return the failure in one line."""
        words = self.message.splitlines()[0] if self.message else ""
        return f"{self.source}: {self.error}: {words}" if words else f"{self.source}: {self.error}"


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """What `preprocess` came to; its `repr` is a summary.

    Attributes:
        output: The output folder, or its URL.
        done: Inputs whose outputs and metadata are there, those of earlier runs included.
        failed: Inputs that failed.
        resumed: How many of `done` an earlier run had done already.
        failures: The failed inputs, in input order.
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
            if len(self.failures) > 10:
                lines.append(f"  … and {len(self.failures) - 10:,} more: see .failures")
            lines.append("  The same call, or `forebay retry`, tries them again.")
        return "\n".join(lines)
