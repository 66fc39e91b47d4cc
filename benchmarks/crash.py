"""What a crash costs: kill -9 for a worker, and for the driver, a third of the way through.

Each input writes a line when it begins, so that what ran twice shows. Afterwards a user makes the
same call again, if the first did not finish the work; so do we.
"""

from __future__ import annotations

import collections
import os
import select
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import Ground, end, outputs, session, start
from benchmarks.preprocess import BURN_S, _name, show
from benchmarks.work import LOG, SPINS, spins_for

PEERS = ("forebay", "pool", "executor", "joblib", "dataloader", "litdata")
# From the kill. The work that is left takes 4 s; who has not ended by then has hung.
LIMIT_S = 20.0
# How long orphans may take to notice that their driver is gone.
ORPHANS_S = 2.0


@dataclass(frozen=True, slots=True)
class Line:
    """An input's start: when, by which process, which input."""

    at: float
    pid: int
    name: str


def crash(ground: Ground, quick: bool) -> None:
    """Print the table."""
    os.environ[SPINS] = str(spins_for(BURN_S))
    count = 400 if quick else 1000
    rows = []
    for peer in PEERS:
        for victim in ("worker", "driver"):
            row = _Crash(ground, peer, count).suffer(victim)
            rows.append((_name(peer), victim, *row))
    print(f"kill -9 a third of the way through {count:,} inputs of 5 ms; 2 workers")
    columns = ("", "killed", "then", "the same call again", "ran twice", "back after", "complete")
    show(columns, rows)
    print(
        "ran twice: executions beyond one an input, over both calls. back after: from the kill to\n"
        "the first execution of an input that had not run yet, by a worker that started after the\n"
        "kill; the same call again is made at once, or when a hang has been waited out\n"
        f"({LIMIT_S:g} s), and its start-up and imports are in."
    )


class _Crash:
    """One peer's run that is interrupted, and what follows."""

    def __init__(self, ground: Ground, peer: str, count: int) -> None:
        self._count = count
        self._folder = ground.fresh()
        self._log = ground.root / f"{self._folder.name}.log"
        self._log.touch()
        self._command = ground.command(peer, "traced", count, self._folder)

    def suffer(self, victim: str) -> tuple[str, ...]:
        """Run, kill, go on; return the cells of the table."""
        process = self._start()
        try:
            while len(self._lines()) < self._count // 3:
                if process.poll() is not None:
                    words = process.communicate()[1].strip().splitlines() or [""]
                    return ("not installed" if not process.returncode else words[-1][:60],)
                # This is the one place that polls: the log is a file, and nobody announces it.
                select.select([], [], [], 0.01)
            killed = time.time()
            before = self._lines()
            if victim == "worker":
                os.kill(before[-1].pid, signal.SIGKILL)
                happened = self._outcome(process)
            else:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                happened = self._orphans(process)
        finally:
            end(process)
        missing = self._count - outputs(self._folder)
        again = "not needed"
        if victim == "driver" or missing or happened != "goes on":
            again = self._again()
        lines = self._lines()
        twice = sum(collections.Counter(line.name for line in lines).values()) - len(
            {line.name for line in lines}
        )
        seen = {line.name for line in before}
        old = {line.pid for line in before}
        back = [
            line.at - killed
            for line in lines
            if line.at > killed and line.pid not in old and line.name not in seen
        ]
        whole = outputs(self._folder)
        return (
            happened,
            again,
            f"{twice}",
            f"{min(back):.2f} s" if back else "never",
            "yes" if whole == self._count else f"{self._count - whole} missing",
        )

    def _start(self) -> subprocess.Popen[str]:
        return start(self._command, **{LOG: str(self._log)})

    def _lines(self) -> list[Line]:
        found = []
        for line in self._log.read_text().splitlines():
            at, pid, name = line.split()
            found.append(Line(float(at), int(pid), name))
        return found

    def _outcome(self, process: subprocess.Popen[str]) -> str:
        """Wait for the end of a run that lost a worker, and say how it ended."""
        try:
            _, stderr = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return "hangs"
        missing = self._count - outputs(self._folder)
        if process.returncode:
            last = [line for line in stderr.splitlines() if line and not line[0].isspace()]
            error = last[-1].partition(":")[0].rpartition(".")[2] if last else "fails"
            return f"raises {error}"
        return f"returns, {missing} missing" if missing else "goes on"

    def _orphans(self, process: subprocess.Popen[str]) -> str:
        """Say how many processes outlive their driver."""
        until = time.monotonic() + ORPHANS_S
        while (left := session(process.pid)) and time.monotonic() < until:
            select.select([], [], [], 0.01)
        return f"leaves {len(left)} processes" if left else "leaves none"

    def _again(self) -> str:
        process = self._start()
        try:
            process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return "hangs"
        finally:
            end(process)
        return "fails" if process.returncode else "ends"
