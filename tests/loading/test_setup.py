"""The simulation prefetches what the loader prefetches: its setup is compared with the loader."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace

import pytest
from streams import until

from forebay import Buffer, DataLoader
from forebay.loading.facts import setup_now
from forebay.loading.messages import BatchResult
from forebay.loading.selections import Depth
from forebay.observe.measurements import Fetched
from forebay.observe.simulation import Work, depth_of, has_buffer, low_mark

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

NBYTES = 5_000
TAKEN = 6

BUFFERS = [
    None,
    "40kB",
    Buffer(max_batches=7),
    Buffer(max_batches=9, refill_below=4),
    Buffer("20kB", max_batches=11),
]


class Numbers:
    """A map-style dataset of numbers."""

    def __len__(self):
        return 400

    def __getitem__(self, index):
        return index


def work_of(*, is_tiny=False):
    """Return work with batches of `NBYTES`."""
    return Work(batch_s=[], step_s=[], nbytes=NBYTES, is_tiny=is_tiny)


def most_outstanding(settings, *, is_tiny):
    """Return how many batches a loader has outstanding at most, by what it really uses."""
    setup, limits = settings.setup, settings.limits()
    depth = Depth(setup)
    if is_tiny:
        for _ in range(20):
            depth.record(BatchResult(None, is_inline=True))
    requested = 0
    while (missing := depth.missing(requested, 0)) and not setup.fills_by_itself:
        requested += missing
    made = [requested] if requested else [limits.slots]
    if limits.max_bytes is not None:
        made.append(limits.max_bytes // NBYTES)
    return min(made)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("buffer", BUFFERS)
def test_the_simulated_depth_is_that_of_the_loader(seed, buffer) -> None:
    """For many settings, with plans and by torch's rules."""
    for workers, each, in_order, auto in itertools.product((1, 2, 5), (None, 2, 3), (1, 0), (0, 1)):
        if auto and workers > 1:
            continue
        loader = DataLoader(
            Numbers(),
            num_workers="auto" if auto else workers,
            prefetch_factor=each,
            in_order=bool(in_order),
            buffer=buffer,
            seed=seed,
        )
        settings, trace = (
            loader._kind(),
            SimpleNamespace(num_workers=1, tried={}, fetched=Fetched()),
        )
        setup = setup_now(settings.setup, trace)
        for is_tiny in (False, True):
            found = depth_of(setup, work_of(is_tiny=is_tiny))
            assert found == most_outstanding(settings, is_tiny=is_tiny), (workers, each, is_tiny)
        if buffer is not None and not setup.fills_by_itself:
            assert low_mark(setup, work_of()) == settings.setup.refill_below
        assert has_buffer(setup) == (buffer is not None)


class Counted(Numbers):
    """Counts samples over all workers; they take longer than tiny ones, of which more are made."""

    made_once = True  # or those that are made again would be counted, too

    def __init__(self, counts) -> None:
        self.counts = counts

    @property
    def made(self):
        return self.counts.stat().st_size

    def __getitem__(self, index):
        time.sleep(0.002)
        with self.counts.open("a") as file:
            file.write(".")
        return index


NINE = Buffer(max_batches=9, refill_below=9)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"seed": 0}, {"seed": 0, "buffer": NINE}])
def test_so_many_batches_are_made(options, tmp_path) -> None:
    """While training takes none, all that may be prefetched is made, and no more."""
    dataset = Counted(tmp_path / "counts")
    with DataLoader(dataset, num_workers=3, prefetch_factor=2, **options) as loader:
        batches = iter(loader)
        for _ in range(TAKEN):  # by torch's rules messages are sent while training asks for one
            next(batches)
            time.sleep(0.05)
        expected = TAKEN + depth_of(loader._kind().setup, work_of())
        until(lambda: dataset.made >= expected)
        time.sleep(0.1)
        assert dataset.made == expected
