"""Mixing by weight: even over any stretch, exact at any position, and changed without loss."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.mixture import Mixture, _count
from forebay.seeds import GOLDEN

WHOLE = 1 << 64
MIXTURE = Mixture(lengths=(1000, 77, 10), weights=(0.7, 0.2, 0.1))
ENDS = [1000, 1077]


def sources(indices):
    return np.searchsorted(ENDS, indices, side="right")


@given(
    st.integers(0, WHOLE - 1),
    st.integers(0, WHOLE) | st.sampled_from([0, WHOLE]),
    st.integers(0, 300),
)
def test_a_count_is_exact(start, bound, positions):
    """It is what counting the points one by one gives."""
    points = ((GOLDEN * at + start) % WHOLE for at in range(positions))
    assert _count(start, positions, bound) == sum(point < bound for point in points)


@pytest.mark.parametrize("seed", [0, 3])
def test_each_source_has_given_its_share_at_every_position(seed):
    """To within a few samples, of which there are hardly more the farther it is."""
    for position in [*range(0, 200_000, 997), 10**15]:
        for count, tenths in zip(MIXTURE.drawn(seed, position), (7, 2, 1), strict=True):
            assert abs(count - position * tenths // 10) < (8 if position < 10**6 else 24)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_source_gives_all_its_samples_before_any_comes_again(shuffle):
    """Each epoch of a source is complete, and has a new order."""
    indices = MIXTURE.indices(3, shuffle, 0, 5000)
    own = indices[sources(indices) == 1] - 1000
    epochs = [own[at : at + 77].tolist() for at in range(0, len(own) // 77 * 77, 77)]
    assert len(epochs) >= 12
    assert all(sorted(epoch) == list(range(77)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == (len(epochs) if shuffle else 1)


@pytest.mark.slow
@given(st.lists(st.integers(1, 300), max_size=6))
def test_any_position_can_be_asked_for(cuts):
    """In pieces it is the same as in one."""
    whole = MIXTURE.indices(1, True, 0, sum(cuts))
    first, pieces = 0, [np.empty(0, np.int64)]
    for count in cuts:
        pieces.append(MIXTURE.indices(1, True, first, count))
        first += count
    assert np.concatenate(pieces).tolist() == whole.tolist()
    assert np.bincount(sources(whole), minlength=3).tolist() == list(MIXTURE.drawn(1, sum(cuts)))


def test_weights_change_without_loss_or_repetition():
    """Each source goes on where it was; one with weight 0 gives nothing."""
    later = MIXTURE.changed((0.0, 0.5, 0.5), 3, 2500)
    before, after = MIXTURE.indices(3, True, 0, 2500), later.indices(3, True, 2500, 2500)
    assert (sources(after) > 0).all()
    assert abs((sources(after) == 1).sum() - 1250) < 4
    own = [index - 1000 for index in (*before, *after) if 1000 <= index < 1077]
    epochs = [own[at : at + 77] for at in range(0, len(own) // 77 * 77, 77)]
    assert all(sorted(epoch) == list(range(77)) for epoch in epochs)
    again = later.changed((0.7, 0.2, 0.1), 3, 5000)
    assert again.drawn(3, 5000) == later.drawn(3, 5000)


def test_another_seed_gives_another_sequence_of_sources():
    """With the same shares."""
    one, other = (sources(MIXTURE.indices(seed, False, 0, 1000)) for seed in (1, 2))
    assert (one != other).any()
    assert np.abs(np.bincount(one) - np.bincount(other)).max() < 8


@pytest.mark.parametrize("weights", [(0, 1, 0), (1, 0, 0), (0, 0, 2), (1, 1e-30, 0), (1e-30, 0, 1)])
def test_weights_at_the_edges(weights):
    """Sources of no weight, or of next to none, wherever they stand."""
    mixture = Mixture(lengths=(1000, 77, 10), weights=weights)
    found = np.bincount(sources(mixture.indices(3, False, 0, 900)), minlength=3)
    assert found.tolist() == list(mixture.drawn(3, 900))
    assert found[np.argmax(weights)] == 900
