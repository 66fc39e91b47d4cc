"""A worker's end of a local output folder: files are staged until the driver publishes them.

See `output_folder.py` for how a file gets its final name.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from forebay.errors import OutputError, shortened
from forebay.formats import SHARD_BYTES
from forebay.jobs.ledger.records import FileFields
from forebay.jobs.outputs.output_names import (
    PRIVATE,
    STAGING,
    asked_name,
    folders_of,
    packed_name,
)
from forebay.jobs.packed.shard_writer import ShardWriter


class Output:
    """What a function receives as `out`: the way to name the files that it makes.

    Its paths are valid until the function returns (for a generator: until it is exhausted).

    Attributes:
        source: The input's name, as the column `source` of the table has it: its path or URL, or
            for a sample of a Dataset its name, or its index as a string; "" for a row without one.
    """

    def __init__(self, source: str, folder: Path, shards: ShardWriter | None = None) -> None:
        """Stage files in `folder`, pack into `shards`."""
        self.source = source
        self.folder = folder
        self._shards = shards
        self._packed: dict[str, dict[str, Any]] = {}  # final name -> metadata
        self._has_ended = False
        self._names: dict[str, str] = {}  # staged path -> final name, in the order asked for
        self._paths: dict[str, Path] = {}  # final name -> staged path
        self._folders: dict[str, str] = {}  # folders that the names need -> one of those names

    def file(self, name: str | os.PathLike[str]) -> Path:
        """Return a private path to write one output file to.

        The file appears under `name` in the output folder only if the whole input succeeds.

        Args:
            name: Relative to the output folder; may hold folders ("speaker1/a.flac"), which
                are made. Asking for the same name again returns the same path.

        Raises:
            OutputError: The name is absolute, leaves the output folder or is forebay's own; or
                this input needs a file and a folder of the same name.
        """
        final = asked_name(name)
        if final in self._paths:
            return self._paths[final]
        path = self.folder / final  # the folder is parsed already
        staged = str(path)
        if "/" in final or self._folders or os.path.lexists(staged):
            path = self._place(final)
            staged = str(path)
        self._names[staged] = final
        self._paths[final] = path
        return path

    def _place(self, final: str) -> Path:
        """Return a free path for a name that needs folders, or that an earlier input uses."""
        folders = folders_of(final)
        other = self._folders.get(final) or next((one for one in folders if one in self._paths), "")
        if other:
            raise OutputError(
                f"out.file({final!r}) clashes with {other!r}, which this input requested before\n"
                "  A name cannot be both a file and a folder. Rename one of the two."
            )
        self._folders.update(dict.fromkeys(folders, final))
        path, number = self.folder / final, 0
        while not _make_room(path, alone=not number and "/" not in final):
            number += 1  # that of an earlier input, not published yet
            path = self.folder / f"{PRIVATE}{number}" / final
        return path

    def pack(self, name: str | os.PathLike[str], data: Any, /, **metadata: Any) -> str:
        """Append one small output to a shard, a tar file in the folder `packed`.

        It is kept only if the whole input succeeds. The outputs of an input are next to each other.
        `forebay.open_output` reads one. Use `file` for large outputs, and for a library that writes
        to a path.

        Args:
            name: Its name in the shard, relative; no two inputs may use the same. Readers of
                WebDataset shards make one sample of "a.flac" and "a.json".
            data: The bytes: `bytes`, or any other buffer, which is copied.
            metadata: A row of the table, beside `destination`. A function that passes some returns
                None.

        Returns:
            The `destination`: "packed/" and the name.

        Raises:
            OutputError: The name is absolute, leaves the folder, or was used by this input before;
                or the output folder is a URL.
            TypeError: The data are not bytes.
        """
        if self._shards is None:
            raise OutputError(
                f"out.pack({shortened(name)}): the output is a URL, and shards can only be written "
                "to a local folder\n  Nothing was written. Use out.file(), or a local folder."
            )
        if self._has_ended:
            raise OutputError(
                f"out.pack({shortened(name)}) was called after its input had ended\n"
                "  Nothing was written. Let the function wait for the threads that it starts."
            )
        final = packed_name(name)
        if final in self._packed:
            raise OutputError(
                f"out.pack({name!r}): this input packed an output of that name before\n"
                "  Give each a name of its own."
            )
        if "destination" in metadata:
            raise TypeError(f"out.pack({name!r}): the destination is the name; leave it out")
        self._shards.add(final, _as_bytes(name, data))
        self._packed[final] = metadata
        return final

    def rows(self, returned: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        """Return the rows of the table, given those that the function returned.

        Raises:
            TypeError: There are some of both.
        """
        if not any(self._packed.values()):
            return returned
        if returned is not None:
            raise TypeError(
                "the function passed metadata to out.pack() and returned metadata, too\n"
                "  Pass all of them to out.pack(), or return rows with the destinations that it "
                "returns."
            )
        return [{"destination": name, **self._packed.get(name, {})} for name in self.names()]

    def final_name(self, path: str) -> str | None:
        """Return the final name of a path that `file` gave; None for any other."""
        return self._names.get(path)

    def names(self) -> list[str]:
        """Return the final names in the order they were asked for, files before packed outputs."""
        return [*self._names.values(), *self._packed]

    def collect(self, root: str) -> tuple[FileFields, ...]:
        """Return the files that were written, with staged paths relative to `root`.

        Raises:
            OutputError: A file that was asked for is missing, or is not a regular file.
        """
        files: list[FileFields] = []
        start = len(root) + 1
        for staged, name in self._names.items():
            try:
                status = os.lstat(staged)
            except FileNotFoundError:
                raise OutputError(
                    f"out.file({name!r}) was requested, but the function never wrote it"
                ) from None
            if (status.st_mode & 0o170000) != 0o100000:
                raise OutputError(
                    f"out.file({name!r}): the function did not leave a regular file there"
                )
            files.append((name, status.st_size, staged[start:], None))
        return tuple(files)

    def collect_packed(self) -> tuple[FileFields, ...]:
        """Return the packed outputs; from now on they survive the worker's death."""
        self._has_ended = True
        return () if self._shards is None or not self._packed else self._shards.commit()

    def discard(self) -> None:
        """Remove what an input made that failed."""
        self._has_ended = True
        if self._shards is not None and self._packed:
            self._shards.discard()
        self._packed.clear()
        for staged in self._names:
            try:
                os.unlink(staged)
            except FileNotFoundError:
                pass
            except OSError:
                import shutil

                shutil.rmtree(staged, ignore_errors=True)
        self._names.clear()
        self._paths.clear()
        self._folders.clear()


def _as_bytes(name: object, data: Any) -> bytes:
    """Return bytes that nobody else can change.

    Raises:
        TypeError: The data are not a buffer.
    """
    if type(data) is bytes:
        return data
    try:
        return memoryview(data).tobytes()
    except (TypeError, ValueError, BufferError):
        raise TypeError(
            f"out.pack({name!r}, data) takes bytes or another buffer; got "
            f"{type(data).__name__}\n  Encode it first, for example with text.encode()."
        ) from None


def _make_room(path: Path, alone: bool) -> bool:
    """Create the folder of a path unless it exists (`alone`); return whether the path is free."""
    if os.path.lexists(path):
        return False
    if not alone:
        try:
            os.makedirs(path.parent, exist_ok=True)
        except (FileExistsError, NotADirectoryError):  # a file where this one needs a folder
            return False
    return True


class Staging:
    """A worker's end of the output folder. It can be pickled."""

    def __init__(self, root: Path, shard_bytes: int = SHARD_BYTES) -> None:
        """Stage below `root`, the output folder; shards have about `shard_bytes`."""
        self._shard_bytes = shard_bytes
        self._shards: ShardWriter | None = None
        self._root = str(root)
        self._driver = os.uname().nodename
        self._is_far = False
        # Not just a number: an abandoned thread of an earlier run may still write to its folder.
        self._run = os.urandom(4).hex()
        self.folder = Path()

    def open(self, worker: int) -> None:
        """Create this worker's folder."""
        self.folder = Path(self._root, STAGING, f"{self._run}-{worker}")
        os.makedirs(self.folder, exist_ok=True)
        self._is_far = os.uname().nodename != self._driver
        self._shards = ShardWriter(self._root, self._shard_bytes, self._is_far)

    def close(self) -> None:
        """Close the open shard."""
        if self._shards is not None:
            self._shards.close()

    def begin(self, source: str) -> Output:
        """Return the `out` of one input."""
        return Output(source, self.folder, self._shards)

    def commit(self, output: Output) -> tuple[FileFields, ...]:
        """Return the staged files and the packed outputs of one input."""
        files = output.collect(self._root)
        if self._is_far:  # the driver's flush does not reach this machine's page cache
            for _, _, staged, _ in files:
                _flush(os.path.join(self._root, staged))
        return files + output.collect_packed()

    def is_full(self) -> bool:
        """Tell whether the output's file system has run out of bytes or of files."""
        status = os.statvfs(self.folder)
        return status.f_bavail * status.f_frsize < 65_536 or (
            status.f_files > 0 and status.f_favail == 0
        )


def _flush(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
