"""Copy a cache from a bucket to a local folder: once per node, checked, continued after a kill.

    cache.json of the bucket ───> .forebay/copying.json       of which cache this is a copy
    blocks.bin, then shards ────> temporary files ── checksums ──> their names
    cache.json, still the same ─> copying.json gets the name cache.json, and the copy is finished

One process copies while it holds the folder's lock; others wait for it, and find the copy finished.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TypeVar

import numpy as np

from forebay.base.file_stores import Folder, Store
from forebay.base.files import atomic_file, refuse_foreign
from forebay.base.formatting import byte_size
from forebay.base.output_names import PRIVATE
from forebay.base.process import LONGEST_WAIT_S
from forebay.caching.index import Index
from forebay.caching.layout import (
    BLOCKS,
    INDEX,
    INDEX_BYTES,
    Blocks,
    checksums,
    is_shard,
    shard_name,
)
from forebay.errors import BusyError, ChangedError, InputError, OutputError, shown_location
from forebay.ledger.database import NAME
from forebay.ledger.lock import LOCK_NAME, FolderLock
from forebay.observe.progress import Progress, log, note, run_label

# The index of the cache of which a folder has an unfinished copy.
COPYING = f"{PRIVATE}/copying.json"
# Shards that are downloaded at once, if the store can.
THREADS = 16
# How often to look whether another process has finished the copy.
PAUSE_S = 0.1
# How long to wait for downloads to end after Ctrl-C or an error; then they end with the process.
ENDING_S = 2.0
_T = TypeVar("_T")
_OF_THE_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})


def copy_cache(store: Store, folder: Path, progress: bool) -> Index | None:
    """Copy what a folder lacks of a cache; return the index, None if there is no finished cache."""
    wanted, here = store.read(INDEX, INDEX_BYTES), Folder(folder)
    if wanted is None:
        return None
    index = Index.from_json(wanted, shown_location(store.locate(INDEX)))
    try:
        if not _is_finished(index, wanted, here):
            with held(folder, progress):
                if not _is_finished(index, wanted, here):
                    _Copy(store, index, wanted, here).finish(progress)
    except OSError as error:
        raise OutputError(
            f"the copy of a cache cannot be written to {str(folder)!r}: {error.strerror}\n"
            "  What is copied is kept. Check the permissions and the space of the folder, or "
            "choose another one; the same call continues."
        ) from error
    return index


def _is_finished(index: Index, wanted: bytes, here: Folder) -> bool:
    return here.read(INDEX, INDEX_BYTES) == wanted and not _lost(index, here)


def _lost(index: Index, here: Folder) -> dict[str, int]:
    """Return name and bytes of the files that a folder lacks, or has with another size."""
    there = dict(here.files()) | {BLOCKS: here.size(BLOCKS)}
    wanted = dict(zip(index.plan.names(), index.sizes, strict=True))
    wanted[BLOCKS] = index.block_bytes
    return {name: size for name, size in wanted.items() if there.get(name) != size}


@contextmanager
def held(folder: Path, progress: bool, call: str = "open_cache") -> Iterator[None]:
    """Hold the folder; wait for another process that does, by the same call."""
    say, is_said = note if progress else log.warning, False
    refuse_foreign(folder / PRIVATE)
    (folder / PRIVATE).mkdir(parents=True, exist_ok=True)
    while True:
        try:
            lock = FolderLock(folder / PRIVATE / LOCK_NAME, f"forebay.{call}")
            break
        except BusyError as error:
            if not is_said:
                say(f"{str(error).partition(chr(10))[0]}; {call} waits until it is copied")
                is_said = True
            time.sleep(PAUSE_S)
    with closing(lock):
        lock.keep_alive()
        yield


class _Copy:
    """A copy under way, by the process that holds the folder."""

    def __init__(self, store: Store, index: Index, wanted: bytes, here: Folder) -> None:
        self._store, self._index, self._wanted, self._here = store, index, wanted, here
        self._blocks: Blocks
        self._ending = Event()

    def finish(self, progress: bool) -> None:
        """Copy what is missing."""
        try:
            lost = self._begin()
            if BLOCKS in lost or self._damage_of_blocks(self._here.path / BLOCKS):
                self._fetch(BLOCKS, self._damage_of_blocks)
            self._blocks = self._index.read_blocks(self._here)
            names = self._index.plan.names()
            self._fetch_shards([at for at, name in enumerate(names) if name in lost], progress)
        except InputError:
            self._check_unchanged()  # that explains why a shard is missing or another one
            raise
        self._check_unchanged()
        if self._here.size(COPYING) is not None:
            os.replace(self._here.locate(COPYING), self._here.locate(INDEX))

    def _begin(self) -> dict[str, int]:
        """Record which cache is copied; return name and bytes of the files that are missing."""
        here, folder = self._here, self._here.path
        known = here.read(INDEX, INDEX_BYTES) or here.read(COPYING, INDEX_BYTES)
        if known is None:
            strangers = [name for name, _ in here.files() if is_shard(name)]
            strangers += [NAME] * (here.size(f"{PRIVATE}/{NAME}") is not None)
            if strangers:
                raise OutputError(
                    f"{str(folder)!r} holds {strangers[0]!r}, which is not part of a copy\n"
                    "  Nothing was copied, since it could be overwritten. Choose an empty folder."
                )
            here.write(COPYING, self._wanted)
        elif known != self._wanted:
            raise ChangedError(
                f"{str(folder)!r} has a copy of an earlier cache than the one that is now at "
                f"{self._url!r}\n"
                "  Nothing was changed. Remove the folder, or choose another, for a copy of the "
                "new one; if it is finished, open_cache(directory) opens the old one."
            )
        for path in folder.glob(".shard-*"):  # a process was killed while it copied
            path.unlink()
        lost = _lost(self._index, here)
        needed, free = sum(lost.values()), shutil.disk_usage(folder).free
        if needed > free:
            raise OutputError(
                f"{byte_size(needed)} of {self._url!r} are to be copied to {str(folder)!r}, and "
                f"its disk has {byte_size(free)} free\n"
                "  Nothing was copied. Free some space, or choose a folder on a larger disk."
            )
        return lost

    def _fetch_shards(self, lost: list[int], progress: bool) -> None:
        """Download shards in threads; raise the first error."""
        total, label = len(self._index.sizes), run_label("copy", self._store.url)
        shown = Progress(total, total - len(lost), progress, unit="shard", label=label)

        def fetch(number: int) -> None:
            self._fetch(shard_name(number), partial(self._damage, number))

        count = THREADS if self._store.is_parallel else 1
        in_threads(lost, fetch, count, self._ending, shown)

    def _fetch(self, name: str, damage: Callable[[Path], str]) -> None:
        """Download a file under a temporary name, and give it its name if it is undamaged."""
        for is_last in (False, True):
            try:
                with atomic_file(self._here.path / name, is_ours=False) as file:
                    self._download(name, Path(file.name))
                    if wrong := damage(Path(file.name)):
                        raise _DamagedError(wrong)
                return
            except _DamagedError as error:
                if is_last:
                    raise InputError(
                        f"{shown_location(self._store.locate(name))!r} is not what was written: "
                        f"{error}\n"
                        "  It was downloaded twice. What is copied is kept. Remove that file, call "
                        "forebay.cache again with the same dataset and location, which writes it "
                        "again, and then open_cache."
                    ) from None

    def _download(self, name: str, path: Path) -> None:
        try:
            if self._store.download(name, path, each=self._check_ending):
                return
        except InputError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno in _OF_THE_DISK:
                raise cause from None
            raise
        raise InputError(
            f"{shown_location(self._store.locate(name))!r} is missing\n"
            "  What is copied is kept. Call forebay.cache again with the same dataset and "
            "location, which writes that file again, and then open_cache."
        )

    def _check_ending(self) -> None:
        if self._ending.is_set():
            raise RuntimeError("the copy has ended")

    def _damage_of_blocks(self, path: Path) -> str:
        data = path.read_bytes() if path.stat().st_size == self._index.block_bytes else b""
        is_right = zlib.crc32(data) == self._index.blocks[1]
        return "" if is_right else "its checksum or size is not that of the index"

    def _damage(self, number: int, path: Path) -> str:
        """Return how a shard differs from what was written; "" if it does not."""
        size, there = self._index.sizes[number], path.stat().st_size
        if there != size:
            return f"it has {there:,} bytes instead of {size:,}"
        at, blocks = self._blocks.of_shard(number), self._blocks
        places = [*zip(blocks.offset[at].tolist(), blocks.length[at].tolist(), strict=True)]
        found, outside = checksums(np.memmap(path, np.uint8, "r").data, places)
        for (offset, length), now, then in zip(places, found, blocks.crc32[at], strict=True):
            if now != then:
                return (
                    f"its bytes {offset:,} to {offset + length:,} have the checksum {now:08x} "
                    f"instead of {then:08x}"
                )
        if outside == (then := self._index.outside[number]):
            return ""
        return f"its schema or end has the checksum {outside:08x} instead of {then:08x}"

    def _check_unchanged(self) -> None:
        """Raise ChangedError if the bucket has another cache than when the copy began."""
        if self._store.read(INDEX, INDEX_BYTES) != self._wanted:
            raise ChangedError(
                f"{self._url!r} was made again, or removed, while it was copied to "
                f"{str(self._here.path)!r}\n"
                "  The copy was stopped. Once the cache is finished, remove the folder and make "
                "the same call again."
            )

    @property
    def _url(self) -> str:
        return shown_location(self._store.url)


class _DamagedError(Exception):
    """A file that was downloaded is not what was written; says how it differs."""


def in_threads(
    todo: Sequence[_T], work: Callable[[_T], None], count: int, ending: Event, shown: Progress
) -> None:
    """Do something in threads; raise the first error.

    Args:
        count: How many threads.
        ending: Is set when nothing more is of use.
        shown: Counts what is done; it is closed.
    """
    ended: SimpleQueue[BaseException | None] = SimpleQueue()
    left = iter(todo)

    def work_off() -> None:
        for each in left:
            try:
                work(each)
                ended.put(None)
            except BaseException as error:  # noqa: BLE001 - it is raised below
                ended.put(error)
                return

    # Daemons, so that a server which does not answer cannot keep the process from ending.
    threads = [
        Thread(target=work_off, name="forebay-copy", daemon=True)
        for _ in range(min(len(todo), count))
    ]
    try:
        for thread in threads:
            thread.start()
        for _ in todo:
            if (error := _next_of(ended)) is not None:
                raise error
            shown.update(1, 0)
    finally:
        ending.set()
        until = time.monotonic() + ENDING_S
        for thread in filter(Thread.is_alive, threads):
            thread.join(max(until - time.monotonic(), 0.0))
        shown.close()


def _next_of(queue: SimpleQueue[BaseException | None]) -> BaseException | None:
    while True:
        try:
            return queue.get(timeout=LONGEST_WAIT_S)
        except Empty:
            pass
