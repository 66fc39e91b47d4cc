"""Faults of workers: deaths, hangs, the end of the zygote, and exceptions of every kind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from datasets import PATIENCE_S, Squares, Stream, error_of_next
from same import assert_same
from streams import Noisy
from torch.utils.data import IterableDataset, default_collate, get_worker_info

import forebay
from forebay.testing.faults import FAULTS, Gate

# A machine of one core is warned of two workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker")

COUNT = 16
FATAL = 5
HANG_S = 0.2

# The first line of the error where a fault is met, and the likely cause that follows it.
DEATHS = {
    "SIGKILL": ("killed by SIGKILL", "usually the machine ran out of memory, or somebody killed"),
    "SIGSEGV": ("killed by SIGSEGV", "native code crashed"),
    "os._exit": ("exited with code 3", "the function ended its process"),
    "hang": (f"timed out after {HANG_S} seconds", "in hang"),
    "hang, deaf": (f"timed out after {HANG_S} seconds", "in hang"),
}
WAYS = {
    "torch's": {},
    "persistent": {"persistent_workers": True},
    "seed": {"seed": 3},
    "seed, persistent": {"seed": 3, "persistent_workers": True},
    "buffer": {"buffer": "1MB"},
    "seed, buffer": {"seed": 3, "buffer": "1MB"},
}

every_death = pytest.mark.parametrize("fault", DEATHS)
every_way = pytest.mark.parametrize("way", WAYS)


class Fate:
    """Meets a fault in a worker, each time or the first time only."""

    def __init__(self, fault, once_in=None):
        self.fault = fault
        self.trace = None if once_in is None else once_in / "met"

    def meet(self):
        if get_worker_info() is None:
            return
        if self.trace is not None:
            if self.trace.exists():
                return
            self.trace.touch()
        FAULTS[self.fault]()


class Fatal(Squares):
    """Numbers of which one meets its fate."""

    def __init__(self, fate):
        super().__init__(COUNT)
        self.fate = fate

    def __getitem__(self, index):
        if index == FATAL:
            self.fate.meet()
        return super().__getitem__(index)


class FatalNoise(Fatal, Noisy):
    """The same, with numbers that are drawn."""


class FatalStream(IterableDataset):
    """Even numbers from worker 0, odd ones from worker 1; one of them meets its fate."""

    def __init__(self, fate):
        self.fate = fate

    def __iter__(self):
        info = get_worker_info()
        for number in range(info.id, COUNT, info.num_workers):
            if number == FATAL:
                self.fate.meet()
            yield number, torch.rand(2)


def loader_of(dataset, way, fault="", **options):
    """A loader of two workers, which loses patience where a fault is a hang."""
    timeout = HANG_S if "hang" in fault else 0
    arguments = {"batch_size": 2, "num_workers": 2, "timeout": timeout}
    return forebay.DataLoader(dataset, **arguments | WAYS[way] | options)


# ---- once ---------------------------------------------------------------------------------------


@pytest.mark.slow
@every_way
@every_death
def test_a_fault_that_is_met_once_costs_nothing(way, fault, tmp_path):
    """The batch is made once more, and nobody can tell: two epochs, with all that is drawn."""
    # What is drawn can be drawn again where it is a function of the seed.
    kind = FatalNoise if "seed" in way else Fatal
    expected = list(loader_of(kind(Fate("raise", None)), way, num_workers=0))
    expected += list(loader_of(kind(Fate("raise")), way, num_workers=0, seed=None))[:0]
    dataset = kind(Fate(fault, once_in=tmp_path))
    with loader_of(dataset, way, fault) as loader:
        batches = list(loader)
        assert loader.statistics().restarts == 1
        assert len(list(loader)) == len(batches)
        assert loader.statistics().restarts == 1
    assert dataset.fate.trace.exists()
    assert_same(batches, expected)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["persistent", "seed", "seed, buffer"])
@every_death
def test_a_fault_in_a_stream_that_is_met_once_costs_nothing(way, fault, tmp_path):
    """The new worker reads past what the dead one gave."""
    whole = loader_of(FatalStream(Fate("raise", Path("/"))), way)
    torch.manual_seed(5)
    with whole:
        expected = list(whole)
    torch.manual_seed(5)
    with loader_of(FatalStream(Fate(fault, once_in=tmp_path)), way, fault) as loader:
        batches = list(loader)
        assert loader.statistics().restarts == 1
    assert_same(batches, expected)


# ---- always -------------------------------------------------------------------------------------


def check_words(error, fault, way, samples):
    """What happened, to whom, the numbers, what was done, what to do."""
    first, cause = DEATHS[fault]
    text = str(error)
    assert first in text.splitlines()[0]
    assert cause in text
    assert f"epoch 0, batch 2: {samples}." in text
    assert "tried 2 times" in text
    assert "num_workers=0" in text


@pytest.mark.slow
@every_way
@every_death
def test_a_fault_that_is_met_again_is_an_error_of_one_batch(way, fault):
    """It says what there is to know, and the loader goes on with the next batch."""
    expected = [default_collate([Squares(COUNT)[n] for n in (i, i + 1)]) for i in range(0, 16, 2)]
    with loader_of(Fatal(Fate(fault)), way, fault) as loader:
        batches = iter(loader)
        assert_same([next(batches), next(batches)], expected[:2])
        with pytest.raises(forebay.WorkerDiedError) as caught:
            next(batches)
        check_words(caught.value, fault, way, "samples [4, 5]")
        assert_same(list(batches), expected[3:])
        assert loader.statistics().restarts >= 1
        # The next epoch meets it in the same place.
        batches = iter(loader)
        assert_same([next(batches), next(batches)], expected[:2])
        with pytest.raises(forebay.WorkerDiedError, match="epoch 1, batch 2"):
            next(batches)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["torch's", "persistent", "seed", "buffer"])
@every_death
def test_a_fault_that_is_met_again_ends_the_stream_of_its_worker(way, fault):
    """Nobody can read past it; the others' streams go on to their ends."""
    with loader_of(FatalStream(Fate(fault)), way, fault) as loader:
        batches = iter(loader)
        assert [next(batches)[0].tolist() for _ in range(2)] == [[0, 2], [1, 3]]
        assert next(batches)[0].tolist() == [4, 6]
        with pytest.raises(forebay.WorkerDiedError) as caught:
            next(batches)
        text = str(caught.value)
        assert DEATHS[fault][0] in text.splitlines()[0]
        assert "epoch 0, batch 3: the next samples of its stream." in text
        assert [batch[0].tolist() for batch in batches] == [[8, 10], [12, 14]]


# ---- the process that forks the workers ---------------------------------------------------------


class Held(Noisy):
    """Numbers of which one waits at a gate, as often as it is told to."""

    def __init__(self, gate, tally, times):
        super().__init__(COUNT)
        self.gate, self.tally, self.times = gate, tally, times

    def __getitem__(self, index):
        if index == FATAL and get_worker_info() is not None:
            with self.tally.open("a") as file:
                file.write("x")
            if len(self.tally.read_text()) <= self.times:
                self.gate.wait()
        return super().__getitem__(index)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["seed", "seed, persistent", "seed, buffer"])
def test_the_death_of_the_zygote_is_nobodys_fault(way, tmp_path):
    """Three times in the midst of one batch, which nobody gives up for it."""
    expected = list(loader_of(Noisy(COUNT), way, num_workers=0))
    gate = Gate(tmp_path)
    with loader_of(Held(gate, tmp_path / "tally", 3), way) as loader:
        iterator = iter(loader)
        batches = [next(iterator)] if way == "seed, buffer" else []
        for _ in range(3):
            kill_zygote_at(gate, iterator, batches)
        batches += list(iterator)
        assert len((tmp_path / "tally").read_text()) == 4
    assert_same(batches, expected)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["torch's", "persistent"])
def test_by_torchs_rules_the_death_of_the_zygote_is_nobodys_fault_either(way, tmp_path):
    """Lanes get their workers back, with all that they had in hand."""
    gate = Gate(tmp_path)
    with loader_of(Held(gate, tmp_path / "tally", 3), way) as loader:
        for _ in range(2):
            iterator, batches = iter(loader), []
            for _ in range(3):
                kill_zygote_at(gate, iterator, batches)
                (tmp_path / "tally").write_text("")
            gate_free = tmp_path / "tally"
            gate_free.write_text("xxx")
            batches += list(iterator)
            assert [batch[0].tolist() for batch in batches] == [[i, i + 1] for i in range(0, 16, 2)]
            gate_free.write_text("")


def kill_zygote_at(gate, iterator, batches):
    """Kill the process that forks the workers while one of them is at the gate."""
    gate.wait_reached()
    os.kill(iterator._feed.pool._zygote[0], signal.SIGKILL)


# ---- exceptions ---------------------------------------------------------------------------------
