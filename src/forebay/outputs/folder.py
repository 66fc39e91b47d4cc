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
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.base.files import refuse_foreign, rename_new
from forebay.base.output_names import (
    PRIVATE,
    STAGING,
    path_elsewhere,
    recorded_name,
)
from forebay.errors import OutputError
from forebay.ledger.records import FileChange, Unpublished
from forebay.outputs.publishing import Publisher
from forebay.outputs.staging import Staging

if TYPE_CHECKING:
    from forebay.ledger.ledger import Ledger

# The most files that `strays` looks at, in about 50 ms.
MOST_LOOKED_AT = 10_000


class OutputFolder:
    """The driver's end of a local folder for outputs; `BucketFolder` overrides the rest.

    Attributes:
        overwrites: Whether files that forebay did not make are replaced.
        refusal: What is raised where something has to be written; None if the folder can be.
    """

    is_local = True
    overwrites = False
    refusal: OutputError | None = None

    def __init__(self, path: Path) -> None:
        """Make the folder where there is none."""
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
            refuse_foreign(self.private)
            self.private.mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=self.private) as probe:
                probe.write(b"forebay")
                probe.flush()
                self._opened_ns = os.fstat(probe.fileno()).st_mtime_ns  # by the disk's clock
        except OSError as error:
            raise OutputError(
                f"the output folder {str(path)!r} cannot be written to: {error.strerror}\n"
                "  Nothing was started. Choose another folder, or check its permissions and space."
            ) from error

    @cached_property
    def _publisher(self) -> Publisher:
        return Publisher(self.path, overwrites=self.overwrites)

    def ledger(self, command: str = "", call: str = "") -> AbstractContextManager[Ledger]:
        """Open the ledger, for one driver at a time."""
        from forebay.ledger.ledger import Ledger

        return Ledger.open(self.private, command, call)

    def copy_ledger(self, ledger: Ledger, *, now: bool = False) -> None:
        """Do nothing: the ledger is in the output folder."""

    def staging(self) -> Staging:
        """Return what the workers need to write here."""
        return Staging(self.path.absolute())

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

    def size(self, name: str) -> int | None:
        """Return an output's bytes; None if there is no file."""
        try:
            return os.lstat(path_elsewhere(name) or os.path.join(self.path, name)).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _unreadable(error) from error

    def files(self) -> list[tuple[str, int]]:
        """Return the name and bytes of every file, forebay's own left out, sorted."""

        def refuse(error: OSError) -> None:
            raise _unreadable(error) from error

        return [(name, self.size(name) or 0) for name in sorted(self._names(refuse))]

    def link(self, name: str, other: str) -> None:
        """Give a published file a second name; both stay when either is replaced or removed."""
        path, link = f"{self._root}/{name}", f"{self._root}/{other}"
        try:
            os.makedirs(os.path.dirname(link), exist_ok=True)
            try:
                os.link(path, link)
            except OSError:  # the file system has no such links
                shutil.copy2(path, link)
        except OSError as error:
            raise OutputError(
                f"{path!r} cannot be copied to {link!r}: {error.strerror}\n"
                "  Nothing was changed. Check the permissions and the space of its folder; then "
                "make the same call again."
            ) from error

    def discard(self, names: Iterable[str]) -> None:
        """Remove files of the private folder; it is not an error if some are gone already."""
        for name in names:
            folder = os.path.dirname(f"{self._root}/{name}")
            if not os.path.islink(folder):
                with suppress(FileNotFoundError):
                    os.unlink(f"{self._root}/{name}")
                with suppress(OSError):  # there are others
                    os.rmdir(folder)

    def missing(self, outputs: Iterable[tuple[str, int]]) -> Iterator[tuple[str, int]]:
        """Yield those of the outputs that are not here; each folder is listed once.

        Args:
            outputs: Name and ordinal of each, by name.
        """
        listed: dict[str, frozenset[str] | None] = {}
        for name, ordinal in outputs:
            elsewhere = path_elsewhere(recorded_name(name))
            path = elsewhere or f"{self._root}/{name}"
            folder, _, base = path.rpartition("/")
            if folder not in listed:
                above = f"{folder}/".startswith
                listed = {each: found for each, found in listed.items() if above(f"{each}/")}
                listed[folder] = _names_in(folder, may_be_away=elsewhere is not None)
            there = listed[folder]
            if there is None or base in there:
                continue
            if not os.path.lexists(path):  # it may be there in other letters
                yield name, ordinal

    def strays(self, ledger: Ledger) -> list[str]:
        """Return names of files that were written during this run, but that no output has.

        Only the first MOST_LOOKED_AT files of the folder are looked at, and no folder that cannot
        be read: the run is over.
        """
        own, found = {*ledger.own_files()}, []
        names = self._names(refuse=lambda _: None)
        for name in ledger.unknown(islice(names, MOST_LOOKED_AT)):
            with suppress(OSError):  # it is gone
                is_new = os.lstat(f"{self._root}/{name}").st_mtime_ns >= self._opened_ns
                found += [name] if is_new and name not in own else []
        return sorted(found)

    def _names(self, refuse: Callable[[OSError], None]) -> Iterator[str]:
        """Yield each file's name, forebay's own left out; call `refuse` where it cannot be read."""
        folders = [""]
        while folders:
            folder = folders.pop()
            try:
                with os.scandir(f"{self._root}/{folder}") as entries:
                    for entry in entries:
                        name = folder + entry.name
                        if not entry.is_dir(follow_symlinks=False):
                            yield name
                        elif name != PRIVATE:
                            folders.append(f"{name}/")
            except OSError as error:
                refuse(error)

    def write_table(self, name: str, write: Callable[[Path], object], *, replaces: bool) -> None:
        """Call `write` with a path, and publish the table; raise FileExistsError for a file."""
        staged = self.private / name
        write(staged)
        (os.replace if replaces else rename_new)(str(staged), f"{self._root}/{name}")
        self.flush()

    def locate(self, name: str) -> Path | str:
        """Return where a published file is: a path, or a URL."""
        return self.path / name

    def clean(self) -> None:
        """Remove everything staged."""
        shutil.rmtree(self.path / STAGING, ignore_errors=True)


def _names_in(folder: str, *, may_be_away: bool) -> frozenset[str] | None:
    """Return the names in a folder; None if they cannot be seen.

    Args:
        may_be_away: Whether that holds for a folder that is not there; otherwise it is empty.
    """
    try:
        return frozenset(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return None if may_be_away else frozenset()
    except OSError:
        return None


def _unreadable(error: OSError) -> OutputError:
    return OutputError(
        f"{error.filename.rstrip('/')!r} cannot be read: {error.strerror}\n"
        "  Nothing was changed. Check its permissions and the disk, and make the same call again."
    )
