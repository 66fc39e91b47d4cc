"""The loop of every worker: take a task, run it, answer immediately.

Answers are never delayed: the driver attributes a death to the first unanswered task, so each
answer must be sent before the next task begins.
"""

from __future__ import annotations

import io
import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from forebay.engine.events import (
    Event,
    TaskFailed,
    TaskFinished,
    TasksReturned,
    WorkerDied,
    WorkerStarted,
)
from forebay.engine.job import GIVE_BACK_S, Assignment, Job, Refusal
from forebay.failures import Failure, message_of, traceback_of
from forebay.tracebacks import cut_own_frames

# Larger exceptions are not sent: their attributes may be whole data sets.
MAX_EXCEPTION_BYTES = 1 << 20


def perform(incarnation: int, job: Job, assignment: Assignment) -> TaskFinished | TaskFailed:
    """Run one task and return the event that reports the outcome."""
    task, attempt, _ = assignment
    began = time.perf_counter()
    try:
        result, nbytes = job.run(assignment)
    except BaseException as error:  # noqa: BLE001 - SystemExit too: a task must not end its worker
        final = isinstance(error, Refusal)
        if isinstance(error, Refusal):
            failure = failure_of(error.__cause__ or error, error.kind)
        else:
            failure = failure_of(error)
        seconds = time.perf_counter() - began
        return TaskFailed(incarnation, task, attempt, failure, seconds, final)
    return TaskFinished(incarnation, task, attempt, result, nbytes, time.perf_counter() - began)


def failure_of(error: BaseException, kind: str = "exception") -> Failure:
    """Describe an exception, without the frames of forebay that led to it."""
    cut_own_frames(error)
    text = traceback_of(error, error.__traceback__)
    return Failure(kind, type(error).__name__, message_of(error), text, exception=error)


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
        incarnation: See `Job.open`.
        worker_id: See `Job.open`.
        job: What to do; its `open` is called first.
        receive: Returns tasks, or None at the end. If called with True it waits for a task; if
            called with False it returns at once, with an empty sequence if there is none.
        report: Sends an event to the driver.
        has_ended: Returns whether to leave out the remaining tasks; by default never.
    """
    try:
        job.open(incarnation, worker_id)
    except Exception as error:  # noqa: BLE001 - whatever setting up user code raises
        report(WorkerDied(incarnation, failure_of(error)))
        return
    report(WorkerStarted(incarnation))
    held: deque[Assignment] = deque()
    while (received := receive(True)) is not None:
        held.extend(received)
        while held and not has_ended():
            event = perform(incarnation, job, held.popleft())
            report(event)
            seconds = event.seconds
            del event  # an exception in it may hold the caller's frames, and with these the pool
            if seconds > GIVE_BACK_S and not job.keeps_tasks:
                while received := receive(False):
                    held.extend(received)
                report(TasksReturned(incarnation, tuple(each.task for each in held)))
                held.clear()
        if received is None:
            break
    job.close()


class SealedError(Exception):
    """Carries an exception through processes that may not be able to import its class.

    Args:
        body: The exception, pickled with its class.
    """

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
