"""`loader.statistics()`: what the loader has done, and what it waits for."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time

import pytest
import torch
from datasets import Squares
from streams import WAYS, until
from torch.utils.data import default_collate

from forebay import Buffer, DataLoader, mix
from forebay.loading import batch_job
from forebay.loading.batch_job import BatchJob
from forebay.loading.fetch import MapFetcher
from forebay.loading.messages import BatchRequest, BatchSpec
from forebay.observe.record import KEPT_WAITS, Trace
from forebay.pools.events import Assignment

# A machine of few cores is warned of several workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

GROWING = [
    "waited_s",
    "fetch_s",
    "collate_s",
    "cpu_s",
    "queued_s",
    "idle_s",
    "restarts",
    "failures",
]


class Kilobytes(Squares):
    """Samples of 40 kB."""

    def __getitem__(self, index):
        return torch.full((10_000,), float(index))


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        *({"seed": 0, **WAYS[way]} for way in ("here", "2 workers", "persistent", "threads")),
        {"num_workers": 2, "buffer": Buffer(max_batches=6)},
        {"num_workers": 2, "buffer": Buffer(max_batches=6), "backend": "thread"},
        {},
        {"num_workers": 2},
    ],
    ids=repr,
)
def test_every_number_makes_sense_at_every_batch(arguments):
    """Where the loader stands, what is ready, and times that only grow."""
    with DataLoader(Kilobytes(24), batch_size=4, **arguments) as loader:
        before = loader.statistics()
        assert (before.epoch, before.batch) == (-1, 0)
        assert (before.ready_batches, before.ready_bytes, before.in_flight) == (0, 0, 0)
        for epoch in range(2):
            for number, _ in enumerate(loader):
                now = loader.statistics()
                assert (now.epoch, now.batch) == (epoch, number + 1)
                assert 0 <= now.ready_batches <= 6
                assert now.in_flight >= 0
                assert (now.ready_bytes > 0) == (now.ready_batches > 0)
                if now.ready_batches:
                    assert (epoch, number + 1) <= now.ready_from <= now.ready_to
                else:
                    assert now.ready_from is None
                    assert now.ready_to is None
                assert 0 <= now.wait_p50_s <= now.wait_p95_s <= now.wait_p99_s <= now.waited_s
                assert all(getattr(before, name) <= getattr(now, name) for name in GROWING)
                before = now
        if "seed" in arguments or "buffer" in arguments:
            assert before.fetch_s > 0
            assert before.collate_s > 0
            assert before.waited_s > 0


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_what_is_ready_is_counted_and_found(backend):
    """The buffer's first and last batch, their number and their bytes."""
    deep = Buffer(max_batches=8)
    with DataLoader(
        Kilobytes(24), batch_size=4, num_workers=2, buffer=deep, backend=backend
    ) as loader:
        iterator = iter(loader)
        until(lambda: loader.statistics().ready_batches == 8)
        now = loader.statistics()
        assert (now.ready_from, now.ready_to) == ((0, 0), (1, 1))
        assert 0 <= now.ready_bytes - 8 * 160_000 < 10_000
        next(iterator)
        now = loader.statistics()
        assert now.ready_from == (0, 1)
        assert now.ready_bytes < 8 * 160_000
        list(iterator)
        # It fills to eight, or rests with fewer if it was full before the last ones were taken.
        until(lambda: loader.statistics().ready_batches >= 4)
        now = loader.statistics()
        assert (now.epoch, now.batch) == (0, 6)
        assert (now.ready_from, now.ready_to) == ((1, 0), divmod(5 + now.ready_batches, 6))
    assert loader.statistics().ready_batches == 0


def test_a_batch_that_raised_is_ready_as_well(num_workers):
    """It has its place in the line; what is ready ends behind it."""

    class Raising(Squares):
        def __getitem__(self, index):
            if index == 1:
                raise ValueError("bad")
            return index

    with DataLoader(Raising(4), num_workers=2, buffer=Buffer(max_batches=3)) as loader:
        iterator = iter(loader)
        until(lambda: loader.statistics().ready_batches == 3)
        assert loader.statistics().ready_to == (0, 2)
        next(iterator)
        with pytest.raises(ValueError, match="bad"):
            next(iterator)
        assert loader.statistics().batch == 2


def test_waiting_for_a_disk_is_told_from_work():
    """Time on the clock and time of the processor are counted apart."""

    class Sleeping(Squares):
        def __getitem__(self, index):
            time.sleep(0.02)
            return index

    loader = DataLoader(Sleeping(4), seed=0)
    assert len(list(loader)) == 4
    now = loader.statistics()
    assert now.fetch_s >= 0.08
    assert now.cpu_s < now.fetch_s / 2
    assert now.waited_s >= 0.08


def test_a_look_is_immutable_and_fits_on_a_line():
    """It can be printed each step, and kept."""
    loader = DataLoader(Squares(4), seed=0)
    for _ in loader:
        now = loader.statistics()
        assert "\n" not in repr(now)
        assert repr(now).startswith(f"Statistics(epoch=0, batch={now.batch}, ready_batches=0, ")
        with pytest.raises(dataclasses.FrozenInstanceError):
            now.epoch = 3


def test_printing_it_shows_a_summary():
    """Each part on its own line; what did not happen is left out."""
    first = DataLoader(Squares(4), seed=0).statistics()
    assert str(first).splitlines() == [
        "position   before the first batch",
        "batches    0 ready, 0 B; 0 in flight",
        "waits      0 s in total; 50% within 0 s, 95% within 0 s, 99% within 0 s",
        "workers    0; in total 0 s fetching, 0 s collating, 0 s idle",
        "processor  0 s, and 0 s waiting for a core",
    ]
    later = dataclasses.replace(
        first,
        epoch=2,
        batch=1050,
        wait_p95_s=0.0275,
        restarts=1,
        copied_batches=3,
        copied_bytes=5_000_000,
        copy_s=0.001,
        sources={"a\n": (1000, 1.5)},
        decisions=("first", "so there are 3 workers"),
    )
    position, _, waits, _, _, *others = str(later).splitlines()
    assert position == "position   epoch 2, batch 1,050"
    assert "95% within 27.5 ms" in waits
    assert others == [
        "failures   1 restart, 0 skipped samples",
        "copies     3, 5 MB in 1 ms; 0 B pinned, 0 B staged",
        "source     a\\n: 1,000 samples, 1.5 epochs",
        "decision   so there are 3 workers",
    ]


def test_percentiles_are_of_the_last_waits():
    """The oldest are forgotten, so that memory does not grow; the sum is of all."""
    trace = Trace()
    assert trace.snapshot()["wait_p50_s"] == 0.0
    for step in range(KEPT_WAITS):
        trace.taken(float(step), 1.0, 0)
    for step in range(KEPT_WAITS):
        trace.taken(float(step), step / KEPT_WAITS, 0)
    assert len(trace.waits) == KEPT_WAITS
    known = trace.snapshot()
    assert abs(known["wait_p50_s"] - 0.5) < 0.01
    assert abs(known["wait_p99_s"] - 0.99) < 0.01
    assert known["waited_s"] > KEPT_WAITS


def test_a_flat_dict_has_every_number():
    """By the names of the attributes; the same names before the first batch and later."""
    with DataLoader(
        Squares(8), batch_size=2, num_workers=1, buffer=Buffer(max_batches=2)
    ) as loader:
        first = loader.statistics().to_dict()
        assert (first["ready_from_epoch"], first["ready_to_batch"]) == (-1, -1)
        iterator = iter(loader)
        next(iterator)
        until(lambda: loader.statistics().ready_batches > 0)
        now = loader.statistics()
        flat = now.to_dict()
    assert list(flat) == list(first)
    assert json.loads(json.dumps(flat)) == flat
    assert {type(value) for value in flat.values()} == {int, float}
    assert (flat["ready_from_epoch"], flat["ready_from_batch"]) == now.ready_from == (0, 1)
    assert (flat["ready_to_epoch"], flat["ready_to_batch"]) == now.ready_to
    numbers = {
        each.name: getattr(now, each.name)
        for each in dataclasses.fields(now)
        if isinstance(getattr(now, each.name), int | float)
    }
    assert numbers.items() <= flat.items()


def test_a_flat_dict_has_the_sources_of_a_mixture():
    """Two numbers for each, under its name."""
    loader = DataLoader(mix({"web": (Squares(4), 1.0), "code": (Squares(2), 1.0)}), batch_size=2)
    assert not [name for name in loader.statistics().to_dict() if name.startswith("sources")]
    list(loader)
    flat = loader.statistics().to_dict()
    assert flat["sources/web/samples"] + flat["sources/code/samples"] == 6
    assert flat["sources/code/epochs"] == flat["sources/code/samples"] / 2


def test_tiny_batches_have_few_timings_that_lose_nothing(monkeypatch):
    """By a clock that each look moves on by 20 us: sums over all batches, sent now and then."""
    clock = itertools.count()
    job = BatchJob(
        BatchSpec(
            dataset=Squares(10),
            auto_collation=True,
            collate_fn=default_collate,
            fetcher=MapFetcher,
        )
    )
    monkeypatch.setattr(batch_job.time, "perf_counter", lambda: next(clock) * 20e-6)
    timings = []
    for task in range(1000):
        answer = job.run(Assignment(task, 1, BatchRequest([task % 10], 0, task)))
        if answer.result.timing is not None:
            timings.append(answer.result.timing)
    assert 2 < len(timings) < 50
    covered = sum(each.batches for each in timings)
    assert 1000 - 1000 / len(timings) * 2 < covered <= 1000
    one = timings[1].fetch_s / timings[1].batches  # the first is slow: samples are timed singly
    later = covered - timings[0].batches
    assert sum(each.fetch_s for each in timings[1:]) == pytest.approx(later * one, rel=0.01)
    assert all(each.seconds < each.busy_s for each in timings[1:])
