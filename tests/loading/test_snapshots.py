"""When states of the user's objects are taken, by a clock that the test moves."""

from __future__ import annotations

import numpy as np
import torch

from forebay.loading.snapshots import (
    CHEAP_S,
    SHARE,
    Snapshots,
    time_to_copy,
)


class Clock:
    """Seconds that pass only where a test says so."""

    now = 100.0

    def __call__(self):
        return self.now


def taken_after(batches, *, batch_s, state_s, size=0, copies=True):
    """Return after which batches a state was taken, and the share of the time for states."""
    clock, began = Clock(), Clock.now
    cost = 0.0

    def passes(seconds):
        nonlocal cost
        clock.now += seconds
        cost += seconds

    def state():
        if not copies:
            passes(state_s)
        return bytes(size)

    def keep(found):
        if copies:
            passes(state_s)
        return found

    snapshots = Snapshots(keep, clock)
    found = []
    for batch in range(batches):
        clock.now += batch_s
        if snapshots.take(state) is not None:
            found.append(batch)
    return found, cost / (clock.now - began)


def test_a_cheap_state_is_taken_after_every_batch():
    """A few microseconds are not worth it to read anything again."""
    found, _ = taken_after(50, batch_s=0.001, state_s=CHEAP_S / 2)
    assert found == list(range(50))


def test_a_costly_state_takes_at_most_its_share_of_the_time():
    """The first one is put off, too: what it takes is estimated by its size."""
    found, share = taken_after(20_000, batch_s=0.001, state_s=0.05, size=20_000_000)
    assert found[0] > 100
    assert len(found) > 10
    assert share <= SHARE


def test_a_state_that_seldom_has_to_be_taken_does_not_stay_cheap():
    """An object that collects more and more is measured each time."""
    clock = Clock()
    snapshots = Snapshots(lambda found: found, clock)
    found = []
    for batch in range(3000):
        clock.now += 0.001

        def state(batch=batch):
            clock.now += batch * 1e-6
            return batch

        found.append(snapshots.take(state) is not None)
    assert all(found[:25])
    assert sum(found[-1000:]) < 100


def test_one_interruption_does_not_make_a_cheap_state_costly():
    """Another process may have had the processor meanwhile."""
    clock = Clock()
    snapshots = Snapshots(lambda found: found, clock)
    for batch in range(20):
        clock.now += 0.001

        def state(batch=batch):
            clock.now += 0.5 if batch == 10 else 5e-6
            return batch

        assert snapshots.take(state) == batch


def test_the_time_to_copy_a_state_is_estimated_by_its_size():
    """Of bytes and of values, without looking at all of them."""
    large = [torch.zeros(10**6), np.zeros(10**6), "x" * 10**7, {"a": {"b": bytes(10**7)}}]
    large += [list(range(10**6)), {"order": tuple(range(10**6)), "at": 3}]
    assert [time_to_copy(each) > CHEAP_S for each in large] == [True] * len(large)
    small = [None, 3, {"at": 3}, torch.zeros(10), {"epoch": 1, "names": ["a", "b"]}]
    assert [time_to_copy(each) <= CHEAP_S for each in small] == [True] * len(small)


def test_an_object_that_is_not_a_container_is_looked_into():
    """Some states are objects of a class; one that answers badly counts as nothing."""

    class Holder:
        def __init__(self):
            self.order = torch.zeros(10**6)

    class Raising:
        @property
        def nbytes(self):
            raise RuntimeError("not known")

    assert time_to_copy({"it": Holder()}) > CHEAP_S
    assert time_to_copy({"it": Raising()}) <= CHEAP_S
