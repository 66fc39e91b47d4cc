"""Where slots and buffers lie, by arithmetic alone; nothing is mapped or written."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forebay.memory.layout import (
    ALIGN,
    FIRST_CAPACITY,
    LARGE_CAPACITY,
    LARGE_SLOTS,
    LEAST_CAPACITY,
    LEAST_SLOTS,
    Cursor,
    Slot,
    Space,
    capacity_for,
)
from forebay.memory.slab import EXTENT

WIDE = 1 << 44


@given(
    capacity=st.integers(0, 4096), sizes=st.lists(st.integers(0, 700), max_size=20), data=st.data()
)
def test_buffers_in_a_slot_are_aligned_and_apart(capacity, sizes, data):
    """What a cursor hands out lies in the slot, on a cache line, behind what it gave before."""
    cursor, end = Cursor(capacity), 0
    for nbytes in sizes:
        start = cursor.take(nbytes)
        if start is None:
            assert -(-end // ALIGN) * ALIGN + nbytes > capacity
            assert cursor.used == end
            continue
        assert start % ALIGN == 0 and start >= end and start + nbytes <= capacity
        end = start + nbytes
        assert cursor.used == end


def test_bytes_without_room_behind_them_are_not_given():
    """The reason is kept, and nothing more is asked for in this slot."""
    asked = []

    def reserve(start, nbytes):
        asked.append((start, nbytes))
        return "full" if nbytes > 100 else None

    cursor = Cursor(1024, reserve)
    assert (cursor.take(1), cursor.take(10), cursor.refused) == (0, 64, None)
    assert (cursor.take(2000), cursor.refused) == (None, None)
    assert (cursor.take(101), cursor.refused) == (None, "full")
    assert (cursor.take(1), cursor.used) == (None, 74)
    assert asked == [(0, 1), (64, 10), (128, 101)]


@pytest.mark.parametrize(
    ("largest", "capacity"),
    [
        (None, FIRST_CAPACITY),
        (0, LEAST_CAPACITY),
        (1, LEAST_CAPACITY),
        (LEAST_CAPACITY // 4, LEAST_CAPACITY),
        (LEAST_CAPACITY // 4 + 1, 2 * LEAST_CAPACITY),
        (38_535_168, 1 << 28),
        (1 << 30, 1 << 32),
    ],
)
def test_slots_are_four_times_the_largest_batch(largest, capacity):
    """And a power of two, never below the least."""
    assert capacity_for(largest, WIDE) == capacity


@given(st.integers(26, 44), st.none() | st.integers(0, 1 << 44))
def test_a_small_slab_still_holds_several_slots_if_batches_allow(bits, largest):
    """Slack is what a small slab saves; a slot holds the largest batch all the same."""
    size = 1 << bits
    capacity = capacity_for(largest, size)
    assert capacity.bit_count() == 1 and capacity >= LEAST_CAPACITY
    assert capacity >= (largest or 0)
    if largest is None or largest * 2 * LEAST_SLOTS <= size:
        assert capacity * LEAST_SLOTS <= size


@given(st.integers(26, 44), st.lists(st.integers(0, 1 << 36), min_size=2).map(sorted))
def test_capacities_grow_with_batches(bits, sizes):
    """Room that is too small for now is too small for ever."""
    capacities = [capacity_for(nbytes, 1 << bits) for nbytes in sizes]
    assert capacities == sorted(capacities)


def test_the_first_slots_are_large_and_go_out_again():
    """What the first batch was written to is warm for the next, whatever its size."""
    space = Space(EXTENT)
    large = [space.take() for _ in range(LARGE_SLOTS)]
    assert {slot.capacity for slot in large} == {LARGE_CAPACITY}
    others = [space.take(), space.take()]
    assert {slot.capacity for slot in others} == {FIRST_CAPACITY}
    space.give_back(large[0])
    assert space.record_size(1000) == []
    assert not space.give_back(others[0])
    assert space.give_back(large[1])
    assert [space.take() for _ in range(2)] == [large[1], large[0]]
    assert [space.take().capacity for _ in range(100_000)] == [LEAST_CAPACITY] * 100_000


def test_ranges_of_outdated_slots_are_cut_anew():
    """A slab that is all used up by large slots has room for small ones when one comes back."""
    space = Space(LEAST_SLOTS << 20)
    slots = [space.take() for _ in range(LEAST_SLOTS)]
    assert {slot.capacity for slot in slots} == {1 << 20}
    assert space.take() is None
    space.record_size(1)
    assert space.take() is None
    space.give_back(slots[3])
    small = [space.take() for _ in range(16)]
    assert sorted(slot.offset - slots[3].offset for slot in small) == list(
        range(0, 1 << 20, 1 << 16)
    )
    assert space.take() is None


def test_small_pieces_are_one_again_when_all_slots_are_back():
    """Outgrown slots leave pieces that are of no use, but not for ever."""
    space = Space(1 << 20)
    space.record_size(1)
    slots = [space.take() for _ in range(16)]
    assert space.take() is None
    space.record_size(1 << 18)
    for slot in slots:
        assert space.take() is None
        space.give_back(slot)
    assert space.take() == Slot(0, 1 << 18)


def test_a_slot_that_is_not_out_is_refused():
    """Handing it out twice would overwrite a batch."""
    space = Space(WIDE)
    slot = space.take()
    space.give_back(slot)
    with pytest.raises(KeyError):
        space.give_back(slot)


def test_a_slot_without_room_is_taken_after_all_others():
    """The others may have pages on a disk that is full; it is not lost."""
    space = Space(WIDE)
    space.large_left = 0
    space.record_size(1000)
    slots = [space.take() for _ in range(3)]
    space.give_back(slots[0])
    space.give_back(slots[1], is_last=True)
    space.give_back(slots[2], is_last=True)
    assert [space.take() for _ in range(3)] == [slots[0], slots[1], slots[2]]


class SpaceMachine(RuleBasedStateMachine):
    """Takes, gives back and outgrows slots at random, and keeps its own books."""

    @initialize(bits=st.integers(17, 27))
    def begin(self, bits):
        self.size = 1 << bits
        self.space = Space(self.size)
        self.out: list[Slot] = []
        self.idle: list[Slot] = []

    @rule()
    def take(self):
        slot = self.space.take()
        if slot is None:
            assert not self.idle
            assert self.out or self.space.capacity > self.size
            return
        if self.idle:
            assert slot == self.idle.pop()
        assert slot.capacity == self.space.capacity
        self.out.append(slot)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def give_back(self, data):
        slot = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        usable = self.space.give_back(slot)
        assert usable == (slot.capacity == self.space.capacity)
        if usable:
            self.idle.append(slot)

    @rule(nbytes=st.integers(0, 1 << 24))
    def see(self, nbytes):
        before = self.space.capacity
        dropped = self.space.record_size(nbytes)
        if self.space.capacity == before:
            assert dropped == []
            return
        assert dropped == [slot for slot in self.idle if slot.capacity != self.space.capacity]
        self.idle = [slot for slot in self.idle if slot.capacity == self.space.capacity]

    @rule()
    def trim(self):
        assert self.space.trim() == self.idle
        self.idle = []

    @invariant()
    def slots_lie_in_the_slab_and_apart(self):
        slots = sorted(self.out + self.idle)
        assert all(slot.offset % LEAST_CAPACITY == 0 for slot in slots)
        assert all(0 <= slot.offset <= self.size - slot.capacity for slot in slots)
        ends = [slot.offset + slot.capacity for slot in slots]
        assert all(end <= after.offset for end, after in zip(ends, slots[1:], strict=False))

    @invariant()
    def slots_out_are_counted(self):
        assert self.space.out == len(self.out)


SpaceMachine.TestCase.settings = settings(stateful_step_count=30, derandomize=True)
TestSpaceMachine = SpaceMachine.TestCase
