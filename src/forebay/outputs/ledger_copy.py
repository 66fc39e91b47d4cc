"""The ledger of a bucket: used on a local disk, with a copy in the bucket for other machines.

    <url>/.forebay/ledger.sqlite   a complete ledger, some seconds behind the local one
    <url>/.forebay/run.json        which run is active, since when, and its last heartbeat

A copy goes up before the first input is worked on, now and then during commits, before outputs
are removed, and when the run ends. Each has a higher `generation`; a run begins a new million
of them, so if two machines continued from the same copy, the later run has the higher numbers.
`lineage` is a random string, made when the bucket was first used. A local ledger of another
lineage is ignored: the bucket was emptied, or it is a bucket of the same name in another store.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from forebay.base.file_stores import Store
from forebay.base.output_names import PRIVATE
from forebay.base.process import LONGEST_WAIT_S, join_thread, wait_until
from forebay.errors import BusyError, OutputError
from forebay.ledger.database import DAMAGES
from forebay.ledger.ledger import Ledger
from forebay.ledger.lock import Holder

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
            join_thread(self._thread)
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
