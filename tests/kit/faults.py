"""Jobs and faults to test with: tasks that die, hang or raise on demand, and gates to hold them.

Everything here is picklable and needs no clock: a gate is a pair of files, and a task that waits at
one signals that first.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from forebay.pools.events import Answer, Assignment


def hang() -> NoReturn:
    """Never return; a Python loop, so that signals other than SIGKILL are handled."""
    while True:
        time.sleep(3600)


def hang_deaf() -> NoReturn:
    """Never return, and ignore every signal that can be ignored."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    hang()


def segfault() -> None:
    """Crash in native code."""
    ctypes.string_at(0)


def kill_self(number: int = signal.SIGKILL) -> None:
    """Die by a signal."""
    os.kill(os.getpid(), number)
    hang()  # until it arrives


FAULTS = {
    "raise": lambda: (_ for _ in ()).throw(ValueError("told to raise")),
    "sys.exit": lambda: sys.exit(3),
    "os._exit": lambda: os._exit(3),
    "SIGSEGV": segfault,
    "SIGKILL": kill_self,
    "hang": hang,
    "hang, deaf": hang_deaf,
}


class Gate:
    """A gate at which a task, in any process, waits until it is opened.

    Args:
        folder: An existing folder to keep the gate in.
        name: Distinguishes gates in the same folder.
    """

    def __init__(self, folder: Path, name: str = "gate") -> None:
        """Close the gate."""
        self._reached = folder / f"{name}.reached"
        self._opened = folder / f"{name}.opened"
        for path in (self._reached, self._opened):
            with suppress(FileExistsError):  # another process may make it just now
                os.mkfifo(path)

    def wait(self) -> None:
        """Signal that the gate was reached, then wait until it is opened."""
        self._reached.write_text("here\n")
        gate = os.open(self._opened, os.O_RDONLY | os.O_NONBLOCK)
        try:
            # With a limit: a signal that arrives just before a wait does not interrupt it.
            waiting = select.poll()
            waiting.register(gate, select.POLLIN)
            while not waiting.poll(1000):
                if not self._opened.exists():  # the tests were killed, and their folder removed
                    raise RuntimeError(f"the gate {self._opened} was removed")
            os.read(gate, 64)
        finally:
            os.close(gate)

    def wait_reached(self) -> None:
        """Wait until a task has reached the gate."""
        self._reached.read_text()

    def open(self) -> None:
        """Let one waiting task through."""
        self._opened.write_text("go\n")


class FaultyJob:
    """A job whose payloads select a fault.

    The name of a fault (`FAULTS`) triggers it; `("once", path, fault)` triggers it only the first
    time, and leaves a file at `path`; `("gate", gate)` waits at a gate; any other payload is
    returned.

    Args:
        broken: A fault to trigger in `open`.
        closed: A file to create in `close`.
    """

    keeps_tasks = False

    def __init__(self, broken: str | None = None, closed: Path | None = None) -> None:
        self._broken = broken
        self._closed = closed

    def open(self, incarnation: int, worker_id: int) -> None:
        """Trigger the fault `broken`, if any."""
        if self._broken is not None:
            FAULTS[self._broken]()

    def run(self, assignment: Assignment) -> Answer:
        """Trigger the fault of the payload, or return the payload."""
        payload: Any = assignment.payload
        if isinstance(payload, str) and payload in FAULTS:
            FAULTS[payload]()
        if isinstance(payload, tuple) and payload[0] == "once" and not os.path.exists(payload[1]):
            Path(payload[1]).touch()
            FAULTS[payload[2]]()
        if isinstance(payload, tuple) and payload[0] == "gate":
            payload[1].wait()
        return Answer(payload, 1)

    def close(self) -> None:
        """Create the file `closed`, if any."""
        if self._closed is not None:
            self._closed.touch()


def meet_fault(source: Path, out: Any) -> dict[str, str]:
    """Meet the fault that the input names; leave a partial file behind if it kills."""
    fault = source.read_text().strip()
    out.file(source.name).write_text("torn")
    if fault in FAULTS:
        FAULTS[fault]()
    out.file(source.name).write_text(f"whole {fault}")
    return {"fault": fault}
