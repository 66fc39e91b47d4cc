"""What forebay asks of a format of shards: where the blocks of a shard are, and how to read them.

    shard ── find ──> blocks: consecutive samples, and where their bytes are   (once, for the index)
    bytes of a block ── prepared ──> memory ── reader, or sample ──> samples   (in each epoch)

A format sees plain bytes: a shard that is compressed as a whole (`.gz`, `.zst`) is decompressed
before, within limits, and is one block. Another format is a subclass that is passed to
`register_format`.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from forebay.errors import InputError, OptionError, shortened

# How many bytes of consecutive samples make a block, where a format can choose.
BLOCK_BYTES = 4 << 20
# Bytes at the beginning of a shard by which `matches` decides.
HEAD_BYTES = 512


class ShardFile(ABC):
    """A shard that is being indexed: local, or in a bucket.

    Attributes:
        name: Its location, as errors show it.
        size: Its bytes.
    """

    name: str
    size: int

    @abstractmethod
    def read(self, offset: int, length: int) -> memoryview:
        """Return exactly these bytes; raise InputError if they are not within the shard."""


class FoundBlocks(NamedTuple):
    """Where the samples of a shard are.

    Attributes:
        rows: How many samples each block has, at least 1.
        extents: One row for each stretch of bytes, with the number of its block, its offset and its
            length: ordered by block, and for each block as `prepared` wants them.
        info: What is needed to read blocks beside their own bytes, such as a schema; the same for
            all blocks of the shard.
        starts: For each sample, where it begins within its block's bytes, if a sample is a stretch
            of them of its own: it ends where the next one begins. None otherwise.
        nbytes: About how much memory each block takes once it is prepared; None for as much as its
            stretches have.
    """

    rows: npt.NDArray[np.int64]
    extents: npt.NDArray[np.int64]
    info: bytes = b""
    starts: npt.NDArray[np.int64] | None = None
    nbytes: npt.NDArray[np.int64] | None = None


class BlockDecoder:
    """Reads the blocks of one shard. Made once per shard and process; used by several threads.

    A format whose samples are stretches of their own (`starts`) has `sample`; another one has
    `reader`, and `prepared` if its blocks have to be decoded as a whole. All raise ValueError for
    bytes that are not those of such a block; what they return owns its memory.
    """

    def prepared(self, block: int, data: memoryview) -> Any:
        """Return what lies in memory of a block, as bytes or a buffer: once per node and fetch.

        Args:
            block: Its number in the shard.
            data: Its stretches, joined.
        """
        return data

    def reader(self, block: int, data: memoryview) -> Callable[[Sequence[int]], list[Any]]:
        """Return what returns samples of a block, given their positions in it; for many calls.

        Args:
            block: Its number in the shard.
            data: What `prepared` returned.
        """
        raise NotImplementedError

    def sample(self, data: memoryview) -> Any:
        """Return a sample, given its own bytes."""
        raise NotImplementedError

    @property
    def schema(self) -> Any:
        """The columns' types, where the format is of Arrow's types."""
        return None

    def record_batch(self, block: int, data: memoryview) -> Any:
        """Return a block as a record batch over `data`, where there is a schema."""
        raise NotImplementedError

    def place_of(self, sample: int) -> str:
        """Return what errors call a sample, given its number in the shard."""
        return f"sample {sample:,}"


class ShardFormat(ABC):
    """A format of shards.

    Attributes:
        name: As `format=` names it.
        suffixes: How the names of its shards end, in lower case and without `.gz` or `.zst`.
        reads_all: Whether `find` reads the whole shard, and not only a footer or a header. Then a
            shard in a bucket is downloaded to be indexed, and its blocks get checksums.
        may_be_empty: Whether a file of no bytes is a shard without samples, and not an error.
    """

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    reads_all: ClassVar[bool] = True
    may_be_empty: ClassVar[bool] = False

    @abstractmethod
    def matches(self, head: bytes) -> bool:
        """Return whether a shard that begins with these bytes is certainly of this format."""

    @abstractmethod
    def find(self, shard: ShardFile) -> FoundBlocks:
        """Return where the blocks of a shard are.

        Every number that the shard says of itself has to be compared with its size before memory
        is taken for it.

        Raises:
            InputError: It is not of this format, or damaged; names shard and offset or line.
        """

    def chosen(
        self, info: bytes, extents: npt.NDArray[np.int64], columns: Sequence[str]
    ) -> npt.NDArray[np.bool_]:
        """Return which stretches are needed to read some columns.

        Args:
            info: As `find` returned it.
            extents: As `find` returned it.
            columns: Their names, in the order in which samples shall have them.

        Raises:
            InputError: The shard has no such column.
        """
        raise OptionError(
            f"columns={list(columns)!r}: shards of the format {self.name!r} are read as a whole\n"
            "  Leave columns= out, and choose in transform=."
        )

    @abstractmethod
    def decoder(self, info: bytes, columns: Sequence[str] | None) -> BlockDecoder:
        """Return what reads the blocks of a shard.

        Args:
            info: As `find` returned it; it may be anybody's, so it has to be checked.
            columns: Those that were chosen; None for all.
        """


# Module and class of each, in the order in which first bytes are compared.
_BUILT_IN = {
    "parquet": ("parquet", "ParquetShards", (".parquet", ".pq")),
    "arrow": ("arrow", "ArrowShards", (".arrow", ".feather", ".ipc")),
    "mds": ("mds", "MdsShards", (".mds",)),
    "tar": ("tar", "TarShards", (".tar",)),
    "jsonl": ("json_lines", "JsonLinesShards", (".jsonl", ".ndjson", ".json")),
}
_registered: dict[str, ShardFormat] = {}
_warned: set[tuple[str, str]] = set()  # the folder and the first word of each warning


def register_format(form: ShardFormat) -> None:
    """Let `open_shards` and `index_shards` read another format, in this process.

    Datasets of its shards take it along to workers and to the process that fetches, so its class
    has to be in a module that these can import.

    Args:
        form: One of a name or suffix that is known already takes its place.
    """
    _registered[form.name] = form


def registered_formats(names: Sequence[str]) -> list[ShardFormat]:
    """Return those of some formats that are from outside."""
    forms = [_registered[name] for name in names if name in _registered]
    return [form for form in forms if not type(form).__module__.startswith("forebay.shards.")]


def format_named(name: str) -> ShardFormat:
    """Return the format of a name.

    Raises:
        OptionError: There is none.
    """
    if name not in _registered and name in _BUILT_IN:
        module, cls, _ = _BUILT_IN[name]
        _registered[name] = getattr(import_module(f"forebay.shards.{module}"), cls)()
    if name not in _registered:
        known = ", ".join(sorted({*_BUILT_IN, *_registered}))
        raise OptionError(f"there is no format {name!r} of shards\n  Known are: {known}.")
    return _registered[name]


def format_by_suffix(name: str) -> ShardFormat | None:
    """Return the format of a shard by the end of its name; None if that does not say it."""
    ends = name.lower()
    for form in _registered.values():
        if ends.endswith(form.suffixes):
            return form
    for known, (_, _, suffixes) in _BUILT_IN.items():
        if ends.endswith(suffixes):
            return format_named(known)
    return None


def format_by_head(head: bytes) -> ShardFormat | None:
    """Return the format of a shard by its first bytes; None if they do not say it."""
    for name in dict.fromkeys((*_registered, *_BUILT_IN)):
        if (form := format_named(name)).matches(head):
            return form
    return None


def blocks_of(begins: Sequence[int], end: int) -> FoundBlocks:
    """Return blocks of consecutive samples, each about as large as `BLOCK_BYTES`.

    Args:
        begins: Where each sample begins; it ends where the next one begins.
        end: Where the last one ends.
    """
    at = np.append(np.array(begins, np.int64), end)
    firsts, first = list[int](), 0
    while first < len(begins):
        firsts.append(first)
        # The samples that fit: at least one.
        first = max(int(np.searchsorted(at, at[first] + BLOCK_BYTES, "right")) - 1, first + 1)
    ends = np.array([*firsts[1:], len(begins)], np.int64)
    rows = ends[: len(firsts)] - np.array(firsts, np.int64)
    bounds = at[[*firsts, len(begins)]]
    lengths = bounds[1:] - bounds[:-1]
    extents = np.stack([np.arange(len(firsts)), bounds[:-1], lengths], axis=1)
    return FoundBlocks(rows, extents, starts=at[:-1] - np.repeat(bounds[:-1], rows))


def most_rows(nbytes: Any) -> Any:
    """Return how many samples so many bytes can hold: more are damage, and would take memory."""
    return 64 * nbytes + (1 << 20)


def warn_of_shard(name: str, words: str) -> None:
    """Warn of what is odd in a shard; of others in its folder, only if it is something else."""
    key = name.rpartition("/")[0], words.partition(" ")[0]
    if key not in _warned:
        _warned.add(key)
        warnings.warn(f"{name}: {words}", RuntimeWarning, stacklevel=3)


def check_names(known: Sequence[str], columns: Sequence[str] | None) -> None:
    """Raise InputError for columns that a shard does not have, or has twice.

    Args:
        columns: Those that are chosen; None for all.
    """
    if columns is not None and len({*columns}) < len(columns):
        raise OptionError(
            f"columns={shortened([*columns])} names a column twice\n  Name each once."
        )
    for each in known if columns is None else columns:
        count = known.count(each)
        if count != 1:
            what = f"{count} columns are" if count else "no column is"
            advice = "Rename all but one." if count else f"There are: {shortened([*known])}."
            raise InputError(f"{what} called {each!r}\n  {advice}")
