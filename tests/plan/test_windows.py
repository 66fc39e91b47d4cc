"""The order by lanes and windows: each sample once, from blocks that are there, for any world."""

from __future__ import annotations

from math import gcd

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.plan import Plan
from forebay.windows import LEAST_BLOCKS, MOST_LANES, InOrder, Windows, lanes_for

ROWS = st.lists(st.integers(1, 30), min_size=1, max_size=150)


def windows_of(rows, batch, together):
    """Return the order of blocks with so many rows."""
    starts = np.concatenate([[0], np.cumsum(rows)])
    lanes = lanes_for(batch, len(rows), together)
    return Windows(starts, batch, lanes, max(together // lanes, 1))


@given(ROWS, st.integers(1, 48), st.integers(1, 60), st.integers(0, 3))
def test_every_sample_has_one_position(rows, batch, together, epoch):
    """In each epoch, whatever the sizes of blocks, batches and windows."""
    order = windows_of(rows, batch, together)
    found = order.at(7, epoch, np.arange(sum(rows)))
    assert sorted(found.tolist()) == list(range(sum(rows)))


@given(ROWS, st.integers(1, 48), st.integers(1, 60), st.integers(0, 3))
def test_a_batch_reads_only_blocks_of_its_windows(rows, batch, together, epoch):
    """So what is fetched by windows is all that is needed, when it is needed."""
    order = windows_of(rows, batch, together)
    until = {}
    for window in order.windows(7, epoch, range(order.lanes)):
        until |= dict.fromkeys(window.blocks.tolist(), (window.due, window.until))
    samples = order.at(7, epoch, np.arange(sum(rows)))
    blocks = np.searchsorted(order.starts, samples, "right") - 1
    for position, block in enumerate(blocks.tolist()):
        first, last = until[block]
        assert first <= position // batch <= last
    assert len(until) == len(rows)


@given(ROWS, st.integers(1, 48), st.integers(1, 60))
def test_windows_come_by_need_and_can_be_entered_anywhere(rows, batch, together):
    """A resume gets the windows that the rest of the epoch needs."""
    order = windows_of(rows, batch, together)
    every = list(order.windows(1, 0, range(order.lanes)))
    assert [window.due for window in every] == sorted(window.due for window in every)
    middle = sum(rows) // batch // 2
    later = [window.blocks.tolist() for window in order.windows(1, 0, range(order.lanes), middle)]
    assert later == [window.blocks.tolist() for window in every if window.until >= middle]


def test_windows_double_up_to_the_size_asked_for_and_change_with_the_epoch():
    """The first batch needs a block of each lane; lanes do not begin windows together later."""
    order = windows_of([10] * 4096, 64, 512)
    assert (order.lanes, order.blocks) == (64, 8)
    lanes = [order.windows(0, 0, [lane]) for lane in range(order.lanes)]
    sizes = [[len(window.blocks) for window in windows] for windows in lanes]
    assert {(*each[:3], *each[4:-1]) for each in sizes} == {(1, 2, 4, *[8] * 6)}
    assert {each[3] for each in sizes} == set(range(1, 9))
    one, other = (list(order.windows(0, epoch, [3])) for epoch in (0, 1))
    kept = {block for window in one for block in window.blocks.tolist()}
    assert kept == {block for window in other for block in window.blocks.tolist()}
    assert one[-2].blocks.tolist() != other[-2].blocks.tolist()


def test_samples_of_neighbouring_batches_are_mixed():
    """The blocks of a global batch are as many as its windows allow."""
    order = windows_of([40] * 2000, 64, 1000)
    samples = order.at(0, 0, np.arange(64 * 100)).reshape(100, 64)
    blocks = [len({*(row // 40)}) for row in samples.tolist() for row in [np.array(row)]]
    assert min(blocks) > 50


@pytest.mark.parametrize("batch", [1, 6, 64, 96, 1000, 4096])
def test_lanes_divide_the_global_batch_and_have_blocks_enough(batch):
    """No window of a lane is too small to mix; 2, 4 and 8 ranks divide them where they can."""
    for blocks, together in ((3, 100), (50, 7), (1000, 1000), (2_400_000, 1000)):
        lanes = lanes_for(batch, blocks, together)
        most = min(batch, MOST_LANES, max(min(blocks, together) // LEAST_BLOCKS, 1))
        others = [each for each in range(1, most + 1) if batch % each == 0]
        assert lanes in others
        assert all(each <= lanes or gcd(each, 8) < gcd(lanes, 8) for each in others)
        assert lanes == 1 or min(blocks, together) >= LEAST_BLOCKS * lanes


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8, 12])
def test_ranks_share_the_same_global_batches(world):
    """Also where their number does not divide the lanes."""
    rng = np.random.default_rng(1)
    rows = rng.integers(1, 30, 300)
    order = windows_of(rows, 48, 100)
    plans = [
        Plan(
            length=int(rows.sum()),
            batch_size=48 // world,
            seed=3,
            shuffle=True,
            world_size=world,
            rank=rank,
            order=order.at,
        )
        for rank in range(world)
    ]
    whole = int(rows.sum()) // 48
    ranks = [[row for block in plan.blocks(0) for row in block.indices][:whole] for plan in plans]
    assert (
        np.concatenate(ranks, axis=1).ravel().tolist()
        == order.at(3, 0, np.arange(48 * whole)).tolist()
    )


def test_a_rank_reads_few_lanes():
    """So the blocks of a node are few, and it can keep them."""
    order = windows_of([10] * 4096, 64, 512)
    samples = order.at(0, 0, np.arange(64 * 600)).reshape(600, 64)
    for rank in range(4):
        lanes = order.lanes_of(rank * 16, 16)
        assert lanes == range(rank * 16, rank * 16 + 16)
        due = [each.blocks for each in order.windows(0, 0, lanes)]
        assert {*(samples[:, rank * 16 : rank * 16 + 16].ravel() // 10)} <= {*np.concatenate(due)}


def test_reading_in_order_needs_one_block_after_the_other():
    """For a loader that does not shuffle."""
    order = InOrder(np.array([0, 5, 9, 20]), 4)
    found = [(w.due, w.until, w.blocks.tolist()) for w in order.windows(0, 0, range(1), 1)]
    assert found == [(0, 1, [0]), (1, 2, [1]), (2, 4, [2])]


@pytest.mark.slow
def test_an_order_of_a_hundred_million_samples_takes_no_array_of_them():
    """Only the blocks count: 2.4 million of them here."""
    starts = np.arange(2_400_001) * 42
    order = Windows(starts, 1024, 256, 4)
    found = order.at(0, 1, np.array([0, 50_000_000, 100_799_999]))
    assert len({*found.tolist()}) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "lanes"), [(240, 240), (1000, 200), (96, 96), (1024, 128)])
def test_ranks_that_divide_the_lanes_read_disjoint_blocks(batch, lanes):
    """Each block is read by one rank; the others share a lane with a neighbour."""
    order = windows_of([40] * 2000, batch, 1000)
    assert order.lanes == lanes
    for world in (1, 2, 3, 4, 5, 8):
        each, rest = divmod(batch, world)
        if rest:
            continue
        own = [order.lanes_of(rank * each, each) for rank in range(world)]
        blocks = [
            block
            for rank in own
            for window in order.windows(3, 0, rank)
            for block in window.blocks.tolist()
        ]
        if lanes % world == 0:
            assert sorted(blocks) == [*range(2000)]
        assert len(blocks) <= 2000 * (1 + (world - 1) / lanes) + world
