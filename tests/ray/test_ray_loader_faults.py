"""Exceptions, deaths and hangs of workers on a cluster that feed a DataLoader."""

from __future__ import annotations

import os
import re
import signal

import pytest
from datasets import Squares
from loaders import COUNT, batches_of, loader_of
from same import assert_same
from streams import Lethal, Noisy

from forebay import WorkerDiedError
from kit.faults import hang

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("cluster"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


class OwnError(Exception):
    """What only the user's code knows."""


class Broken(Squares):
    """One sample raises what it was told to."""

    def __init__(self, count, error):
        super().__init__(count)
        self.error = error

    def __getitem__(self, index):
        if index == 5:
            raise self.error
        return super().__getitem__(index)


class Hanging(Squares):
    def __getitem__(self, index):
        if index == 5:
            hang()
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("error", "buffer"), [(KeyError("five"), None), (OwnError("no"), "1MB")], ids=["key", "own"]
)
def test_an_exception_keeps_its_type(error, buffer):
    """With the words of the worker and the notes that a local one has."""
    said = []
    for backend in ("process", "ray"):
        with loader_of(Broken(COUNT, error), backend=backend, buffer=buffer) as loader:
            iterator = iter(loader)
            next(iterator)
            with pytest.raises(type(error)) as caught:
                next(iterator)
            said.append((caught.value.__notes__, [type(arg) for arg in caught.value.args]))
            assert len(list(iterator)) == COUNT // 4 - 2  # it goes on after that
    local, remote = (
        [re.sub(r"worker process \d", "worker", each) for each in notes] for notes, _ in said
    )
    assert remote == local
    assert said[0][1] == said[1][1]


def test_samples_that_raise_are_left_out():
    """The same ones, and listed the same."""
    found = []
    for backend in ("process", "ray"):
        dataset = Broken(COUNT, OwnError("no such"))
        with loader_of(dataset, backend=backend, on_error="skip") as loader:
            batches = list(loader)
            found.append((batches, [each._replace(traceback="") for each in loader.failures]))
            assert "OwnError" in loader.failures[0].traceback
    assert_same(found[1], found[0])


def test_a_batch_whose_worker_is_killed_is_made_again(tmp_path):
    """And the batches do not show it."""
    expected = batches_of(Noisy(COUNT), backend="process")
    with loader_of(Lethal(COUNT, 13, tmp_path), buffer="1MB") as loader:
        assert_same(list(loader), expected)
        assert loader.statistics().restarts == 1
    assert (tmp_path / "died").exists()


class AlwaysLethal(Squares):
    def __getitem__(self, index):
        if index == 5:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().__getitem__(index)


def test_a_batch_that_always_kills_is_an_error_that_says_where():
    """The samples, the signal, the node."""
    with loader_of(AlwaysLethal(COUNT)) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(
            WorkerDiedError, match=r"killed by signal: Segmentation fault \(SIGSEGV"
        ) as caught:
            next(iterator)
    assert "epoch 0, batch 1" in str(caught.value)
    assert "(on node " in str(caught.value)


def test_a_hang_is_killed():
    """Tried again once, then an error with the stack."""
    with loader_of(Hanging(COUNT), timeout=0.5) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(RuntimeError, match=r"timed out after 0\.5 seconds") as caught:
            next(iterator)
    assert "in hang" in str(caught.value)
