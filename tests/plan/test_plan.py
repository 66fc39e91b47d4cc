"""The plan of batches: the same for any number of ranks, and no rank is a step short."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.mixture import Mixture
from forebay.plan import Plan

WORLDS = (1, 2, 3, 4, 6, 8, 12)
PLAN = Plan(length=103, batch_size=24, seed=5, shuffle=True)
KINDS = {
    "shuffled": {},
    "in order": {"shuffle": False},
    "drop_last": {"drop_last": True},
    "uneven": {"tail": "uneven"},
    "whole batches": {"tail": "fill"},
    "mixture": {"mixture": Mixture(lengths=(50, 50, 3), weights=(1, 2, 3))},
    "smaller than a batch": {"length": 5},
}


def batches(plan, epoch=0, sample=0):
    """Return indices, position and repeated of each batch of one rank."""
    return [
        (indices, position, block.repeated)
        for block in plan.blocks(epoch, sample)
        for indices, position in zip(block.indices.tolist(), block.positions.tolist(), strict=True)
    ]


def ranks(plan, world):
    size = plan.batch_size // world
    return [replace(plan, batch_size=size, world_size=world, rank=rank) for rank in range(world)]


def global_batches(plans, epoch=0, sample=0):
    """Return the batches of all ranks together, without what is repeated."""
    each = [batches(plan, epoch, sample) for plan in plans]
    together = []
    for step in range(max(map(len, each))):
        here = [rank[step] for rank in each if step < len(rank)]
        together.append(
            [index for own, _, repeated in here for index in own[: len(own) - repeated]]
        )
    return together


@pytest.mark.slow
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("world", WORLDS[1:])
def test_global_batches_are_the_same_for_any_number_of_ranks(options, world):
    """Each rank has a slice, in the order of the ranks."""
    plan = replace(PLAN, **options)
    for epoch in (0, 7):
        assert global_batches(ranks(plan, world), epoch) == global_batches([plan], epoch)


@pytest.mark.slow
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_knows_how_many_steps_it_has(options, world):
    """From any position; with equal tails every rank has the same number of equal batches."""
    plan = replace(PLAN, **options)
    for sample in (0, 24, 96):
        steps = []
        for rank in ranks(plan, world):
            found = batches(rank, sample=sample)
            assert rank.steps(sample) == len(found)
            steps.append([len(indices) for indices, _, _ in found])
        if plan.tail != "uneven":
            assert len(set(map(tuple, steps))) == 1
    assert max(len(each) for each in steps) <= 1


def test_an_epoch_has_every_sample_once():
    """Whatever is repeated is named; `drop_last` leaves out less than a global batch."""
    for world in WORLDS:
        found = [index for batch in global_batches(ranks(PLAN, world)) for index in batch]
        assert sorted(found) == list(range(103))
        dropped = replace(PLAN, drop_last=True)
        assert sum(map(len, global_batches(ranks(dropped, world)))) == 96


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_at_most_one_sample_is_repeated_on_a_rank(world):
    """And none where the tail can be shared out evenly."""
    for length in range(1, 60):
        plans = ranks(replace(PLAN, length=length), world)
        repeated = [batches(plan)[-1][2] for plan in plans]
        assert sum(repeated) == -(length % 24) % world
        assert max(repeated) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS[1:])
@pytest.mark.parametrize("mixture", [None, KINDS["mixture"]["mixture"]])
def test_ranks_fill_their_last_batches_one_after_the_other(world, mixture):
    """What they gather is the samples of the tail, and then those of the epoch's beginning."""
    for length in [*range(1, 60)] if mixture is None else [103]:
        plan = replace(PLAN, length=length, tail="fill", mixture=mixture)
        found = [batches(rank) for rank in ranks(plan, world)]
        assert {len(indices) for own in found for indices, _, _ in own} == {24 // world}
        last = [index for own in found for index in own[-1][0]]
        tail = global_batches([replace(plan, tail="repeat")])[-1]
        first = itertools.chain(*global_batches([replace(plan, tail="repeat")]))
        again = itertools.islice(itertools.cycle(first), 24 - len(tail))
        assert last == [*tail, *again]
        assert sum(own[-1][2] for own in found) == 24 - len(tail)
        assert set(last) <= set(range(length))


def test_uneven_ranks_have_at_most_one_step_less():
    """Nothing is repeated, and ranks that have no sample of the tail have no batch of it."""
    plans = ranks(replace(PLAN, length=26, tail="uneven"), 12)
    found = [batches(plan) for plan in plans]
    assert sorted(map(len, found)) == [1] * 10 + [2] * 2
    assert all(repeated == 0 for rank in found for _, _, repeated in rank)


@given(st.integers(1, 500), st.integers(1, 9), st.integers(0, 500))
def test_a_plan_can_be_begun_anywhere(length, batch_size, batch):
    """What comes from a position on is the end of what comes from the beginning."""
    plan = Plan(length=length, batch_size=batch_size, seed=1, shuffle=True)
    assert batches(plan, 3, batch * batch_size) == batches(plan, 3)[batch:]


def test_positions_are_those_of_the_epoch():
    """They are what random numbers depend on, so no two ranks may have one in common."""
    for world in (1, 3, 8):
        found = [
            position + at
            for plan in ranks(PLAN, world)
            for indices, position, repeated in batches(plan)
            for at in range(len(indices) - repeated)
        ]
        assert sorted(found) == list(range(103))
