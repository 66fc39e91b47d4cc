"""A worker's end of a local output folder: files are staged until the driver publishes them.

See `folder.py` for how a file gets its final name.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from forebay.base.output_names import asked_name, elsewhere
from forebay.errors import OutputError
from forebay.ledger.records import FileFields
from forebay.outputs.output import Output
from forebay.outputs.staging_folders import StagingFolders


class Staging:
    """A worker's end of the output folder. It can be pickled.

    Attributes:
        is_local: Whether the output folder is that in which files are staged.
    """

    is_local = True

    def __init__(self, root: Path) -> None:
        """Stage below `root`, the output folder."""
        self.function = "the function"  # what messages call it
        self._root = str(root)
        self._driver = os.uname().nodename
        self._is_far = False
        self._run = os.urandom(4).hex()
        self.folders: StagingFolders  # once it is open

    def open(self, worker: int) -> None:
        """Create this worker's folder."""
        try:
            self.folders = StagingFolders(self._root, self._run, worker)
        except OSError as error:
            raise OutputError(
                f"a worker cannot make its folder for staged files: {error}\n"
                "  No input counts as failed.\n"
                "  Free some space and inodes (see df -h and df -i), or make the output folder "
                "writable; then make the same call again."
            ) from error
        self._is_far = os.uname().nodename != self._driver

    def begin(self, source: str) -> Output:
        """Return the `out` of one input."""
        return Output(source, self.folders, self.locate)

    def locate(self, name: str) -> Path | str:
        """Return where an output of this name will be."""
        return Path(self._root, name)

    def commit(
        self, output: Output, files: Mapping[str, tuple[str, int]]
    ) -> tuple[FileFields, ...]:
        """Return the files that `collect` found, with staged paths relative to the folder."""
        if self._is_far:  # the driver's flush does not reach this machine's page cache
            for path in filter(None, (path for path, _ in files.values())):
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
        if not files:  # the usual case of rows
            return ()
        files, start = output.settled(files), len(self._root) + 1
        return tuple((name, size, path[start:]) for name, (path, size) in files.items())

    def written_at(self, path: str) -> tuple[str, dict[str, tuple[str, int]]]:
        """Return the `destination` of a path that a function wrote to by itself, and the files.

        A file, or all files of a folder, by the names that the ledger has for them: relative for
        one in the output folder, and never removed elsewhere.
        """
        real, root = os.path.realpath(path), os.path.realpath(self._root)
        is_inside = real.startswith(f"{root}/") and self.is_local
        found = [real] if not os.path.isdir(real) else _regular_below(real)
        if found == [real] and not _is_plain(real):
            raise OutputError(
                f"the function returned {path!r}, which is no regular file\n"
                "  Nothing of this input was kept: only files and folders can be outputs."
            )
        start = len(root) + 1
        names = [asked_name(each[start:]) if is_inside else elsewhere(each) for each in found]
        sizes = map(os.path.getsize, found)
        files = {name: ("", size) for name, size in zip(names, sizes, strict=True)}
        return real[start:] if is_inside else path, files

    def is_full(self) -> bool:
        """Return whether the output's file system has run out of bytes or of files."""
        status = os.statvfs(self.folders.path)
        return status.f_bavail * status.f_frsize < 65_536 or (
            status.f_files > 0 and status.f_favail == 0
        )


def _regular_below(folder: str) -> list[str]:
    found = [os.path.join(above, name) for above, _, names in os.walk(folder) for name in names]
    return sorted(path for path in found if _is_plain(path))


def _is_plain(path: str) -> bool:
    return stat.S_ISREG(os.lstat(path).st_mode)
