"""The plain records of inputs, outputs and runs that other parts pass to each other.

Annotations are evaluated at once: workers import this module, and a named tuple would compile each
of them from a string.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from forebay.failures import Failure

if TYPE_CHECKING:
    import numpy.typing as npt


class Input(NamedTuple):
    """One input as it was listed, known by its row or else its path. A tuple: there may be many.

    Attributes:
        source: The path or URL, without credentials: they may change, and the ledger keeps it.
        row: The table's row as a JSON object, columns in the table's order; for a sample that has
            a name, that and what tells it from others of the name, or its source again if only
            others have names; None otherwise.
    """

    source: str
    row: str | None = None
    identity: str = ""


def key_of(source: str, row: str | None) -> str:
    """Return what an input is known by: its row, or its path if it is none of a table."""
    return source if row is None else row


class LinkInput(Input):
    """An input whose path is a symbolic link."""


class SecretInput(Input):
    """An input without the credentials of its URL or row; `opens` is that with them."""

    opens: str


def shown_input(source: str, row: str | None, identity: str, opens: str) -> Input:
    """Return an input, given its source and row as they are shown, and what opens it."""
    if opens == key_of(source, row):
        return Input(source, row, identity)
    found = SecretInput(source, row, identity)
    found.opens = opens
    return found


class Todo(NamedTuple):
    """One input that still has to be worked on, as the ledger lists it.

    Attributes:
        opens: Its source or row with credentials; None if it has none. For a sample its index in
            the Dataset, or None for that by its ordinal.
    """

    ordinal: int
    source: str
    row: str | None
    opens: str | None = None


class OutputFile(NamedTuple):
    """One output of an input."""

    name: str
    size: int
    staged: str = ""


# The fields of an `OutputFile`, as a worker sends them: pickle calls Python code for a named tuple.
FileFields = tuple[str, int, str]


class Done(NamedTuple):
    """An input that was processed successfully.

    Attributes:
        content: The identity of the files that were read, as a worker saw them, perhaps with a hash
            of the content, or after the call; see `identity.py`. "" if there is none.
    """

    ordinal: int
    attempts: int
    seconds: float
    outputs: tuple[OutputFile, ...]
    metadata: str
    content: str = ""


class FailedInput(NamedTuple):
    """An input that failed and is not tried again in this run; `metadata` may say more."""

    ordinal: int
    failure: Failure
    metadata: str | None = None


class FileChange(NamedTuple):
    """A rename or a removal in the output folder that a commit requires; safe to do twice.

    With a `staged` path, that file is renamed to `name`, which must be free; without, `name` is
    removed. A removal and a rename of the same name replace the file. A tuple, since there is one
    for every file.
    """

    name: str
    staged: str | None = None


class Leftover(NamedTuple):
    """An output of an earlier result that no row of the table has.

    Attributes:
        may_come_back: Whether another call may list its input.
    """

    name: str
    size: int
    reason: str
    may_come_back: bool = False


class Unpublished(NamedTuple):
    """A staged file that could not be given its name."""

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


# How many of the inputs that cannot be seen are named.
NAMED = 1000

# Yields the numbers of those inputs whose files have the content of the hash beside them.
SameContents = Callable[[Iterable[tuple[int, Input, str]]], Iterator[int]]
# Tells whether the folder of a file is away, given the file's path.
IsAway = Callable[[str], bool]


class Enrolment(NamedTuple):
    """How a listing compared with the ledger.

    Attributes:
        same: Inputs whose results stay as they are, `unseen` ones among them.
        changed: Done inputs that hold something else now, and are to be done again.
        retimed: How many of `changed` have the size that they had, and another time.
        kept: Files that have another time and the content that they had; they are in `same`.
        unseen: The ordinals of done inputs that cannot be seen now.
        unseen_names: The names of the first of these.
    """

    new: int
    same: int
    changed: int
    gone: int
    moved: int = 0
    retimed: int = 0
    kept: int = 0
    unseen: tuple[int, ...] = ()
    unseen_names: tuple[str, ...] = ()


# ---- earlier rows --------------------------------------------------------------------------------
# Where the results of samples are in files that an earlier run wrote.


class Taken(NamedTuple):
    """The samples of a range whose results are taken over from one file.

    Attributes:
        location: The file's path or URL.
        first: The first sample that it was made of, an index in the dataset of that time.
        indices: The samples, in order: their indices in the dataset.
        rows: Their places in the range that the file was made of.
    """

    location: str
    first: int
    indices: list[int]
    rows: list[int]


class EarlierRows(NamedTuple):
    """For each sample of a dataset, where an earlier run left its result.

    Attributes:
        files: Path or URL of each file, and the first sample that it was made of.
        file: The number of the file that has the result of a sample; -1 if it has to be made.
        row: The sample's place in the range that this file was made of.
        record: What the ledger says of the content of these files.
    """

    files: tuple[tuple[str, int], ...] = ()
    file: npt.NDArray[Any] | None = None
    row: npt.NDArray[Any] | None = None
    record: Mapping[str, Any] = {}

    @property
    def samples(self) -> int:
        """Number of samples whose results are taken over."""
        return 0 if self.file is None else int((self.file >= 0).sum())

    def taken(self, first: int, count: int) -> list[Taken]:
        """Return what is taken over for a range, file by file."""
        if self.file is None or self.row is None:
            return []
        file, row = self.file[first : first + count], self.row[first : first + count]
        found = []
        for number in sorted({*file.tolist()} - {-1}):
            (at,) = (file == number).nonzero()
            location, start = self.files[number]
            found.append(Taken(location, start, (at + first).tolist(), row[at].tolist()))
        return found

    def left(self, first: int, count: int) -> Sequence[int]:
        """Return the samples of a range whose results have to be made."""
        if self.file is None:
            return range(first, first + count)
        (at,) = (self.file[first : first + count] < 0).nonzero()
        return range(first, first + count) if len(at) == count else (at + first).tolist()
