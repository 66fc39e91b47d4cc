"""The processes of a training program: its lives, one after the other, and the ranks of each."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.call import Call
from benchmarks.exactness.checker import Seen
from benchmarks.exactness.histories import Life
from benchmarks.exactness.record import ENDED_BY, Task

# A life hangs if its processes take less than this of processor time while so many seconds pass,
# or if it has not ended in the longest time. So one of a busy machine does not.
IDLE_S, IDLE_CPU_S, LONGEST_S = 40.0, 0.5, 1200.0
# How long the other ranks may take to end after one that failed.
GRACE_S = 10.0
_TICKS = os.sysconf("SC_CLK_TCK")


class Server:
    """A process that has imported a library and forks one process for each rank of a life."""

    def __init__(self, driver: str) -> None:
        self._call = Call(
            "benchmarks.exactness.life", driver, "serve", talks=True,
            OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1",
        )  # fmt: skip
        self._pid = self._call.process.pid

    def close(self) -> None:
        """End it and all processes that are left."""
        self._call.end()

    def start(self, rank: int, task: Task, settings: dict[str, str]) -> int:
        """Start a rank, and return its process."""
        return int(self._ask({"rank": rank, "task": asdict(task), "settings": settings}))

    def status(self, pid: int) -> int:
        """Return the exit status of a process that has ended."""
        return int(self._ask({"wait": pid}))

    def left(self) -> list[int]:
        """Return the processes of the current life."""
        return [pid for pid in self._call.left() if pid != self._pid]

    def kill(self) -> None:
        """End all processes of the current life."""
        while left := [pid for pid in self.left() if not ended(pid)]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def _ask(self, order: dict[str, Any]) -> str:
        ends = self._call.process
        assert ends.stdin is not None and ends.stdout is not None
        ends.stdin.write(json.dumps(order) + "\n")
        ends.stdin.flush()
        while line := ends.stdout.readline():
            if line.startswith("answer "):
                return line.split()[1]
        raise RuntimeError(f"the process of {ends.args} ended: {self._call.printed()[1]}")


def ended(pid: int) -> bool:
    """Return whether a process has ended, whether it was waited for or not."""
    try:
        return _fields(pid)[0] == "Z"
    except OSError:
        return True


def _failed(pid: int) -> bool:
    """Return whether a process has ended with an error, before it is waited for."""
    with contextlib.suppress(OSError):
        state, *_, status = _fields(pid)
        return state == "Z" and status != "0"
    return False


def _fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()


def _processor_s(pids: list[int]) -> float:
    """Return the processor time of processes and of those that they waited for."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += sum(map(int, _fields(pid)[11:15]))
    return total / _TICKS


class Lives:
    """The lives of one loader's trainings; those that histories share are run once."""

    def __init__(self, driver: str, scratch: Path) -> None:
        self._server, self._scratch = Server(driver), scratch
        self._records: dict[tuple[str, tuple[Life, ...]], tuple[Path, Seen]] = {}

    def __enter__(self) -> Lives:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def seen(self, kind: str, lives: tuple[Life, ...]) -> Seen:
        """Return what the last of these lives noted."""
        return self._run(kind, lives)[1]

    def _run(self, kind: str, lives: tuple[Life, ...]) -> tuple[Path, Seen]:
        if (kind, lives) not in self._records:
            life, record = lives[-1], Path(tempfile.mkdtemp(dir=self._scratch))
            states: list[str] = []
            if life.begin is not None:
                before, _ = self._run(kind, lives[:-1])
                states = [
                    str(before / f"state-{life.begin}.{rank}") for rank in range(lives[-2].ranks)
                ]
            task = Task(
                kind, str(self._scratch), str(record), life.workers, 0, life.ranks,
                life.batch // life.ranks, life.epochs, tuple(states), life.last, life.fault,
            )  # fmt: skip
            seen = _live(self._server, task)
            if seen.hangs:  # once more: the machine may have been busy
                shutil.rmtree(record)
                record.mkdir()
                seen = _live(self._server, task)
            self._records[kind, lives] = record, seen
        return self._records[kind, lives]


def _live(server: Server, task: Task) -> Seen:
    """Run all ranks of a life, and return what they noted."""
    # Short, as paths of sockets have to be.
    temporary = tempfile.mkdtemp(prefix="life-")
    settings = {"TMPDIR": temporary}
    if task.ranks > 1:
        settings |= {
            "WORLD_SIZE": str(task.ranks),
            "LOCAL_WORLD_SIZE": str(task.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
        }
    pids = []
    for rank in range(task.ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if task.ranks > 1 else {}
        pids.append(server.start(rank, task, settings | own))
    hangs = not _wait(server, pids)
    server.kill()
    errors = []
    for rank, pid in enumerate(pids):
        status = server.status(pid)
        if status and not hangs:
            words = _last_words((Path(task.record) / f"output-{rank}").read_text())
            errors.append(words if status > 0 else f"ended by signal {-status}: {words}")
    shutil.rmtree(temporary, ignore_errors=True)
    # That of a rank that was killed after another had failed says nothing.
    errors.sort(key=lambda error: error.startswith("ended by signal"))
    return _read(Path(task.record), task.ranks, errors[0] if errors else "", hangs)


def _last_words(printed: str) -> str:
    """Return the error that a rank says it ended by, or the last line: others print there, too."""
    lines = printed.strip().splitlines() or ["no word"]
    errors = [line.removeprefix(ENDED_BY) for line in lines if line.startswith(ENDED_BY)]
    return errors[-1] if errors else lines[-1]


def _wait(server: Server, pids: list[int]) -> bool:
    """Return whether the ranks of a life end."""
    began = checked = time.monotonic()
    spent, failed = _processor_s(server.left()), None
    while not all(map(ended, pids)):
        time.sleep(0.05)
        now = time.monotonic()
        failed = failed or (now if any(map(_failed, pids)) else None)
        if failed and now - failed > GRACE_S:
            return True
        if now - began > LONGEST_S:
            return False
        if now - checked > IDLE_S:
            used, checked = _processor_s(server.left()), now
            if used - spent < IDLE_CPU_S:
                return False
            spent = used
    return True


def _read(record: Path, ranks: int, error: str, hangs: bool) -> Seen:
    ids, bits, handlers, end = [], [], set(), ""
    for rank in range(ranks):
        path = record / f"rank-{rank}"
        lines = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        )
        batches = [line for line in lines if "ids" in line]
        ids.append(tuple(tuple(line["ids"]) for line in batches))
        bits.append(tuple(tuple(map(tuple, line["bits"])) for line in batches))
        handlers |= {line["handler"] for line in lines if "handler" in line}
        end = next((line["end"] for line in lines if "end" in line), end)
    return Seen(tuple(ids), tuple(bits), error, hangs, len(handlers), end)


def _free_port() -> int:
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return int(each.getsockname()[1])
