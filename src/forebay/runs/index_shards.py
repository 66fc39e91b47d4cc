"""index_shards(): find the blocks of shards on all cores or a cluster, shard by shard.

    shards ──> a run of `preprocess`: each shard a file of its own ──> shards.index, last

The index is written anew from these files by each call, in the order of the shards' names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from forebay.base.file_stores import Folder, Store, folder_at
from forebay.base.files import is_url
from forebay.base.formatting import counted
from forebay.base.process import is_worker
from forebay.caching.stores import ObjectStore, bucket_at, fsspec_bucket
from forebay.errors import InputError, short_tracebacks, shown_location
from forebay.observe.progress import note
from forebay.options import Ray
from forebay.runs.preprocess import preprocess
from forebay.runs.report import Report
from forebay.shards.format import ShardFormat, format_named, register_format
from forebay.shards.index import IndexedShard, ShardIndex
from forebay.shards.indexing import index_shard
from forebay.shards.location import Listed, Location, ShardList, find_shards
from forebay.shards.sources import INDEX_NAME, whole_file

# Shards are indexed again if what is found in them has another form.
_VERSION = "4"


@short_tracebacks
def index_shards(
    location: Location,
    index: str | os.PathLike[str],
    *,
    format: str | None = None,
    num_workers: int | Literal["auto"] | None = None,
    backend: str | Ray = "process",
    timeout: float | None = None,
    retries: int | None = None,
    progress: bool = True,
) -> Report:
    """Write down where the samples of shards are, for `open_shards(location, index=index)`.

    The same call again indexes only shards that are new, or that changed in size, ETag or time of
    writing; after a kill it continues. A shard that cannot be read fails alone, and is left out of
    the index. Samples keep their indices if shards are added whose names come last.

    Args:
        location: The shards, as in `open_shards`.
        index: Folder for the index, created if missing, or the fsspec URL of one.
        format: The format of the shards, where suffixes do not say it, as in `open_shards`.
        num_workers: As in `preprocess`.
        backend: As in `preprocess`: "ray" for the nodes of a cluster.
        timeout: Seconds that one shard may take.
        retries: How often a shard that failed is tried again; None for 1.
        progress: Show progress on stderr.

    Returns:
        The report of the run, with the shards that failed. Its table has a row for each shard:
        its name, size, ETag or time, and how many samples and blocks it has.

    Raises:
        OptionError: A setting is impossible.
        InputError: There are no shards, or none can be read.
        OutputError: The folder of the index cannot be written to.
        ChangedError, BusyError, FailuresError, WorkerDiedError: As `preprocess`.
    """
    form = None if format is None else format_named(format)
    found, place = find_shards(location, format), folder_at(index)
    before = _names(place)
    rows = [
        {
            "shard": each.name,
            "bytes": each.size,
            "tag": each.tag,
            "root": shown_location(found.root),
        }
        for each in found.shards
    ]
    report = preprocess(
        _ShardIndexing(found.root, form),
        rows,
        index,
        num_workers=num_workers,
        backend=backend,
        timeout=timeout,
        retries=retries,
        max_failures=len(rows),
        version=f"{_VERSION} {format or ''}",
        progress=progress,
    )
    shards = [*_indexed(place, found)]
    if not shards:
        raise InputError(
            f"{shown_location(found.root)!r}: none of {counted(len(rows), 'shard')} could be "
            f"indexed\n  forebay failures {shown_location(os.fspath(index))} says why."
        )
    place.write(INDEX_NAME, bytes(ShardIndex.of(shards).data))
    if gone := sorted(before - {each.name for each in found.shards}):
        more = f" and {len(gone) - 1:,} more" if len(gone) > 1 else ""
        note(f"gone from the index: {gone[0]!r}{more}; indices of samples after them changed")
    return report


@dataclass
class _ShardIndexing:
    """Indexes a shard, which is a row; in a worker."""

    root: str
    form: ShardFormat | None
    _store: ObjectStore | None = None

    def __call__(self, row: dict[str, Any], out: Path) -> dict[str, int]:
        """Write what the index says of a shard."""
        if self.form is not None:
            register_format(self.form)  # a worker may be a new interpreter
        if self._store is None and is_url(self.root):
            # The process that starts others must not have the threads of obstore.
            self._store = bucket_at(self.root) if is_worker() else fsspec_bucket(self.root)
        listed = Listed(str(row["shard"]), int(row["bytes"]), str(row["tag"]))
        name = None if self.form is None else self.form.name
        shard = index_shard(self.root, listed, name, self._store)
        (out / _file_of(listed)).write_bytes(ShardIndex.of([shard]).data)
        return {"samples": int(shard.found.rows.sum()), "blocks": len(shard.found.rows)}

    def __getstate__(self) -> Any:
        """Leave out the connection."""
        return {**self.__dict__, "_store": None}


def _file_of(listed: Listed) -> str:
    text = repr(tuple(listed)).encode("utf-8", "surrogateescape")
    return f"{sha256(text).hexdigest()[:32]}.shard"


def _indexed(place: Store | Folder, found: ShardList) -> Iterator[IndexedShard]:
    """Yield what is known of the shards that were indexed."""
    for listed in found.shards:
        if (data := whole_file(place, _file_of(listed))) is None:
            continue
        shard = ShardIndex.read(data, f"the index of {listed.name!r}").indexed(0)
        if shard.listed == listed:
            yield shard


def _names(place: Store | Folder) -> set[str]:
    """Return the shards of the index that is there."""
    data = whole_file(place, INDEX_NAME)
    if data is None:
        return set()
    try:
        known = ShardIndex.read(data, "the index")
    except InputError:  # it is written anew
        return set()
    return {known.listed(at).name for at in range(len(known.sizes))}
