"""The number of workers changes while batches are made: the same batches come, in order."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from datasets import Squares
from streams import until
from torch.utils.data import get_worker_info

from forebay import Buffer, DataLoader

BATCHES = 120
CHANGES = {10: 4, 40: 2, 70: 3, 100: 1}


class Informed(Squares):
    """Samples that tell what `get_worker_info` says of their worker, which no other process has."""

    made_once = True

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return index, -1 if info is None else info.num_workers


def loader_of(**options: Any) -> DataLoader:
    """Return a loader whose batches any worker may make, beginning with one worker."""
    options = {"num_workers": 1, "seed": 3, "shuffle": False, "prefetch_factor": 8, **options}
    return DataLoader(Informed(BATCHES * 2), batch_size=2, **options)


def alive(feed: Any) -> list[int]:
    """Return the processes of the workers that there are, whether they are to end or not."""
    found = []
    for pid in list(feed.pool.pids.values()):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        found.append(pid)
    return found


def settle(feed: Any, is_so: Callable[[], bool]) -> None:
    """Let the feed work until something holds."""

    def looked() -> bool:
        feed.poll(0.02)
        return is_so()

    until(looked)


def indices_while_resizing(loader: DataLoader, count: Callable[[Any], int]) -> list[int]:
    """Return the indices of an epoch in which the number of workers changes as `CHANGES` says.

    Args:
        loader: See `loader_of`.
        count: Returns how many workers a feed has; each change is waited for.
    """
    iterator, indices = iter(loader), []
    feed = iterator.pipeline.feed
    for number, (index, _) in enumerate(iterator):
        indices += index.tolist()
        if (wanted := CHANGES.get(number)) is not None:
            feed.resize(wanted)
            settle(feed, lambda wanted=wanted: count(feed) == wanted)
    loader.close()
    return indices


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"buffer": Buffer(max_batches=8)}], ids=["plain", "buffer"]
)
def test_every_batch_comes_once_and_in_order_while_workers_come_and_go(options) -> None:
    """1, 4, 2, 3 and 1 workers in the middle of an epoch; as many processes as were asked for."""
    found = indices_while_resizing(loader_of(**options), lambda feed: len(alive(feed)))
    assert found == list(range(BATCHES * 2))


def test_workers_keep_the_number_that_they_were_told_first() -> None:
    """A dataset that divides work by `num_workers` must not see it change."""
    loader = loader_of(num_workers=2)
    iterator = iter(loader)
    iterator.pipeline.feed.resize(4)
    told = {count for _, counts in iterator for count in counts.tolist()}
    assert told == {2}
    loader.close()


def test_a_worker_killed_while_workers_are_stopped_costs_nothing() -> None:
    """Its batch is made by one that stays; it is not replaced beyond the number asked for."""
    loader = loader_of()
    iterator = iter(loader)
    feed = iterator.pipeline.feed
    feed.resize(4)
    settle(feed, lambda: len(alive(feed)) == 4)
    indices = next(iterator)[0].tolist()
    feed.resize(2)
    for pid in alive(feed)[-2:]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it has been stopped already
    settle(feed, lambda: len(alive(feed)) == 2)
    indices += [index for batch, _ in iterator for index in batch.tolist()]
    assert indices == list(range(BATCHES * 2))
    loader.close()


def test_handles_of_stopped_workers_have_no_process() -> None:
    """As those of workers that are gone: nobody waits for a number that never comes."""
    loader = loader_of(num_workers=2)
    iterator = iter(loader)
    next(iterator)
    feed = iterator.pipeline.feed
    feed.resize(1)
    settle(feed, lambda: not iterator._workers[1].is_alive())
    states = [(worker.is_alive(), worker.exitcode) for worker in iterator._workers]
    loader.close()
    # How a stopped worker ended is known if the process that forked it could report it in time.
    assert states in [[(True, None), (False, code)] for code in (None, 0)]


def test_threads_come_and_go_too() -> None:
    """As many threads as were asked for; every batch once."""
    found = indices_while_resizing(loader_of(backend="thread"), lambda _: len(threads()))
    assert found == list(range(BATCHES * 2))


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("forebay-worker-")]
