"""Lives are lived here, each in a process of its own.

    host ── forks ──> guard ── forks ──> life ── forks, starts ──> whatever it needs
                        │ adopts orphans: whatever is left when the life has ended descends from it

The guard ends a life that hangs after seconds, with the stacks of all its threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

from . import left
from .life import Domain, Life, Verdict, WrongError

# What is left of a life ends within this time, on a loaded machine.
_ENDING_S = 20.0
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER, from <linux/prctl.h>
_MOST_OUTPUT = 20_000


def live_all(
    domain: Domain, lives: Iterable[Life], jobs: int = 1, patience: float = 1.0
) -> Iterator[Verdict]:
    """Live lives, several at once; yield how each ended, as they end.

    Args:
        jobs: How many at once.
        patience: What a life's limit of time is multiplied by, for a machine that is busy.
    """
    domain.prepare()
    under_way: dict[int, tuple[int, Life, float]] = {}  # by the read end of its guard's pipe
    waiting = iter(lives)
    is_over = False
    try:
        while under_way or not is_over:
            while not is_over and len(under_way) < jobs:
                life = next(waiting, None)
                if life is None:
                    is_over = True
                    break
                domain.prepare_for(life)
                end, guard = _start_guard(domain, life, patience)
                under_way[end] = (guard, life, time.monotonic())
            for end in select.select(list(under_way), [], [])[0] if under_way else ():
                guard, life, began = under_way.pop(end)
                with os.fdopen(end) as pipe:
                    said = pipe.read()
                os.waitpid(guard, 0)
                answer = json.loads(said) if said else {"kind": "died", "problem": "no guard"}
                yield Verdict(life, **answer, seconds=time.monotonic() - began)
    finally:
        for guard, _, _ in under_way.values():
            for process in (*left.descendants(guard), guard):
                _kill(process)
            os.waitpid(guard, 0)


def live_one(domain: Domain, life: Life, patience: float = 1.0) -> Verdict:
    """Live one life; return how it ended."""
    return next(live_all(domain, [life], patience=patience))


def _start_guard(domain: Domain, life: Life, patience: float) -> tuple[int, int]:
    """Fork a guard; return where it answers, and its process ID."""
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    guard = os.fork()
    if guard:
        os.close(write_end)
        return read_end, guard
    status = 1
    try:
        os.close(read_end)
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        answer = _guarded(domain, life, patience)
        with os.fdopen(write_end, "w") as pipe:
            pipe.write(json.dumps(answer))
        status = 0
    except BaseException:  # noqa: BLE001 - this process ends here
        traceback.print_exc()
    finally:
        os._exit(status)


def _guarded(domain: Domain, life: Life, patience: float) -> dict[str, str]:
    folder = Path(tempfile.mkdtemp(prefix="life-"))
    work, output, history, verdict = (
        folder / name for name in ("work", "output", "history", "verdict")
    )
    work.mkdir()
    child = os.fork()
    if not child:
        _live(domain, life, work, output, history, verdict)
    limit_s = patience * getattr(domain, "limit_s", lambda _: domain.LIMIT_S)(life.setup)
    is_over = _await(child, limit_s)
    answer = {"kind": "right", "problem": ""}
    if not is_over:
        _print_stacks(child)
        answer = {"kind": "hang", "problem": f"no end in {limit_s:.0f} s"}
    elif verdict.exists():
        answer = json.loads(verdict.read_text())
    else:
        answer = {"kind": "died", "problem": "its process died"}
    alive = _await_none() if is_over else []
    if alive and answer["kind"] == "right":
        names = "; ".join(f"{process} {left.command(process)}" for process in alive)
        answer = {"kind": "left", "problem": f"processes outlive it: {names}"}
    while rest := left.descendants(os.getpid()):
        for process in rest:
            _kill(process)
        _reap()
    for name, file in (("history", history), ("output", output)):
        text = file.read_text(errors="replace") if file.exists() else ""
        answer[name] = text[-_MOST_OUTPUT:]
    shutil.rmtree(folder, ignore_errors=True)
    return answer


def _live(
    domain: Domain, life: Life, work: Path, output: Path, history: Path, verdict: Path
) -> None:
    """Live in this process, which ends."""
    os.setsid()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.chdir(work)
    answer = {"kind": "right", "problem": ""}
    try:
        with history.open("a", buffering=1) as file:
            domain.live(life, work, lambda sentence: print(sentence, file=file) or None)
    except WrongError as error:
        answer = {"kind": "wrong", "problem": str(error)}
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the life's end
        traceback.print_exc()
        answer = {"kind": "error", "problem": f"{type(error).__name__}: {error}"}
    finally:
        verdict.write_text(json.dumps(answer))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _await(child: int, limit_s: float) -> bool:
    """Wait for a child; return whether it ended in time. Orphans are reaped meanwhile."""
    watched = os.pidfd_open(child)
    try:
        ready = select.select([watched], [], [], limit_s)[0]
    finally:
        os.close(watched)
    return bool(ready)


def _await_none() -> list[int]:
    """Wait until nothing descends from this process; return what still does after a while."""
    end = time.monotonic() + _ENDING_S
    while True:
        _reap()
        alive = left.descendants(os.getpid())
        if not alive or time.monotonic() > end:
            return alive
        time.sleep(0.01)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _print_stacks(child: int) -> None:
    """Have the life's processes print their stacks; those that do not know how to are killed."""
    for process in (child, *left.descendants(child)):
        try:
            os.kill(process, signal.SIGCONT)
            os.kill(process, signal.SIGUSR1)
        except ProcessLookupError:
            continue
    time.sleep(0.5)


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
