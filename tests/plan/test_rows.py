"""Which samples share a row: each once in every epoch, rows that fit, and costs that are equal."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.lengths import batch_by_length, pack_sequences
from forebay.plan import balanced
from forebay.sample_rows import packed_patterns
from forebay.seeds import EPOCH, permuted

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=120)


def members_of(rows, epoch):
    """Return the samples of every row of an epoch."""
    return [rows.members(epoch * EPOCH + row) for row in range(len(rows))]


@given(LENGTHS, st.integers(60, 200), st.integers(0, 3), st.sampled_from([None, 1, 7, 1000]))
def test_every_sample_is_in_one_row_that_fits(lengths, size, epoch, window):
    rows = pack_sequences(lengths, lengths, size=size, window=window)
    found = members_of(rows, epoch)
    assert Counter(each for row in found for each in row) == Counter(range(len(lengths)))
    assert all(0 < sum(lengths[each] for each in row) <= size for row in found)
    if window is not None:
        assert all(len({each // window for each in row}) == 1 for row in found)


@given(
    LENGTHS,
    st.integers(60, 300),
    st.one_of(st.none(), st.integers(1, 9)),
    st.integers(0, 3),
    st.sampled_from([None, 1, 7, 1000]),
)
def test_every_sample_is_in_one_batch_within_its_limits(lengths, most, samples, epoch, window):
    groups = batch_by_length(lengths, lengths, max_tokens=most, max_samples=samples, window=window)
    found = members_of(groups, epoch)
    assert Counter(each for row in found for each in row) == Counter(range(len(lengths)))
    assert all(len(row) * max(lengths[each] for each in row) <= most for row in found)
    assert all(0 < len(row) <= (samples or len(row)) for row in found)
    if window is not None:
        assert all(len({each // window for each in row}) == 1 for row in found)


@pytest.mark.slow
@given(st.lists(st.integers(1, 200), min_size=1, max_size=15), st.integers(1, 90))
def test_a_long_sample_is_split_into_pieces_that_cover_it(lengths, size):
    samples = [np.arange(length) + 1000 * at for at, length in enumerate(lengths)]
    rows = pack_sequences(samples, lengths, size=size)
    pieces = [piece for row in range(len(rows)) for piece in rows[row]]
    assert np.array_equal(np.sort(np.concatenate(pieces)), np.concatenate(samples))
    assert all((np.diff(piece) == 1).all() and len(piece) <= size for piece in pieces)
    assert len(pieces) == sum(-(-length // size) for length in lengths)


@pytest.mark.parametrize(("long", "left"), [("truncate", [4, 9, 10]), ("drop", [4, 9])])
def test_what_is_too_long_is_cut_or_left_out(long, left):
    samples = [np.arange(length) for length in (4, 9, 25)]
    rows = pack_sequences(samples, [4, 9, 25], size=10, long=long)
    assert sorted(len(each) for row in range(len(rows)) for each in rows[row]) == left


@pytest.mark.slow
@pytest.mark.parametrize(
    "draw",
    [
        lambda rng, count: rng.integers(1, 4097, count),
        lambda rng, count: np.clip(rng.lognormal(6.0, 1.0, count), 1, 4096),
        lambda rng, count: np.clip(rng.lognormal(5.6, 1.1, count), 8, 4096),
        lambda rng, count: np.clip(rng.gamma(2.0, 180.0, count), 20, 4096),
    ],
    ids=["uniform", "lognormal", "texts", "proteins"],
)
def test_rows_are_nearly_full(draw):
    lengths = draw(np.random.default_rng(0), 65_536).astype(int)
    rows = pack_sequences(lengths, lengths, size=4096)
    assert lengths.sum() >= 0.99 * len(rows) * 4096


@pytest.mark.slow
def test_samples_change_places_from_epoch_to_epoch():
    """Each sample is in each place of its length about equally often."""
    lengths = [6, 6, 6, 6, 4, 4, 4, 4]
    rows = pack_sequences(lengths, lengths, size=10)
    pairs = Counter(tuple(row) for epoch in range(1600) for row in members_of(rows, epoch))
    assert len(pairs) == 16
    assert all(300 < count < 500 for count in pairs.values())


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=8), st.integers(0, 2**64 - 1))
def test_orders_of_different_lengths_are_permutations(sizes, key):
    positions = np.concatenate([np.arange(size) for size in sizes])
    limits = np.repeat(sizes, sizes)
    keys = np.repeat(np.array([key] * len(sizes), np.uint64), sizes)
    found = permuted(positions, limits, keys)
    begin = 0
    for size in sizes:
        assert sorted(found[begin : begin + size].tolist()) == list(range(size))
        begin += size


def test_the_best_fit_is_chosen():
    """The 3 goes beside the 7, which leaves no space, and not beside the 6."""
    patterns = packed_patterns([3, 6, 7], [1, 1, 1], 10)
    assert sorted(each.parts for each in patterns) == [((1, 1),), ((2, 1), (0, 1))]


def test_ten_million_samples_of_one_length_are_one_pattern():
    assert [each.rows for each in packed_patterns([5], [10_000_000], 10)] == [5_000_000]


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4), st.integers(0, 1000))
def test_each_rank_gets_its_number_of_rows(ranks, each, batches, seed):
    costs = np.random.default_rng(seed).lognormal(size=(batches, ranks * each))
    dealt = [balanced(costs, [each] * ranks, rank) for rank in range(ranks)]
    assert [part.shape for part in dealt] == [(batches, each)] * ranks
    together = np.sort(np.concatenate(dealt, axis=1), axis=1)
    assert (together == np.arange(ranks * each)).all()
    assert all((np.diff(part, axis=1) > 0).all() for part in dealt)


def test_costs_of_ranks_are_nearly_equal():
    """Eight ranks of eight packed rows; dealt in order, the most expensive has 1.1 of the mean."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6.0, 1.0, 65_536), 1, 4096).astype(int)
    rows = pack_sequences(lengths, lengths, size=4096)
    order = rng.permutation(len(rows))[: len(rows) // 64 * 64].reshape(-1, 64)
    costs = rows.rows.costs_of(order.ravel()).reshape(order.shape)
    loads = np.stack(
        [np.take_along_axis(costs, balanced(costs, [8] * 8, rank), 1).sum(1) for rank in range(8)],
        axis=1,
    )
    assert (loads.max(1) / loads.mean(1)).mean() < 1.03
    plain = costs.reshape(-1, 8, 8).sum(2)
    assert (plain.max(1) / plain.mean(1)).mean() > 1.1
