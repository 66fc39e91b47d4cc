"""The driver's end of packed outputs: shards are completed and published when the table is written.

    worker ── append ──> .forebay/packed/00000.tar     open; may end in bytes that no input owns
    commit ────────────> the ledger: name, size, shard, offset
    complete ──────────> packed/00000.tar, packed/index.sqlite

A shard whose members follow each other without a gap is cut after the last one and gets the end of
a tar file. A shard with a gap, because an input was changed or two inputs claimed one name, is
copied without the gap, under a new number; so is a shard that somebody may still write to. So a
published shard lists the recorded members, and no others. It is never changed: if a member of it is
outdated, also the last one, it is replaced by a copy.

After a kill at any point the next run does the same again.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from typing import TYPE_CHECKING

from forebay.base.files import open_regular
from forebay.base.output_names import MEMBER_INDEX, PACKED, member_name, shard_name
from forebay.errors import OutputError
from forebay.ledger.names import (
    ShardRecord,
    move_members,
    read_shards,
    recorded_members,
    write_shards,
)
from forebay.ledger.records import PackedMember
from forebay.outputs.packed_reader import IndexWriter
from forebay.outputs.shard_writer import (
    BLOCK,
    END,
    OpenShards,
    ShardFiles,
    header,
    header_bytes,
    padding,
    write_at,
)
from forebay.outputs.staging import rename_new

if TYPE_CHECKING:
    from forebay.ledger.ledger import Ledger

# How long to wait for a worker that is ending to close its shard.
_PATIENCE_S = 0.5
_COPY_BYTES = 1 << 20


@dataclass(slots=True)
class _Extent:
    """What the recorded members of a shard take up."""

    nbytes: int = 0
    end: int = 0

    @property
    def has_gaps(self) -> bool:
        return self.nbytes != self.end


def complete_shards(ledger: Ledger, root: str, flush: Callable[[], None]) -> None:
    """Publish all recorded packed outputs, and nothing else, with an index; safe to do twice.

    No worker may be at work.
    """
    files, known = ShardFiles(root), read_shards(ledger)
    if not known.numbers and not files.opened.is_dir():
        return
    _check_folder(files, known)
    try:
        files.opened.mkdir(exist_ok=True)
        with IndexWriter(files.opened / MEMBER_INDEX) as index:
            extents: defaultdict[int, _Extent] = defaultdict(_Extent)
            index.add(_measured(recorded_members(ledger), extents))
            live = {
                _completed(number, extent, files, index, ledger, flush)
                for number, extent in sorted(extents.items())
            }
            index.complete()
        flush()
        _publish(frozenset(live), known, files, ledger)
        flush()
        write_shards(ledger, ShardRecord(frozenset(live)))
    except OSError as error:
        raise OutputError(
            f"the shards of packed outputs cannot be completed: {error}\n"
            "  The inputs are done and in the ledger, and their outputs in the shards. Check the "
            "disk's space and health, then make the same call again."
        ) from error


def intact_members(ledger: Ledger, root: str) -> Iterator[tuple[str, int]]:
    """Yield name and bytes of the recorded packed outputs that are in their shards."""
    shards = OpenShards(ShardFiles(root).path)
    try:
        for _, member in recorded_members(ledger):
            with suppress(OSError):
                if _is_there(member, shards[member.shard]):
                    yield member.name, member.size
    finally:
        shards.close()


def _check_folder(files: ShardFiles, known: ShardRecord) -> None:
    """Raise OutputError if shards cannot be published."""
    folder, index = str(files.complete), files.complete / MEMBER_INDEX
    if os.path.islink(folder) or (os.path.lexists(folder) and not os.path.isdir(folder)):
        raise OutputError(
            f"{folder!r} is a link or a file, where the shards of packed outputs belong\n"
            "  Nothing was written there. Remove it, and make the same call again."
        )
    if not known.numbers and os.path.lexists(index):
        raise OutputError(
            f"{str(index)!r} exists, but no run recorded in this output folder wrote it\n"
            "  It was left as it is, and no shard was published. Move it away, with the shards "
            "beside it, and make the same call again."
        )


def _measured(
    members: Iterable[tuple[int, PackedMember]], extents: defaultdict[int, _Extent]
) -> Iterator[PackedMember]:
    """Yield the members, and sum up each shard in `extents`."""
    for _, member in members:
        name, size, shard, offset, _ = member
        end = offset + size + (-size % BLOCK)
        extent = extents[shard]
        extent.nbytes += end - offset + header_bytes(member_name(name), size)
        extent.end = max(extent.end, end)
        yield member


def _completed(
    number: int,
    extent: _Extent,
    files: ShardFiles,
    index: IndexWriter,
    ledger: Ledger,
    flush: Callable[[], None],
) -> int:
    """Make a shard one that can be published, or copy it; return its number then."""
    path = files.path(number)
    is_open = path.parent == files.opened
    try:
        file = open_regular(path, os.O_RDWR if is_open else os.O_RDONLY, follows=False)
    except FileNotFoundError:
        raise _damaged(path, "it does not exist") from None
    with file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes < extent.end:
            raise _damaged(path, f"it has fewer than {extent.end:,} bytes")
        # If it is longer, outdated members are at its end.
        if not is_open and not extent.has_gaps and nbytes == extent.end + len(END):
            return number
        if is_open and not extent.has_gaps and _is_unused(file):
            os.ftruncate(file.fileno(), extent.end)
            write_at(file, END, extent.end)
            return number
        new, copy = files.create()
        with copy:
            places = _copied(file, index.of_shard(number), new, copy)
    flush()  # first, or after a power cut the ledger might name a copy that is not on the disk
    move_members(ledger, places)
    index.move(places)
    return new


def _copied(
    source: FileIO, members: Iterator[PackedMember], number: int, target: FileIO
) -> dict[str, tuple[int, int]]:
    """Copy members to another shard; return the shard and offset of each by its name."""
    places: dict[str, tuple[int, int]] = {}
    end = 0
    for member in members:
        if not _is_there(member, source):
            raise _damaged(source.name, f"{member.name!r} is not where it should be")
        head = header(member_name(member.name), member.size)
        write_at(target, head, end)
        end += len(head)
        places[member.name] = number, end
        for at in range(0, member.size, _COPY_BYTES):
            data = os.pread(source.fileno(), min(_COPY_BYTES, member.size - at), member.offset + at)
            write_at(target, data, end + at)
        write_at(target, padding(member.size), end + member.size)
        end += member.size + (-member.size % BLOCK)
    write_at(target, END, end)
    return places


def _publish(live: frozenset[int], known: ShardRecord, files: ShardFiles, ledger: Ledger) -> None:
    """Give complete shards and the index their names; remove all others of ours."""
    dead = known.numbers - live
    write_shards(ledger, ShardRecord(live, dead))  # first, or they would be foreign after a kill
    index = files.opened / MEMBER_INDEX
    if live:
        files.complete.mkdir(exist_ok=True)
        for number in sorted(live & files.numbers(files.opened)):
            name = shard_name(number)
            try:
                rename_new(str(files.opened / name), str(files.complete / name))
            except FileExistsError:
                raise OutputError(
                    f"'{PACKED}/{name}' exists already, and forebay did not make it\n"
                    "  It was left as it is, and the shard was not published. Move it away, and "
                    "make the same call again."
                ) from None
        os.replace(index, files.complete / MEMBER_INDEX)
    else:
        (files.complete / MEMBER_INDEX).unlink(missing_ok=True)
    for number in dead:
        (files.complete / shard_name(number)).unlink(missing_ok=True)
    for name in os.listdir(files.opened):  # no recorded member is in them
        with suppress(OSError):
            (files.opened / name).unlink()
    for folder in (files.opened, files.complete):
        with suppress(OSError):  # something else is in it
            folder.rmdir()


def _is_there(member: PackedMember, file: FileIO) -> bool:
    """Return whether a shard has a member where the ledger says."""
    head = header(member_name(member.name), member.size)
    start = member.offset - len(head)
    if start < 0 or os.fstat(file.fileno()).st_size < member.offset + member.size:
        return False
    return os.pread(file.fileno(), len(head), start) == head


def _is_unused(file: FileIO) -> bool:
    """Wait until nobody else can write to a shard; return False if that takes too long.

    Without locks, on some network file systems, nobody can tell.
    """
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        except OSError:
            return False
        else:
            return True


def _damaged(path: object, reason: str) -> OutputError:
    return OutputError(
        f"the shard {str(path)!r} is missing or damaged: {reason}\n"
        "  No shard was published, and nothing is lost besides. Run `forebay verify` on the output "
        "folder, then make the same call again: it processes the inputs again whose outputs were "
        "in the shard."
    )
