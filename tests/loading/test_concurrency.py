"""`concurrency=`: several samples at once in threads of each worker."""

from __future__ import annotations

import os
import random
import signal
import threading

import numpy
import pytest
import torch
from datasets import PATIENCE_S, Squares
from same import assert_same
from streams import Noisy, NoisyGroups
from torch.utils.data import IterableDataset, Subset

from forebay import DataLoader, OptionError, WorkerDiedError, mix

# A machine of few cores is warned of several workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

WAYS = [
    {},
    {"num_workers": 1},
    {"num_workers": 2},
    {"num_workers": 2, "buffer": "1MB"},
    {"num_workers": 2, "backend": "thread"},
]


def batches_of(dataset, epochs=2, **arguments):
    """Return the batches of some epochs."""
    arguments = {"batch_size": 4, "shuffle": True, "seed": 1, **arguments}
    with DataLoader(dataset, **arguments) as loader:
        return [list(loader) for _ in range(epochs)]


class Meeting(Squares):
    """Samples that come only in groups: each waits until others are made at the same time."""

    def __init__(self, count, together):
        super().__init__(count)
        self.together, self.barrier = together, None

    def __getitem__(self, index):
        if self.barrier is None:
            with LOCK:
                self.barrier = self.barrier or threading.Barrier(self.together)
        self.barrier.wait(PATIENCE_S)
        return index


LOCK = threading.Lock()


class Owning(Noisy):
    """Samples that also draw from generators of the dataset's own."""

    def __init__(self, count):
        super().__init__(count)
        self.numpy, self.random = numpy.random.default_rng(0), random.Random(0)
        self.torch = torch.Generator()

    def __getitem__(self, index):
        own = self.numpy.random(), self.random.random(), torch.rand(1, generator=self.torch)
        return (*super().__getitem__(index), *own)


# ---- the same batches ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("kind", [Noisy, Owning])
def test_batches_are_the_same_for_any_concurrency(kind, way):
    """Bit for bit, whatever draws random numbers, and although samples end in any order."""
    expected = batches_of(kind(22))
    assert_same(batches_of(kind(22), concurrency=16, **way), expected)


def test_a_subset_and_a_mixture_are_asked_for_single_samples():
    """A Subset's own `__getitems__` only calls `__getitem__` for each."""
    for dataset in (Subset(Noisy(22), range(3, 22)), mix({"a": (Noisy(9), 1), "b": (Noisy(4), 2)})):
        expected = batches_of(dataset, shuffle=False)
        assert_same(batches_of(dataset, shuffle=False, concurrency=4), expected)
    alone = batches_of(Subset(Noisy(22), range(22)), shuffle=False, batch_size=1)
    together = batches_of(Subset(Noisy(22), range(22)), shuffle=False, batch_size=11)
    assert torch.equal(alone[0][5][1][0], together[0][0][1][5])  # random numbers of the sample


def test_a_state_continues_with_another_concurrency():
    """It is no part of the position."""
    expected = batches_of(Noisy(22), epochs=1)[0]
    arguments = {"batch_size": 4, "shuffle": True, "seed": 1}
    with DataLoader(Noisy(22), concurrency=5, num_workers=1, **arguments) as loader:
        iterator = iter(loader)
        found = [next(iterator) for _ in range(2)]
        state = loader.state_dict()
    with DataLoader(Noisy(22), **arguments) as loader:
        loader.load_state_dict(state)
        assert_same(found + list(loader), expected)


# ---- at once -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS[:2], ids=str)
def test_so_many_samples_are_made_at_once(way):
    """Of several batches, if one has fewer; and the samples keep their order."""
    found = batches_of(Meeting(8, 8), 1, batch_size=4, shuffle=False, concurrency=8, **way)
    assert [each.tolist() for each in found[0]] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_generators_that_samples_do_not_draw_from_keep_none_waiting():
    """Wherever the program has them: samples that wait for each other are still made at once."""
    kept = [torch.Generator(), numpy.random.default_rng(1), random.Random(1)]
    found = batches_of(Meeting(8, 8), 1, batch_size=4, shuffle=False, concurrency=8, num_workers=1)
    assert len(found[0]) == 2 and len(kept) == 3


# ---- failures ------------------------------------------------------------------------------------


class Patchy(Noisy):
    """Noisy samples, of which each fifth cannot be had."""

    def __getitem__(self, index):
        if index % 5 == 2:
            raise ValueError(f"no sample {index}")
        return super().__getitem__(index)


@pytest.mark.parametrize("way", WAYS[:2], ids=str)
def test_an_exception_names_its_sample(way):
    """And the batches after it are returned."""
    with DataLoader(Patchy(10), batch_size=3, seed=0, concurrency=4, **way) as loader:
        iterator = iter(loader)
        with pytest.raises(ValueError, match="no sample 2") as caught:
            next(iterator)
        assert "forebay: sample 2, " in "\n".join(caught.value.__notes__)
        assert next(iterator)[0].tolist() == [3, 4, 5]


def test_the_slowest_sample_is_known():
    """Each is timed in its own thread."""

    class Slow(Squares):
        def __getitem__(self, index):
            if index == 5:
                threading.Event().wait(4.0)  # longer than any pause of a loaded machine
            return index

    with DataLoader(Slow(12), batch_size=4, num_workers=1, concurrency=4, seed=0) as loader:
        list(loader)
        assert next(iter(loader._loader_progress.trace.slowest)).index == 5


class Lethal(Noisy):
    """A sample that kills its worker, each time."""

    def __getitem__(self, index):
        if index == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.slow
def test_a_death_is_blamed_on_its_batch_only():
    """The worker had begun others; these are made again, by one that runs nothing else."""
    with DataLoader(Lethal(16), batch_size=4, num_workers=1, concurrency=8, seed=0) as loader:
        iterator, found = iter(loader), []
        for number in range(4):
            if number == 1:
                with pytest.raises(WorkerDiedError, match="4, 5, 6, 7"):
                    next(iterator)
            else:
                found.append(next(iterator)[0].tolist())
    assert found == [[0, 1, 2, 3], [8, 9, 10, 11], [12, 13, 14, 15]]


class Hanging(Squares):
    """A sample that does not come before `over`."""

    def __init__(self, count):
        super().__init__(count)
        self.over = threading.Event()

    def __getitem__(self, index):
        if index == 5:
            self.over.wait()
        return index


@pytest.fixture
def hanging():
    """A dataset whose threads end after the test."""
    dataset = Hanging(12)
    yield dataset
    dataset.over.set()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["process", "thread"])
def test_a_timeout_is_blamed_on_its_batch_only(backend, hanging):
    """Those behind it, which wait for its answer, are not at fault."""
    arguments = {"batch_size": 4, "num_workers": 1, "concurrency": 8, "timeout": 1.5, "seed": 0}
    with DataLoader(hanging, backend=backend, **arguments) as loader:
        iterator = iter(loader)
        assert next(iterator).tolist() == [0, 1, 2, 3]
        with pytest.raises(WorkerDiedError, match=r"timed out after 1\.5 seconds"):
            next(iterator)
        assert next(iterator).tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize("way", [{}, WAYS[1], WAYS[-1]], ids=str)
def test_closing_does_not_wait_for_a_thread_that_hangs(way, hanging):
    """It ends with the worker, or is left behind as a daemon."""
    with DataLoader(hanging, batch_size=4, concurrency=8, seed=0, **way) as loader:
        assert next(iter(loader)).tolist() == [0, 1, 2, 3]
    # Its turn at the random generators ended, too: others need not wait for it.
    expected = batches_of(Noisy(6), 1)
    assert_same(batches_of(Noisy(6), 1, num_workers=1, backend="thread"), expected)


# ---- refused -------------------------------------------------------------------------------------


class Stream(IterableDataset):
    """Yields nothing."""

    def __iter__(self):
        return iter(())


@pytest.mark.parametrize("concurrency", [0, -1, 1.5, True, "4"])
def test_impossible_values_are_refused(concurrency):
    """At once."""
    with pytest.raises(OptionError, match=r"concurrency=.* 1, 2, 3, … or None"):
        DataLoader(Squares(4), concurrency=concurrency)


@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        (Stream(), "one sample after the other"),
        (NoisyGroups(4), "__getitems__ is called with a whole batch"),
        (Subset(NoisyGroups(4), [1]), "__getitems__ is called with a whole batch"),
        (torch.arange(4), "slices of what is in memory"),
    ],
)
def test_datasets_that_cannot_have_it_are_refused(dataset, why):
    """With the reason; one at a time is possible."""
    with pytest.raises(OptionError, match=why):
        DataLoader(dataset, concurrency=2)
    assert DataLoader(dataset, concurrency=1).concurrency == 1
