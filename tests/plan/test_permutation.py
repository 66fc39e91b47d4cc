"""The order of an epoch: every number once, in an order that nothing distinguishes from chance."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.seeds import ORDER, Permutation, seed_of

THOROUGH = pytest.mark.thorough


def order(length, key):
    return Permutation(length, key).at(np.arange(length)).tolist()


def surprise(counts, expected):
    """Return by how many standard deviations counts differ from what chance gives (chi square)."""
    counts, expected = np.asarray(counts, float), np.asarray(expected, float)
    freedom = counts.size - 1
    square = ((counts - expected) ** 2 / expected).sum()
    return (square - freedom) / math.sqrt(2 * freedom)


@given(st.integers(1, 600), st.integers(0, 2**64 - 1))
def test_every_number_comes_once(length, key):
    """For every length, one among them, also one that fills its grid badly."""
    assert sorted(order(length, key)) == list(range(length))


@given(st.integers(1, 10**12), st.integers(0, 2**64 - 1), st.data())
def test_any_position_can_be_asked_for_first(length, key, data):
    """In any order and shape, and each gives what it gives among others."""
    positions = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=8))
    permutation = Permutation(length, key)
    together = permutation.at(np.array(positions)).tolist()
    assert together == [permutation.at(np.array([each]))[0] for each in positions]
    assert all(0 <= number < length for number in together)
    assert len(set(together)) == len(set(positions))


def test_the_order_is_that_of_every_other_version():
    """A state from an older version goes on in the same order: these numbers never change."""
    assert order(12, 0) == [11, 8, 6, 7, 9, 4, 3, 5, 2, 1, 10, 0]
    far = Permutation(10**9, 7).at([0, 1, 999_999_999])
    assert far.tolist() == [85743846, 285237889, 111078486]


@pytest.mark.slow
@pytest.mark.parametrize("length", [2, 3, 4, pytest.param(5, marks=pytest.mark.thorough)])
def test_every_order_of_a_few_numbers_is_equally_likely(length):
    """Of two to six numbers, over many keys; odd and even orders alike."""
    trials = 40 * math.factorial(length) + 500
    counts = Counter(tuple(order(length, seed_of(key, 1))) for key in range(trials))
    orders = list(itertools.permutations(range(length)))
    expected = np.full(len(orders), trials / len(orders))
    assert surprise([counts[each] for each in orders], expected) < 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "length", [8, 25, pytest.param(13, marks=THOROUGH), pytest.param(100, marks=THOROUGH)]
)
def test_every_number_is_equally_likely_at_every_position(length):
    """The table of positions and numbers is as even as chance makes it."""
    table, trials = np.zeros((length, length)), 600
    for key in range(trials):
        table[np.arange(length), order(length, seed_of(key, 2))] += 1
    assert surprise(table.ravel(), np.full(length * length, trials / length)) < 5


@pytest.mark.slow
@pytest.mark.parametrize("length", [100, 1000, 5000])
def test_neighbours_have_nothing_to_do_with_each_other(length):
    """Their differences are spread evenly, and no order resembles that of the next key."""
    differences, trials = np.zeros(16), 200
    for key in range(trials):
        numbers = np.array(order(length, seed_of(key, 3)))
        steps = (numbers[1:] - numbers[:-1]) % length - 1
        differences += np.bincount(steps * 16 // (length - 1), minlength=16)
    shares = np.bincount(np.arange(length - 1) * 16 // (length - 1), minlength=16) / (length - 1)
    assert surprise(differences, shares * differences.sum()) < 5
    one, other = order(length, seed_of(0, ORDER, 3)), order(length, seed_of(0, ORDER, 4))
    assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(length)


def test_a_billion_numbers_take_no_memory():
    """Neither to make the order nor to ask it for a position in the middle."""
    tracemalloc.start()
    try:
        Permutation(10**9, 1).at(np.arange(5 * 10**8, 5 * 10**8 + 256))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 100_000
