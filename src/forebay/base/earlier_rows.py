"""Where the results of samples are in files that an earlier run wrote. PURE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy.typing as npt


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


@dataclass(frozen=True, slots=True, eq=False)
class EarlierRows:
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
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
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
