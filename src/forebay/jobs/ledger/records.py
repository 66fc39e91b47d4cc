"""The plain records that the parts of `jobs/` pass to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from forebay.failures import Failure


@dataclass(frozen=True, slots=True)
class Input:
    """One input as it was listed.

    Attributes:
        source: Path or URL as the user gave it; for a manifest's row the value of its path
            column ("" if it has none); for a Dataset the index as text.
        row: The manifest's row as a JSON object, columns in the manifest's order; None for a path.
        identity: What tells a changed input from the same one: "size:mtime_ns" or an etag;
            "missing" where there is no such file; "" where there is nothing to look at.
    """

    source: str
    row: str | None = None
    identity: str = ""

    @property
    def key(self) -> str:
        """What makes this input itself: its row, or else its path."""
        return self.source if self.row is None else self.row


class Todo(NamedTuple):
    """One input that still has to be worked on, as the ledger lists it."""

    ordinal: int
    source: str
    row: str | None


class OutputFile(NamedTuple):
    """One file an input produced. A tuple, since it is pickled for every one of them.

    Attributes:
        name: Final name, relative to the output folder, with "/" between its parts.
        size: Bytes.
        staged: Where it waits, relative to the output folder; "" if it is at its name already.
    """

    name: str
    size: int
    staged: str = ""


class Done(NamedTuple):
    """The work on one input ended well.

    Attributes:
        ordinal: The input's place in the listing.
        attempts: How many tries it took in this run, the good one included.
        seconds: Wall time of the good try.
        outputs: Its files, in the order the function asked for them.
        metadata: A JSON list of objects: its rows of the metadata table, without the
            manifest's columns and `source`; `destination` holds an output's final name.
    """

    ordinal: int
    attempts: int
    seconds: float
    outputs: tuple[OutputFile, ...]
    metadata: str


class FailedInput(NamedTuple):
    """The work on one input failed for good in this run.

    Attributes:
        ordinal: The input's place in the listing.
        failure: How; its `source` is not set, since the ledger knows it.
    """

    ordinal: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class Chore:
    """Something to do in the output folder after a commit, safe to do twice.

    A chore with a `staged` path renames it to `name`, which must be free; one without removes
    `name`. With both of a name, the file there is replaced.
    """

    name: str
    staged: str | None = None


class Unpublished(NamedTuple):
    """A staged file that could not be given its name.

    Attributes:
        name: Its name, where something else may stand.
        staged: Where it waits.
        reason: Why, for a person.
    """

    name: str
    staged: str
    reason: str


@dataclass(frozen=True, slots=True)
class Counts:
    """How many inputs are in which state; `total = done + failed + todo`."""

    total: int
    done: int
    failed: int

    @property
    def todo(self) -> int:
        """Inputs neither done nor failed."""
        return self.total - self.done - self.failed
