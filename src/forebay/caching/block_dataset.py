"""A dataset whose samples are in blocks: of a cache, or of shards; in folders, or in a bucket.

source: mapped files, or blocks of a bucket ──> sample
                             each time it is read: ──> transform
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import index as as_index
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch.utils.data import Dataset

from forebay.base.formatting import byte_size, counted, summary
from forebay.errors import OptionError, shown_location
from forebay.options import parse_bytes

if TYPE_CHECKING:
    import numpy.typing as npt

    from forebay.caching.bucket_reader import BucketReader
    from forebay.caching.lookahead import Lookahead
    from forebay.observe.measurements import Fetched
    from forebay.windows import InOrder, Window, Windows

# What `window="auto"` is for a bucket.
WINDOW = 4_000_000_000
# The same for files in folders of which whole blocks are decoded, and the most bytes of decoded
# blocks that a process keeps for its next samples.
DECODED_WINDOW, KEPT_BYTES = 256_000_000, 512 << 20


def window_bytes(window: float | str | None, usual: int | None) -> int | None:
    """Return the bytes of `window=`, given what "auto" is."""
    return usual if window == "auto" else None if window is None else parse_bytes(window, "window")


def kept_bytes(window: int | None) -> int:
    """Return how many bytes of decoded blocks a process keeps: those of a window."""
    return KEPT_BYTES if window is None else min(window, KEPT_BYTES)


def disk_bytes(directory: Any, disk: float | str, what: str) -> int:
    """Return the bytes of `disk=`; `directory=` is given with it or neither.

    Args:
        what: What is read, if it is in a folder, where neither has a meaning.
    """
    if what and (directory is not None or disk != 0):
        raise OptionError(
            f"directory= and disk= are for a cache in a bucket, or shards, and {what}\n"
            "  Leave them out: it is read from there."
        )
    if bool(disk) != (directory is not None):
        raise OptionError(
            f"disk={disk!r} with directory={directory!r}: disk= is how much is kept in directory=, "
            "and one of them is missing\n  Nothing was started. Give both, or neither."
        )
    return parse_bytes(disk, "disk") if disk else 0


class BlockTable(Protocol):
    """Where samples are: blocks of consecutive ones.

    Attributes:
        first: The index of each block's first sample.
        nbytes: About what each block takes in memory.
        total_bytes: What an epoch fetches of all blocks.
        mean_bytes: Bytes of a block in memory, on average.
    """

    first: npt.NDArray[np.int64]

    @property
    def nbytes(self) -> npt.NDArray[Any]:
        """See above."""

    @property
    def total_bytes(self) -> int:
        """See above."""

    @property
    def mean_bytes(self) -> float:
        """See above."""

    def __len__(self) -> int: ...


class SampleSource(Protocol):
    """What reads samples.

    Attributes:
        location: The folder or the URL that they are in.
    """

    @property
    def location(self) -> Any:
        """See above."""

    @property
    def blocks(self) -> Any:
        """A `BlockTable`."""

    def sample(self, position: int, *, is_copy: bool = False) -> Any:
        """Return a sample; a copy if its owner changes it."""

    def samples(self, positions: Sequence[int], *, are_copies: bool = False) -> list[Any]:
        """Return several samples."""


class BlockDataset(Dataset[Any]):
    """The samples of blocks; see `CachedDataset` and `ShardDataset`.

    Attributes:
        transform: Called with each sample, each time it is read; may be set at any time.
        window: Bytes of samples that a `DataLoader` with `seed=` shuffles together; None for all.
    """

    _source: SampleSource

    def __init__(
        self,
        source: Any,
        samples: int,
        transform: Callable[[Any], Any] | None = None,
        window: int | None = None,
    ) -> None:
        self.transform, self.window = transform, window
        self._source, self._samples = source, samples
        self._orders: dict[tuple[int, int], Windows] = {}

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Any:
        """Return a sample."""
        if self.transform is None:
            return self._source.sample(self._position(index))
        position = self._position(index)
        return self._transformed(self._source.sample(position, is_copy=True), position)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return samples, in the order asked for."""
        positions = [*map(self._position, indices)]
        if self.transform is None:
            return self._source.samples(positions)
        samples = self._source.samples(positions, are_copies=True)
        return [*map(self._transformed, samples, positions)]

    def _transformed(self, sample: Any, position: int) -> Any:
        assert self.transform is not None
        try:
            return self.transform(sample)
        except Exception as error:
            error.add_note(f"forebay: transform= raised it for {self.name_of(position)}")
            raise

    def name_of(self, position: int) -> str:
        """Return what errors call a sample."""
        return f"sample {position:,}"

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    @property
    def _facts(self) -> dict[str, Any]:
        """What a notebook shows beside samples, transform and window: of files, their `shards`."""
        return {}

    def __repr__(self) -> str:
        shards, where = counted(self._facts["shards"], "shard"), self._source.location
        order = "" if self.window is None else f", shuffled by {byte_size(self.window)}"
        shown = f"{shown_location(str(where))!r}: {len(self):,} samples in {shards}{order}"
        return f"<{type(self).__name__} {shown}>"

    def _repr_html_(self) -> str:
        """Return the summary for a notebook."""
        window = "all" if self.window is None else byte_size(self.window)
        facts = {"samples": len(self), **self._facts, "transform": self.transform}
        return summary(type(self).__name__, facts | {"window": window})

    @property
    def by_blocks(self) -> BlockDataset:
        """What says how samples are read by blocks."""
        return self

    def windows(self, batch: int) -> Windows | None:
        """Return the order of samples for global batches of a size; None for an exact one."""
        if self.window is None:
            return None
        key = batch, self.window
        if key not in self._orders:
            from forebay.windows import Windows, lanes_for

            blocks = self.block_table
            together = max(int(self.window / blocks.mean_bytes), 1)
            lanes = lanes_for(batch, len(blocks), together)
            order = Windows(self._starts, batch, lanes, max(together // lanes, 1))
            self._orders = {key: order}
        return self._orders[key]

    def described(self, batch: int, shuffle: bool) -> str:
        """Return in words how a `DataLoader` with `seed=` reads blocks of a bucket.

        Args:
            batch: The global batch size.
            shuffle: Whether the order is random.
        """
        blocks, order = self.block_table, self.windows(batch) if shuffle else None
        if shuffle and order is None:
            return f"shuffled exactly, each sample by a request of its own: {len(self):,} an epoch"
        how = "in order"
        if order is not None:
            most = order.batch // order.lanes
            how = (
                f"shuffled by windows of {byte_size(self.window or 0)}, at most {most:,} of "
                f"{counted(batch, 'sample')} of a batch from one block"
            )
        nbytes = byte_size(blocks.total_bytes)
        return (
            f"{how}; an epoch is {counted(len(blocks), 'request')} for {nbytes}, less what is kept"
        )

    def groups(self, least: int) -> npt.NDArray[np.int64]:
        """Return the first sample and the first block of each group, and then where all end.

        A group is some consecutive blocks that have at least so many samples together.
        """
        starts, firsts = self._starts, [0]
        while (block := int(starts.searchsorted(starts[firsts[-1]] + least))) < len(starts) - 1:
            firsts.append(block)
        blocks = np.array([*firsts, len(starts) - 1])
        return np.stack([starts[blocks], blocks], axis=1)

    def rows_of(self, blocks: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> BlockDataset:
        """Return how rows are read that are made of the samples of groups.

        Args:
            blocks: The first block of each group, and where it ends: [groups, 2].
            rows: The first row of each group, and how many rows there are.
        """
        return RowBlocks(self, blocks, rows)

    @property
    def block_table(self) -> BlockTable:
        """Where the samples are."""
        table: BlockTable = self._source.blocks
        return table

    @property
    def _starts(self) -> npt.NDArray[np.int64]:
        return np.append(self.block_table.first, len(self))

    def lookahead(
        self, batch: int, first: int, count: int, shuffle: bool, fetched: Fetched
    ) -> Lookahead | None:
        """Return what has blocks fetched for a loader; None if each sample is fetched by itself.

        Args:
            batch: The global batch size.
            first: The first sample of the loader's rank in each global batch.
            count: How many samples that rank has there.
            shuffle: Whether the order is random.
            fetched: Where to note what is fetched.
        """
        from forebay.windows import InOrder

        if self.remote is None:
            return None
        order = self.windows(batch) if shuffle else InOrder(self._starts, batch)
        if order is None:  # nothing to fetch ahead, but what is fetched is counted
            order = InOrder(self._starts[:1], batch)
        return self._lookahead(order, order.lanes_of(first, count), fetched)

    def _lookahead(self, order: Any, lanes: range, fetched: Fetched) -> Lookahead | None:
        from forebay.caching.lookahead import Lookahead

        assert self.remote is not None
        return Lookahead(self.remote, order, lanes, self.window, fetched)

    @property
    def remote(self) -> BucketReader | None:
        """What reads a bucket; None for files in a folder."""
        return None

    def _position(self, index: int) -> int:
        at = as_index(index)  # also of a tensor, as the indices of a Subset may be
        position = at if at >= 0 else at + self._samples
        if not 0 <= position < self._samples:
            raise IndexError(f"there is no sample {index}: there are {len(self):,}")
        return position


# ---- rows ----------------------------------------------------------------------------------------
# Each group of blocks is to rows what a block is to samples: its rows come from a window together.


@dataclass(frozen=True, eq=False)
class _Groups:
    """A `BlockTable` of groups."""

    first: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    total_bytes: int

    @property
    def mean_bytes(self) -> float:
        return max(float(self.nbytes.sum()), 1.0) / max(len(self), 1)

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True, eq=False)
class _OfGroups:
    """An order of groups, as one of their blocks."""

    order: Windows | InOrder
    blocks: npt.NDArray[np.int64]

    @property
    def batch(self) -> int:
        return self.order.batch

    @property
    def lanes(self) -> int:
        return self.order.lanes

    def windows(
        self, seed: int, epoch: int, lanes: Iterable[int], batch: int = 0
    ) -> Iterator[Window]:
        """See `Windows.windows`."""
        for window in self.order.windows(seed, epoch, lanes, batch):
            ranges = [np.arange(*self.blocks[group]) for group in window.blocks]
            yield window._replace(blocks=np.concatenate(ranges))


class RowBlocks(BlockDataset):
    """What says how rows of `pack_sequences` are read: in which order, and which blocks when.

    Args:
        dataset: That of the samples.
        blocks: The first block of each group, and where it ends: [groups, 2].
        rows: The first row of each group, and how many rows there are.
    """

    def __init__(
        self,
        dataset: BlockDataset,
        blocks: npt.NDArray[np.int64],
        rows: npt.NDArray[np.int64],
    ) -> None:
        self._dataset, self._blocks = dataset, blocks
        table = dataset.block_table
        until = np.append(0, np.cumsum(table.nbytes, dtype=np.int64))
        nbytes = until[blocks[:, 1]] - until[blocks[:, 0]]
        super().__init__(None, int(rows[-1]), None, dataset.window)
        self._groups = _Groups(rows[:-1], nbytes, table.total_bytes)

    @property
    def block_table(self) -> Any:
        """See `BlockDataset`."""
        return self._groups

    @property
    def remote(self) -> Any:
        """See `BlockDataset`."""
        return self._dataset.remote

    def _lookahead(self, order: Any, lanes: range, fetched: Fetched) -> Lookahead | None:
        # The rows of a global batch are dealt to ranks by their costs: any rank may have any.
        del lanes
        return super()._lookahead(_OfGroups(order, self._blocks), range(order.lanes), fetched)

    def __repr__(self) -> str:
        return f"<rows of {self._dataset!r}>"
