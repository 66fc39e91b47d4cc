"""Copy shards from a bucket to a local folder: once per node, checked, continued after a kill.

Which shards are there is a list of lines, one for each that is complete: its name, size and ETag.
"""

from __future__ import annotations

import json
import os
import zlib
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event

import numpy as np

from forebay.base.file_stores import Store
from forebay.base.files import atomic_file
from forebay.base.output_names import PRIVATE, inside_name
from forebay.caching.copies import THREADS, held, in_threads
from forebay.errors import ChangedError, InputError, OutputError, shown_location
from forebay.observe.progress import Progress, run_label
from forebay.shards.index import UNKNOWN, ShardIndex
from forebay.shards.location import Listed

_RECORD = f"{PRIVATE}/shards.jsonl"
_CALL = "open_shards"


def copy_shards(root: str, index: ShardIndex, folder: Path, progress: bool) -> None:
    """Copy the shards of an index that a folder lacks.

    Raises:
        InputError: A shard is missing.
        ChangedError: A shard is not the one that is in the index.
        OutputError: The folder cannot be written to.
    """
    try:
        if _lost(index, folder):
            with held(folder, progress, _CALL):
                _copy(root, index, folder, _lost(index, folder), progress)
    except OSError as error:
        raise OutputError(
            f"the copy of shards cannot be written to {str(folder)!r}: {error.strerror}\n"
            "  What is copied is kept. Check the permissions and the space of the folder, or "
            "choose another one; the same call continues."
        ) from error


def _lost(index: ShardIndex, folder: Path) -> list[int]:
    """Return the shards that a folder lacks, or has of another time."""
    known = set()
    with suppress(FileNotFoundError):
        for line in (folder / _RECORD).read_text().splitlines():
            with suppress(ValueError, TypeError):  # a kill may have cut the last one
                known.add(tuple(json.loads(line)))
    lost = []
    for number in range(len(index.sizes)):
        listed = index.listed(number)
        with suppress(FileNotFoundError):
            there = os.stat(folder / inside_name(listed.name, _CALL)).st_size
            if tuple(listed) in known and there == listed.size:
                continue
        lost.append(number)
    return lost


def _copy(root: str, index: ShardIndex, folder: Path, lost: list[int], progress: bool) -> None:
    store, ending = Store(root, InputError), Event()
    total = len(index.sizes)
    label = run_label("copy", root)
    shown = Progress(total, total - len(lost), progress, unit="shard", label=label)
    work = partial(_fetch, store, index, folder, ending)
    in_threads(lost, work, THREADS if store.is_parallel else 1, ending, shown)


def _fetch(store: Store, index: ShardIndex, folder: Path, ending: Event, number: int) -> None:
    """Download a shard under a temporary name, and give it its name if it is what was indexed."""

    def check_ending() -> None:
        if ending.is_set():
            raise RuntimeError("the copy has ended")

    listed = index.listed(number)
    path = folder / inside_name(listed.name, _CALL)
    path.parent.mkdir(parents=True, exist_ok=True)
    where = shown_location(store.locate(listed.name))
    with atomic_file(path, is_ours=False) as file:
        if not store.download(listed.name, Path(file.name), each=check_ending):
            raise InputError(f"{where} is missing\n  What is copied is kept. Bring it back.")
        if not _is_indexed(Path(file.name), index, number, listed):
            raise ChangedError(
                f"{where} changed after it was indexed, or arrived damaged\n"
                "  What is copied is kept. Make the same call again; if it fails again, call "
                "forebay.index_shards again, which reads only the shards that changed."
            )
    with (folder / _RECORD).open("a") as record:
        record.write(json.dumps(listed) + "\n")


def _is_indexed(path: Path, index: ShardIndex, number: int, listed: Listed) -> bool:
    if path.stat().st_size != listed.size:
        return False
    data = np.memmap(path, np.uint8, "r").data if listed.size else memoryview(b"")
    for block in range(index.first_block(number), int(index.block_ends[number])):
        found, known = 0, int(index.crc32[block])
        for at in range(index.extents(block).start, index.extents(block).stop):
            begin = int(index.offset[at])
            found = zlib.crc32(data[begin : begin + int(index.length[at])], found)
        if known not in (UNKNOWN, found):
            return False
    return True
