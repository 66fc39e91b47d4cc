"""Streams: datasets that are iterated, a copy of them in every worker."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from datasets import (
    CountingStream,
    Shards,
    SizedStream,
    Stream,
    StreamThatFails,
    as_it_is,
    error_of_next,
    numbers,
)
from same import assert_same
from torch.utils.data import ChainDataset, IterableDataset, get_worker_info
from torch.utils.data import DataLoader as TorchDataLoader

import forebay
from forebay.base import torch_internals

# A machine of few cores is warned of the workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create . worker")


def in_turn(*shards):
    """Return the batches of workers in the order in which torch hands them out: one each, in turn.

    Those that have come to their end are left out.
    """
    longest = max(map(len, shards))
    return [shard[turn] for turn in range(longest) for shard in shards if turn < len(shard)]


def batches(first, count, size, *, drop_last=False):
    """Return the batches that one shard gives by itself."""
    made = [
        list(range(first + start, first + min(start + size, count)))
        for start in range(0, count, size)
    ]
    return made[:-1] if drop_last and made and len(made[-1]) < size else made


class Arrays(IterableDataset):
    """Samples that are arrays, of which `==` has no truth value."""

    def __iter__(self):
        return (np.arange(3) + number for number in range(5))


def test_samples_of_a_stream_are_compared_with_nothing(loader_class):
    """Their `==` may raise, as an array's does where a truth value is asked for."""
    expected = [[[0, 1, 2], [1, 2, 3]], [[2, 3, 4], [3, 4, 5]], [[4, 5, 6]]]
    assert numbers(loader_class(Arrays(), batch_size=2)) == expected


def test_every_worker_gives_the_whole_stream(loader_class):
    """A stream that does not look at its worker comes twice from two of them, in turn."""
    loader = loader_class(Stream(3), batch_size=2, num_workers=2)
    assert numbers(loader) == [[0, 1], [0, 1], [2], [2]]


@pytest.mark.parametrize("arguments", [{}, {"buffer": "1MB"}, {"seed": 0}], ids=repr)
def test_a_stream_that_nothing_divides_is_warned_of(arguments):
    """With the number of times that each sample comes, and no batch lost."""
    with forebay.DataLoader(Stream(3), batch_size=2, num_workers=2, **arguments) as loader:
        with pytest.warns(UserWarning, match="each of the 2 workers reads all of Stream: its"):
            assert numbers(loader) == [[0, 1], [0, 1], [2], [2]]


def test_a_question_of_another_process_is_none_of_a_worker(monkeypatch):
    """The trainer may have been a worker itself, which its workers inherit."""
    monkeypatch.setattr(torch_internals._AskedInfo, "was_asked", True)
    with forebay.DataLoader(Stream(3), batch_size=2, num_workers=2) as loader:
        with pytest.warns(UserWarning, match="each of the 2 workers reads all of Stream"):
            list(loader)


DIVIDED = {
    "by worker": (Shards(2, 2), {"num_workers": 2}),
    "one worker": (Stream(3), {"num_workers": 1}),
    "worker_init_fn": (Stream(3), {"num_workers": 2, "worker_init_fn": print}),
}


@pytest.mark.parametrize(("stream", "arguments"), DIVIDED.values(), ids=DIVIDED)
def test_a_stream_that_is_divided_is_not_warned_of(stream, arguments):
    """Or that may be, by worker_init_fn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "This DataLoader will create")
        assert list(forebay.DataLoader(stream, batch_size=2, **arguments))


SIZES = [(1, 7), (30, 2), (0, 5), (0, 0), (2, 9, 5), (9, 0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(
    ("persistent", "drop_last"), [(False, False), (True, True)], ids=["plain", "persistent"]
)
def test_workers_that_end_at_different_times_keep_torchs_order(
    loader_class, sizes, persistent, drop_last
):
    """Each worker gives its own shard; batches come in turn from those that have any left."""
    loader = loader_class(
        Shards(*sizes),
        batch_size=2,
        drop_last=drop_last,
        num_workers=len(sizes),
        persistent_workers=persistent,
    )
    shards = [
        batches(100 * worker, count, 2, drop_last=drop_last) for worker, count in enumerate(sizes)
    ]
    for _ in range(2 if persistent else 1):
        assert numbers(loader) == in_turn(*shards)


@pytest.mark.parametrize("sizes", [(1, 7), (5, 0)], ids=str)
def test_without_batches_items_come_in_turn(loader_class, sizes):
    """batch_size=None: one item from each worker that has any left."""
    loader = loader_class(Shards(*sizes), batch_size=None, num_workers=2)
    shards = [list(range(100 * w, 100 * w + count)) for w, count in enumerate(sizes)]
    assert list(loader) == in_turn(*shards)


def test_without_batches_items_come_as_they_are(loader_class, num_workers):
    """A stream of ready batches needs no collating: they are converted like single samples."""
    ready = [torch.ones(3, 2), {"a": [torch.zeros(2), "text"]}, None, (1, 2.5)]

    class Ready(IterableDataset):
        def __iter__(self):
            info = get_worker_info()
            return iter(ready[info.id :: info.num_workers] if info else ready)

    loader = loader_class(Ready(), batch_size=None, num_workers=num_workers)
    assert_same(list(loader), list(TorchDataLoader(ready, batch_size=None)))


@pytest.mark.parametrize(
    ("batch_size", "expected"), [(3, [[0, 1, 2], [3, 4]]), (None, [0, 1, 2, 3, 4])]
)
def test_a_collate_fn_gets_lists_of_items_or_items(loader_class, batch_size, expected):
    """As with a map-style dataset."""
    loader = loader_class(Stream(5), batch_size=batch_size, collate_fn=as_it_is, num_workers=1)
    assert list(loader) == expected


def test_streams_can_be_chained(loader_class, num_workers):
    """ChainDataset and `+`: one after the other, batches across the seam."""
    for chain in (ChainDataset([Shards(3, 1), Shards(2, 1)]), Shards(3, 1) + Shards(2, 1)):
        loader = loader_class(chain, batch_size=4, num_workers=num_workers)
        if num_workers:
            assert numbers(loader) == [[0, 1, 2, 0], [100, 100], [1]]
        else:
            assert numbers(loader) == [[0, 1, 2, 100], [0, 1, 100]]


def test_each_epoch_starts_the_stream_again(loader_class, num_workers):
    """Fresh copies in fresh workers; the one copy of the main process counts on."""
    loader = loader_class(CountingStream(2), batch_size=2, num_workers=num_workers)
    epochs = [numbers(loader) for _ in range(2)]
    assert epochs == ([[[1, 1]] * 2] * 2 if num_workers else [[[1, 1]], [[2, 2]]])


def test_persistent_workers_keep_the_stream_and_start_it_again(loader_class):
    """Their copies of the dataset live on from epoch to epoch."""
    loader = loader_class(CountingStream(2), batch_size=2, num_workers=2, persistent_workers=True)
    assert [numbers(loader) for _ in range(3)] == [[[n, n]] * 2 for n in (1, 2, 3)]


def test_an_endless_stream_can_be_left(loader_class, num_workers):
    """A break leaves it behind, and the next epoch starts anew."""

    class Endless(IterableDataset):
        def __iter__(self):
            while True:
                yield 7

    loader = loader_class(Endless(), batch_size=2, num_workers=num_workers)
    for _ in range(2):
        taken = [batch.tolist() for batch, _ in zip(loader, range(6), strict=False)]
        assert taken == [[7, 7]] * 6


def test_an_iterator_may_be_the_stream(loader_class):
    """`__iter__` may return anything with `__next__`, the dataset itself included."""

    class Once(IterableDataset):
        left = 3

        def __iter__(self):
            return self

        def __next__(self):
            if self.left == 0:
                raise StopIteration
            self.left -= 1
            return self.left

    loader = loader_class(Once(), batch_size=2)
    assert [numbers(loader) for _ in range(2)] == [[[2, 1], [0]], []]


# ---- lengths ------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [None, 1])
def test_a_stream_longer_than_it_said_is_warned_of(loader_class, num_workers, batch_size):
    """Who asked for len() is told of every item beyond it, and gets them all."""
    loader = loader_class(SizedStream(4, said=2), batch_size=batch_size, num_workers=num_workers)
    assert len(loader) == 2
    with pytest.warns(UserWarning, match="Length of .* was reported to be 2") as caught:
        loaded = list(loader)
    assert len(loaded) == (8 if num_workers else 4)
    words = [str(each.message) for each in caught if "Length of" in str(each.message)]
    assert len(words) == len(loaded) - 2
    assert "but 3 samples have been fetched" in words[0]
    assert ("multiprocessing data-loading" in words[0]) is (num_workers > 0)


def test_a_stream_is_not_warned_of_unless_its_length_was_asked_for(loader_class, num_workers):
    """Warnings are errors here: a wrong length that nobody heard goes by."""
    loader = loader_class(SizedStream(4, said=2), batch_size=None, num_workers=num_workers)
    assert len(list(loader)) == (8 if num_workers else 4)


def test_a_stream_as_long_as_it_said_is_not_warned_of(loader_class):
    """Nor is a shorter one."""
    for count in (3, 2):
        loader = loader_class(SizedStream(count, said=3), batch_size=1)
        assert len(loader) == 3
        assert len(list(loader)) == count


# ---- streams that fail --------------------------------------------------------------------------


def test_a_stream_that_cannot_start_fails_in_iter_or_at_the_first_batch(loader_class, num_workers):
    """In the main process at iter(); from a worker as its first batch."""
    loader = loader_class(StreamThatFails(4, "at once"), num_workers=num_workers)
    if num_workers:
        kind, words = error_of_next(iter(loader))
        assert kind is ValueError
        assert words.startswith("Caught ValueError in DataLoader worker process 0.\nOriginal")
        assert "no stream today" in words
    else:
        with pytest.raises(ValueError, match=r"^no stream today$"):
            iter(loader)


def test_a_stream_that_breaks_off_fails_in_its_turn(loader_class, num_workers):
    """The batches before are handed out; after the error the stream has come to its end."""
    iterator = iter(loader_class(StreamThatFails(4, "later"), num_workers=num_workers))
    workers = max(1, num_workers)
    assert [next(iterator).item() for _ in range(2 * workers)] == sorted([0, 1] * workers)
    for worker in range(workers):
        kind, words = error_of_next(iterator)
        assert kind is ValueError
        assert "no more of it" in words
        assert (f"in DataLoader worker process {worker}." in words) is (num_workers > 0)
    with pytest.raises(StopIteration):
        next(iterator)


def test_a_collate_fn_that_raises_costs_its_batch_alone(loader_class, num_workers):
    """The stream goes on behind the batch that could not be collated."""

    def collate(samples):
        if 2 in samples:
            raise KeyError("two")
        return samples

    loader = loader_class(Shards(6, 0), batch_size=2, collate_fn=collate, num_workers=num_workers)
    iterator = iter(loader)
    assert next(iterator) == [0, 1]
    kind, words = error_of_next(iterator)
    assert kind is KeyError
    assert "two" in words
    assert list(iterator) == [[4, 5]]
