"""Where outputs go: a bucket, with its copy of the ledger, or a local folder (`folder.py`)."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

from forebay.base.files import Store, is_url, local_path
from forebay.base.output_names import PRIVATE, path_elsewhere, recorded_name
from forebay.base.process import LONGEST_WAIT_S, join, wait_until
from forebay.errors import BusyError, ForebayError, LedgerError, OutputError, shown_location
from forebay.ledger.database import DAMAGES, NAME, Snapshot, read_snapshot
from forebay.ledger.ledger import Ledger
from forebay.ledger.lock import Holder
from forebay.ledger.records import FileChange, FileFields, Unpublished
from forebay.outputs.folder import OutputFolder
from forebay.outputs.staging import Output, Staging
from forebay.pools.events import Refusal

# ---- ledger copy ---------------------------------------------------------------------------------
# The ledger of a bucket: used on a local disk, with a copy in the bucket for other machines.
#
#     <url>/.forebay/ledger.sqlite   a complete ledger, some seconds behind the local one
#     <url>/.forebay/run.json        which run is active, since when, and its last heartbeat
#
# A copy goes up before the first input is worked on, now and then during commits, before outputs
# are removed, and when the run ends. Each has a higher `generation`; a run begins a new million
# of them, so if two machines continued from the same copy, the later run has the higher numbers.
# `lineage` is a random string, made when the bucket was first used. A local ledger of another
# lineage is ignored: the bucket was emptied, or it is a bucket of the same name in another store.

LEDGER = f"{PRIVATE}/ledger.sqlite"
RUN = f"{PRIVATE}/run.json"
# How often a run sends a heartbeat and maybe a copy, and how long without one until it counts as
# dead.
BEAT_S = 30.0
STALE_S = 120.0
# A copy is due once this many times the duration of the last one has passed.
REST = 20
# Generations reserved for one run.
RUN_STEP = 1_000_000


@dataclass(frozen=True, slots=True)
class Run:
    """The last run, as run.json describes it.

    Attributes:
        heartbeat: When it last wrote this, in seconds since 1970 by the clock of its machine.
    """

    holder: Holder
    state: str
    heartbeat: float
    generation: int
    lineage: str

    @property
    def live_holder(self) -> Holder | None:
        """The holder if it may still be alive; None if the run ended or its process is dead.

        A process of this machine is looked up. One of another machine counts as dead after
        `STALE_S` without a heartbeat, so the clocks of the machines should agree within a minute.
        """
        if self.state != "running":
            return None
        if self.holder.is_visible:
            return self.holder if self.holder.is_alive else None
        return self.holder if time.time() - self.heartbeat < STALE_S else None

    def is_same_as(self, other: Run) -> bool:
        """Return whether both are records of the same run, at any time of its life."""
        mine, theirs = (
            (one.holder, one.lineage, one.generation // RUN_STEP) for one in (self, other)
        )
        return mine == theirs


def read_run(store: Store) -> Run | None:
    """Return the record in run.json; None if there is none, or it is truncated or damaged."""
    text = store.read(RUN)
    if text is None:
        return None
    try:
        found = json.loads(text)
        return Run(
            holder=Holder.from_record(found["holder"]),
            state=str(found["state"]),
            heartbeat=float(found["heartbeat"]),
            generation=int(found["generation"]),
            lineage=str(found["lineage"]),
        )
    except DAMAGES:
        return None


class LedgerCopy:
    """Keeps the copy in the bucket up to date with the local ledger, from `join` to `leave`.

    A thread sends what `update` took, since a slow network must not hold up the workers. What it
    fails to send goes up with the next copy; the last one, in `leave`, says so if it fails.
    """

    def __init__(self, store: Store, scratch: Path) -> None:
        self._store = store
        self._path = scratch / "copy.sqlite"
        self._run: Run | None = None
        self._successor: Run | None = None
        self._sending = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._taken = False
        self._took_s = 0.0
        self._due = 0.0

    def join(self, ledger: Ledger, command: str, call: str = "") -> None:
        """Bring the local ledger up to date, and make this the bucket's run."""
        there = read_run(self._store)
        this = Holder.this_process(command, self._path.parent, call)
        other = None if there is None else there.live_holder
        if other is not None and (other.host, other.pid) != (this.host, this.pid):
            raise self._busy(other)
        lineage, generation = ledger.get_meta("lineage"), int(ledger.get_meta("generation") or 0)
        if there is None or lineage != there.lineage or generation < there.generation:
            lineage = self._adopt(ledger, there)
            generation = int(ledger.get_meta("generation") or 0)
        newest = max(generation, there.generation if there is not None else 0)
        self._run = Run(
            holder=this,
            state="running",
            heartbeat=time.time(),
            generation=(newest // RUN_STEP + 1) * RUN_STEP,
            lineage=lineage or uuid.uuid4().hex,
        )
        self._store.write(RUN, json.dumps(asdict(self._run)).encode())
        self.update(ledger, now=True)
        self._thread = threading.Thread(target=self._serve, name="forebay-copy", daemon=True)
        self._thread.start()

    def update(self, ledger: Ledger, *, now: bool = False) -> None:
        """Take a copy if one is due, to be sent soon; with `now` take and send it at once."""
        self.check()
        if not now and (self._taken or time.monotonic() < self._due):
            return
        if now:  # the copy before may be on its way, for as long as the network takes
            wait_until(lambda seconds: self._sending.acquire(timeout=seconds))
        elif not self._sending.acquire(blocking=False):
            return
        try:
            self._take(ledger)
            if now:
                self._send("running")
        finally:
            self._sending.release()
        if now:
            self.check()
        else:
            self._wake.set()

    def check(self) -> None:
        """Raise BusyError if another machine has taken over."""
        if self._successor is not None:
            raise self._busy(self._successor.holder)

    def leave(self, ledger: Ledger) -> None:
        """Send the last copy and say that the run has ended."""
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            join(self._thread)
        if self._successor is None:
            self._take(ledger)
            self._send("ended")
        self._path.unlink(missing_ok=True)
        self.check()

    def _adopt(self, ledger: Ledger, there: Run | None) -> str | None:
        """Replace the local ledger by the bucket's; return its lineage."""
        self._path.unlink(missing_ok=True)
        if self._store.download(LEDGER, self._path):
            ledger.load(self._path)
            return ledger.get_meta("lineage")
        # The local ledger belongs to earlier content of this bucket, whose files are gone.
        ledger.forget()
        if there is not None:
            return there.lineage
        foreign = self._store.top() - {PRIVATE}
        if foreign:
            raise OutputError(
                f"{self._store.url} holds files, such as {min(foreign)!r}, but no ledger\n"
                "  They could be overwritten, so nothing was started. Choose an empty folder of "
                "the bucket."
            )
        return None

    def _take(self, ledger: Ledger) -> None:
        began = time.monotonic()
        assert self._run is not None, "join comes first"
        self._run = replace(self._run, generation=self._run.generation + 1)
        ledger.set_meta("lineage", self._run.lineage)
        ledger.set_meta("generation", str(self._run.generation))
        ledger.backup(self._path)
        self._taken = True
        self._took_s = time.monotonic() - began

    def _send(self, state: str) -> None:
        """Send the copy that was taken, if any, and the heartbeat; the caller holds the lock."""
        assert self._run is not None, "join comes first"
        began = time.monotonic()
        there = read_run(self._store)
        if there is not None and not there.is_same_as(self._run):
            self._successor = there
            return
        if self._taken:
            self._store.upload([(str(self._path), LEDGER)])
            self._taken = False
            self._took_s += time.monotonic() - began
            self._due = time.monotonic() + max(BEAT_S, REST * self._took_s)
        record = replace(self._run, state=state, heartbeat=time.time())
        self._store.write(RUN, json.dumps(asdict(record)).encode())

    def _serve(self) -> None:
        while True:
            self._wake.wait(BEAT_S)
            self._wake.clear()
            if self._closing:
                return
            if self._sending.acquire(timeout=LONGEST_WAIT_S):  # Ctrl-C may leave it locked
                try:
                    with suppress(OutputError):
                        self._send("running")
                finally:
                    self._sending.release()

    def _busy(self, holder: Holder) -> BusyError:
        error = BusyError(
            f"another run holds {self._store.url}: {holder}\n"
            "  This run stopped. Wait until that one ends, "
            f"and make the same call again; if it died, wait {STALE_S:g} s."
        )
        error.holder = holder
        return error


# ---- bucket --------------------------------------------------------------------------------------
# Outputs in a bucket, or any other fsspec store: uploaded, then committed.
#
#     function ── out.file("a.flac") ──> a local scratch file           (worker)
#     the input succeeds ──────────────> uploaded to its final name     (worker)
#     ledger.record ───────────────────> the commit point               (driver)
#     periodically ────────────────────> a copy of the ledger           (driver)
#
# An object is complete or absent, but there may be one that the ledger does not know, if a worker
# died between the upload and the commit. That input is redone, and overwrites it.
# The ledger, its lock and the scratch files are in a local folder that belongs to the URL.


# The most outputs that a run looks for before it starts: a request lists a thousand.
MOST_LISTED = 100_000


class Bucket(OutputFolder):
    """The driver's end of an output URL: a local folder with the ledger, and files elsewhere."""

    is_local = False

    def __init__(self, url: str) -> None:
        """Make the local folder that belongs to the URL."""
        self._store = Store(url)
        super().__init__(_local_folder(self._store))
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
        return Output(source, self.folders, is_alone=True)

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


def _local_folder(store: Store) -> Path:
    """Return the local folder that belongs to a URL."""
    home = os.environ.get("XDG_STATE_HOME", "")
    states = Path(home) if os.path.isabs(home) else Path.home() / ".local" / "state"
    name = shown_location(store.canonical_url)  # the same with a renewed token
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
    return states / "forebay" / digest[:16]


# ---- output places -------------------------------------------------------------------------------


def open_place(output: str | os.PathLike[str]) -> OutputFolder:
    """Return the folder or the bucket that `output` names."""
    text = local_path(output)
    return Bucket(text) if is_url(text) else OutputFolder(Path(os.path.abspath(text)))


@contextmanager
def newest_ledger(output: str | os.PathLike[str]) -> Iterator[tuple[Path, Holder | None]]:
    """Find the ledger of a place, to be read from outside with `forebay.ledger.database`.

    That of a URL is the local one, or else a copy of that in the bucket, whichever is newer.
    """
    text = local_path(output)
    if not is_url(text):
        yield Path(text) / PRIVATE, None
        return
    store = Store(text)
    there, private = read_run(store), _local_folder(store) / PRIVATE
    local = private / NAME
    if there is not None and local.is_file() and local.stat().st_size:
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


def snapshot_of(output: str | os.PathLike[str]) -> Snapshot:
    """Read the counts in the ledger of a place from outside."""
    with newest_ledger(output) as (folder, live):
        return read_snapshot(folder, live)
