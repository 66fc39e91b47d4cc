"""Processes that iterate a loader, or train, and send what came; one that hangs is ended."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from resume_check.comparison import LoaderRun, ReceivedBatch, count_of_batches
from resume_check.digests import digested
from resume_check.words import message_of

# How long to wait at most before it is looked whether the process is alive.
_LONGEST_WAIT_S = 1.0
# prctl's: which signal a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1

# How long a process that has sent all it had may take to end by itself.
_ENDING_S = 10.0
# How an error begins that says which method a loader does not have.
LACKING = "the loader has no "


@dataclass(frozen=True, slots=True)
class LoaderJob:
    """What one process does.

    Attributes:
        num_workers: What `make_loader` is called with; None for nothing.
        state: The pickled state to load.
        stop_after: After how many batches the state is taken; None for never.
        kill: Whether it is killed then.
        epoch: Which epoch it begins in.
        number: Which batch of that epoch is its first.
        is_boundary: Whether what is left of the epoch before that one may come first, empty.
        most: How many batches it sends at most.
    """

    epochs: int
    num_workers: int | None
    state: bytes | None = None
    stop_after: int | None = None
    kill: bool = False
    epoch: int = 0
    number: int = 0
    is_boundary: bool = False
    most: int | None = None


# ---- the check's process -------------------------------------------------------------------------


def run_apart(make_loader: Callable[..., Any], job: LoaderJob, timeout: float) -> LoaderRun:
    """Run a job in a process of its own, and return what it sent; the process is gone then."""
    return received_from(partial(_run, make_loader, job), timeout, kill=job.kill)


def received_from(
    target: Callable[[Connection], None], timeout: float, *, kill: bool = False
) -> LoaderRun:
    """Call a function in a process of its own, and return what it sent; the process is gone then.

    Args:
        target: It sends pairs, pickled: "batch", "state", or at last "end", and a value.
        timeout: Seconds without one, after which the process counts as hanging.
        kill: Whether it is killed after its state.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_begin, args=(target, ours, theirs, os.getpid()))
    found = LoaderRun()
    try:
        with warnings.catch_warnings():  # of threads in a process that forks
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        with suppress(OSError):  # it has ended
            ours.send_bytes(b"begin")
        while message := _next_message(process, ours, timeout, found):
            kind, value = message
            if kind == "batch":
                found.batches.append(value)
            elif kind == "state":
                found.state = value
            else:
                found.error = value
            if kind == "end" or (kind == "state" and kill):
                break
        if not found.error and not kill:
            process.join(_ENDING_S)
    finally:
        try:
            _end(process)
        finally:  # not before: a closed pipe would let it end by itself
            ours.close()
            theirs.close()
    return found


def _next_message(
    process: Any, connection: Connection, timeout: float, found: LoaderRun
) -> tuple[str, Any] | None:
    """Return what a process sends next; None, with the error noted, if nothing comes."""
    until = time.monotonic() + timeout
    while not connection.poll(max(min(until - time.monotonic(), _LONGEST_WAIT_S), 0)):
        if not process.is_alive() and not connection.poll(0):
            _note_end(process, found)  # its children may hold the pipe open
            return None
        if time.monotonic() >= until:
            after = count_of_batches(len(found.batches))
            found.error = f"it hangs: nothing came for {timeout:g} s after {after}"
            return None
    try:
        message: tuple[str, Any] = pickle.loads(connection.recv_bytes())  # noqa: S301 - our own
    except (EOFError, OSError):
        _note_end(process, found)
        return None
    return message


def _note_end(process: Any, found: LoaderRun) -> None:
    process.join(_LONGEST_WAIT_S)
    code = process.exitcode or 0
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    found.error = f"its process {how} after {count_of_batches(len(found.batches))}"


def _end(process: Any) -> None:
    """Kill a process and the children in its group, and wait for it."""
    if process.pid is None:
        return
    with suppress(OSError):  # the group is empty
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
    process.close()


# ---- a run's process -----------------------------------------------------------------------------


def _begin(
    target: Callable[[Connection], None], theirs: Connection, ours: Connection, parent: int
) -> None:
    os.setpgid(0, 0)  # so that a kill includes the loader's workers, and Ctrl-C does not
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    theirs.close()
    try:
        ours.recv_bytes()
    except EOFError:  # Ctrl-C came before the other process knew of this one
        return
    target(ours)


def send(connection: Connection, kind: str, value: Any) -> None:
    """Send to the process that waits in `received_from`."""
    connection.send_bytes(pickle.dumps((kind, value)))


def _run(make_loader: Callable[..., Any], job: LoaderJob, ours: Connection) -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the threads that a forked process has inherited do not run
    doing = ["make_loader()"]
    try:
        for kind, value in _messages(make_loader, job, doing):
            send(ours, kind, value)
            if kind == "state" and job.kill:
                ours.recv_bytes()  # nothing comes, except the end
        send(ours, "end", "")
    except BaseException as error:  # noqa: BLE001 - the user's loader may raise anything
        with suppress(OSError):  # nobody listens
            send(ours, "end", f"{doing[0]} raised {type(error).__name__}: {message_of(error)}")


def _messages(
    make_loader: Callable[..., Any], job: LoaderJob, doing: list[str]
) -> Iterator[tuple[str, Any]]:
    """Yield the batches of a run, and its state where that is wanted.

    Args:
        doing: Its item says what is being done, for an error.
    """
    given = {} if job.num_workers is None else {"num_workers": job.num_workers}
    loader = make_loader(**given)
    for name in ("__iter__", "state_dict", "load_state_dict"):
        if not callable(getattr(loader, name, None)):
            yield "end", f"{LACKING}{name}(): {type(loader).__qualname__}"
            return
    if job.state is not None:
        doing[0] = "load_state_dict()"
        loader.load_state_dict(pickle.loads(job.state))  # noqa: S301 - of a process before this
    epoch, number, count, is_boundary = job.epoch, job.number, 0, job.is_boundary
    while epoch < job.epochs:
        before = count
        doing[0] = f"epoch {epoch}, batch {number}"
        for batch in loader:
            yield "batch", ReceivedBatch(epoch, number, digested(batch))
            count, number = count + 1, number + 1
            if count == job.stop_after:
                doing[0] = "state_dict()"
                yield "state", pickle.dumps(loader.state_dict())
                return
            if count == job.most:
                return
            doing[0] = f"epoch {epoch}, batch {number}"
        epoch += count > before or not is_boundary
        number, is_boundary = 0, False
