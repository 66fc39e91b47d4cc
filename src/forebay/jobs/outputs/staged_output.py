"""A worker's end of a local output folder: files are staged until the driver publishes them.

See `output_folder.py` for how a file gets its final name.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from forebay.errors import OutputError
from forebay.jobs.ledger.records import OutputFile
from forebay.jobs.outputs.output_names import PRIVATE, STAGING, asked_name, folders_of


class Output:
    """What a function receives as `out`: the way to name the files that it makes.

    Its paths are valid until the function returns (for a generator: until it is exhausted).

    Attributes:
        source: The input's name, as the column `source` of the table has it: its path or URL, or
            for a sample of a Dataset its name, or its index as a string; "" for a row without one.
    """

    def __init__(self, folder: str) -> None:
        """Stage files in `folder`."""
        self.folder = folder
        self.source = ""
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
        folders = folders_of(final)
        other = self._folders.get(final) or next((one for one in folders if one in self._paths), "")
        if other:
            raise OutputError(
                f"out.file({final!r}) clashes with {other!r}, which this input requested before\n"
                "  A name cannot be both a file and a folder. Rename one "
                "of the two."
            )
        self._folders.update(dict.fromkeys(folders, final))
        path = f"{self.folder}/{final}"
        number = 0
        while not _make_room(path, alone=not number and "/" not in final):
            number += 1  # that of an earlier input, not published yet
            path = os.path.join(self.folder, f"{PRIVATE}{number}", final)
        self._names[path] = final
        self._paths[final] = Path(path)
        return self._paths[final]

    def final_name(self, path: str) -> str | None:
        """Return the final name of a path that `file` gave; None for any other."""
        return self._names.get(path)

    def names(self) -> list[str]:
        """Return the final names, in the order they were asked for."""
        return list(self._names.values())

    def collect(self, root: str) -> tuple[OutputFile, ...]:
        """Return what was written, with staged paths relative to `root`.

        Raises:
            OutputError: A file that was asked for is missing, or is not a regular file.
        """
        files = []
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
            files.append(OutputFile(name, status.st_size, staged[start:]))
        return tuple(files)

    def discard(self) -> None:
        """Remove the staged files of an input that failed."""
        for staged in self._names:
            try:
                os.unlink(staged)
            except FileNotFoundError:
                pass
            except OSError:
                shutil.rmtree(staged, ignore_errors=True)
        self._names.clear()
        self._paths.clear()
        self._folders.clear()


def _make_room(path: str, alone: bool) -> bool:
    """Create the folder of a path unless it exists (`alone`); return whether the path is free."""
    if os.path.lexists(path):
        return False
    if not alone:
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        except (FileExistsError, NotADirectoryError):  # a file where this one needs a folder
            return False
    return True


class Staging:
    """A worker's end of the output folder. Travels by pickle."""

    def __init__(self, root: Path) -> None:
        """Stage below `root`, the output folder."""
        self._root = str(root)
        self._driver = os.uname().nodename
        self._is_far = False
        # Not just a number: an abandoned thread of an earlier run may still write to its folder.
        self._run = os.urandom(4).hex()
        self.folder = ""

    def open(self, worker: int) -> None:
        """Create this worker's folder."""
        self.folder = os.path.join(self._root, STAGING, f"{self._run}-{worker}")
        os.makedirs(self.folder, exist_ok=True)
        self._is_far = os.uname().nodename != self._driver

    def begin(self) -> Output:
        """Return the `out` of one input."""
        return Output(self.folder)

    def commit(self, output: Output) -> tuple[OutputFile, ...]:
        """Return the staged files of one input."""
        files = output.collect(self._root)
        if self._is_far:  # the driver's flush does not reach this machine's page cache
            for file in files:
                _flush(os.path.join(self._root, file.staged or ""))
        return files

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
