"""The cost of a crash: kill -9 for a worker, and for the driver, a third of the way through.

Each input writes a line when it begins, which shows the inputs that ran twice. If the first call
did not finish the work, the same call is made again, as a user would.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.call import Call
from benchmarks.measure import Ground, outputs
from benchmarks.peers import NAMES
from benchmarks.preprocess import BURN_S, Rows, show
from benchmarks.work import LOG, SPINS, spins_for

PEERS = ("forebay", "pool", "executor", "joblib", "dataloader", "litdata")
# Counted from the kill. The remaining work takes 4 s; a run that takes longer than this hangs.
LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Line:
    """An input's start: when, by which process, which input."""

    at: float
    pid: int
    name: str


def lines_of(log: Path) -> list[Line]:
    """Return the lines that traced inputs have written so far."""
    found = []
    for line in log.read_text().splitlines():
        at, pid, name = line.split()
        found.append(Line(float(at), int(pid), name))
    return found


def crash(ground: Ground, quick: bool) -> None:
    """Print the table."""
    os.environ[SPINS] = str(spins_for(BURN_S))
    count = 400 if quick else 1000
    rows = Rows()
    for peer in PEERS:
        for victim in ("worker", "driver"):
            row = _Crash(ground, peer, count).suffer(victim)
            rows.append((NAMES[peer], victim, *row))
    print(f"kill -9 a third of the way through {count:,} inputs of 5 ms; 2 workers")
    columns = ("", "killed", "then", "the same call again", "ran twice", "back after", "complete")
    show(columns, rows)
    print(
        "ran twice: executions beyond one an input, in both calls together. back after: from the\n"
        "kill to the first execution, by a new worker, of an input that had not run before\n"
        "the kill. The same call again is made at once, or after a hang was waited out\n"
        f"({LIMIT_S:g} s), and its start-up and imports are in. leaves: processes that are still\n"
        "there when the same call again is over."
    )


class _Crash:
    """One run of a peer that is interrupted, and the call that continues it."""

    def __init__(self, ground: Ground, peer: str, count: int) -> None:
        self._ground, self._peer, self._count = ground, peer, count
        self._folder = ground.fresh()
        self._log = ground.root / f"{self._folder.name}.log"
        self._log.touch()

    def suffer(self, victim: str) -> tuple[str, ...]:
        """Run, kill and continue; return the cells of the table."""
        with self._call() as call:
            while len(self._lines()) < self._count // 3:
                if call.process.poll() is not None:
                    words = call.process.communicate()[1].strip().splitlines() or [""]
                    failed = call.process.returncode
                    return (words[-1][:60] if failed else "not installed",)
                # Polled, because nothing signals that a line was written to the file.
                time.sleep(0.01)
            killed = time.time()
            before = self._lines()
            again, called = "not needed", killed
            if victim == "worker":
                os.kill(before[-1].pid, signal.SIGKILL)
                happened = self._outcome(call)
                if happened != "goes on":
                    call.end()  # a user would have to end a call that hangs
                    called = time.time()
                    again = self._again()
            else:
                call.process.kill()
                call.process.wait()
                again = self._again()
                left = len(call.left())
                happened = f"leaves {left} processes" if left else "leaves none"
        lines = self._lines()
        seen = {line.name for line in before}
        old = {line.pid for line in before}
        back = [
            line.at - killed
            for line in lines
            if line.at > called and line.pid not in old and line.name not in seen
        ]
        missing = self._count - outputs(self._folder)
        return (
            happened,
            again,
            f"{len(lines) - len({line.name for line in lines})}",
            f"{min(back):.2f} s" if back else "never",
            f"{missing} missing" if missing else "yes",
        )

    def _call(self) -> Call:
        log = {LOG: str(self._log)}
        return self._ground.call(self._peer, "traced", self._count, self._folder, **log)

    def _lines(self) -> list[Line]:
        return lines_of(self._log)

    def _outcome(self, call: Call) -> str:
        """Wait for the end of a run that lost a worker, and say how it ended."""
        try:
            _, stderr = call.process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return "hangs"
        missing = self._count - outputs(self._folder)
        if call.process.returncode:
            errors = re.findall(r"^(?:\w+\.)*(\w+): ", stderr, re.MULTILINE)
            return f"raises {errors[-1]}" if errors else "fails"
        return f"returns, {missing} missing" if missing else "goes on"

    def _again(self) -> str:
        with self._call() as call:
            try:
                call.process.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                return "hangs"
            return "fails" if call.process.returncode else "ends"
