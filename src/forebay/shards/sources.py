"""Open the index of shards: of a file, which processes share, or in memory."""

from __future__ import annotations

import hashlib
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from forebay.base.file_stores import Folder, Store, folder_at
from forebay.base.files import atomic_file, is_url, open_regular
from forebay.base.formatting import counted
from forebay.base.machine import usable_cores
from forebay.caching.stores import ObjectStore, answers_have_tags, fsspec_bucket
from forebay.errors import ChangedError, InputError, shown_location
from forebay.shards.format import ShardFormat, register_format, registered_formats
from forebay.shards.index import IndexedShard, ShardIndex
from forebay.shards.location import Listed, Location, ShardList, find_shards, root_of_known

# The file of an index in its folder, and the most that is downloaded of one.
INDEX_NAME = "shards.index"
# An index in memory that took longer is kept for the next time.
KEEP_S = 1.0
# After how long without use it is removed.
_KEPT_S = 30 * 86_400.0
# Shards that are indexed at once where requests are waited for.
_THREADS = 16


class OpenIndex:
    """An index; pickled as the path of its file, or as its bytes where it has none."""

    def __init__(self, path: str, data: bytes, identity: str) -> None:
        """Open it; raise ChangedError if the file is another one by now."""
        self.path, self._data = path, data
        mapped = _mapped_index(path) if path else None
        content = memoryview(data if mapped is None else mapped)
        self.index = ShardIndex.read(content, repr(path) if path else "the index")
        if mapped is not None:
            mapped.madvise(mmap.MADV_DONTNEED)  # most pages are needed for the check alone
        self.identity = identity or self.index.identity
        if self.index.identity != self.identity:
            raise ChangedError(
                f"{path!r} was written anew while its shards were read\n"
                "  Samples would be others. Open the shards again, and begin the epoch anew."
            )

    def __reduce__(self) -> Any:
        """Take formats from outside along: the process that fetches is a new interpreter."""
        forms = registered_formats(self.index.forms)
        return _received, (self.path, self._data, self.identity, forms)


def _mapped_index(path: str) -> mmap.mmap:
    with open_regular(path) as file:
        if not os.fstat(file.fileno()).st_size:
            raise InputError(f"{path!r} is empty\n  Remove it and call forebay.index_shards again.")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _received(path: str, data: bytes, identity: str, forms: Sequence[ShardFormat]) -> OpenIndex:
    for form in forms:
        register_format(form)
    return OpenIndex(path, data, identity)


def given_index(
    index: str | os.PathLike[str], location: Location, form: str | None, progress: bool
) -> tuple[str, OpenIndex]:
    """Return the folder of shards, and the index that `index_shards` wrote.

    The shards are compared with the index: by a listing, or when their first bytes come, where
    each answer says of which object it is.

    Args:
        index: Its folder.
        location: The shards.
        form: Of a folder's shards; None to go by suffix.

    Raises:
        InputError: There is none, or it names shards that are gone.
        ChangedError: A shard changed since.
    """
    place = folder_at(index, InputError)
    where = shown_location(place.locate(INDEX_NAME))
    opened = _read(place)
    if opened is None:
        raise InputError(
            f"{where!r}: there is no index\n"
            "  forebay.index_shards(location, index) writes it, or finishes it."
        )
    root = root_of_known(location, opened.index.names)
    if root is None or not answers_have_tags(root):
        found = find_shards(location, form)
        check_shards(opened.index, found, where, progress)
        root = found.root
    return root, opened


def _read(place: Store | Folder) -> OpenIndex | None:
    if isinstance(place, Folder):
        with suppress(FileNotFoundError, NotADirectoryError):
            return OpenIndex(place.locate(INDEX_NAME), b"", "")
        return None
    data = whole_file(place, INDEX_NAME)
    return None if data is None else _kept(data, _kept_name(place.url, data))


def whole_file(place: Store | Folder, name: str) -> bytes | None:
    """Return a file, however large; None if there is none."""
    size = place.size(name)
    return None if size is None else place.read(name, size)


def check_shards(index: ShardIndex, found: ShardList, where: str, progress: bool) -> None:
    """Compare an index with the shards that are there; say which are new."""
    there = {each.name: each for each in found.shards}
    gone, changed = list[Listed](), list[Listed]()
    for number in range(len(index.sizes)):
        known = index.listed(number)
        now = there.pop(known.name, None)
        if now is None:
            gone.append(known)
        elif now != known:
            changed.append(known)
    again = "Call forebay.index_shards again, which reads only those that are new or changed."
    root = shown_location(found.root)
    if gone:
        raise InputError(
            f"{root}/{gone[0].name} is in the index {where!r}, and not there: {len(gone):,} of "
            f"{len(index.sizes):,} shards are gone\n"
            f"  Bring them back, or name the location that was indexed. {again}"
        )
    if changed:
        raise ChangedError(
            f"{root}/{changed[0].name} changed after it was indexed in {where!r}: {len(changed):,} "
            f"of {len(index.sizes):,} shards did\n  {again}"
        )
    if there:
        from forebay.observe.progress import log, note

        say = note if progress else log.warning
        say(
            f"{root}/{next(iter(there))} is not in the index {where!r}, and left out: "
            f"{counted(len(there), 'shard')} of {len(found.shards):,}. {again}"
        )


def made_index(found: ShardList, location: Location, form: str | None, progress: bool) -> OpenIndex:
    """Return an index of all shards, made in memory; kept for the next time if that took long."""
    name = _kept_name((form, found.root, str(location)), found.shards)
    with suppress(InputError, OSError, RuntimeError):  # none is kept, or there is no home
        opened = OpenIndex(str(path := _cache_folder() / name), b"", "")
        os.utime(path)  # it is used now
        return opened
    began = time.monotonic()
    store = fsspec_bucket(found.root) if is_url(found.root) else None
    shards = _indexed(found, form, store, progress)
    data = bytes(ShardIndex.of(shards).data)
    if time.monotonic() - began < KEEP_S:
        return OpenIndex("", data, "")
    return _kept(data, name)


def _indexed(
    found: ShardList, form: str | None, store: ObjectStore | None, progress: bool
) -> list[IndexedShard]:
    # Not for processes that only read.
    from forebay.observe.progress import Progress, run_label
    from forebay.shards.apart import apart
    from forebay.shards.indexing import index_shard

    shown = Progress(
        len(found.shards), 0, progress, unit="shard", label=run_label("index", found.root)
    )
    shards = []
    threads = ThreadPoolExecutor(_THREADS if store is not None else max(int(usable_cores()), 1))

    def work(listed: Listed) -> IndexedShard:
        return index_shard(found.root, listed, form, store)

    with apart():
        try:
            for each in threads.map(work, found.shards):
                shards.append(each)
                shown.update(1, 0)
        finally:
            threads.shutdown(cancel_futures=True)
            shown.close()
    return shards


def _kept_name(place: Any, content: Any) -> str:
    """Return the name of the file of an index: that of its place, and what it has now."""
    parts = (repr(each).encode("utf-8", "surrogateescape") for each in (place, content))
    return "-".join(hashlib.sha256(each).hexdigest()[:16] for each in parts) + ".index"


def _kept(data: bytes, name: str) -> OpenIndex:
    """Keep an index in the user's cache folder if that can be written to.

    What was kept of the same place before goes, and what was not used for long.
    """
    try:
        path = _cache_folder() / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic_file(path, is_ours=False) as file:
            file.write(data)
        opened = OpenIndex(str(path), b"", "")
        for other in path.parent.glob("*.index"):
            is_same = other.name.partition("-")[0] == name.partition("-")[0]
            is_old = is_same or other.stat().st_mtime < time.time() - _KEPT_S
            if is_old and other.name != name:
                other.unlink(missing_ok=True)
        return opened
    except (OSError, RuntimeError):
        return OpenIndex("", data, "")


def _cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    caches = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
    return caches / "forebay" / "shards"
