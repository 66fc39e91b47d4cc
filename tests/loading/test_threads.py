"""Threads: workers of the thread backend, and threads that share one iterator."""

from __future__ import annotations

import threading

import pytest
import torch
from datasets import PATIENCE_S, Squares
from streams import Noisy

from forebay import Buffer, DataLoader, OptionError, WorkerDiedError

# A machine of few cores is warned of several workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Meeting(Squares):
    """Samples that come only in pairs: each waits for another to be made at the same time."""

    def __init__(self, count):
        super().__init__(count)
        self.barrier = threading.Barrier(2)

    def __getitem__(self, index):
        self.barrier.wait(PATIENCE_S)
        return index


@pytest.mark.slow
def test_threads_make_samples_at_the_same_time():
    """Without a seed there is nothing that they would have to take turns for."""
    with DataLoader(Meeting(8), num_workers=2, backend="thread") as loader:
        assert [each.item() for each in loader] == list(range(8))


@pytest.mark.slow
def test_a_thread_that_hangs_keeps_nobody_from_the_generators():
    """It is abandoned with its turn; the next epoch, and other loaders, go on."""
    over = threading.Event()

    class Hanging(Squares):
        def __getitem__(self, index):
            if index == 5 and not over.is_set():
                over.wait()
            return index

    arguments = {"batch_size": 4, "num_workers": 2, "backend": "thread", "seed": 0}
    with DataLoader(Hanging(12), timeout=1.5, **arguments) as loader:
        iterator = iter(loader)
        assert next(iterator).tolist() == [0, 1, 2, 3]
        with pytest.raises(WorkerDiedError, match=r"timed out after 1\.5 seconds"):
            next(iterator)
        assert next(iterator).tolist() == [8, 9, 10, 11]
        with DataLoader(Squares(4), **arguments) as other:
            assert len(list(other)) == 1
        over.set()
        assert len(list(loader)) == 3


@pytest.mark.slow
def test_threads_that_wait_for_the_one_that_hangs_are_not_blamed():
    """Their time went by without a turn: what they were at work on is made by others."""
    over = threading.Event()

    class Hanging(Squares):
        def __getitem__(self, index):
            if index == 0:
                over.wait()
            return index

    with DataLoader(Hanging(8), num_workers=4, backend="thread", seed=0, timeout=1.5) as loader:
        iterator = iter(loader)
        with pytest.raises(WorkerDiedError, match=r"batch 0: samples \[0\]"):
            next(iterator)
        assert [each.item() for each in iterator] == list(range(1, 8))
        over.set()


def test_worker_init_fn_is_called_in_each_thread():
    """With its lane; what it raises is raised in the loop."""
    called = []
    with DataLoader(
        Squares(8), num_workers=2, backend="thread", worker_init_fn=called.append
    ) as loader:
        list(loader)
    assert sorted(called) == [0, 1]

    def refuse(lane):
        raise ValueError(f"lane {lane}")

    loader = DataLoader(Squares(8), num_workers=1, backend="thread", worker_init_fn=refuse)
    with loader, pytest.raises(ValueError, match="lane 0"):
        next(iter(loader))


def test_a_thread_hands_on_the_very_exception():
    """Nothing was sent, so nothing need be rebuilt."""

    class OddError(Exception):
        def __init__(self, one, other):
            super().__init__(f"{one} and {other}")

    error = OddError(1, 2)

    class Raising(Squares):
        def __getitem__(self, index):
            raise error

    loader = DataLoader(Raising(4), num_workers=1, backend="thread")
    with loader, pytest.raises(OddError, match="1 and 2") as caught:
        next(iter(loader))
    assert caught.value is error


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        {"num_workers": 2},
        {"num_workers": 2, "seed": 0},
        {"num_workers": 2, "buffer": Buffer(max_batches=5)},
        {"num_workers": 2, "buffer": "1MB", "backend": "thread"},
    ],
    ids=repr,
)
def test_threads_may_share_an_iterator(arguments):
    """Each batch goes to one of them, and all come to their end."""
    with DataLoader(range(200), **arguments) as loader:
        iterator = iter(loader)
        got = []
        threads = [
            threading.Thread(target=lambda: got.extend(each.item() for each in iterator))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
    assert sorted(got) == list(range(200))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_threads_that_share_an_iterator_share_its_audit(workers):
    """Whichever of them takes the answers of the process that makes samples a second time."""
    arguments = {"num_workers": workers, "seed": 0, "batch_size": 1}
    with DataLoader(Noisy(400), **arguments) as loader:
        for _ in range(5):
            iterator, got, errors = iter(loader), [], []

            def read(iterator=iterator, got=got, errors=errors):
                try:
                    got.extend(int(sample[0]) for sample in iterator)
                except RuntimeError as error:
                    errors.append(error)

            threads = [threading.Thread(target=read) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(PATIENCE_S)
            assert (errors, sorted(got)) == ([], list(range(400)))
        assert (loader.statistics().audited >= 5, loader.statistics().differences) == (True, ())


def test_a_timeout_needs_a_worker():
    """In this very process nobody could be stopped."""
    with pytest.raises(OptionError, match="timeout=1 needs a worker"):
        DataLoader(Squares(4), timeout=1, seed=0)


class Nested(Squares):
    """Each sample is an epoch of a loader with threads."""

    def __getitem__(self, index):
        inner = DataLoader(Noisy(4), num_workers=1, backend="thread", seed=index)
        with inner:
            return [sample[1].tolist() for sample in inner], torch.rand(1).item()


@pytest.mark.parametrize("outer", [{"num_workers": 0}, {"num_workers": 2, "backend": "thread"}])
def test_a_sample_may_iterate_a_loader_with_threads(outer):
    """Its threads get their turns while the sample waits for them, and it draws what it would."""
    loaders = [
        DataLoader(Nested(3), batch_size=None, seed=1, **how) for how in (outer, {"num_workers": 0})
    ]
    found, expected = (list(loader) for loader in loaders)
    assert found == expected
    for loader in loaders:
        loader.close()
