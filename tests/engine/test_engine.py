"""The engine's loop over a pool whose events are written down."""

from __future__ import annotations

import pytest

from forebay.engine.commands import DeliverResult, Outcome
from forebay.engine.engine import Engine
from forebay.engine.limits import MAX_DEATHS_IN_A_ROW, Limits
from forebay.errors import WorkerDiedError
from forebay.failures import Failure
from forebay.pools.base import Pool
from forebay.pools.events import Event, TaskFinished, WorkerDied, WorkerStarted


class WrittenPool(Pool):
    """Returns these events, one list for each `wait`; does nothing itself."""

    def __init__(self, *events: list[Event]) -> None:
        self._events = iter(events)

    def wait(self, timeout: float | None) -> list[Event]:
        return next(self._events)

    def _ignore(self, *_: object) -> None: ...

    start = send_to_all = kill = stop = wake = close = take_stacks = _ignore


def outcomes_until_it_gives_up(*events: list[Event]) -> tuple[list[Outcome], str]:
    """Return the outcomes of two tasks for two workers, and the message of the error."""
    tasks = iter([(0, "a"), (1, "b")])
    engine = Engine(WrittenPool(*events), Limits(num_workers=2, slots=4, lookahead=9), tasks)
    outcomes: list[Outcome] = []
    with pytest.raises(WorkerDiedError) as caught:
        while True:
            outcomes += engine.step()
    return outcomes, str(caught.value)


@pytest.mark.parametrize("is_last", [False, True])
def test_a_result_that_comes_with_the_end_is_delivered_first(is_last: bool) -> None:
    """Its outcome is known before the error."""
    end = WorkerDied(1, Failure("exception", "ValueError", "no license"))
    result = TaskFinished(0, 0, 1, "r", 1, 0.1)
    both: list[Event] = [result, end] if is_last else [end, result]
    outcomes, message = outcomes_until_it_gives_up([WorkerStarted(0)], both)
    assert outcomes == [DeliverResult(0, 1, 0.1, 1, "r")]
    assert message.startswith("a worker cannot be set up: ValueError: no license\n")
    assert "in a row" not in message


def test_workers_that_keep_dying_are_counted_in_the_message() -> None:
    """Two start at a time, and those that die together count once."""
    crash = Failure("crash", "WorkerDiedError", "the worker exited with code 3")
    numbers = range(2 * MAX_DEATHS_IN_A_ROW)
    outcomes, message = outcomes_until_it_gives_up(*([WorkerDied(at, crash)] for at in numbers))
    assert outcomes == []
    assert message.startswith("workers cannot be kept alive: WorkerDiedError: the worker exited")
    assert "10 times in a row" in message
