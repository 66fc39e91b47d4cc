"""`num_workers="auto"`: the number follows the load, and no batch depends on it."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import time

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import forebay
from forebay import AutoWorkers, Buffer, DataLoader, OptionError
from forebay.loading import workers
from known_load import know_load

# Only against hanging.
DEADLINE_S = 150.0


class Waiting(Dataset):
    """Samples that take a while without using the processor, and draw; each names its process."""

    made_once = True

    def __init__(self, length=120, seconds=0.002):
        self.length, self.seconds = length, seconds

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return index, torch.rand(3), os.getpid()


def without_pids(batches):
    """Return batches without what is different in each process."""
    return [(index.tolist(), drawn.tolist()) for index, drawn, _ in batches]


def iterate_until(loader, is_done):
    """Iterate, epoch after epoch, until something is true; return all batches."""
    batches, deadline = [], time.monotonic() + DEADLINE_S
    while not is_done():
        assert time.monotonic() < deadline, loader.statistics()
        for batch in loader:
            batches.append(batch)
    return batches


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"buffer": Buffer(max_batches=40)}, id="buffer"),
        pytest.param({}, id="no-buffer", marks=pytest.mark.slow),
        pytest.param({"backend": "thread"}, id="thread", marks=pytest.mark.slow),
        pytest.param({"world_size": 2, "rank": 1}, id="rank", marks=pytest.mark.slow),
    ],
)
def test_it_grows_while_training_waits_and_no_batch_changes(arguments, monkeypatch):
    """Workers that wait for their storage: as many as are allowed, and the batches of one."""
    know_load(monkeypatch, workers, step_s=0.001, batch_s=0.04)
    usual = {"batch_size": 4, "shuffle": True, "seed": 3}
    with DataLoader(Waiting(), num_workers=AutoWorkers(max=6), **usual, **arguments) as loader:
        found = iterate_until(loader, lambda: loader.statistics().num_workers == 6)
        now = loader.statistics()
        assert now.decisions
        assert "training waits" in now.decisions[0]
        assert "6 workers instead of" in now.decisions[-1]
    with DataLoader(Waiting(), num_workers=1, **usual, **arguments) as loader:
        epochs = range(len(found) // len(loader))
        expected = [batch for _ in epochs for batch in loader]
    assert without_pids(found) == without_pids(expected)


def test_it_shrinks_where_fewer_are_enough(monkeypatch):
    """A trainer that takes its time: one worker makes what it needs."""
    know_load(monkeypatch, workers, step_s=0.05, batch_s=0.001)
    with DataLoader(Waiting(8), num_workers="auto", buffer=Buffer(max_batches=4)) as loader:
        iterate_until(loader, lambda: loader.statistics().num_workers == 1)
        assert "enough" in loader.statistics().decisions[-1]


@pytest.mark.thorough
def test_it_grows_with_what_it_measures():
    """Without a known load: on an idle machine, samples that take 40 ms."""
    with DataLoader(Waiting(seconds=0.04), 4, num_workers=AutoWorkers(max=6)) as loader:
        iterate_until(loader, lambda: loader.statistics().num_workers == 6)
        assert "training waits" in loader.statistics().decisions[0]


def test_decisions_are_logged(caplog, monkeypatch):
    """Each as a line for the logger "forebay"."""
    know_load(monkeypatch, workers, step_s=0.001, batch_s=0.04)
    with (
        caplog.at_level(logging.INFO, "forebay"),
        DataLoader(Waiting(), 4, num_workers=AutoWorkers(max=4), buffer="1MB") as loader,
    ):
        iterate_until(loader, lambda: loader.statistics().num_workers == 4)
        assert f"num_workers=4: {loader.statistics().decisions[-1]}" in caplog.messages


def test_without_a_seed_the_order_is_drawn_from_torch():
    """As with any of forebay's own arguments: equal after the same `torch.manual_seed`."""

    def batches():
        torch.manual_seed(5)
        with DataLoader(Waiting(16, 0), 4, shuffle=True, num_workers="auto") as loader:
            return without_pids(loader)

    first = batches()
    assert batches() == first
    assert sorted(index for indices, _ in first for index in indices) == list(range(16))


def test_a_dataset_of_tensors_needs_no_worker():
    """It is sliced in the trainer, whatever `num_workers` is."""
    data = torch.utils.data.TensorDataset(torch.arange(10))
    loader = DataLoader(data, 5, num_workers="auto")
    assert [batch.tolist() for (batch,) in loader] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert loader.statistics().num_workers == 0


def test_it_is_a_number_for_other_libraries():
    """They read it, and make a new loader with it."""
    loader = DataLoader(Waiting(), num_workers=AutoWorkers(max=12))
    assert loader.num_workers == 12
    assert isinstance(loader.num_workers, int)
    for again in (copy.copy(loader.num_workers), pickle.loads(pickle.dumps(loader.num_workers))):
        assert isinstance(again, AutoWorkers)
        assert repr(again) == "AutoWorkers(max=12)"
    assert "num_workers=AutoWorkers(max=12)" in repr(loader)
    assert 8 <= DataLoader(Waiting(), num_workers="auto").num_workers <= 64


class InfoOf(Waiting):
    """What a worker knows of itself."""

    def __getitem__(self, index):
        info = get_worker_info()
        return info.id, info.num_workers


def test_a_worker_knows_the_largest_number():
    """Its ID is below that, however many there are."""
    with DataLoader(InfoOf(), None, num_workers=AutoWorkers(max=5)) as loader:
        assert {info[1] for info in loader} == {5}


class Stream(IterableDataset):
    """Three samples."""

    def __iter__(self):
        return iter(range(3))


def test_what_cannot_be_is_refused():
    """An iterable dataset, of which each worker reads a part; and impossible numbers."""
    with pytest.raises(OptionError, match='an iterable dataset cannot have num_workers="auto"'):
        DataLoader(Stream(), num_workers="auto")
    for wrong in (0, -1, 2.0, True, "3"):
        with pytest.raises(OptionError, match=r"AutoWorkers\(max=.*is not valid"):
            forebay.AutoWorkers(max=wrong)
