"""The samples of shards that others wrote, in folders or in a bucket.

location ──> shards ──> index ──> source: mapped shards, or blocks of a bucket ──> sample
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from forebay.base.files import is_url
from forebay.base.formatting import counted
from forebay.base.origins import Origin
from forebay.caching.block_dataset import (
    DECODED_WINDOW,
    WINDOW,
    BlockDataset,
    disk_bytes,
    kept_bytes,
    window_bytes,
)
from forebay.caching.dataset import local_folder
from forebay.caching.fetcher_process import FetcherProcess
from forebay.errors import InputError, OptionError, short_tracebacks, shown_location
from forebay.shards.blocks import ShardBlocks
from forebay.shards.bucket_shards import ShardPlace
from forebay.shards.format import format_named
from forebay.shards.local_shards import LocalShards
from forebay.shards.location import Location, find_shards
from forebay.shards.shard_reader import ShardReader
from forebay.shards.sources import OpenIndex, given_index, made_index


class ShardDataset(BlockDataset):
    """The samples of shards; made by `open_shards`.

    It is pickled as the places of its shards and of its index, so little is sent to spawned
    workers.

    Attributes:
        location: The folder, or the URL, that all shards are in.
        transform: Called with each sample, each time it is read; may be set at any time.
        window: Bytes of samples that a `DataLoader` with `seed=` shuffles together; None for all.
    """

    _source: LocalShards | ShardReader

    def __init__(
        self,
        source: LocalShards | ShardReader,
        transform: Callable[[Any], Any] | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__(source, source.index.samples, transform, window)

    @property
    def location(self) -> str:
        """Where the shards are."""
        return self._source.location

    @property
    def blocks(self) -> ShardBlocks:
        """Where the samples are."""
        return self._source.blocks

    def samples(self, positions: Sequence[int]) -> list[Any]:
        """Return samples without the transform."""
        return self._source.samples(positions)

    def name_of(self, position: int) -> str:
        """See `BlockDataset`."""
        return f"sample {position:,} ({self._source.blocks.place_of(position)})"

    def origins(self, *, reads: bool = True) -> Sequence[Origin]:
        """Return the shards, in order; see `base/origins.py`."""
        del reads
        columns = self._source.blocks.columns
        found = self._source.index.origins
        return (
            found
            if columns is None
            else [each._replace(stamp=f"{each.stamp} {columns}") for each in found]
        )

    def counts_of(self, name: str) -> Any:
        """Return the number in a column or field of each sample, or the length of what is there."""
        from forebay.shards.columns import counts_of

        return counts_of(self, name)

    @property
    def decoded(self) -> tuple[int, int]:
        """How many blocks of local shards were decoded so far, and their rows."""
        return self._source.decoded

    def of_columns(self, columns: Sequence[str]) -> ShardDataset:
        """Return a dataset of the same rows, of which a sample is a `ColumnRow`."""
        return ShardDataset(self._source.of_columns(columns), None, self.window)

    @property
    def _facts(self) -> dict[str, Any]:
        index, where = self._source.index, shown_location(self.location)
        return {"shards": len(index.sizes), "formats": ", ".join(index.forms), "location": where}

    @property
    def remote(self) -> ShardReader | None:
        """See `BlockDataset`."""
        return None if isinstance(self._source, LocalShards) else self._source

    def __reduce__(self) -> Any:
        return ShardDataset, (self._source, self.transform, self.window)


@short_tracebacks
def open_shards(
    location: Location,
    *,
    index: str | os.PathLike[str] | None = None,
    format: str | None = None,
    transform: Callable[[Any], Any] | None = None,
    columns: Sequence[str] | None = None,
    directory: str | os.PathLike[str] | None = None,
    disk: float | str = 0,
    window: float | str | None = "auto",
    progress: bool = True,
) -> ShardDataset:
    """Open shards that others wrote as a map-style dataset, without converting them.

    Shards are in sorted order of their names, and samples in the order of their shards. A sample
    of a tar is a dict of `__key__` and, for each extension, the bytes of that file, as WebDataset
    groups them.

    Args:
        location: A folder, a file, a glob such as `"data/*.tar"`, a pattern with braces such as
            `"train-{000..999}.tar"`, or a list of these; paths, or fsspec URLs in one bucket. In a
            folder and its subfolders, every file with a known suffix is a shard, except .json files
            beside others; all must have one format. A shard may be compressed as a whole (.gz,
            .zst).
        index: The folder, or its URL, that `index_shards` wrote an index to. None to find all
            samples now, which reads a tar or JSON lines once as a whole; what takes longer than a
            second to find is kept in the user's cache folder until a shard changes.
        format: The format of the shards, where suffixes do not say it: "tar", "parquet", "arrow",
            "jsonl", "mds", or the name of one that `register_format` got.
        transform: Called with each sample each time it is read; it may change it in place.
        columns: Names of the columns to read, in this order, where the format has columns.
        directory: For a URL: the local folder for what is kept.
        disk: For a URL: how much to keep there, as in `open_cache`.
        window: As in `open_cache`. "auto" is 4 GB for a URL. For local shards, it is 256 MB if
            blocks are decoded or decompressed as a whole, and otherwise None: an exact shuffle.
        progress: Show on stderr how many shards are indexed.

    Returns:
        The dataset. A `DataLoader` with `seed=` reads it as a cache: with an exact state, on any
        number of ranks and workers.

    Raises:
        OptionError: A setting is impossible.
        InputError: There are no shards, or one is missing, damaged or cannot be read.
        ChangedError: A shard is not the one that is in the index.
        OutputError: `directory` cannot be written to.
    """
    if format is not None:
        format_named(format)
    if columns is not None and (isinstance(columns, str) or not columns):
        raise OptionError(f"columns={columns!r} is no list of names\n  Nothing was read.")
    if columns is not None and len({*columns}) < len([*columns]):
        raise OptionError(f"columns={columns!r} names a column twice\n  Name each once.")
    if index is None:
        found = find_shards(location, format)
        root = found.root
    else:
        given = index, location, format, progress
        root, opened = given_index(*given)
    nbytes = disk_bytes(directory, disk, "" if is_url(root) else f"{root!r} is a folder")
    if index is None:
        opened = made_index(found, location, format, progress)
    if not opened.index.samples:
        raise InputError(
            f"{shown_location(root)!r}: there are no samples in "
            f"{counted(len(opened.index.sizes), 'shard')}"
        )
    names = None if columns is None else tuple(columns)
    folder = None if directory is None else str(local_folder(directory))
    if is_url(root):
        place = ShardPlace(root, folder, nbytes, names, identity=opened.identity, opened=opened)
        process = FetcherProcess.of(place)
        if index is not None:  # it will be read like this, and not only some of its columns
            process.begin()  # it starts while the reader does
        return ShardDataset(ShardReader(place, process), transform, window_bytes(window, WINDOW))
    together = window_bytes(window, _usual_window(opened))
    return ShardDataset(LocalShards(root, opened, names, kept_bytes(together)), transform, together)


def _usual_window(opened: OpenIndex) -> int | None:
    """Return what `window="auto"` is for local shards."""
    is_plain = (opened.index.starts_at >= 0).all() and not opened.index.codecs.any()
    return None if is_plain else DECODED_WINDOW
