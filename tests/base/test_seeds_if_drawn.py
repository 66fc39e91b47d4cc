"""Samples that draw or not: their results are those of seeded ones, and few are seeded."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch

from forebay.base import draw_detection
from forebay.base.draw_detection import (
    BatchSeeds,
    SeedsIfDrawn,
    generators_fingerprint,
    seed_nothing,
    states_of_fingerprint,
)
from forebay.base.randomness import generator_states, seed_generators


@pytest.fixture(autouse=True)
def _generators():
    """Begin with known generators."""
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


def states():
    """Return the states of all three, to compare."""
    state, (_, keys, *rest), tensor_state = generator_states()
    return state, keys.tolist(), rest, tensor_state.tolist()


LIBRARIES = {
    "random": random.random,
    "random.gauss": lambda: random.gauss(0, 1),
    "numpy": np.random.random,
    "numpy.normal": np.random.normal,
    "torch": lambda: torch.rand(1).item(),
    "torch.normal": lambda: torch.randn(1).item(),
    # Looked up when they are called: a worker replaces them.
    "numpy's state": lambda: np.random.get_state()[1].tolist()[:3],
    "random's state": lambda: random.getstate()[1][:3],
    "torch's state": lambda: bytes(torch.get_rng_state().numpy()),
    "torch's seed": lambda: int(torch.initial_seed()),
    "a fork of torch's state": lambda: list(forked()),
}


def forked():
    with torch.random.fork_rng([]):
        yield torch.rand(1).item()


@pytest.fixture
def seeds(monkeypatch):
    """Seeds of a worker; what it replaces is put back."""
    for module in (torch, torch.random):
        for name in ("initial_seed", "get_rng_state"):
            monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(random, "getstate", random.getstate)
    monkeypatch.setattr(np.random, "get_state", np.random.get_state)
    seeds = SeedsIfDrawn()
    seeds.open()
    return seeds


class InTrainer:
    """Runs each call in a batch of its own, after which the generators must be as before."""

    def __init__(self, purpose="samples"):
        self.seeds = BatchSeeds()
        self.calls = getattr(self.seeds, purpose)

    def run(self, call):
        before = states()
        try:
            with self.seeds.batch():
                return self.calls.run(call)
        finally:
            assert states() == before


@pytest.fixture(params=["worker", "trainer", "collate_fn in the trainer"])
def make_seeds(request, monkeypatch):
    """Make what seeds calls; what it replaces is put back."""
    if request.param != "worker":
        return partial(InTrainer, "samples" if request.param == "trainer" else "collation")
    for module in (torch, torch.random):
        for name in ("initial_seed", "get_rng_state"):
            monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(random, "getstate", random.getstate)
    monkeypatch.setattr(np.random, "get_state", np.random.get_state)

    def make():
        seeds = SeedsIfDrawn()
        seeds.open()
        return seeds

    return make


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)
@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("is_between", [True, False])
def test_samples_are_as_if_each_was_seeded(make_seeds, library, first, is_between):
    """Whichever sample of whichever batch is the first to draw, and whatever is drawn between."""

    def batch(number, set_seed):
        found = []
        for sample in range(2):
            set_seed(number * 100 + sample)
            found.append(library() if number * 2 + sample >= first * 3 else "nothing")
        return found

    seeds = make_seeds()
    np.random.normal()  # the second one of a pair is left
    for number in range(6):
        found = seeds.run(partial(batch, number))
        before = generator_states()
        assert found == batch(number, seed_generators)
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
        if is_between:
            np.random.normal()


def test_what_draws_nothing_is_not_seeded(make_seeds):
    """The first batch is, to find out."""
    calls, seeds = [], make_seeds()
    for _ in range(3):
        seeds.run(lambda set_seed: calls.append(set_seed is seed_nothing))
    assert calls == [False, True, True]


def test_what_draws_is_made_twice_at_most_once(make_seeds):
    """Nothing is repeated if the first batch draws; otherwise the first that does."""
    for first in (0, 2):
        seeds, calls = make_seeds(), []

        def batch(set_seed, first=first, calls=calls):
            calls.append(set_seed)
            set_seed(1)
            if len(calls) > first:
                random.random()

        for _ in range(5):
            seeds.run(batch)
        assert len(calls) == (5 if first == 0 else 6)
        assert seed_nothing not in calls[first + 1 :]


def test_an_error_that_depends_on_random_numbers_is_that_of_the_seed(make_seeds):
    """As well as one that does not."""

    def batch(is_drawn, set_seed):
        set_seed(4)
        raise KeyError(random.random() if is_drawn else "x")

    seeds = make_seeds()
    seeds.run(lambda set_seed: None)
    with pytest.raises(KeyError, match="x"):
        seeds.run(partial(batch, False))
    with pytest.raises(KeyError) as raised:
        seeds.run(partial(batch, True))
    random.seed(4)
    assert raised.value.args == (random.random(),)


def test_an_interrupted_batch_leaves_the_trainers_generators_as_they_were():
    """Ctrl-C comes after it drew without a seed."""

    def batch(is_interrupted, set_seed):
        if is_interrupted:
            random.random()
            np.random.normal()
            torch.rand(1)
            raise KeyboardInterrupt

    seeds = InTrainer()
    seeds.run(partial(batch, False))
    with pytest.raises(KeyboardInterrupt):
        seeds.run(partial(batch, True))


def test_the_trainers_functions_are_its_own_between_batches():
    """What counts their calls is there only while a batch is made."""

    def functions():
        of_torch = [getattr(torch, name) for name in ("initial_seed", "get_rng_state")]
        return [random.getstate, np.random.get_state, *of_torch, torch.random.get_rng_state]

    before, seeds = functions(), InTrainer()
    for _ in range(3):
        seeds.run(lambda set_seed: set_seed(1))
        assert functions() == before


def test_another_generator_of_numpy_is_watched_too():
    """The user may replace the global one."""
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(5))
    try:
        assert generators_fingerprint() == generators_fingerprint()
        seen = generators_fingerprint()
        np.random.random()
        assert generators_fingerprint() != seen
    finally:
        np.random.set_bit_generator(before)


@pytest.mark.parametrize("is_found", [True, False])
def test_a_fingerprint_has_the_states_that_it_was_taken_of(monkeypatch, is_found):
    """Whether the memory of `random`'s generator was found or not."""
    assert draw_detection._random_words() is not None
    if not is_found:
        monkeypatch.setattr(draw_detection, "_random_words", lambda: None)
    random.gauss(0, 1)  # the second one of a pair is left
    for _ in range(2):
        found, known = generators_fingerprint(), generator_states()
        state, _, tensor_state = states_of_fingerprint(found, known[1])
        assert (state, tensor_state.tolist()) == (known[0], known[2].tolist())
        random.random()
        torch.rand(1)
        assert generators_fingerprint() != found
