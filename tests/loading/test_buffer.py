"""The buffer: one stream across epochs, as deep as it was told to be."""

from __future__ import annotations

import math
import time

import pytest
import torch
from datasets import Gate, Gated, Squares
from same import assert_same
from streams import Asked, until
from torch.utils.data import (
    ConcatDataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from forebay import Buffer, DataLoader, OptionError
from forebay.buffer import buffer_of
from forebay.engine.tasks import State
from forebay.loading import planner
from forebay.loading.selections import CHUNK
from forebay.options import parse_bytes

# A machine of few cores is warned of several workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

BACKENDS = pytest.mark.parametrize("backend", ["process", "thread"])


# ---- its arguments ------------------------------------------------------------------------------

SIZES = {
    1: 1,
    "1": 1,
    30e9: 30 * 10**9,
    "800MB": 800 * 10**6,
    "30GB": 30 * 10**9,
    "30GiB": 30 * 2**30,
    "1.5kb": 1500,
    " 2 TiB ": 2 * 2**40,
    "7B": 7,
}


@pytest.mark.parametrize(("text", "nbytes"), SIZES.items(), ids=str)
def test_sizes_are_numbers_or_texts(text, nbytes):
    """In powers of 1000, or of 1024 with an i."""
    assert parse_bytes(text) == nbytes


def test_a_size_is_a_buffer_of_that_size():
    """As an argument of the loader, or by position."""
    assert buffer_of("800MB") == Buffer("800MB") == Buffer(max_bytes=800 * 10**6)


NO_SIZES = [
    *(0, -1, True, 1.5, math.inf, math.nan, 1e30, 2**63),
    *("", "GB", "-1GB", "30 gigs", "0GB", "\u0663GB", b"1GB"),
]


@pytest.mark.parametrize("size", [*NO_SIZES, pytest.param("9" * 400 + "GB", id="400 digits")])
def test_what_is_no_size_is_refused(size):
    """With examples of what is."""
    with pytest.raises(OptionError, match=r"is not a size; it must be .*'30GB'"):
        DataLoader(Squares(1), buffer=size)


WRONG = {
    "no mark": ({}, r"^Buffer\(\) needs max_bytes or max_batches"),
    "no batches": ({"max_batches": 0}, "^max_batches=0 is not valid"),
    "a half": ({"max_batches": 1.5}, r"^max_batches=1\.5 is not valid"),
    "yes": ({"max_batches": True}, "^max_batches=True is not valid"),
    "low mark of nothing": ({"max_batches": 9, "refill_below": 0}, "^refill_below=0 is not"),
    "low above high": ({"max_batches": 9, "refill_below": 10}, "^refill_below=10 is above max_b"),
    "bytes": ({"max_bytes": "much"}, "^buffer='much' is not a size"),
    "directory": ({"max_batches": 9, "directory": "/no/such"}, "^directory='/no/such' is not a f"),
}


@pytest.mark.parametrize(("arguments", "words"), WRONG.values(), ids=WRONG)
def test_marks_that_make_no_sense_are_refused(arguments, words):
    """Each with its own name."""
    with pytest.raises(OptionError, match=words):
        Buffer(**arguments)


@pytest.mark.parametrize("name", ["backend", "on_error", "seed"])
def test_other_arguments_that_make_no_sense_are_refused(name):
    """Before anything starts."""
    with pytest.raises(OptionError, match=f"^{name}='x' is not valid; it must be"):
        DataLoader(Squares(1), **{name: "x"})


# ---- how deep it is -----------------------------------------------------------------------------


def rests_at(loader, count):
    """Wait until so many batches are ready, and nothing more is made."""
    until(lambda: loader.statistics().ready_batches >= count)
    before = loader.dataset.total()
    until(lambda: loader.statistics().ready_batches == count)
    for _ in range(20):  # whatever was under way beyond the mark would come now
        time.sleep(0.001)
        assert loader.statistics().ready_batches == count
    assert loader.dataset.total() == before


@BACKENDS
def test_it_fills_to_the_high_mark_and_again_below_the_low_mark(backend):
    """Without anybody taking batches; and not before there are fewer than the low mark."""
    dataset = Asked(250)
    deep = Buffer(max_batches=20, refill_below=12)
    with DataLoader(dataset, num_workers=2, buffer=deep, backend=backend) as loader:
        iterator = iter(loader)
        rests_at(loader, 20)
        assert dataset.total() == 20
        for _ in range(8):
            next(iterator)
        rests_at(loader, 12)
        assert dataset.total() == 20
        next(iterator)
        rests_at(loader, 20)
        assert dataset.total() == 29


@BACKENDS
def test_no_more_batches_are_ready_than_fit_into_the_bytes(backend):
    """A size is a size: no more batches than fit, whatever their number."""
    dataset = Big(60)
    with DataLoader(dataset, num_workers=2, buffer="100kB", backend=backend) as loader:
        iterator = iter(loader)
        next(iterator)
        until(lambda: loader.statistics().ready_batches >= 8)
        for batch in iterator:
            assert batch.nbytes == 10_000
            now = loader.statistics()
            assert now.ready_batches <= 10
            assert 0 <= now.ready_bytes - now.ready_batches * 10_000 < 2_000


class Big(Squares):
    """Samples of 10 kB."""

    def __getitem__(self, index):
        return torch.full((10_000,), index % 256, dtype=torch.uint8)


def test_a_batch_larger_than_the_buffer_still_comes():
    """One at a time."""
    with DataLoader(Big(9), batch_size=3, num_workers=2, buffer=Buffer(max_bytes=100)) as loader:
        assert [int(batch[0, 0]) for batch in loader] == [0, 3, 6]


def test_the_low_mark_is_below_the_high_mark_by_itself():
    """80 % of what it held when it was full."""
    dataset = Asked(250)
    with DataLoader(dataset, num_workers=2, buffer=Buffer(max_batches=20)) as loader:
        iterator = iter(loader)
        rests_at(loader, 20)
        for _ in range(4):
            next(iterator)
        rests_at(loader, 16)
        next(iterator)
        rests_at(loader, 20)


# More batches than requests are made in advance: the marks of somebody who filled 30 GB by hand.
MARKS = Buffer(max_bytes="1GB", max_batches=1000, refill_below=800)
LOADERS = {
    "in the order of a plan": lambda buffer: DataLoader(
        Squares(40_000), batch_size=8, num_workers=2, buffer=buffer
    ),
    "across short epochs": lambda buffer: DataLoader(
        Squares(50), batch_size=8, shuffle=True, seed=0, num_workers=2, buffer=buffer
    ),
    "by a sampler of the user": lambda buffer: DataLoader(
        Squares(300),
        batch_size=8,
        sampler=RandomSampler(Squares(300)),
        num_workers=2,
        buffer=buffer,
    ),
    "by threads": lambda buffer: DataLoader(
        Squares(40_000), batch_size=8, num_workers=2, buffer=buffer, backend="thread"
    ),
    "from an iterable dataset": lambda buffer: DataLoader(
        Numbers(40_000), batch_size=8, num_workers=2, buffer=buffer
    ),
    "from an iterable dataset, in any order": lambda buffer: DataLoader(
        Numbers(40_000), batch_size=8, num_workers=2, buffer=buffer, in_order=False
    ),
}


class Numbers(IterableDataset):
    """Each worker yields all numbers below `count`."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return map(torch.tensor, range(self.count))


@pytest.fixture
def patient(monkeypatch):
    """Have a sampler of the user read to the mark, also on a machine that takes long for it."""
    monkeypatch.setattr(planner, "READ_S", 3600.0)


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("kind", LOADERS)
def test_it_fills_while_the_trainer_is_away(kind):
    """After one `next`, to the mark in batches; then nothing is made down to the low mark."""
    with LOADERS[kind](MARKS) as loader:
        iterator = iter(loader)
        next(iterator)

        def has_filled():
            return loader.statistics().ready_batches >= 999

        until(has_filled)
        until(lambda: not loader.statistics().in_flight)
        full = loader.statistics().ready_batches
        assert full <= 1000
        if "iterable" in kind:  # its epochs would be needed to take 200 batches without a pause
            return
        taken = 0
        while full - taken > 800:
            try:
                next(iterator)
                taken += 1
            except StopIteration:
                iterator = iter(loader)
            now = loader.statistics()
            assert (now.ready_batches, now.in_flight) == (full - taken, 0)
        for batch in iterator:
            del batch
            break
        else:
            next(iter(loader))
        until(has_filled)


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("kind", LOADERS)
def test_it_fills_to_the_mark_in_bytes(kind):
    """After one `next`, whatever the number of batches is."""
    nbytes = 800 * 1024  # each batch counts as 1 KiB at least
    with LOADERS[kind](Buffer(nbytes)) as loader:
        iterator = iter(loader)
        next(iterator)
        until(lambda: loader.statistics().ready_bytes >= 0.97 * nbytes)
        until(lambda: not loader.statistics().in_flight)
        assert loader.statistics().ready_bytes <= nbytes


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_it_fills_however_many_batches_are_ready_at_first(monkeypatch):
    """They are counted together with the room that they leave."""
    request = planner.Planner._put_missing

    def late(self, at_least=0):
        until(lambda: len(self._feed.ready) == len(self._requests))
        request(self, at_least)

    monkeypatch.setattr(planner.Planner, "_put_missing", late)
    with LOADERS["by a sampler of the user"](MARKS) as loader:
        next(iter(loader))
        until(lambda: loader.statistics().ready_batches >= 999)


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_it_fills_however_many_batches_wait_for_their_turn():
    """Made before those in front of them, they are counted with the room that they leave."""
    gates = Gate(), Gate()
    dataset = ConcatDataset([Gated(8, 0, gates[0]), Gated(2392, 0, gates[1])])
    usual = {"batch_size": 8, "sampler": SequentialSampler(dataset), "buffer": MARKS}
    with DataLoader(dataset, num_workers=3, **usual) as loader:
        iterator = iter(loader)
        flow = iterator.pipeline.feed._engine.flow
        until(lambda: flow.counts[State.READY] > CHUNK)
        gates[0].open()
        next(iterator)
        gates[1].open()
        until(lambda: loader.statistics().ready_batches >= 999)
    for gate in gates:
        gate.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_workers", [2, pytest.param("auto", marks=pytest.mark.thorough)], ids=str
)
def test_workers_of_a_buffer_that_nobody_reads_end_and_come_back(monkeypatch, num_workers):
    """As of a loader that a notebook keeps: what is ready stays, and every batch is the same."""
    usual = {"batch_size": 8, "shuffle": True, "seed": 0, "buffer": Buffer(max_batches=20)}
    expected = [*DataLoader(Squares(800), **{**usual, "buffer": None})]
    with DataLoader(Squares(800), num_workers=num_workers, **usual) as loader:
        iterator = iter(loader)
        found = [next(iterator)]
        pool = iterator.pipeline.feed.pool
        # 19 where all 20 were ready before one was taken: it rests down to the low mark.
        until(lambda: loader.statistics().ready_batches >= 19)
        monkeypatch.setattr("forebay.loading.feed.IDLE_S", 0.0)
        until(lambda: not pool.living_pids())
        monkeypatch.setattr("forebay.loading.feed.IDLE_S", 600.0)
        assert loader.statistics().ready_batches >= 19
        found += [next(iterator) for _ in range(30)]
        monkeypatch.setattr("forebay.loading.feed.IDLE_S", 0.0)
        until(lambda: not pool.living_pids())
        loader.refresh()  # drops what is ready
        found += iterator
        assert loader.statistics().restarts == 0
    assert_same(found, expected)


class SlowlyReadSampler(Sampler):
    """Says how far it was read; the clock seems to move on by a second with each index."""

    def __init__(self, monkeypatch):
        self.read, self.monkeypatch = 0, monkeypatch

    def __len__(self):
        return 10_000

    def __iter__(self):
        now = time.perf_counter()
        for index in range(10_000):
            self.read += 1
            seconds = now + self.read
            self.monkeypatch.setattr(planner.time, "perf_counter", lambda at=seconds: at)
            yield index


def test_a_sampler_that_is_slow_does_not_keep_the_trainer_waiting(monkeypatch):
    """Beyond the usual number it is read a little with each batch, not to the mark at once."""
    sampler = SlowlyReadSampler(monkeypatch)
    with DataLoader(Squares(10_000), sampler=sampler, num_workers=1, buffer=MARKS) as loader:
        iterator = iter(loader)
        first = sampler.read
        assert first < 500
        for _ in range(20):
            next(iterator)
        assert first < sampler.read <= first + 20 * planner.CHUNK


# ---- one stream across epochs -------------------------------------------------------------------


@pytest.fixture
def gate():
    """A gate that is opened at the end, so that no worker waits for ever."""
    gate = Gate()
    yield gate
    gate.close()


@BACKENDS
def test_the_next_epoch_is_being_made_while_this_one_is_not_taken(backend, gate):
    """Its first batches are ready before any of this one's was handed out."""
    dataset = Asked(10)
    deep = Buffer(max_batches=25)
    with DataLoader(dataset, num_workers=2, buffer=deep, backend=backend) as loader:
        iterator = iter(loader)
        until(lambda: loader.statistics().ready_batches == 25)
        now = loader.statistics()
        assert (now.epoch, now.batch) == (0, 0)
        assert (now.ready_from, now.ready_to) == ((0, 0), (2, 4))
        assert [batch.item() for batch in iterator] == list(range(10))
        assert loader.statistics().ready_from == (1, 0)
        assert [batch.item() for batch in loader] == list(range(10))


class GatedOnce(Gated):
    """Samples of which one waits until a gate opens, in the first epoch of a loader with seed 0."""

    seed = None  # of that sample, which no other one has

    def __getitem__(self, index):
        if self.seed in (None, torch.initial_seed()):
            return super().__getitem__(index) if self.seed else torch.initial_seed()
        return index


@pytest.mark.slow
def test_a_slow_head_holds_nobody_up(gate):
    """While one worker is at the epoch's last sample, the other makes all of the next epoch."""
    dataset = GatedOnce(6, 5, gate)
    dataset.seed = list(DataLoader(dataset, batch_size=None, seed=0))[5]
    deep = Buffer(max_batches=16, refill_below=16)  # with room for one more it makes one more
    with DataLoader(dataset, num_workers=2, buffer=deep, seed=0) as loader:
        iterator = iter(loader)
        assert [next(iterator).item() for _ in range(5)] == list(range(5))
        # Batch 5 waits at the gate; also what was given to its worker is made by the other one.
        until(lambda: loader._loader_progress.pipeline.feed._engine.flow.counts[State.READY] >= 10)
        gate.open()
        assert [batch.item() for batch in iterator] == [5]
        assert [batch.item() for batch in loader] == list(range(6))


@BACKENDS
def test_after_a_break_nothing_is_made_twice(backend):
    """What was made of the next epoch is handed out; of this one nothing more is made."""
    dataset = Asked(10)
    deep = Buffer(max_batches=15)
    with DataLoader(dataset, num_workers=2, buffer=deep, backend=backend) as loader:
        for batch in loader:
            if batch.item() == 2:
                break
        until(lambda: loader.statistics().ready_batches + loader.statistics().batch >= 15)
        made = dataset.asked[0]
        assert made == 2
        iterator = iter(loader)
        assert loader.statistics().ready_from == (1, 0)
        assert loader.statistics().ready_batches >= 5
        assert [next(iterator).item() for _ in range(5)] == list(range(5))
    # Each sample at most once in each of the epochs 0 to 3: nothing was thrown away and redone.
    assert dataset.asked[9] <= 3
    assert dataset.total() <= 10 + 5 + 15


def test_it_outlives_the_loop_and_not_the_loader():
    """Between epochs workers go on; with the loader they end."""
    loader = DataLoader(Asked(4), num_workers=1, buffer=Buffer(max_batches=3, refill_below=3))
    assert len(list(loader)) == 4
    until(lambda: loader.statistics().ready_batches == 3)
    loader.close()
    assert loader._loader_progress.pipeline.feed is None
    assert len(list(loader)) == 4
    loader.close()


def test_a_new_iteration_ends_the_one_before():
    """There is one buffer, and one reader of it; the other is told so, not cut short."""
    with DataLoader(Squares(5), num_workers=1, buffer="1MB") as loader:
        one = iter(loader)
        next(one)
        other = iter(loader)
        with pytest.raises(RuntimeError, match="ended by a later iter"):
            next(one)
        assert len(list(other)) == 5
