"""Several datasets as one: by weight, over ranks and epochs, resumed, with changed weights."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from datasets import Squares
from streams import Noisy
from torch.utils.data import IterableDataset, RandomSampler, TensorDataset

import forebay
from forebay import DataLoader, OptionError

WEB, CODE, MATH = 400, 90, 10


def mixed(weights=(0.7, 0.2, 0.1), samples=None, **options):
    """Make a loader over three sources, whose samples are their index in all of them together."""
    sources = {
        name: (TensorDataset(torch.arange(first, first + count)), weight)
        for (name, first, count), weight in zip(
            [("web", 0, WEB), ("code", WEB, CODE), ("math", WEB + CODE, MATH)],
            weights,
            strict=True,
        )
    }
    return DataLoader(forebay.mix(sources, samples=samples), **{"batch_size": 10, **options})


def indices(loader, count=None):
    """Return the samples of the next epoch, or of its first batches."""
    found = []
    for number, (batch,) in enumerate(loader, 1):
        found += batch.tolist()
        if number == count:
            break
    return found


def shares(found):
    """Return how many samples are of each source."""
    web = sum(index < WEB for index in found)
    math = sum(index >= WEB + CODE for index in found)
    return web, len(found) - web - math, math


def epochs_of_source(found, first, count):
    """Return the samples of one source, cut where it has given all it has."""
    own = [index for index in found if first <= index < first + count]
    return [own[at : at + count] for at in range(0, len(own), count)]


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_batch_has_the_shares(shuffle):
    """To within a sample or two, though each source goes through epochs of its own."""
    loader = mixed(shuffle=shuffle, seed=3)
    assert len(loader) == 50
    found = [index for _ in range(4) for index in indices(loader)]
    for at in range(0, len(found), 10):
        web, code, math = shares(found[at : at + 10])
        assert abs(web - 7) <= 1
        assert abs(code - 2) <= 1
        assert abs(math - 1) <= 1
    for first, count in [(0, WEB), (WEB, CODE), (WEB + CODE, MATH)]:
        *whole, _ = epochs_of_source(found, first, count)
        assert whole
        assert all(sorted(epoch) == list(range(first, first + count)) for epoch in whole)
        assert len(set(map(tuple, whole))) == (len(whole) if shuffle else 1)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("buffer", [None, "1MB"])
def test_weights_change_at_a_step(num_workers, buffer):
    """From the next batch on, however far ahead batches were made; nothing is lost or repeated."""
    if buffer is not None and not num_workers:
        return
    runs = []
    for _ in range(2):
        with mixed(num_workers=num_workers, buffer=buffer, seed=3, shuffle=True) as loader:
            found = []
            for number, (batch,) in enumerate(loader, 1):
                found += batch.tolist()
                if number == 7:
                    loader.set_weights({"web": 0, "code": 0.5, "math": 0.5})
            found += indices(loader)
        runs.append(found)
        assert abs(shares(found[:70])[0] - 49) <= 1
        assert shares(found[70:])[0] == 0
        assert len(found) == 1000
        *whole, _ = epochs_of_source(found, WEB, CODE)
        assert all(sorted(epoch) == list(range(WEB, WEB + CODE)) for epoch in whole)
    assert runs[0] == runs[1]


@pytest.mark.slow
@pytest.mark.filterwarnings(r"ignore:epoch \d+ was left after batch \d+ and state_dict")
def test_a_state_is_small_and_knows_the_weights():
    """After any number of epochs and changes; the weights are those of the state."""
    sizes = []
    loader = mixed(seed=3, shuffle=True)
    for epoch in range(12):
        loader.set_weights({"web": 1 + epoch % 3, "code": 1, "math": 2})
        iterator = iter(loader)
        for _ in range(4 + epoch):
            next(iterator)
        loader.set_weights({"web": 1, "code": 1 + epoch % 5, "math": 2})
        next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
        sizes.append(len(json.dumps(state)))
        if epoch % 6:
            continue
        again = mixed(seed=3, shuffle=True, num_workers=1)
        again.load_state_dict(state)
        with again:
            rest = [batch[0].tolist() for batch in iterator]
            assert [batch[0].tolist() for batch in again] == rest
            assert len(rest) == 50 - 5 - epoch
    assert max(sizes) < sizes[0] + 60


def test_weights_changed_before_the_first_epoch_and_between_epochs():
    """They hold from the next batch on, and for copies of the loader they are what was given."""
    loader = mixed(seed=3)
    loader.set_weights({"web": 0, "code": 1, "math": 0})
    assert shares(indices(loader)) == (0, 500, 0)
    loader.set_weights({"web": 0, "code": 0, "math": 5})
    assert shares(indices(loader)) == (0, 0, 500)


def test_weights_may_change_between_a_resume_and_its_first_batch():
    """They hold from the position that was loaded, in the second epoch here."""
    loader, again = mixed(seed=3, shuffle=True), mixed(seed=3, shuffle=True)
    list(loader)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    again.load_state_dict(loader.state_dict())
    for each in (loader, again):
        each.set_weights({"web": 1, "code": 3, "math": 2})
    assert indices(again) == [index for (batch,) in iterator for index in batch.tolist()]
    assert indices(again) == indices(loader)


def test_statistics_name_the_sources():
    """How many samples of each were handed out over all ranks, and how many of its epochs."""
    loaders = [mixed(seed=3, world_size=2, rank=rank, batch_size=5) for rank in range(2)]
    found = []
    for loader in loaders:
        assert loader.statistics().sources == {}
        found += indices(loader)
        found += indices(loader, 4)
    for loader in loaders:
        sources = loader.statistics().sources
        assert list(sources) == ["web", "code", "math"]
        assert tuple(count for count, _ in sources.values()) == shares(found)
        assert sources["math"][1] == sources["math"][0] / MATH


def test_a_mixture_needs_no_other_argument():
    """Its weights take effect, and the order is drawn from torch's generator, as a shuffle is."""
    torch.manual_seed(4)
    once = indices(mixed(shuffle=True))
    torch.manual_seed(4)
    assert indices(mixed(shuffle=True)) == once
    torch.manual_seed(5)
    assert indices(mixed(shuffle=True)) != once
    assert abs(shares(once)[0] - 350) <= 2


def test_a_batch_is_asked_for_source_by_source():
    """A source with `__getitems__` is asked once for all of its samples in the batch."""
    asked = []

    class Together(Squares):
        def __getitems__(self, wanted):
            asked.append(wanted)
            return [self[index] for index in wanted]

    sources = {"one": (Together(30), 1.0), "other": (Squares(30), 1.0)}
    loader = DataLoader(forebay.mix(sources), batch_size=10, seed=1)
    alone = DataLoader(
        forebay.mix({name: (Squares(30), 1.0) for name in sources}), batch_size=10, seed=1
    )
    for batch, expected in zip(loader, alone, strict=True):
        assert batch[0].tolist() == expected[0].tolist()
    assert len(asked) == 6
    assert abs(sum(map(len, asked)) - 30) <= 1


def test_a_mixed_dataset_can_be_indexed():
    """It is the sources laid end to end."""
    dataset = forebay.mix({"a": (range(3), 1), "b": (range(10, 12), 2)})
    assert [dataset[at] for at in range(len(dataset))] == [0, 1, 2, 10, 11]
    assert dataset[-1] == 11
    for beyond in (5, -6):
        with pytest.raises(IndexError, match="there are 5"):
            dataset[beyond]
    assert repr(dataset) == "<MixedDataset a: 3 x 1, b: 2 x 2>"


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(3))


REFUSED = {
    "nothing": ({}, {}, "no sources"),
    "no names": ([(Squares(3), 1)], {}, "takes sources by name; got list"),
    "no weight": ({"a": Squares(3)}, {}, "takes a dataset and a weight"),
    "an iterable": ({"a": (Endless(), 1)}, {}, "source 'a' is a Endless"),
    "an empty one": ({"a": ([], 1)}, {}, "source 'a' is empty"),
    "a negative weight": ({"a": ([1], -1)}, {}, "weight of 'a' is -1"),
    "no number": ({"a": ([1], "much")}, {}, "weight of 'a' is 'much'"),
    "infinity": ({"a": ([1], float("inf"))}, {}, "weight of 'a' is inf"),
    "all 0": ({"a": ([1], 0), "b": ([1], 0)}, {}, "all weights are 0"),
    "no samples": ({"a": ([1], 1)}, {"samples": 0}, "samples=0"),
}


@pytest.mark.parametrize(("sources", "options", "words"), REFUSED.values(), ids=REFUSED)
def test_a_mixture_that_cannot_be_is_refused(sources, options, words):
    """When it is made, by name."""
    with pytest.raises(OptionError, match=words):
        forebay.mix(sources, **options)


def test_what_a_loader_of_a_mixture_refuses():
    """A sampler, and weights for sources that do not exist."""
    dataset = forebay.mix({"a": (Noisy(3), 1)})
    with pytest.raises(OptionError, match="takes no sampler"):
        DataLoader(dataset, sampler=RandomSampler(dataset))
    loader = DataLoader(dataset)
    with pytest.raises(OptionError, match="weights are needed for 'a'; got 'b'"):
        loader.set_weights({"b": 1})
    with pytest.raises(OptionError, match=r"made by forebay\.mix"):
        DataLoader(Squares(3), seed=1).set_weights({"a": 1})


STAGES = {
    0: {"web": 1, "code": 1, "math": 0},
    7: {"web": 0, "code": 1, "math": 0},
    60: {"web": 1, "code": 0, "math": 1},
}


def scheduled(world=1, rank=0, num_workers=0, schedule=STAGES):
    """Make a loader over three sources with weights by step; an epoch has 41 steps."""
    sources = {
        "web": (TensorDataset(torch.arange(WEB)), 1),
        "code": (TensorDataset(torch.arange(WEB, WEB + CODE)), 1),
        "math": (TensorDataset(torch.arange(WEB + CODE, WEB + CODE + MATH)), 1),
    }
    return DataLoader(
        forebay.mix(sources, schedule=schedule),
        batch_size=12 // world,
        shuffle=True,
        seed=3,
        world_size=world,
        rank=rank,
        num_workers=num_workers,
        drop_last=True,
    )


def steps_of(loaders, epochs=2):
    """Return the samples of each global batch, sorted."""
    found = []
    for _ in range(epochs):
        for step in zip(*loaders, strict=True):
            found.append(sorted(index for (batch,) in step for index in batch.tolist()))
    return found


@functools.cache
def steps_of_one():
    return steps_of([scheduled()])


def test_weights_by_step():
    """They change just there, over epochs, and no source repeats a sample before its end."""
    found = steps_of_one()
    assert len(found) == 82
    code = [sum(WEB <= index < WEB + CODE for index in batch) for batch in found]
    assert all(5 <= count <= 7 for count in code[:7])
    assert code[7:60] == [12] * 53
    assert code[60:] == [0] * 22
    drawn = [index for batch in found for index in batch if WEB <= index < WEB + CODE]
    counts = {drawn.count(index) for index in range(WEB, WEB + CODE)}
    assert max(counts) - min(counts) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("world", "num_workers"), [(2, 0), (3, 2), (6, 0)])
def test_weights_by_step_are_those_of_any_world(world, num_workers):
    loaders = [scheduled(world, rank, num_workers) for rank in range(world)]
    assert steps_of(loaders) == steps_of_one()
    for loader in loaders:
        loader.close()


def test_weights_by_step_after_a_resume():
    loader, found = scheduled(), []
    for _, batch in zip(range(5), loader, strict=False):
        found.append(sorted(batch[0].tolist()))
    resumed = scheduled()
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert found + steps_of([resumed]) == steps_of_one()


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({-1: STAGES[0]}, "the step -1"),
        ({"7": STAGES[0]}, "the step '7'"),
        ({0: {"web": 1}}, "weights are needed for"),
        ([1], "weights by step"),
    ],
)
def test_schedules_that_cannot_be(schedule, words):
    with pytest.raises(OptionError, match=words):
        scheduled(schedule=schedule)


def test_a_schedule_excludes_set_weights():
    with pytest.raises(OptionError, match="with a schedule"):
        scheduled().set_weights({"web": 1, "code": 1, "math": 1})
