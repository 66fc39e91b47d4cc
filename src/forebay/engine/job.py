"""The contract of a job: what a worker does with a task, wherever the worker runs."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol


class Assignment(NamedTuple):
    """One task for a worker: which, the how-many-th try, and what it is about."""

    task: int
    attempt: int
    payload: Any


class Answer(NamedTuple):
    """A job's answer to one task; `nbytes` is what the result occupies until it is consumed."""

    result: Any
    nbytes: int


class Refusal(Exception):  # noqa: N818 - a verdict on the task, not an error of forebay
    """Raised by a job when a failure is not worth another try.

    Its `__cause__` is the failure itself.

    Attributes:
        kind: A word that classifies it, for `Cause.kind`.
    """

    def __init__(self, kind: str) -> None:
        """Classify the failure as `kind`."""
        super().__init__(kind)
        self.kind = kind


class Job(Protocol):
    """What a worker does. It reaches a process worker by pickle, once however many there are.

    Attributes:
        keeps_tasks: Whether a worker keeps the tasks behind a slow one, because they are bound to
            it; otherwise it gives them back for others to have.
    """

    keeps_tasks: bool

    def open(self, worker: int, lane: int) -> None:
        """Set up, in the worker, before its first task.

        Args:
            worker: Its number, which no other ever has.
            lane: Its place, from 0 to num_workers - 1, which a replacement inherits.
        """

    def run(self, assignment: Assignment) -> Answer:
        """Do one task. Whatever it raises is laid to that task; the worker lives on."""
        ...

    def close(self) -> None:
        """Tidy up, in the worker, when it is told to go; not called on a worker that dies."""
