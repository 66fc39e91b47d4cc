"""The loop of every worker: take a task, run it, answer immediately.

Answers are never delayed: the driver attributes a death to the first unanswered task, so each
answer must be sent before the next task begins.
"""

from __future__ import annotations

import fcntl
import io
import os
import pickle
import queue
import select
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from forebay.errors import cut_own_frames, message_of, traceback_of
from forebay.failures import Failure
from forebay.pools.events import (
    GIVE_BACK_S,
    Assignment,
    Event,
    Job,
    Refusal,
    TaskFailed,
    TaskFinished,
    TasksReturned,
    WorkerDied,
    WorkerStarted,
)

# Larger exceptions are not sent: their attributes may be whole data sets.
MAX_EXCEPTION_BYTES = 1 << 20


def perform(incarnation: int, job: Job, assignment: Assignment) -> TaskFinished | TaskFailed:
    """Run one task and return the event that reports the outcome."""
    task, attempt, _ = assignment
    process, began = os.getpid(), time.perf_counter()
    try:
        result, nbytes = job.run(assignment)
    except Refusal as error:
        failure, final = failure_of(error.__cause__ or error, error.kind), True
    except BaseException as error:  # noqa: BLE001 - SystemExit too: a task must not end its worker
        if os.getpid() != process:
            end_fork(error)
        failure, final = failure_of(error), False
    else:
        if os.getpid() != process:
            end_fork()
        fields = incarnation, task, attempt, result, nbytes, time.perf_counter() - began
        return tuple.__new__(TaskFinished, fields)  # calls no Python code
    return TaskFailed(incarnation, task, attempt, failure, time.perf_counter() - began, final)


def perform_all(
    incarnation: int, job: Any, assignments: Sequence[Assignment]
) -> list[TaskFinished | TaskFailed]:
    """Run tasks by one call of the user's function; where it fails, by one for each half of them.

    Each has its share of the call's time. A task alone fails with its own error.
    """
    if len(assignments) == 1:
        return [perform(incarnation, job, assignments[0])]
    began = time.perf_counter()
    try:
        answers = job.run_all(assignments)
    except (Exception, SystemExit):  # noqa: BLE001 - whatever the user's code raises
        middle = len(assignments) // 2
        first = perform_all(incarnation, job, assignments[:middle])
        return first + perform_all(incarnation, job, assignments[middle:])
    seconds = (time.perf_counter() - began) / len(assignments)
    return [
        TaskFinished(incarnation, task, attempt, result, nbytes, seconds)
        for (task, attempt, _), (result, nbytes) in zip(assignments, answers, strict=True)
    ]


def end_fork(error: BaseException | None = None) -> NoReturn:
    """End this process, which user code forked and then left, as a program ends.

    The process that it was forked from goes on: it alone answers, and has the outputs.
    """
    code: Any = 0
    if isinstance(error, SystemExit):
        code = error.code or 0
    elif error is not None:
        code = traceback_of(error, error.__traceback__)
    if not isinstance(code, int):
        with suppress(AttributeError, OSError, ValueError):  # the stream is None, or closed
            sys.stderr.write(f"{code}\n")
        code = 1
    flush_streams()
    os._exit(code & 0xFF)


def failure_of(error: BaseException, kind: str = "exception") -> Failure:
    """Describe an exception, without the frames of forebay that led to it."""
    cut_own_frames(error)
    text = traceback_of(error, error.__traceback__)
    return Failure(kind, type(error).__name__, message_of(error), text, exception=error)


def as_sent(event: Event) -> Any:
    """Return an event in the form in which it travels between processes.

    An answer is a plain tuple: pickle calls Python code for each named one.
    """
    return tuple(event) if type(event) is TaskFinished else event


def as_received(sent: Any) -> Any:
    """Return the event that `as_sent` was called with."""
    # Calls no Python code, as the class would.
    return tuple.__new__(TaskFinished, sent) if type(sent) is tuple else sent


# How `faulthandler` begins the stack of the thread that it was called in.
STACK_BEGINS = "Current thread (most recent call first):\n"


def without_our_frames(stacks: str) -> str:
    """Remove the frames outside the job from stacks of `faulthandler`."""
    kept, ours = [], False
    for line in stacks.splitlines(keepends=True):
        ours = line.startswith("  ") and (ours or "/pools/worker.py" in line)
        if not ours:
            kept.append(line)
    return "".join(kept)


class TaskQueue(queue.SimpleQueue[Sequence[Assignment] | None]):
    """Tasks from another thread; None is their end."""

    def receive(self, wait: bool) -> Sequence[Assignment] | None:
        """Return tasks, as the `receive` of `serve` does."""
        try:
            return self.get(block=wait)
        except queue.Empty:
            return ()


def serve(
    incarnation: int,
    worker_id: int,
    job: Job,
    receive: Callable[[bool], Sequence[Assignment] | None],
    report: Callable[[Event], None],
    has_ended: Callable[[], bool] = bool,
) -> None:
    """Run tasks until `receive` returns None.

    Args:
        receive: Returns tasks, or None at the end. If called with True it waits for a task; if
            called with False it returns at once, with an empty sequence if there is none.
        has_ended: Returns whether the tasks that are left are not to be begun.
    """
    try:
        job.open(incarnation, worker_id)
    except Exception as error:  # noqa: BLE001 - whatever setting up user code raises
        report(WorkerDied(incarnation, failure_of(error)))
        return
    report(WorkerStarted(incarnation))
    if begin := getattr(job, "begin", None):
        receive = _begun_ahead(receive, begin)
    tasks, reporting = _SharedTasks(receive, has_ended), threading.Lock()

    most = getattr(job, "batch_size", 1)

    def run(job: Job) -> None:
        while assignments := tasks.take(most):
            seconds = 0.0
            for event in perform_all(incarnation, job, assignments):
                with reporting:
                    report(event)
                seconds += event.seconds
            # An exception in it may hold the caller's frames, and with these the pool.
            del event, assignments
            if seconds > GIVE_BACK_S and not job.keeps_tasks:
                returned = TasksReturned(incarnation, tasks.take_all())
                with reporting:
                    report(returned)
        job.close()

    # A job that runs several tasks at once has copies, one for each thread; the first is itself.
    threads = [
        threading.Thread(target=run, args=(each,), name=f"forebay-input-{number}", daemon=True)
        for number, each in enumerate((getattr(job, "copies", None) or [job])[1:], 1)
    ]
    for thread in threads:
        thread.start()
    run(job)
    for thread in threads:
        thread.join()


def _begun_ahead(
    receive: Callable[[bool], Sequence[Assignment] | None], begin: Callable[[Assignment], None]
) -> Callable[[bool], Sequence[Assignment] | None]:
    """Return a `receive` of tasks that a job begins as they arrive, while it runs those before."""
    arrived = TaskQueue()

    def read() -> None:
        received: Sequence[Assignment] | None = ()
        while received is not None:
            received = receive(True)
            for each in received or ():
                begin(each)
            arrived.put(received)

    threading.Thread(target=read, name="forebay-ahead", daemon=True).start()
    return arrived.receive


class _SharedTasks:
    """The tasks of a worker, for several threads; one that finds none waits for the next ones."""

    def __init__(
        self,
        receive: Callable[[bool], Sequence[Assignment] | None],
        has_ended: Callable[[], bool],
    ) -> None:
        self._receive, self._is_over = receive, has_ended
        self._held = deque[Assignment]()
        self._has_ended, self._lock = False, threading.Lock()

    def take(self, most: int = 1) -> list[Assignment]:
        """Return the next tasks, waiting for the first of them; [] at the end."""
        held = self._held
        with self._lock:
            while not held and not self._has_ended:
                self._add(self._receive(True))
            while len(held) < most and not self._has_ended:
                before = len(held)
                self._add(self._receive(False))
                if len(held) == before:  # no other has arrived
                    break
            if self._has_ended or self._is_over():
                return []
            return [held.popleft() for _ in range(min(most, len(held)))]

    def take_all(self) -> tuple[int, ...]:
        """Return the numbers of the tasks that none has begun, and that none is to begin."""
        if not self._lock.acquire(blocking=False):
            return ()  # another thread waits for a task, or takes them back
        try:
            while received := self._receive(False):
                self._add(received)
            if received is None:
                self._add(None)
            returned = tuple(each.task for each in self._held)
            self._held.clear()
            return returned
        finally:
            self._lock.release()

    def _add(self, received: Sequence[Assignment] | None) -> None:
        self._has_ended |= received is None
        self._held.extend(received or ())


class SealedError(Exception):
    """Carries an exception through processes that may not be able to import its class."""

    def __init__(self, body: bytes) -> None:
        super().__init__(body)
        self._body = body

    def opened(self) -> BaseException | None:
        """Return the exception; None if it cannot be unpickled."""
        try:
            found = pickle.loads(self._body)  # noqa: S301 - from our own worker
        except Exception:  # noqa: BLE001 - whatever the user's exception does when it is copied
            return None
        return found if isinstance(found, BaseException) else None


def portable(event: TaskFailed) -> TaskFailed:
    """Return the event in picklable form: without an exception that pickle would not preserve."""
    failure = event.failure
    assert failure.exception is not None, "it was raised in this process"
    if _pickled(failure.exception, pickle.Pickler) is not None:
        return event
    import cloudpickle

    body = _pickled(failure.exception, cloudpickle.Pickler)
    sealed = None if body is None else SealedError(body)
    return event._replace(failure=failure._replace(exception=sealed))


class _Bounded(io.BytesIO):
    """A file that takes at most `MAX_EXCEPTION_BYTES`."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > MAX_EXCEPTION_BYTES:
            raise OverflowError("the exception is too large to be sent")
        return super().write(data)


def _pickled(error: BaseException, pickler: Any) -> bytes | None:
    """Pickle an exception; return None if it is too large or does not survive a round trip."""
    file = _Bounded()
    try:
        pickler(file).dump(error)
        copy = pickle.loads(file.getvalue())  # noqa: S301 - what was just pickled
        is_same = type(copy) is type(error) and str(copy) == str(error)
    except Exception:  # noqa: BLE001 - whatever the user's exception does when it is copied
        return None
    return file.getvalue() if is_same else None


# ---- channel -------------------------------------------------------------------------------------
# Send objects through a pair of pipes: a length, then a pickle.
#
# Both ends are this program's own processes; nothing is read from a disk. No two workers share a
# channel, so a process that dies in the middle of a write only damages its own.
#
# Pipes, not a socket: a socket charges each small message some 800 bytes of its buffer and is full
# after 280 of them, long before the driver reads them; a pipe packs them.

_LENGTH = struct.Struct("!Q")
_CHUNK = 1 << 18
# Room for answers while the driver is busy; the maximum for an unprivileged process.
_PIPE_BYTES = 1 << 20


def roomy_pipe() -> tuple[int, int]:
    """Return the ends (to read, to write) of a pipe with a larger buffer, if the system allows."""
    ends = os.pipe()
    with suppress(OSError):  # the user's limit for pipes is reached; a smaller buffer works too
        fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return ends


class Channel:
    """One end: a pipe to read from and one to write to, both owned.

    `send` and `receive` block; `receive_nowait`, `queue` and `flush` never do.
    """

    def __init__(self, incoming: int, outgoing: int) -> None:
        self._incoming = incoming
        self.outgoing = outgoing  # the descriptor that is written to, for a selector
        self._received = bytearray()
        self._queued = bytearray()
        self._arrivals = select.poll()
        self._arrivals.register(incoming, select.POLLIN)
        self.ended = False

    def fileno(self) -> int:
        """Return the descriptor that is read from, for a selector."""
        return self._incoming

    def send(self, message: Any) -> None:
        """Send one object, waiting for room."""
        data = _framed(message)
        sent = os.write(self.outgoing, data)
        while sent < len(data):
            sent += os.write(self.outgoing, memoryview(data)[sent:])

    def receive(self) -> Any:
        """Return the next object, waiting for it."""
        while not (messages := self._parse(1)):
            data = os.read(self._incoming, _CHUNK)
            if not data:
                raise EOFError
            self._received += data
        return messages[0]

    def receive_nowait(self) -> list[Any]:
        """Return every whole object that has arrived; sets `ended` when no more can come."""
        while not self.ended and self._arrivals.poll(0):
            data = os.read(self._incoming, _CHUNK)
            self._received += data
            self.ended = not data
        return self._parse()

    def queue(self, message: Any) -> None:
        """Queue an object to be sent by `flush`."""
        self._queued += _framed(message)

    def flush(self) -> bool:
        """Send as much as the pipe accepts; return whether anything is left.

        The descriptor must be non-blocking (`os.set_blocking`).
        """
        while self._queued:
            try:
                sent = os.write(self.outgoing, self._queued)
            except BlockingIOError:
                return True
            except BrokenPipeError:  # the other end died; its death is reported by other means
                self._queued.clear()
                return False
            del self._queued[:sent]
        return False

    def close(self) -> None:
        """Close both pipes; the other end then reads an end of file."""
        os.close(self._incoming)
        os.close(self.outgoing)

    def _parse(self, most: int | None = None) -> list[Any]:
        messages: list[Any] = []
        begin, first, arrived = 0, _LENGTH.size, len(self._received)
        with memoryview(self._received) as view:
            while len(messages) != most and arrived >= first:
                end = first + _LENGTH.unpack_from(view, begin)[0]
                if arrived < end:
                    break
                messages.append(pickle.loads(view[first:end]))  # noqa: S301
                begin, first = end, end + _LENGTH.size
        del self._received[:begin]
        return messages


def _framed(message: Any) -> bytes:
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


def flush_streams() -> None:
    """Flush what was printed so far, if the streams are still open."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # the stream is None, or closed
            stream.flush()
