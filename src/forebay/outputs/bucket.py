"""Outputs in a bucket, or any other fsspec store: uploaded, then committed.

    function ── out.file("a.flac") ──> a local scratch file           (worker)
    the input succeeds ──────────────> uploaded to its final name     (worker)
    ledger.record ───────────────────> the commit point               (driver)
    periodically ────────────────────> a copy of the ledger           (driver)

An object is complete or absent, but there may be one that the ledger does not know, if a worker
died between the upload and the commit. That input is redone, and overwrites it.
The ledger, its lock and the scratch files are in a local folder that belongs to the URL.
"""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

from forebay.base.file_stores import Store
from forebay.base.output_names import PRIVATE, path_elsewhere, recorded_name
from forebay.errors import ForebayError, OutputError, shown_location
from forebay.ledger.ledger import Ledger
from forebay.ledger.records import FileChange, FileFields, Unpublished
from forebay.outputs.folder import OutputFolder
from forebay.outputs.ledger_copy import LedgerCopy
from forebay.outputs.output import Output
from forebay.outputs.staging import Staging
from forebay.pools.events import Refusal

# The most outputs that a run looks for before it starts: a request lists a thousand.
MOST_LISTED = 100_000


class BucketFolder(OutputFolder):
    """The driver's end of an output URL: a local folder with the ledger, and files elsewhere."""

    is_local = False

    def __init__(self, url: str) -> None:
        """Make the local folder that belongs to the URL."""
        self._store = Store(url)
        super().__init__(private_folder_of(self._store))
        self._copy = LedgerCopy(self._store, self.private)

    @contextmanager
    def ledger(self, command: str = "", call: str = "") -> Iterator[Ledger]:
        """Open the ledger, brought up to date from the bucket; send it back at the end."""
        with Ledger.open(self.private, command, call) as ledger:
            self._copy.join(ledger, command, call)
            try:
                yield ledger
            except BaseException:
                with suppress(ForebayError):  # the exception that is being raised says more
                    self._copy.leave(ledger)
                raise
            self._copy.leave(ledger)

    def copy_ledger(self, ledger: Ledger, *, now: bool = False) -> None:
        """Send a copy of the ledger to the bucket, if one is due or must be there `now`."""
        self._copy.update(ledger, now=now)

    def staging(self) -> Uploads:
        """Return what the workers need to write here."""
        return Uploads(self._store, self.path)

    def flush(self) -> None:
        """Only check that no other machine took over: uploaded files are durable."""
        self._copy.check()

    def perform(self, file_changes: Sequence[FileChange]) -> Iterator[list[Unpublished]]:
        """Remove objects as the ledger says. Safe to do twice."""
        names = [one.name for one in file_changes if one.staged is None]
        self._store.remove([recorded_name(name) for name in names if path_elsewhere(name) is None])
        return iter(())

    def size(self, name: str) -> int | None:
        """Return an output's bytes; None if there is no object, or no file if it is elsewhere."""
        return self._store.size(name) if path_elsewhere(name) is None else super().size(name)

    def files(self) -> list[tuple[str, int]]:
        """Return the name and bytes of every object, forebay's own left out, sorted."""
        return [each for each in self._store.files() if not each[0].startswith(f"{PRIVATE}/")]

    def link(self, name: str, other: str) -> None:
        """Copy an object within the bucket."""
        self._store.copy(name, other)

    def discard(self, names: Iterable[str]) -> None:
        """Remove objects; it is not an error if some are gone already."""
        self._store.remove(names)

    def missing(self, outputs: Iterable[tuple[str, int]]) -> Iterator[tuple[str, int]]:
        """Yield those of the outputs that are not here; none of too many, which take long to list.

        Args:
            outputs: Name and ordinal of each.
        """
        recorded = [*islice(outputs, MOST_LISTED + 1)]
        if 0 < len(recorded) <= MOST_LISTED:
            there = {name for name, _ in self.files()}
            absent = [each for each in recorded if each[0] not in there]
            yield from (each for each in absent if path_elsewhere(each[0]) is None)
            yield from super().missing(each for each in absent if path_elsewhere(each[0]))

    def strays(self, ledger: Ledger) -> list[str]:
        """Return none: to list a bucket takes a request for each thousand objects."""
        return []

    def write_table(self, name: str, write: Callable[[Path], object], *, replaces: bool) -> None:
        """Call `write` with a local path, and upload the file."""
        if not replaces and self.size(name) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.locate(name))
        with tempfile.TemporaryDirectory(dir=self.private) as scratch:
            path = Path(scratch, name)
            write(path)
            self._store.upload([(str(path), name)])

    def locate(self, name: str) -> str:
        """Return the URL of an object."""
        return self._store.locate(name)


class Uploads(Staging):
    """A worker's end of an output URL: files are staged in the folder `root`, then uploaded."""

    is_local = False

    def __init__(self, store: Store, root: Path) -> None:
        super().__init__(root)
        self._store = store

    def open(self, worker: int) -> None:
        """Create this worker's folder, and connect to the store."""
        super().open(worker)
        self._store.open()

    def begin(self, source: str) -> Output:
        """Return the `out` of one input, which shares no folder."""
        return Output(source, self.folders, self.locate, is_alone=True)

    def locate(self, name: str) -> str:
        """Return the URL of an output of this name."""
        return self._store.locate(name)

    def commit(
        self, output: Output, files: Mapping[str, tuple[str, int]]
    ) -> tuple[FileFields, ...]:
        """Upload the files of one input to their final names."""
        paths = [(path, name) for name, (path, _) in files.items() if path]
        try:
            if paths:
                self._store.upload(paths)
        except OutputError:
            probe = f"{PRIVATE}/probe-{os.path.basename(self.folders.path)}"
            try:
                self._store.write(probe, b"forebay")
                self._store.remove([probe])
            except OutputError as error:
                raise Refusal("environment") from error
            self._store.upload(paths)  # if it fails again, the cause is in the files or their names
        output.discard()
        return tuple((name, size, "") for name, (_, size) in files.items())


def private_folder_of(store: Store) -> Path:
    """Return the local folder that belongs to a URL."""
    home = os.environ.get("XDG_STATE_HOME", "")
    try:
        states = Path(home) if os.path.isabs(home) else Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise OutputError(
            "this user has no home folder, where forebay keeps the ledger of a run whose output is "
            "a URL\n"
            "  Nothing was started. Set XDG_STATE_HOME to a folder of your own (or HOME), the same "
            "for every call."
        ) from error
    name = shown_location(store.canonical_url)  # the same with a renewed token
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
    return states / "forebay" / digest[:16]
