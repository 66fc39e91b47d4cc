"""The driver's end of a local output folder: staged files get their names once the ledger has them.

    function ── out.file("a.flac") ──> .forebay/staging/w0/a.flac     (worker)
    the input succeeds ──────────────> reported, not yet visible      (worker)
    flush ───────────────────────────> every staged byte is on disk   (driver)
    ledger.record ───────────────────> the commit point               (driver)
    perform ─────────────────────────> pieces/a.flac                  (driver)

A kill before the record leaves staged files, which the next run removes; a kill after it leaves
file changes in the ledger, which the next run performs. Neither leaves a partial or an unknown
file.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.errors import OutputError
from forebay.formats import SHARD_BYTES
from forebay.jobs.ledger.records import FileChange, Unpublished
from forebay.jobs.outputs.output_names import PRIVATE, STAGING
from forebay.jobs.outputs.publishing import Publisher
from forebay.jobs.outputs.renames import rename_new
from forebay.jobs.outputs.staged_output import Staging
from forebay.jobs.packed.shards import complete_shards, intact_members

if TYPE_CHECKING:
    from forebay.jobs.ledger.ledger import Ledger


class OutputFolder:
    """The driver's end of a local output folder.

    Attributes:
        path: The folder.
        private: forebay's own folder in it.
    """

    def __init__(self, path: Path) -> None:
        """Make the folder where there is none.

        Raises:
            OutputError: It cannot be made, is a file, cannot be written to, or has a symbolic link
                in the place of forebay's own files.
        """
        self.path = path
        self._root = str(path)
        self.private = path / PRIVATE
        if path.is_file():
            raise OutputError(
                f"the output {str(path)!r} is a file, not a folder\n"
                "  Nothing was started. Name a folder; and if you wrote a glob in a shell, quote "
                "it, or the shell replaces it with its matches."
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._refuse_foreign()
            self.private.mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=self.private) as probe:
                probe.write(b"forebay")
        except OSError as error:
            raise OutputError(
                f"the output folder {str(path)!r} cannot be written to: {error.strerror}\n"
                "  Nothing was started. Choose another folder, or check its permissions and space."
            ) from error
        self._publisher = Publisher(path)

    def _refuse_foreign(self) -> None:
        """Raise OutputError if forebay's own files are links, pipes or devices."""
        odd = self.private if self.private.is_symlink() else None
        if odd is None and self.private.is_dir():
            with os.scandir(self.private) as entries:
                kinds = {
                    each.name: stat.S_IFMT(each.stat(follow_symlinks=False).st_mode)
                    for each in entries
                }
            names = [
                name for name, kind in kinds.items() if kind not in (stat.S_IFREG, stat.S_IFDIR)
            ]
            odd = self.private / names[0] if names else None
        if odd is not None:
            what = f"a link to {os.readlink(odd)!r}" if odd.is_symlink() else "a pipe or a device"
            raise OutputError(
                f"{str(odd)!r} is {what}, which forebay does not make\n"
                "  Nothing was started, because the run would write to it. Remove it, or choose "
                "another output folder."
            )

    def ledger(self, command: str = "") -> Ledger:
        """Open the ledger, for one driver at a time."""
        from forebay.jobs.ledger.ledger import Ledger

        return Ledger.open(self.private, command)

    def copy_ledger(self, ledger: Ledger, *, now: bool = False) -> None:
        """Do nothing: the ledger is in the output folder."""

    def staging(self, shard_bytes: int = SHARD_BYTES) -> Staging:
        """Return what the workers need to write here; `shard_bytes` is the size of a shard."""
        return Staging(self.path.absolute(), shard_bytes)

    def flush(self) -> None:
        """Flush everything written below the folder to disk, contents and names."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            if sys.platform != "linux":
                os.sync()
            elif ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), str(self.path))
        finally:
            os.close(descriptor)

    def perform(self, file_changes: Sequence[FileChange]) -> Iterator[list[Unpublished]]:
        """Remove and publish files, part by part; see `Publisher.perform`."""
        return self._publisher.perform(file_changes)

    def complete_shards(self, ledger: Ledger) -> None:
        """Publish the shards of packed outputs, and their index; see `jobs/packed/shards.py`."""
        complete_shards(ledger, self._root, self.flush)

    def packed_outputs(self, ledger: Ledger) -> Iterator[tuple[str, int]]:
        """Return name and bytes of the recorded packed outputs that are in their shards."""
        return intact_members(ledger, self._root)

    def size(self, name: str) -> int | None:
        """Return a published file's bytes; None if there is none.

        Raises:
            OutputError: It cannot be determined whether there is one.
        """
        try:
            return os.lstat(os.path.join(self.path, name)).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _unreadable(error) from error

    def files(self) -> list[tuple[str, int]]:
        """Return the name and bytes of every file, forebay's own left out, sorted.

        Raises:
            OutputError: A folder cannot be read. Its files would count as missing.
        """

        def refuse(error: OSError) -> None:
            raise _unreadable(error) from error

        names = []
        for folder, folders, files in os.walk(self.path, onerror=refuse):
            if Path(folder) == self.path and PRIVATE in folders:
                folders.remove(PRIVATE)
            names += [os.path.relpath(os.path.join(folder, file), self.path) for file in files]
        return [(name, self.size(name) or 0) for name in sorted(names)]

    def write_table(self, name: str, write: Callable[[Path], object], *, replaces: bool) -> None:
        """Call `write` with a staging path, and publish the table in one step.

        Raises:
            FileExistsError: There is a file with that name, which may not be replaced.
        """
        staged = self.private / name
        write(staged)
        (os.replace if replaces else rename_new)(str(staged), f"{self._root}/{name}")
        self.flush()

    def locate(self, name: str) -> Path:
        """Return the path of a published file."""
        return self.path / name

    def clean(self) -> None:
        """Remove everything staged."""
        shutil.rmtree(self.path / STAGING, ignore_errors=True)


def _unreadable(error: OSError) -> OutputError:
    return OutputError(
        f"{error.filename!r} cannot be read: {error.strerror}\n"
        "  Nothing was changed. Check its permissions and the disk, and make the same call again."
    )
