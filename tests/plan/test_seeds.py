"""Seeds and orders: functions of where a sample stands, the same everywhere and for ever."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from forebay.seeds import COLLATE, ORDER, SAMPLE, SAMPLER, WORKER, seed_of

SEEDS = st.integers(-(2**70), 2**70)
PATHS = st.lists(st.integers(0, 2**40), min_size=1, max_size=5)


@given(SEEDS, PATHS)
def test_a_seed_is_64_bits_that_depend_on_nothing_else(seed, path):
    """torch and numpy take what comes out, and asking twice gives the same."""
    value = seed_of(seed, *path)
    assert 0 <= value < 2**64
    assert value == seed_of(seed, *path)


def test_seeds_are_those_of_every_other_version():
    """A state from an older version goes on with the same batches: these numbers never change."""
    assert seed_of(0, SAMPLE, 0, 0, 0) == 0xC739F5EC15A29D83
    assert seed_of(-1, 1, 2, 3, 4) == 0xD822B5361D82F770


@given(SEEDS, PATHS, st.data())
def test_every_number_of_the_path_counts(seed, path, data):
    """Another epoch, batch or position gives another seed."""
    position = data.draw(st.integers(0, len(path) - 1))
    other = list(path)
    other[position] += data.draw(st.integers(1, 2**20))
    assert seed_of(seed, *path) != seed_of(seed, *other)
    assert seed_of(seed, *path) != seed_of(seed, *path, 0)


def test_no_two_of_many_samples_have_the_same_seed():
    """Nor two purposes at the same place; the order of the numbers counts, too."""
    places = [
        (use, e, b, p)
        for use in (SAMPLE, COLLATE)
        for e in range(6)
        for b in range(40)
        for p in range(40)
    ]
    assert len({seed_of(7, *place) for place in places}) == len(places)
    assert len({ORDER, SAMPLE, COLLATE, SAMPLER, WORKER}) == 5


def test_both_halves_of_a_seed_are_random():
    """Each half seeds a generator of its own; one bit of the place changes half of the bits."""
    values = np.array([seed_of(1, SAMPLE, 0, 0, p) for p in range(4096)], dtype=np.uint64)
    for half in (values >> np.uint64(32), values & np.uint64(0xFFFFFFFF)):
        assert len(np.unique(half)) > 4090
        share = np.unpackbits(half.astype(np.uint32).view(np.uint8)).mean()
        assert abs(share - 0.5) < 0.01
    flips = np.unpackbits((values[:-1] ^ values[1:]).view(np.uint8)).mean()
    assert abs(flips - 0.5) < 0.01
