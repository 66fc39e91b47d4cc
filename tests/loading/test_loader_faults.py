"""Faults of workers: deaths, hangs, the end of the zygote, and exceptions of every kind."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pickle import PicklingError

import pytest
import torch
from datasets import Failing, Squares, Stream, error_of_next
from same import assert_same
from streams import Noisy, until
from torch.utils.data import IterableDataset, default_collate, get_worker_info

import forebay
from kit.faults import FAULTS

# A machine of one core is warned of two workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker")
COUNT = 16
FATAL = 5
HANG_S = 1.5

# The first line of the error where a fault is met, and the likely cause that follows it.
DEATHS = {
    "SIGKILL": (
        "killed by signal: Killed (SIGKILL",
        "usually the machine ran out of memory, or someone killed",
    ),
    "SIGSEGV": ("killed by signal: Segmentation fault (SIGSEGV", "native code crashed"),
    "os._exit": ("exited with code 3", "the function ended its process"),
    "hang, deaf": (f"timed out after {HANG_S} seconds", "in hang"),
}
WAYS = {
    "torch's": {},
    "persistent": {"persistent_workers": True},
    "seed": {"seed": 3},
    "buffer": {"buffer": "1MB"},
    "seed, buffer": {"seed": 3, "buffer": "1MB"},
}

every_way = pytest.mark.parametrize("way", WAYS)


def deaths_in(deadly_in, *others_in):
    """Parametrize by ways and faults: SIGKILL in some ways, the other deaths in fewer."""
    cases = [(way, "SIGKILL") for way in deadly_in]
    cases += [(way, fault) for way in others_in for fault in DEATHS if fault != "SIGKILL"]
    return pytest.mark.parametrize(("way", "fault"), cases)


class Fate:
    """Meets a fault in a worker, each time or the first time only."""

    def __init__(self, fault, once_in=None):
        self.fault = fault
        self.trace = None if once_in is None else once_in / "met"

    def meet(self):
        if get_worker_info() is None:
            return
        if self.trace is not None:
            try:
                self.trace.touch(exist_ok=False)  # two workers may come to it at the same time
            except FileExistsError:
                return
        FAULTS.get(self.fault, bool)()


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


def two_epochs(way):
    """Return what is to come, made here; numbers that are drawn too where they have a seed."""
    seed = WAYS[way].get("seed")
    kind = Squares if seed is None else Noisy
    loader = forebay.DataLoader(kind(COUNT), batch_size=2, seed=seed)
    return [list(loader), list(loader)]


# ---- once ---------------------------------------------------------------------------------------


@pytest.mark.slow
@deaths_in(WAYS, "torch's", "seed, buffer")
def test_a_fault_that_is_met_once_costs_nothing(way, fault, tmp_path):
    """The batch is made once more, and nobody can tell, in this epoch or the next."""
    kind = FatalNoise if "seed" in way else Fatal
    with loader_of(kind(Fate(fault, once_in=tmp_path)), way, fault) as loader:
        assert_same([list(loader), list(loader)], two_epochs(way))
        # With a buffer, a later epoch may have met it first.
        until(lambda: loader.statistics().restarts > 0)
        assert loader.statistics().restarts == 1


@pytest.mark.slow
@deaths_in(["persistent", "seed", "seed, buffer"], "seed, buffer")
def test_a_fault_in_a_stream_that_is_met_once_costs_nothing(way, fault, tmp_path):
    """The new worker reads past what the dead one gave."""
    torch.manual_seed(5)
    with loader_of(FatalStream(Fate("nothing")), way) as whole:
        expected = list(whole)
    torch.manual_seed(5)
    with loader_of(FatalStream(Fate(fault, once_in=tmp_path)), way, fault) as loader:
        batches = list(loader)
        assert loader.statistics().restarts == 1
    assert_same(batches, expected)


# ---- always -------------------------------------------------------------------------------------


@pytest.mark.slow
@deaths_in(WAYS, "torch's", "seed, buffer")
def test_a_fault_that_is_met_again_is_an_error_of_one_batch(way, fault):
    """It says what there is to know, and the loader continues with the next batch."""
    expected = [default_collate([Squares(COUNT)[n] for n in (i, i + 1)]) for i in range(0, 16, 2)]
    with loader_of(Fatal(Fate(fault)), way, fault) as loader:
        batches = iter(loader)
        assert_same([next(batches), next(batches)], expected[:2])
        with pytest.raises(forebay.WorkerDiedError) as caught:
            next(batches)
        text = str(caught.value)
        what, cause = DEATHS[fault]
        assert what in text.splitlines()[0]
        for words in (cause, "epoch 0, batch 2: samples [4, 5].", "tried 2 times", "num_workers=0"):
            assert words in text
        assert_same(list(batches), expected[3:])
        assert loader.statistics().restarts >= 1
        assert_same(next(iter(loader)), expected[0])


@pytest.mark.slow
@deaths_in(["torch's", "persistent", "seed", "buffer"], "buffer")
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
        assert loader.statistics().restarts == 1  # its other orders cost no further workers


# ---- the process that forks the workers ---------------------------------------------------------


class KillsItsMaker(Fate):
    """A fate that strikes who forked the worker, and so all workers: three times in all."""

    def __init__(self, folder):
        super().__init__("hang")
        self.traces = [folder / str(number) for number in range(3)]

    def meet(self):
        for trace in self.traces:
            with suppress(FileExistsError):
                trace.touch(exist_ok=False)
                os.kill(os.getsid(0), signal.SIGKILL)  # whose session it is
                super().meet()


@pytest.mark.slow
@every_way
def test_the_death_of_the_zygote_is_nobodys_fault(way, tmp_path):
    """Three times in the midst of one batch: nobody gives it up for that, and nothing is lost."""
    kind = FatalNoise if "seed" in way else Fatal
    fate = KillsItsMaker(tmp_path)
    with loader_of(kind(fate), way) as loader:
        assert_same([list(loader), list(loader)], two_epochs(way))
    assert all(trace.exists() for trace in fate.traces)


@pytest.mark.slow
def test_streams_survive_the_death_of_the_zygote(tmp_path):
    """Both workers read again past what they gave."""
    with loader_of(FatalStream(KillsItsMaker(tmp_path)), "seed") as loader:
        numbers = [batch[0].tolist() for batch in loader]
    assert numbers == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]


# ---- exceptions ---------------------------------------------------------------------------------


class OwnError(Exception):
    """An exception of several words."""


class UnsendableError(ValueError):
    """An exception that holds what cannot be sent."""

    def __init__(self, words):
        self.hook = lambda: words


def batches_and_error(loader, failing):
    """Return the error of one batch, having checked the batches before and after it."""
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(failing)] == [[0, 1], [2, 3], [4, 5]][:failing]
    kind, words = error_of_next(batches)
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5], [6, 7]][failing + 1 :]
    return kind, words


def fail(worker):
    raise OwnError("no worker today", worker)


@pytest.mark.slow
@every_way
def test_a_worker_init_fn_that_raises_is_an_error_of_each_batch(way):
    """Nothing is tried again, nobody waits, and the next epoch says the same."""
    with loader_of(Squares(4), way, worker_init_fn=fail) as loader:
        for _ in range(2):
            batches = iter(loader)
            for _ in range(2):
                kind, words = error_of_next(batches)
                assert (kind, "no worker today" in words) == (OwnError, True)
            assert list(batches) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["torch's", "buffer", pytest.param("seed", marks=pytest.mark.thorough)]
)
def test_workers_that_die_as_they_are_set_up_are_given_up(way):
    """Not started for ever; a new epoch tries again."""
    with loader_of(Squares(4), way, worker_init_fn=lambda worker: os._exit(3)) as loader:
        for _ in range(2):
            with pytest.raises(forebay.WorkerDiedError, match=r"kept alive.*with code 3"):
                list(loader)


@every_way
def test_a_dataset_that_cannot_be_sent_leaves_nothing_behind(way):
    """With `spawn`: pickle's own error, and torch's warning."""
    loader = loader_of(Failing(4, UnsendableError("x"), ()), way, multiprocessing_context="spawn")
    with pytest.warns(UserWarning, match="Got pickle error when attempting to start a worker"):
        with pytest.raises((AttributeError, TypeError, PicklingError), match="pickle"):
            iter(loader)


ENDINGS = [
    pytest.param(SystemExit(3), "sys.exit(3) was called", id="SystemExit"),
    pytest.param(
        KeyboardInterrupt("x"), "not answer: KeyboardInterrupt: x", id="KeyboardInterrupt"
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["process", "thread"])
@pytest.mark.parametrize(("raised", "words"), ENDINGS)
@pytest.mark.parametrize("way", ["torch's", "seed", "buffer"])
def test_what_would_end_a_process_costs_a_batch(way, raised, words, backend):
    """It is tried once more, and is the worker's own affair: no Ctrl-C, no end of the trainer."""
    with loader_of(Failing(8, raised, (5,)), way, backend=backend) as loader:
        kind, text = batches_and_error(loader, 2)
    assert kind is forebay.WorkerDiedError
    assert words in text.splitlines()[0]
    assert "epoch 0, batch 2: samples [4, 5]." in text


@pytest.mark.slow
@pytest.mark.parametrize(("raised", "words"), ENDINGS)
@pytest.mark.parametrize("way", ["torch's", "seed", "buffer"])
def test_what_would_end_a_process_ends_a_stream(way, raised, words):
    """A generator cannot be asked again: this is no end of the dataset, it is an error."""

    class Ends(Stream):
        def __iter__(self):
            yield from range(3)
            raise raised

    with loader_of(Ends(0), way) as loader:
        batches = iter(loader)
        assert [next(batches).tolist() for _ in range(2)] == [[0, 1]] * 2
        for _ in range(2):
            kind, text = error_of_next(batches)
            assert kind is forebay.WorkerDiedError
            assert words in text.splitlines()[0]
            assert "tried once" in text
        assert list(batches) == []


@pytest.mark.parametrize("options", [{}, {"seed": 3}], ids=str)
def test_without_workers_what_would_end_the_process_may_do_so(options):
    """sys.exit() in a sample is sys.exit(), and Ctrl-C is Ctrl-C."""
    for raised in (SystemExit(3), KeyboardInterrupt()):
        batches = iter(forebay.DataLoader(Failing(8, raised, (5,)), batch_size=2, **options))
        assert [next(batches).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
        assert error_of_next(batches)[0] is type(raised)
