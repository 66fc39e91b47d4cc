"""What is copied when, by random events: nothing is overwritten, lost, leaked or waited for."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.devices.flow import Allocate, Discard, StartCopy, TransferFlow

AHEAD = 1


class Copies(RuleBasedStateMachine):
    """A feed, a device and a consumer that do anything they may, and remember who has what."""

    def __init__(self) -> None:
        super().__init__()
        self.flow = TransferFlow(AHEAD)
        self.count = 0
        self.waiting: list[int] = []  # arrived, and their copies were not started
        self.started: dict[int, int] = {}  # batch to slot: started, and neither taken nor dropped
        self.taken: dict[int, int] = {}  # batch to slot
        self.sizes: dict[int, int] = {}
        self.capacity: dict[int, int] = {}  # of the slots that are allocated

    def perform(self, commands, *, refuse=None):
        """Perform commands; refuse the memory for one batch."""
        for command in commands:
            match command:
                case Allocate(slot, nbytes):
                    assert slot not in self.capacity
                    if refuse is not None:
                        self.flow.refuse(refuse)
                        return
                    self.capacity[slot] = nbytes
                case StartCopy(batch, slot):
                    self.waiting.remove(batch)
                    assert self.sizes[batch] <= self.capacity[slot]
                    assert slot not in self.started.values(), "two batches in a slot"
                    assert slot not in self.taken.values(), "a batch in use is overwritten"
                    self.started[batch] = slot
                case Discard(slot):
                    assert slot not in self.started.values()
                    assert slot not in self.taken.values()
                    del self.capacity[slot]

    @rule(nbytes=st.integers(1, 20_000))
    def arrives(self, nbytes):
        self.sizes[self.count] = nbytes
        self.waiting.append(self.count)
        self.flow.arrived(self.count, nbytes)
        self.count += 1

    @rule()
    def advances(self):
        first, before = self.waiting[:1], len(self.started)
        commands = self.flow.advance()
        self.perform(commands)
        if commands:
            assert before < AHEAD
            assert first[0] in self.started, "copies are started in the order of arrival"

    @rule()
    def is_refused(self):
        first = self.waiting[:1]
        commands = self.flow.advance()
        if any(isinstance(each, Allocate) for each in commands):
            self.perform(commands, refuse=first[0])
            assert self.flow.advance() == [], "it does not try again until there is room"
        else:
            self.perform(commands)

    @precondition(lambda self: self.waiting or self.started)
    @rule(is_refused=st.booleans())
    def is_taken(self, is_refused):
        batch = min([*self.waiting, *self.started])
        commands = self.flow.want(batch)
        if is_refused and any(isinstance(each, Allocate) for each in commands):
            self.perform(commands, refuse=batch)
            assert batch in self.waiting
            return
        self.perform(commands)
        self.flow.take(batch)
        self.taken[batch] = self.started.pop(batch)

    @precondition(lambda self: self.waiting or self.started)
    @rule(data=st.data())
    def is_dropped(self, data):
        batch = data.draw(st.sampled_from(sorted([*self.waiting, *self.started])))
        if batch in self.waiting:
            self.waiting.remove(batch)
        self.started.pop(batch, None)
        self.perform(self.flow.drop(batch))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def is_released(self, data):
        batch = data.draw(st.sampled_from(sorted(self.taken)))
        self.perform(self.flow.release(self.taken.pop(batch)))

    @invariant()
    def memory_is_bounded(self):
        assert self.capacity.keys() == self.flow.slots.keys()
        assert len(self.capacity) <= max(AHEAD + 2, len(self.taken) + AHEAD + 1)


Copies.TestCase.settings = settings(stateful_step_count=60)
TestCopies = Copies.TestCase


def started(commands):
    return [each for each in commands if isinstance(each, StartCopy)]


def test_memory_that_is_not_reused_is_forgotten():
    """Page-locked memory of torch's belongs to its batch, which has exactly the size it needs."""
    flow = TransferFlow(reuses=False)
    flow.arrived(0, 100)
    flow.arrived(1, 7)
    assert flow.want(0) == [Allocate(0, 100), StartCopy(0, 0)]
    flow.take(0)
    assert flow.slots == {}
    assert flow.advance() == [Allocate(1, 7), StartCopy(1, 1)]
    assert flow.drop(1) == [Discard(1)]
