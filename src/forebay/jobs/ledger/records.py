"""The plain records that the parts of `jobs/` pass to each other.

Annotations are evaluated at once: workers import this module, and a named tuple would compile each
of them from a string.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from forebay.failures import Failure


class Input(NamedTuple):
    """One input as it was listed. A tuple, since there may be very many.

    Attributes:
        source: Path or URL as the user gave it; for a table's row the value of its path
            column ("" if it has none); for a Dataset the sample's name, or its index as a string.
        row: The table's row as a JSON object, columns in the table's order; for a Dataset with
            names the index; None otherwise.
        identity: Changes when the input does: "size:mtime_ns" or an etag;
            "missing" if there is no such file; "" if there is nothing to compare.
    """

    source: str
    row: str | None = None
    identity: str = ""

    @property
    def key(self) -> str:
        """What identifies this input: its row, or else its path."""
        return self.source if self.row is None else self.row


class LinkInput(Input):
    """An input whose path is a symbolic link."""


class RowsInPlace(NamedTuple):
    """A listing that can be read from any of its inputs on, so the ledger need not copy them.

    Attributes:
        name: Absolute path of the manifest.
        fingerprint: A string that changes with the manifest.
        start: Called with an ordinal, from 1; yields the inputs from that one on.
        read: The same without identities, which are those of the files that the rows name.
    """

    name: str
    fingerprint: str
    start: Callable[[int], Iterator[Input]]
    read: Callable[[int], Iterator[Input]]


class Todo(NamedTuple):
    """One input that still has to be worked on, as the ledger lists it."""

    ordinal: int
    source: str
    row: str | None


class OutputFile(NamedTuple):
    """One output of an input.

    Attributes:
        name: Final name, relative to the output folder, with "/" between its parts.
        size: Bytes.
        staged: Its path in the staging folder, relative to the output folder; "" if the file
            already has its final name.
        place: For a packed output: its shard, the offset of its data there, and their CRC-32. None
            for a file.
    """

    name: str
    size: int
    staged: str = ""
    place: tuple[int, int, int] | None = None


# The fields of an `OutputFile`, as a worker sends them: pickle calls Python code for a named tuple.
FileFields = tuple[str, int, str, tuple[int, int, int] | None]


class PackedMember(NamedTuple):
    """A packed output, as a ledger or an index has it.

    Attributes:
        name: Final name; it begins with "packed/".
        size: Bytes of the data.
        shard: The number of the shard that holds it.
        offset: Where the data begin in the shard.
        crc: CRC-32 of the data.
    """

    name: str
    size: int
    shard: int
    offset: int
    crc: int


class Done(NamedTuple):
    """An input that was processed successfully.

    Attributes:
        ordinal: The input's place in the listing.
        attempts: Number of attempts in this run, including the one that succeeded.
        seconds: Duration of the attempt that succeeded.
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
    """An input that failed and is not tried again in this run.

    Attributes:
        ordinal: The input's place in the listing.
        failure: Why; its `source` is not set, since the ledger has it.
    """

    ordinal: int
    failure: Failure


class FileChange(NamedTuple):
    """A rename or a removal in the output folder that a commit requires; safe to do twice.

    With a `staged` path, that file is renamed to `name`, which must be free; without, `name` is
    removed. A removal and a rename of the same name replace the file. A tuple, since there is one
    for every file.
    """

    name: str
    staged: str | None = None


class Unpublished(NamedTuple):
    """A staged file that could not be given its name.

    Attributes:
        name: Its final name, which something else may have.
        staged: Its path in the staging folder.
        reason: Why, for the message.
    """

    name: str
    staged: str
    reason: str


class Counts(NamedTuple):
    """How many inputs are in which state; `total = done + failed + todo`."""

    total: int
    done: int
    failed: int

    @property
    def todo(self) -> int:
        """Inputs neither done nor failed."""
        return self.total - self.done - self.failed
