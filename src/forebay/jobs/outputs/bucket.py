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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from pathlib import Path

from forebay.engine.job import Refusal
from forebay.errors import ForebayError, LedgerError, OutputError
from forebay.formats import SHARD_BYTES
from forebay.jobs.ledger.database import NAME
from forebay.jobs.ledger.holder import Holder
from forebay.jobs.ledger.ledger import Ledger
from forebay.jobs.ledger.ledger_copy import LEDGER, LedgerCopy, read_run
from forebay.jobs.ledger.records import FileChange, FileFields, Unpublished
from forebay.jobs.ledger.snapshot import read_snapshot
from forebay.jobs.outputs.output_folder import OutputFolder
from forebay.jobs.outputs.output_names import PRIVATE, recorded_name
from forebay.jobs.outputs.staged_output import Output, Staging
from forebay.jobs.outputs.store import Store


class Bucket:
    """The driver's end of an output URL.

    Attributes:
        private: The local folder of the ledger, its lock, and files that are being sent.
    """

    def __init__(self, url: str) -> None:
        """Make the local folder that belongs to the URL.

        Raises:
            OutputError: There is no such file system, or the local folder cannot be created.
        """
        self._store = Store(url)
        self._local = OutputFolder(_local_folder(self._store))
        self.private = self._local.private
        self._copy = LedgerCopy(self._store, self.private)

    @contextmanager
    def ledger(self, command: str = "") -> Iterator[Ledger]:
        """Open the ledger, brought up to date from the bucket; send it back at the end.

        Raises:
            BusyError: Another run has it, here or on another machine.
            OutputError: The bucket cannot be written.
        """
        with Ledger.open(self.private, command) as ledger:
            self._copy.join(ledger, command)
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

    def staging(self, shard_bytes: int = SHARD_BYTES) -> Uploads:
        """Return what the workers need to write here."""
        return Uploads(self._store, self._local.staging())

    def flush(self) -> None:
        """Only check that no other machine took over: uploaded files are durable."""
        self._copy.check()

    def perform(self, file_changes: Sequence[FileChange]) -> Iterator[list[Unpublished]]:
        """Remove objects as the ledger says. Safe to do twice.

        Returns:
            Nothing to iterate over: workers upload outputs to their names.

        Raises:
            LedgerError: A name leads out of the folder; nothing was touched.
        """
        self._store.remove([recorded_name(one.name) for one in file_changes if one.staged is None])
        return iter(())

    def complete_shards(self, ledger: Ledger) -> None:
        """Do nothing: only a local folder has shards."""

    def packed_outputs(self, ledger: Ledger) -> Iterator[tuple[str, int]]:
        """Return nothing: only a local folder has shards."""
        return iter(())

    def size(self, name: str) -> int | None:
        """Return an object's bytes; None if there is none."""
        return self._store.size(name)

    def files(self) -> list[tuple[str, int]]:
        """Return the name and bytes of every object, forebay's own left out, sorted."""
        return [each for each in self._store.files() if not each[0].startswith(f"{PRIVATE}/")]

    def write_table(self, name: str, write: Callable[[Path], object], *, replaces: bool) -> None:
        """Call `write` with a local path, and upload the file.

        Raises:
            FileExistsError: There is an object with that name, which may not be replaced.
        """
        if not replaces and self.size(name) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.locate(name))
        with tempfile.TemporaryDirectory(dir=self.private) as scratch:
            path = Path(scratch, name)
            write(path)
            self._store.upload([(str(path), name)])

    def locate(self, name: str) -> str:
        """Return the URL of an object."""
        return self._store.locate(name)

    def clean(self) -> None:
        """Remove every scratch file."""
        self._local.clean()


class Uploads:
    """A worker's end of an output URL. It can be pickled."""

    def __init__(self, store: Store, staging: Staging) -> None:
        """Stage files with `staging`, upload them to `store`."""
        self._store = store
        self._staging = staging

    def open(self, worker: int) -> None:
        """Create this worker's folder, and connect to the store."""
        self._staging = copy(self._staging)  # worker threads share what this was copied from
        self._staging.open(worker)
        self._store.open()

    def begin(self, source: str) -> Output:
        """Return the `out` of one input, which shares no folder."""
        return Output(source, self._staging.folders, is_alone=True)

    def commit(self, output: Output) -> tuple[FileFields, ...]:
        """Upload the files of one input to their final names.

        Raises:
            OutputError: The store takes other files, but not these.
            Refusal: "environment": the store takes no files.
        """
        root = str(self._staging.folders.path.parent)
        files = output.collect(root)
        paths = [(os.path.join(root, staged), name) for name, _, staged, _ in files]
        try:
            if paths:
                self._store.upload(paths)
        except OutputError:
            probe = f"{PRIVATE}/probe-{self._staging.folders.path.name}"
            try:
                self._store.write(probe, b"forebay")
                self._store.remove([probe])
            except OutputError as error:
                raise Refusal("environment") from error
            self._store.upload(paths)  # if it fails again, the cause is in the files or their names
        output.discard()
        return tuple((name, size, "", None) for name, size, _, _ in files)

    def is_full(self) -> bool:
        """Tell whether the local disk has run out of bytes or of files."""
        return self._staging.is_full()

    def close(self) -> None:
        """Do nothing: every file was closed by the function."""


@contextmanager
def newest_copy(url: str) -> Iterator[tuple[Path, Holder | None]]:
    """Find the newest ledger of a URL: the local one, or else a copy of that in the bucket.

    Yields:
        The folder that holds the ledger, and the running driver according to the bucket.

    Raises:
        LedgerError: There is none.
    """
    store = Store(url)
    there = read_run(store)
    private = _local_folder(store) / PRIVATE
    if there is not None and _is_written(private / NAME):
        meta = read_snapshot(private).meta
        generation = int(meta.get("generation", 0))
        if meta.get("lineage") == there.lineage and generation >= there.generation:
            yield private, None
            return
    with tempfile.TemporaryDirectory() as scratch:
        if not store.download(LEDGER, Path(scratch, NAME)):
            raise LedgerError(
                f"{store.url} holds no ledger: it is not an output of forebay's\n"
                "  Give the URL that was given as `output`."
            )
        yield Path(scratch), None if there is None else there.live_holder


def _is_written(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _local_folder(store: Store) -> Path:
    """Return the local folder that belongs to a URL."""
    home = os.environ.get("XDG_STATE_HOME", "")
    states = Path(home) if os.path.isabs(home) else Path.home() / ".local" / "state"
    digest = hashlib.sha256(store.canonical_url.encode("utf-8", "surrogatepass")).hexdigest()
    return states / "forebay" / digest[:16]
