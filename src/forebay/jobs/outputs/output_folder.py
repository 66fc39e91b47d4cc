"""The driver's end of a local output folder: staged files get their names once the ledger has them.

    function ── out.file("a.flac") ──> .forebay/staging/w0/a.flac     (worker)
    the input succeeds ──────────────> reported, not yet visible      (worker)
    flush ───────────────────────────> every staged byte is on disk   (driver)
    ledger.record ───────────────────> the commit point               (driver)
    perform ─────────────────────────> pieces/a.flac                  (driver)

A kill before the record leaves staged files, which the next run removes; a kill after it leaves
file changes in the ledger, which the next run performs. Neither leaves a partial or an unknown
file.

A file gets its name only if nothing has that name, so a file that the ledger does not know is never
overwritten; and only if no folder on its path is a symbolic link.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.errors import OutputError
from forebay.formats import SHARD_BYTES
from forebay.jobs.ledger.records import FileChange, Unpublished
from forebay.jobs.outputs.output_names import (
    PRIVATE,
    STAGING,
    folders_of,
    is_packed,
    recorded_name,
    removable_name,
    staged_name,
)
from forebay.jobs.outputs.renames import rename_new
from forebay.jobs.outputs.staged_output import Staging
from forebay.jobs.packed.shards import complete_shards, intact_members

if TYPE_CHECKING:
    from forebay.jobs.ledger.ledger import Ledger

# Errors of a rename that are due to the file's name. All others are errors of the disk.
_OF_THE_NAME = frozenset(
    {
        *(errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.ENAMETOOLONG),
        *(errno.ELOOP, errno.EXDEV, errno.EACCES, errno.EPERM, errno.EINVAL, errno.EILSEQ),
    }
)


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
        self._plain = {""}  # folders known to be reached without a link
        self._made = {""}  # folders known to exist
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
        self._real = os.path.realpath(path)

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

    def perform(self, file_changes: Sequence[FileChange]) -> list[Unpublished]:
        """Remove and publish files as the ledger says, removals first. Safe to do twice.

        A name that is removed and published is replaced in one step. Folders that removals leave
        empty are removed, too: a file may have that name next.

        Returns:
            What could not be published, and why.

        Raises:
            LedgerError: A name leads out of the folder; nothing was touched.
            OSError: The disk is full or broken.
        """
        removed, published = set(), []
        for given, staged in file_changes:
            if staged is not None:
                published.append((recorded_name(given), staged_name(staged)))
            elif not is_packed(name := removable_name(given)):  # its shard is written again
                removed.add(name)
        self._remove(removed - {name for name, _ in published})
        outcomes = [self._publish(name, staged, name in removed) for name, staged in published]
        return [each for each in outcomes if each is not None]

    def _remove(self, names: Iterable[str]) -> None:
        parents = set()
        for name in names:
            parent = os.path.dirname(name)
            if self._leads_elsewhere(parent) is not None:
                continue
            # It is already gone, or not a file of forebay's.
            with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                os.unlink(f"{self._root}/{name}")
            if not name.startswith(f"{PRIVATE}/"):
                parents.add(parent)
        for parent in sorted(parents, key=len, reverse=True):
            while parent:
                try:
                    os.rmdir(f"{self._root}/{parent}")
                except OSError:
                    break
                self._made.discard(parent)
                parent = os.path.dirname(parent)

    def _publish(self, name: str, staged: str, replaces: bool) -> Unpublished | None:
        """Give a staged file its name; return the reason if that is impossible."""
        final, parent = f"{self._root}/{name}", name.rpartition("/")[0]
        elsewhere = self._leads_elsewhere(parent)
        if elsewhere is not None:
            reason = (
                f"{name!r} would leave the output folder: a symbolic link leads to {elsewhere!r}\n"
                "  Nothing was written there. Remove the link, or name the output differently."
            )
            return Unpublished(name, staged, reason)
        try:
            if parent not in self._made:
                os.makedirs(os.path.dirname(final), exist_ok=True)
                self._made.update([parent, *folders_of(parent)])
            if self._leads_elsewhere(staged.rpartition("/")[0]) is not None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), staged)
            (os.replace if replaces else rename_new)(f"{self._root}/{staged}", final)
            return None
        except FileNotFoundError:
            if os.path.lexists(final):
                return None  # done before
            self._made.discard(parent)
            reason = (
                f"{name!r} vanished between being staged and being published\n"
                f"  Something else removes files in {str(self.private)!r}, or its folder. The "
                "next run creates it again."
            )
        except OSError as error:
            if error.errno not in _OF_THE_NAME:
                raise
            reason = self._obstacle(name, error)
        return Unpublished(name, staged, reason)

    def _obstacle(self, name: str, error: OSError) -> str:
        """Return why a file cannot have its name, as a message."""
        path = next(
            (one for one in folders_of(name) if not os.path.isdir(f"{self._root}/{one}")), None
        )
        if path is not None and os.path.lexists(f"{self._root}/{path}"):
            return (
                f"{name!r} needs a folder, but there is a file: {path!r}\n"
                "  Nothing was written there. Name one of the two differently."
            )
        if os.path.lexists(f"{self._root}/{name}"):
            if os.path.isdir(f"{self._root}/{name}"):  # of another input's outputs, perhaps
                what, kind = " as a folder", "folder"
            else:
                what, kind = ", and no input of forebay's made it", "file"
            return (
                f"{name!r} exists already{what}\n"
                f"  It was left as it is. Name the output differently, or move the {kind} away."
            )
        return (
            f"{name!r} cannot be published: {error.strerror}\n"
            "  Nothing was written there. Check the permissions of its folder, or name the output "
            "differently."
        )

    def _leads_elsewhere(self, folder: str) -> str | None:
        """Return the real path of a folder that is a symbolic link; None if it is not a link."""
        if folder in self._plain:
            return None
        real = os.path.realpath(f"{self._root}/{folder}")
        if real != os.path.join(self._real, folder):
            return real
        if os.path.isdir(real):  # otherwise a link may still be created there
            self._plain.add(folder)
        return None

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
