"""The samples of a finished cache, in a folder or in a bucket.

index ──> source: mapped shards of a folder, or blocks of a bucket ──> leaves ──> sample
                                                        each time it is read: ──> transform
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from forebay.base.file_stores import Folder, Store, folder_at
from forebay.base.value_classes import Classes, Identity, loaded_class
from forebay.caching.arrow_shards import Shards
from forebay.caching.block_dataset import (
    DECODED_WINDOW,
    WINDOW,
    BlockDataset,
    disk_bytes,
    kept_bytes,
    window_bytes,
)
from forebay.caching.index import CachePlan, Index
from forebay.errors import InputError, OptionError, short_tracebacks, shown_location

if TYPE_CHECKING:
    from forebay.base.origins import Origin
    from forebay.caching.cache_reader import CacheReader


class CachedDataset(BlockDataset):
    """The samples of a cache, as the dataset returned them; made by `cache` and `open_cache`.

    Tensors and arrays are contiguous. Those of a cache in a folder view the file's pages in memory,
    which all processes share. They may be written to: neither the file nor other processes change,
    but this process sees the change when it reads the sample again, so `clone()` what you change in
    place. A `transform` need not: it receives copies. Those of a cache in a bucket, or of a
    compressed one, are copies.

    It is pickled as the location of its files, so little is sent to spawned workers. It keeps no
    file open.

    Attributes:
        directory: Where the files are: a folder, or the URL of one.
        transform: Called with each sample, each time it is read; may be set at any time.
        window: Bytes of samples that a `DataLoader` with `seed=` shuffles together; None for all.
    """

    _source: Shards | CacheReader

    def __init__(
        self,
        source: Shards | CacheReader,
        plan: CachePlan,
        transform: Callable[[Any], Any] | None = None,
        classes: Classes | None = None,
        window: int | None = None,
        blocks: int = 0,
    ) -> None:
        """See `open_cache`; `blocks` is a checksum of all blocks' checksums."""
        super().__init__(source, plan.samples, transform, window)
        self._plan, self._blocks_sum = plan, blocks
        source.classes = dict(classes or {})

    @property
    def directory(self) -> Path | str:
        """Where the files are."""
        return self._source.location

    def table(self) -> pa.Table:
        """Return all samples as an Arrow table: one row each, in order.

        Of a cache in a folder, it is over the mapped files.

        Raises:
            OptionError: The cache is in a bucket.
        """
        return self._shards().table()

    def shard_tables(self) -> Iterator[pa.Table]:
        """Yield the samples of one shard after the other, each as an Arrow table; see `table`."""
        shards = self._shards()
        return (shards[at].table() for at in range(len(shards)))

    def _shards(self) -> Shards:
        if not isinstance(self._source, Shards):
            raise OptionError(
                f"{shown_location(str(self.directory))!r} is in a bucket, and a table is of mapped "
                "files\n  Copy the folder first (aws s3 sync, rclone), and open the copy."
            )
        return self._source

    def origins(self, *, reads: bool = True) -> Sequence[Origin]:
        """Return the cache: one that was compressed, or has grown, has other blocks."""
        from forebay.base.origins import Origin

        del reads
        return (Origin("", f":{self._blocks_sum:08x}", len(self)),)

    @property
    def remote(self) -> CacheReader | None:
        """What reads a cache in a bucket; None for one in a folder."""
        return None if isinstance(self._source, Shards) else self._source

    @property
    def _facts(self) -> dict[str, Any]:
        where = shown_location(str(self.directory))
        return {"shards": self._plan.shards, "directory": where}

    def __reduce__(self) -> Any:
        known = self._source.classes.items()
        classes = {at: cls for at, cls in known if loaded_class(at, issubclass(cls, tuple)) is cls}
        given = self._source, self._plan, self.transform, classes, self.window
        return CachedDataset, (*given, self._blocks_sum)


@short_tracebacks
def open_cache(
    location: str | os.PathLike[str],
    transform: Callable[[Any], Any] | None = None,
    *,
    directory: str | os.PathLike[str] | None = None,
    disk: float | str = 0,
    window: float | str | None = "auto",
) -> CachedDataset:
    """Open a finished cache without the dataset that it was made from.

    Of a cache in a bucket, a child of this process fetches blocks of about 4 MiB for all of its
    loaders and workers, checks them, and shares them in memory. It ends with this process. With
    `disk=0`, the default, nothing is written to any disk; the memory that a training takes is up to
    twice `window`, divided among the ranks, and as little as a few blocks for other reads.
    `disk="200GB"` keeps as many blocks as fit in a local folder, from epoch to epoch and from job
    to job; whatever is there is compared with its checksum. A copy of all files (`aws s3 sync`,
    `rclone`) is an ordinary cache in a folder.

    A `DataLoader` with `shuffle=True` and `seed=` takes samples from a window: some blocks that are
    in memory together, other ones in each epoch. Whatever the number of ranks and workers, and
    whatever is cached, the batches are the same.

    Args:
        location: The folder, or its URL.
        transform: As in `cache`.
        directory: For a URL: the local folder for what is kept, on a disk that no other node uses;
            created if missing.
        disk: For a URL: how much to keep in `directory`: bytes, or a string such as "200GB". What
            is larger than the cache keeps every block.
        window: How much is shuffled together, over all ranks: bytes of samples, or a string such as
            "4GB"; None for an exact shuffle of all samples, in which each is fetched by itself.
            "auto" is 4 GB for a URL, 256 MB for a compressed cache in a folder, and None for
            another one. With a window, a cache in a folder that
            is larger than memory is read block by block, instead of at random.

    Returns:
        The dataset. A NamedTuple has the user's own class if its module was imported before,
        and otherwise a substitute with the same name and fields.

    Raises:
        OptionError: A setting is impossible.
        InputError: There is no finished cache; it cannot be reached; or a file of it is missing,
            truncated or, in a bucket, not what was written.
        OutputError: The folder cannot be written to, or its disk is too small.
    """
    place = folder_at(location, InputError)
    together = window_bytes(window, WINDOW)
    if isinstance(place, Store):
        reader = _in_bucket(place.url, directory, disk)
        known = reader.index
        given = known.plan, transform, known_classes(known), together, known.blocks[1]
        return CachedDataset(reader, *given)
    disk_bytes(directory, disk, f"the cache {str(place.path)!r} is in a folder")
    index = Index.read(place)
    if index is None:
        raise _no_cache(place)
    lost = index.missing(place)
    if lost:
        raise InputError(
            f"the cache {str(place.path)!r} lacks {lost[0]}: {len(lost)} of its "
            f"{len(index.sizes) + 1} files are missing\n"
            "  Call forebay.cache again, with the same dataset and location: it writes the "
            "missing files again. If this is a copy, copy the whole folder."
        )
    return _in_folder(place.path, index, transform, known_classes(index), window)


def _in_folder(
    folder: Path,
    index: Index,
    transform: Callable[[Any], Any] | None,
    classes: Classes,
    window: float | str | None = "auto",
) -> CachedDataset:
    plan = index.plan
    usual = None if plan.compression is None else DECODED_WINDOW
    together = window_bytes(window, usual)
    given = plan, transform, classes, together, index.blocks[1]
    return CachedDataset(Shards(folder, plan, kept_bytes(together)), *given)


def known_classes(index: Index) -> dict[Identity, type]:
    """Return the classes of a cache's samples that this process has loaded."""
    found = ((identity, loaded_class(identity, is_tuple)) for identity, is_tuple in index.classes())
    return {identity: cls for identity, cls in found if cls is not None}


def cached_dataset(
    place: Store | Folder,
    index: Index,
    transform: Callable[[Any], Any] | None,
    classes: Classes,
) -> CachedDataset:
    """Return the dataset of a finished cache; one in a bucket is connected to when it is read."""
    plan, classes = index.plan, {**known_classes(index), **classes}
    if isinstance(place, Folder):
        return _in_folder(place.path, index, transform, classes)
    from forebay.caching.cache_reader import CacheReader
    from forebay.caching.fetcher_process import Place

    given = plan, transform, classes, WINDOW, index.blocks[1]
    return CachedDataset(CacheReader(Place(place.url)), *given)


def _in_bucket(
    url: str, directory: str | os.PathLike[str] | None, disk: float | str
) -> CacheReader:
    """Return what reads a cache in a bucket."""
    from forebay.caching.cache_reader import CacheReader
    from forebay.caching.fetcher_process import Place

    nbytes = disk_bytes(directory, disk, "")
    folder = None if directory is None else str(local_folder(directory))
    return CacheReader(Place(url, folder, nbytes))


def _no_cache(place: Folder) -> InputError:
    """Return the error for a folder without a finished cache."""
    return InputError(
        f"{str(place.path)!r} holds no finished cache\n"
        "  forebay.cache(dataset, location) creates one, or finishes an incomplete one. If this is "
        "a copy, copy its .forebay folder too."
    )


def local_folder(directory: str | os.PathLike[str] | None) -> Path:
    """Return the folder in which blocks are kept."""
    place = None if directory is None else folder_at(directory)
    if not isinstance(place, Folder):
        raise OptionError(
            f"directory={directory!r} is not a local folder, and disk= keeps blocks in one\n"
            '  Nothing was started. Name one, as in directory="/nvme/cache".'
        )
    return place.path
