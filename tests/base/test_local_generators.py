"""Samples that threads make side by side draw what they would draw if each were made alone."""

from __future__ import annotations

import copy
import os
import pickle
import random
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import random as imported
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import rand as imported_rand

from forebay.base.datasets import OwnedGenerators, generator_state, set_state
from forebay.base.draw_detection import ThreadTurns
from forebay.base.local_generators import LocalGenerators
from forebay.base.randomness import generators_kept, generators_restored, seed_generators

PATIENCE_S = 60
THREADS = 4


def by_random() -> float:
    return random.random()


def by_imported_function() -> float:
    return imported()


def state_of_numpy() -> Any:
    return np.random.get_state()[1][:3].tolist()


GLOBAL: dict[str, Callable[[], Any]] = {
    "random": by_random,
    "an imported function": by_imported_function,
    "gauss, in pairs": lambda: random.gauss(0, 1),
    "randint": lambda: random.randint(0, 99),
    "shuffle": lambda: random.sample(range(9), 5),
    "getrandbits": lambda: random.getrandbits(70),
    "numpy": np.random.random,
    "an imported function of numpy": lambda: imported_rand(2).tolist(),
    "normal, in pairs": np.random.randn,
    "choice": lambda: np.random.choice(9, 3).tolist(),
    "numpy's RandomState": lambda: np.random.mtrand._rand.randint(99),
    "torch": lambda: torch.rand(2).tolist(),
    "torch.randint": lambda: torch.randint(1, 9, (2,)).tolist(),
    "torch.randperm": lambda: torch.randperm(5).tolist(),
    "in place": lambda: torch.empty(2).uniform_(1, 2).tolist(),
    "distributions": lambda: torch.distributions.Normal(0, 1).sample((2,)).tolist(),
    "the state of random": lambda: random.getstate()[1][:3],
    "the state of numpy": state_of_numpy,
    "the state of torch": lambda: bytes(torch.get_rng_state().numpy()),
    "the seed of torch": lambda: int(torch.initial_seed()),
    "another seed": lambda: (random.seed(5), np.random.seed(5), random.random(), np.random.rand()),
}
# What no thread can be asked for.
UNKNOWN: dict[str, Callable[[], Any]] = {
    "a function in a container": random.random,
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(20)).tolist(),
    "a seed for torch": lambda: (torch.manual_seed(5), torch.rand(1).item())[1],
    "another thread": lambda: ThreadPoolExecutor(1).submit(random.random).result(),
}
OWNED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default_rng": (lambda: np.random.default_rng(1), lambda own: own.normal()),
    "integers, in halves": (lambda: np.random.default_rng(1), lambda own: int(own.integers(9))),
    "Philox": (lambda: np.random.Generator(np.random.Philox(1)), lambda own: own.random()),
    "RandomState": (lambda: np.random.RandomState(1), lambda own: own.randn()),
    "its seed": (lambda: np.random.RandomState(1), lambda own: (own.seed(3), own.randn())[1]),
    "Random": (lambda: random.Random(1), lambda own: own.gauss(0, 1)),
    "torch.Generator": (torch.Generator, lambda own: torch.rand(2, generator=own).tolist()),
}
UNKNOWN_OWNED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a bit generator": (lambda: np.random.PCG64(1), lambda own: own.random_raw()),
    "a class of the user": (type("Own", (random.Random,), {}), lambda own: own.random()),
    "a seed for a torch.Generator": (
        torch.Generator,
        lambda own: (own.manual_seed(3), torch.rand(1, generator=own).item())[1],
    ),
}


def states() -> tuple[Any, ...]:
    return (
        random.getstate(),
        str(np.random.get_state(legacy=False)),
        bytes(torch.get_rng_state().numpy()),
    )


def alone(seed: int, draw: Callable[[], Any], owned: OwnedGenerators | None = None) -> list[Any]:
    """Return what a sample draws that is made by itself."""
    with generators_kept():
        seed_generators(seed)
        if owned is not None:
            owned.seed(seed)
        return [draw() for _ in range(3)]


class Samples:
    """Makes samples in threads that are all within one at the same time, as often as it can."""

    def __init__(self, draw: Callable[[], Any], owned: OwnedGenerators | None = None) -> None:
        local = LocalGenerators()
        self.turns, self.calls, self.draw = ThreadTurns(local), 0, draw
        if owned is not None and not local.own(owned):
            self.turns.run_alone()
        self.meeting = threading.Barrier(THREADS, timeout=0.05)

    def sample(self, seed: int) -> list[Any]:
        def call(set_seed: Callable[[int], None]) -> list[Any]:
            self.calls += 1
            set_seed(seed)
            drawn = [self.draw()]
            self.meet()
            drawn.append(self.draw())
            self.meet()
            return [*drawn, self.draw()]

        return self.turns.run(call)

    def meet(self) -> None:
        try:
            self.meeting.wait()
        except threading.BrokenBarrierError:  # it is made again, alone
            self.meeting.reset()

    def make(self, seeds: list[int]) -> list[list[Any]]:
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(self.sample, seeds))


def seed_of(number: int) -> int:
    return (number * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)


SEEDS = [seed_of(number) for number in range(4 * THREADS)]


@pytest.mark.slow
@pytest.mark.parametrize("draw", GLOBAL.values(), ids=GLOBAL)
def test_samples_draw_side_by_side_as_if_alone(draw: Callable[[], Any]) -> None:
    """Each before, between and after others do, and from the second round on none is made twice."""
    before = states()
    samples = Samples(draw)
    samples.turns.local.has_mode = True  # type: ignore[union-attr]
    assert samples.make(SEEDS) == [alone(seed, draw) for seed in SEEDS]
    assert samples.calls == len(SEEDS)
    assert states() == before


@pytest.mark.parametrize(("make", "draw"), OWNED.values(), ids=OWNED)
def test_samples_draw_from_generators_that_the_dataset_owns(
    make: Callable[[], Any], draw: Callable[[Any], Any]
) -> None:
    """They are one object for all threads, and have for each the seeds of its sample."""
    own = make()
    holder = SimpleNamespace(transform=[own])
    owned = OwnedGenerators(dataset=holder)
    before = generator_state(own)
    samples = Samples(partial(draw, own), owned)
    expected = [alone(seed, partial(draw, own), OwnedGenerators(dataset=holder)) for seed in SEEDS]
    set_state(own, before)
    assert samples.make(SEEDS) == expected
    assert samples.calls == len(SEEDS)
    assert str(generator_state(own)) == str(before)


@pytest.mark.parametrize("draw", UNKNOWN.values(), ids=UNKNOWN)
def test_samples_that_draw_in_another_way_are_made_alone(draw: Callable[[], Any]) -> None:
    """The first ones are made again, and from then on one at a time: the numbers are the same."""
    before = states()
    samples = Samples(draw)
    assert samples.make(SEEDS) == [alone(seed, draw) for seed in SEEDS]
    assert samples.calls > len(SEEDS)
    assert states() == before


@pytest.mark.parametrize(("make", "draw"), UNKNOWN_OWNED.values(), ids=UNKNOWN_OWNED)
def test_generators_that_cannot_be_asked_are_drawn_from_alone(
    make: Callable[[], Any], draw: Callable[[Any], Any]
) -> None:
    """Such as those of a class of the user's own."""
    own = make()
    owned = OwnedGenerators(own=own)
    samples = Samples(partial(draw, own), owned)
    expected = [alone(seed, partial(draw, own), owned) for seed in SEEDS]
    assert samples.make(SEEDS) == expected


def test_torch_is_told_what_to_draw_from_once_it_draws() -> None:
    """That slows all of its functions, so samples that draw nothing from it are spared."""
    samples = Samples(lambda: (torch.ones(2) + 1, random.random()))
    samples.make(SEEDS)
    assert not samples.turns.local.has_mode  # type: ignore[union-attr]
    samples = Samples(lambda: torch.rand(1).item())
    before = states()
    assert samples.make(SEEDS) == [alone(seed, samples.draw) for seed in SEEDS]
    assert samples.turns.local.has_mode  # type: ignore[union-attr]
    assert len(SEEDS) < samples.calls <= len(SEEDS) + THREADS
    assert states() == before


def test_other_threads_draw_from_the_generators_of_the_process() -> None:
    """As if there were no samples, also while the state of a sample is in numpy's generator."""
    turns, inside, over = ThreadTurns(LocalGenerators()), threading.Event(), threading.Event()

    def call(set_seed: Callable[[int], None]) -> list[float]:
        set_seed(SEEDS[1])
        first = np.random.randn()
        inside.set()
        assert over.wait(PATIENCE_S)
        return [first, np.random.randn(), np.random.randn()]

    with generators_restored(), ThreadPoolExecutor(1) as pool:
        seed_generators(7)
        expected = np.random.randn(9).tolist()
        seed_generators(7)
        drawn = np.random.randn(3).tolist()
        sample = pool.submit(turns.run, call)
        assert inside.wait(PATIENCE_S)
        drawn += np.random.randn(3).tolist()
        over.set()
        assert sample.result() == alone(SEEDS[1], np.random.randn)
        assert drawn + np.random.randn(3).tolist() == expected


def test_what_keeps_the_generators_in_a_sample_keeps_those_of_the_process() -> None:
    """Another loader in a sample, for example, which seeds them for its own samples."""

    def draw() -> Any:
        drawn = random.random(), np.random.rand(), torch.rand(1).item()
        with generators_kept():
            seed_generators(4)
            inner = random.random(), np.random.rand(), torch.rand(1).item()
        return drawn, inner

    samples = Samples(draw)
    samples.turns.local.has_mode = True  # type: ignore[union-attr]
    assert samples.make(SEEDS) == [alone(seed, draw) for seed in SEEDS]


def test_generators_can_be_copied_as_before() -> None:
    """A copy is an ordinary generator in the same state."""
    own = [np.random.default_rng(3), np.random.RandomState(3), random.Random(3)]
    assert LocalGenerators().own(OwnedGenerators(own=own))
    for copied in (pickle.loads(pickle.dumps(own)), copy.deepcopy(own)):
        assert type(copied[0].bit_generator) is np.random.PCG64
        assert type(copied[2]) is random.Random
        first = copied[0].random(), copied[1].randn(), copied[2].random()
        expected = [np.random.default_rng(3), np.random.RandomState(3), random.Random(3)]
        assert first == (expected[0].random(), expected[1].randn(), expected[2].random())


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_process_forked_during_a_draw_can_draw() -> None:
    """The lock that numpy took may be held by a thread that the fork lacks."""
    LocalGenerators()
    lock = np.random.get_bit_generator().lock
    inside, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            inside.set()
            over.wait(PATIENCE_S)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(PATIENCE_S)
    pid = os.fork()
    if not pid:
        signal.alarm(PATIENCE_S)
        os._exit(0 if 0 <= np.random.rand() < 1 else 1)
    over.set()
    thread.join(PATIENCE_S)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
