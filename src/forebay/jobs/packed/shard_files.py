"""Where shards are: open ones in forebay's own folder, complete ones in the folder `packed`."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from forebay.jobs.outputs.output_names import OPEN_SHARDS, PACKED, shard_name, shard_number

_KEPT_OPEN = 16


class ShardFiles:
    """The shards of one output folder.

    Args:
        root: The output folder.

    Attributes:
        opened: The folder of open shards; made by `create`.
        complete: The folder of complete shards.
    """

    def __init__(self, root: str) -> None:
        self.opened = Path(root, OPEN_SHARDS)
        self.complete = Path(root, PACKED)

    def create(self) -> tuple[int, FileIO]:
        """Create an open shard with a number that no other has; return both.

        Raises:
            OSError: The disk is full or broken.
        """
        self.opened.mkdir(exist_ok=True)
        number = max((*self.numbers(self.opened), *self.numbers(self.complete)), default=-1) + 1
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        while True:
            try:
                descriptor = os.open(self.opened / shard_name(number), flags, 0o666)
            except FileExistsError:
                number += 1  # another worker was faster
            else:
                return number, FileIO(descriptor, "r+")

    def numbers(self, folder: Path) -> set[int]:
        """Return the numbers of the shards in a folder; none if there is no folder."""
        try:
            names = os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            return set()
        return {number for number in map(shard_number, names) if number is not None}

    def path(self, number: int) -> Path:
        """Return where a shard is, or would be if it is complete."""
        path = self.opened / shard_name(number)
        return path if os.path.lexists(path) else self.complete / shard_name(number)


def open_shard(path: Path, flags: int = os.O_RDONLY) -> FileIO:
    """Open a shard that exists.

    Raises:
        OSError: There is none, or it is a link, a pipe or a device.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    file = FileIO(descriptor, "r+" if flags & os.O_RDWR else "r")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def write_at(file: FileIO, data: bytes, at: int) -> None:
    """Write all of `data` to a shard, beginning at the offset `at`.

    Raises:
        OSError: The disk is full or broken.
    """
    rest = memoryview(data)
    while rest:
        count = os.pwrite(file.fileno(), rest, at)
        at, rest = at + count, rest[count:]


class OpenShards:
    """Opens shards for reading, and keeps the last few open.

    Args:
        path_of: Returns the path of a shard.
    """

    def __init__(self, path_of: Callable[[int], Path]) -> None:
        self._path_of = path_of
        self._open: dict[int, FileIO] = {}  # the least recently used first

    def __getitem__(self, number: int) -> FileIO:
        """Return a shard.

        Raises:
            OSError: It cannot be opened.
        """
        file = self._open.pop(number, None)
        if file is None:
            file = open_shard(self._path_of(number))
            if len(self._open) >= _KEPT_OPEN:
                self._open.pop(next(iter(self._open))).close()
        self._open[number] = file
        return file

    def close(self) -> None:
        """Close all."""
        for file in self._open.values():
            file.close()
        self._open.clear()
