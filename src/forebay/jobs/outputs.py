"""A local output folder: files are staged in private, and published once the ledger knows them.

    function ── out.file("a.flac") ──> .forebay/staging/w0/a.flac     (worker)
    the input ends well ─────────────> reported, not yet visible      (worker)
    flush ───────────────────────────> every staged byte is on disk   (driver)
    ledger.record ───────────────────> the commit point               (driver)
    perform ─────────────────────────> pieces/a.flac                  (driver)

A kill before the record leaves staged files, which the next run removes; a kill after it leaves
chores in the ledger, which the next run performs. Neither leaves a torn or an unknown file.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from forebay.errors import OutputError
from forebay.jobs.records import Chore, OutputFile

if TYPE_CHECKING:  # workers stage files and need no ledger
    from forebay.jobs.ledger import Ledger

# forebay's own folder inside every output folder.
PRIVATE = ".forebay"


def checked_name(name: object, reserved: frozenset[str] = frozenset()) -> str:
    """Return an output's name in its one spelling, relative to the output folder.

    Raises:
        OutputError: The name is empty or absolute, leaves the folder, or is forebay's own.
    """
    if not isinstance(name, str | os.PathLike) or not os.fspath(name):
        raise OutputError(f"out.file() wants the name of a file, such as 'a.flac'; got {name!r}")
    text = os.fspath(name)
    if isinstance(text, bytes) or "\0" in text:
        raise OutputError(f"out.file({text!r}): a name is text without NUL characters")
    if "/" not in text and text not in reserved and not text.startswith("."):
        return text  # the usual case, and the quick one
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts or not path.name:
        raise OutputError(
            f"out.file({text!r}) would leave the output folder\n"
            "  Nothing was written. Give a name relative to it, without '..'."
        )
    if path.parts[0] == PRIVATE or str(path) in reserved:
        raise OutputError(f"out.file({text!r}): that name is forebay's own; choose another")
    return str(path)


class Output:
    """What a function receives as `out`: the way to name the files that it makes.

    Its paths are valid until the function returns (for a generator: is exhausted).
    """

    def __init__(self, folder: str, reserved: frozenset[str]) -> None:
        """Stage files in `folder`."""
        self.folder = folder
        self._reserved = reserved
        self._names: dict[str, str] = {}  # staged path -> final name, in the order asked for
        self._paths: dict[str, Path] = {}  # the other way round

    def file(self, name: str | os.PathLike[str]) -> Path:
        """Return a private path to write one output file to.

        The file appears under `name` in the output folder only if the whole input succeeds.

        Args:
            name: Relative to the output folder; may hold folders ("speaker1/a.flac"), which
                are made. Asking for the same name again returns the same path.

        Raises:
            OutputError: The name is absolute, leaves the output folder or is forebay's own.
        """
        final = checked_name(name, self._reserved)
        if final in self._paths:
            return self._paths[final]
        path = f"{self.folder}/{final}"
        number = 0
        while not _make_room(path, alone=not number and "/" not in final):
            number += 1  # an earlier input's is there, reported and not yet published
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
                    f"out.file({name!r}) was asked for, but the function never wrote it"
                ) from None
            if (status.st_mode & 0o170000) != 0o100000:
                raise OutputError(f"out.file({name!r}): the function left no regular file there")
            files.append(OutputFile(name, status.st_size, staged[start:]))
        return tuple(files)

    def discard(self) -> None:
        """Remove what was staged; for an input that failed."""
        for staged in self._names:
            try:
                os.unlink(staged)
            except FileNotFoundError:
                pass
            except OSError:
                shutil.rmtree(staged, ignore_errors=True)
        self._names.clear()
        self._paths.clear()


def _make_room(path: str, alone: bool) -> bool:
    """Make the folder of a path, unless it is there (`alone`); return whether the path is free."""
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

    def __init__(self, root: Path, reserved: frozenset[str]) -> None:
        """Stage below `root`, the output folder."""
        self._root = str(root)
        self._reserved = reserved
        self._driver = os.uname().nodename
        self._is_far = False
        # Not a mere number: a thread that a former run abandoned may still write to its own.
        self._run = os.urandom(4).hex()
        self.folder = ""

    def open(self, worker: int) -> None:
        """Make this worker's own folder."""
        self.folder = os.path.join(self._root, PRIVATE, "staging", f"{self._run}-{worker}")
        os.makedirs(self.folder, exist_ok=True)
        self._is_far = os.uname().nodename != self._driver

    def begin(self) -> Output:
        """Return the `out` of one input."""
        return Output(self.folder, self._reserved)

    def commit(self, output: Output) -> tuple[OutputFile, ...]:
        """Return what one input made, staged and waiting for the driver."""
        files = output.collect(self._root)
        if self._is_far:  # the driver's flush does not reach what this machine holds back
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


class OutputFolder:
    """The driver's end of a local output folder.

    Attributes:
        path: The folder.
        private: forebay's own folder in it.
        nests: True: a name cannot be a file and a folder at once.
    """

    nests = True

    def __init__(self, path: Path) -> None:
        """Make the folder where there is none.

        Raises:
            OutputError: It cannot be made, is a file, or cannot be written to.
        """
        self.path = path
        self._root = str(path)
        self.private = path / PRIVATE
        self._admitted = {""}  # parents known not to lead out of the folder
        self._made = {""}  # parents known to exist
        self._was_empty = False
        if path.is_file():
            raise OutputError(
                f"the output {str(path)!r} is a file, not a folder\n"
                "  Nothing was started. Name a folder; and if you wrote a glob in a shell, quote "
                "it, or the shell puts its matches there."
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            with os.scandir(path) as entries:
                self._was_empty = next(entries, None) is None
            self.private.mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=self.private) as probe:  # one for each that starts
                probe.write(b"forebay")
        except OSError as error:
            raise OutputError(
                f"the output folder {str(path)!r} cannot be written to: {error.strerror}\n"
                "  Nothing was started. Choose another folder, or see to its permissions and space."
            ) from error

    def ledger(self, command: str = "") -> Ledger:
        """Open the ledger, for one driver at a time."""
        from forebay.jobs.ledger import Ledger

        return Ledger.open(self.private, command)

    def keep(self, ledger: Ledger, *, now: bool = False) -> None:
        """Do nothing: the ledger lies beside its outputs."""

    def staging(self, reserved: frozenset[str]) -> Staging:
        """Return what the workers need to write here."""
        return Staging(self.path.absolute(), reserved)

    def flush(self) -> None:
        """Bring everything written below the folder to disk, contents and names."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            if sys.platform != "linux":
                os.sync()
            elif ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), str(self.path))
        finally:
            os.close(descriptor)

    def perform(self, chores: Sequence[Chore]) -> list[str]:
        """Publish and remove files as the ledger says. Safe to do twice.

        Returns:
            Names that could not be published: neither staged any more nor there already.

        Raises:
            OutputError: A folder on the way leads out of the output folder.
        """
        root = self._root
        vanished = []
        for chore in chores:
            final = f"{root}/{chore.name}"
            if chore.staged is None:
                # Gone already, or something that is not ours.
                with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                    os.unlink(final)
                continue
            parent = os.path.dirname(chore.name)
            if parent not in self._made:
                self.admit(chore.name)
                os.makedirs(os.path.dirname(final), exist_ok=True)
                self._made.update([parent, *map(str, PurePosixPath(parent).parents)])
            try:
                os.replace(f"{root}/{chore.staged}", final)
            except FileNotFoundError:
                if not os.path.lexists(final):
                    vanished.append(chore.name)
        return vanished

    def admit(self, name: str) -> None:
        """Raise OutputError if `name` leads out of the folder, or through something else's file."""
        parent = os.path.dirname(name)
        if parent in self._admitted:
            return
        root, real = os.path.realpath(self.path), os.path.realpath(self.path / parent)
        if not real.startswith(root + os.sep):
            raise OutputError(
                f"{name!r} would leave the output folder: a symbolic link leads to {real!r}\n"
                "  Nothing was written there. Remove the link, or name the file differently."
            )
        above = Path(real)
        while not os.path.lexists(above):
            above = above.parent
        if not above.is_dir():
            raise OutputError(
                f"{name!r} needs a folder where there is a file: {str(above)!r}\n"
                "  Nothing was written there. Name one of the two differently."
            )
        if above == Path(real):  # else a file may yet be published under that name
            self._admitted.add(parent)

    def holds(self, name: str) -> bool:
        """Tell whether something stood under a final name before this run published anything."""
        is_free = self._was_empty and name not in self._made
        return not is_free and os.path.lexists(f"{self._root}/{name}")

    def size(self, name: str) -> int | None:
        """Return a published file's bytes; None if there is none."""
        try:
            return os.lstat(os.path.join(self.path, name)).st_size
        except OSError:
            return None

    def files(self) -> list[tuple[str, int]]:
        """Return the name and bytes of every file, forebay's own left out, sorted."""
        names = []
        for folder, folders, files in os.walk(self.path):
            if Path(folder) == self.path and PRIVATE in folders:
                folders.remove(PRIVATE)
            names += [os.path.relpath(os.path.join(folder, file), self.path) for file in files]
        return [(name, self.size(name) or 0) for name in sorted(names)]

    def write_table(self, name: str, write: Callable[[Path], object]) -> None:
        """Have a table written where it belongs."""
        write(self.path / name)

    def locate(self, name: str) -> Path:
        """Return the path of a published file."""
        return self.path / name

    def clean(self) -> None:
        """Remove everything staged."""
        shutil.rmtree(self.private / "staging", ignore_errors=True)
