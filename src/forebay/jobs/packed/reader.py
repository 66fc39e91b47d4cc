"""Read packed outputs: `open_output` finds the shard that holds an output, by the index.

An index and its shards are replaced when a later run changes them; a reader notices that by the
index's identity as a file, and opens both again.
"""

from __future__ import annotations

import errno
import io
import os
import threading
from pathlib import Path
from typing import Any, BinaryIO

from forebay.errors import InputError, shortened
from forebay.jobs.ledger.records import PackedMember
from forebay.jobs.outputs.output_names import MEMBER_INDEX, PACKED, shard_name
from forebay.jobs.packed.member_index import MemberIndex
from forebay.jobs.packed.shard_files import OpenShards

_local = threading.local()
# What opening a file that does not exist may raise; a member may have a longer name than a file.
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG})


def open_output(path: str | os.PathLike[str]) -> BinaryIO:
    """Open an output of `preprocess` for reading, whether it is a file or packed into a shard.

    Args:
        path: The output's path or fsspec URL, as `from_table` and a run over a table pass it in the
            column `destination`.

    Returns:
        A binary file at its beginning. A packed output is read into memory.

    Raises:
        InputError: There is no such output, or its shard or the index is damaged.
        OSError: It cannot be read.
    """
    name = os.fspath(path)
    if "://" in name:
        import fsspec

        opened: BinaryIO = fsspec.open(name, "rb").open()
        return opened
    try:
        return Path(name).open("rb")
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
        found = _found(name)
        if found is None:
            raise InputError(
                f"there is no output {shortened(name)}, neither a file nor packed\n"
                f"  A packed output is found by {PACKED}/{MEMBER_INDEX} in its output folder, an "
                "index which is written at the end of a run, together with the table."
            ) from error
    while True:
        reader, member = found
        try:
            return io.BytesIO(reader.read(member))
        except InputError:
            found = _found(name)  # a run may have replaced the index and the shard meanwhile
            if found is None or found[0] is reader:
                raise


def packed_identity(path: str) -> str:
    """Return what changes with the content of a packed output; "" if there is none of that name."""
    if f"{PACKED}/" not in path:
        return ""  # the usual case
    try:
        found = _found(path)
    except InputError:  # whoever opens it is told
        return ""
    return "" if found is None else f"{found[1].size}:{found[1].crc}"


def _found(path: str) -> tuple[_Reader, PackedMember] | None:
    """Return the reader of a path, and the place; None if it is not a packed output."""
    parts = path.split("/")
    for at in range(len(parts) - 1):
        if parts[at] == PACKED and (reader := _reader("/".join(parts[: at + 1]))) is not None:
            member = reader.index.find("/".join(parts[at:]))
            if member is not None:
                return reader, member
    return None


class _Reader:
    """Reads the packed outputs in one folder, in one thread of one process."""

    def __init__(self, folder: str, index: MemberIndex) -> None:
        self.index = index
        self._shards = OpenShards(lambda number: Path(folder, shard_name(number)))

    def read(self, member: PackedMember) -> bytes:
        """Return a packed output.

        Raises:
            InputError: It is not in its shard.
        """
        try:
            file = self._shards[member.shard]
            if os.fstat(file.fileno()).st_size < member.offset + member.size:
                raise InputError(_lost(member, "its shard is too short"))
            data = os.pread(file.fileno(), member.size, member.offset)
            while len(data) < member.size:  # a read returns at most 2 GiB
                more = os.pread(file.fileno(), member.size - len(data), member.offset + len(data))
                if not more:
                    raise InputError(_lost(member, "its shard is too short"))
                data += more
        except OSError as error:
            raise InputError(_lost(member, str(error))) from error
        return data

    def close(self) -> None:
        """Close the index and the shards."""
        self._shards.close()
        self.index.close()

    def __del__(self) -> None:
        """Close them when the thread has ended."""
        self.close()


def _reader(folder: str) -> _Reader | None:
    """Return this thread's reader of a folder of shards; None if that has no index."""
    try:
        status = os.stat(os.path.join(folder, MEMBER_INDEX))
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return None
    identity = (os.getpid(), status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
    readers: dict[str, tuple[Any, _Reader]] = _local.__dict__.setdefault("readers", {})
    kept, reader = readers.get(folder, (None, None))
    if reader is None or kept != identity:
        if reader is not None:
            reader.close()
        reader = _Reader(folder, MemberIndex(Path(folder, MEMBER_INDEX)))
        readers[folder] = identity, reader
    return reader


def _lost(member: PackedMember, reason: str) -> str:
    return (
        f"the packed output {member.name!r} cannot be read from shard "
        f"{shard_name(member.shard)}: {reason}\n"
        "  Run `forebay verify` on the output folder, then make the call again that made it."
    )
