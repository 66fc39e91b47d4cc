"""States in odd places: after a failure, edited by hand, of another mixture, between odd calls."""

from __future__ import annotations

import copy
import threading

import numpy
import pytest
import torch
from datasets import PATIENCE_S, Squares
from torch.utils.data import IterableDataset, RandomSampler, Sampler, TensorDataset

import forebay
from forebay import DataLoader, OptionError


def numbers(count=20):
    """Return a dataset of numbers."""
    return TensorDataset(torch.arange(count))


def taken(loader, batches=None):
    """Return the samples of the next batches, or of the rest of the epoch."""
    found = []
    for number, (batch,) in enumerate(loader, 1):
        found += batch.tolist()
        if number == batches:
            break
    return found


def mixed(counts=(50, 50), weights=None, names="abc", samples=100, **options):
    """Make a loader of a mixture."""
    weights = weights or [1.0] * len(counts)
    sources = {
        name: (numbers(count), weight)
        for name, count, weight in zip(names, counts, weights, strict=False)
    }
    dataset = forebay.mix(sources, samples=samples)
    return DataLoader(dataset, **{"batch_size": 10, "seed": 1, "shuffle": True, **options})


@pytest.mark.parametrize("options", [{}, {"seed": 1}])
def test_an_epoch_that_could_not_begin_is_not_lost(options):
    """Ctrl-C while it begins: a loaded position stays, and so does the number of the epoch."""

    class Failing(Sampler):
        fails = False

        def __iter__(self):
            if self.fails:
                raise KeyboardInterrupt
            return iter(range(20))

        def __len__(self):
            return 20

    sampler = Failing()
    loader = DataLoader(numbers(), batch_size=4, sampler=sampler, **options)
    taken(loader)
    taken(loader, 2)
    state = loader.state_dict()
    loader = DataLoader(numbers(), batch_size=4, sampler=sampler, **options)
    loader.load_state_dict(state)
    sampler.fails = True
    with pytest.raises(KeyboardInterrupt):
        taken(loader)
    sampler.fails = False
    assert loader.epoch == 1
    assert taken(loader) == list(range(8, 20))
    sampler.fails = True
    with pytest.raises(KeyboardInterrupt):
        taken(loader)
    assert loader.epoch == 2
    assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (2, 0)


@pytest.mark.parametrize("options", [{}, {"seed": 1}])
def test_a_sampler_that_raises_in_mid_epoch_ends_nothing(options):
    """The state is that after the last batch that was handed out."""

    class Torn(Sampler):
        def __iter__(self):
            yield from range(9)
            raise OSError("torn")

        def __len__(self):
            return 20

    loader = DataLoader(numbers(), batch_size=4, sampler=Torn(), **options)
    with pytest.raises(OSError, match="torn"):
        taken(loader)
    state = loader.state_dict()
    assert (state["epoch"], state["batch"], state["sample"]) == (0, 2, 8)


@pytest.mark.parametrize("options", [{}, {"seed": 1}])
def test_another_order_is_refused(options):
    """Of `shuffle`, while an epoch is under way."""
    loader = DataLoader(numbers(), batch_size=4, shuffle=True, **options)
    taken(loader, 2)
    other = DataLoader(numbers(), batch_size=4, **options)
    with pytest.raises(OptionError, match=r"shuffle=True, the loader has shuffle=False"):
        other.load_state_dict(loader.state_dict(), strict=False)


def test_at_the_beginning_of_an_epoch_anything_may_change():
    """Nothing of it was handed out, so nothing can be lost."""
    loader = DataLoader(numbers(), batch_size=4, shuffle=True, seed=1)
    taken(loader)
    other = DataLoader(numbers(23), batch_size=5, seed=1, drop_last=True)
    other.load_state_dict(loader.state_dict())
    assert other.epoch == 1
    assert taken(other) == list(range(20))


OTHER_SOURCES = {
    "other lengths": {"counts": (30, 50)},
    "other names": {"names": "xy"},
    "another order": {"names": "ba"},
    "fewer": {"counts": (50,)},
    "more": {"counts": (50, 50, 50)},
}


@pytest.mark.parametrize("other", OTHER_SOURCES.values(), ids=OTHER_SOURCES)
def test_a_mixture_of_other_sources_is_refused(other):
    """The samples would come from other places; also where it is a dataset without sources."""
    loader = mixed()
    taken(loader, 3)
    state = loader.state_dict()
    with pytest.raises(
        OptionError, match=r"'a' \(50 samples\), 'b' \(50 samples\), the loader mixes"
    ):
        mixed(**other).load_state_dict(state, strict=False)
    with pytest.raises(OptionError, match="the loader mixes no sources"):
        DataLoader(numbers(100), batch_size=10, seed=1, shuffle=True).load_state_dict(state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("was", "now"),
    [
        ({"samples": 100}, {"samples": 120}),
        ({"samples": 100}, {"samples": 50}),
        ({"batch_size": 30, "drop_last": True}, {"batch_size": 40, "drop_last": True}),
    ],
)
@pytest.mark.parametrize("batches", [0, 2])
def test_the_sources_go_on_where_they_were(was, now, batches):
    """Whatever the epoch's length is now: every source gives all of its samples in turn."""
    if batches and now == {"samples": 50}:
        return  # a shorter epoch cannot go on
    loader = mixed((1000,), **was)
    found = taken(loader)
    if batches:
        found += taken(loader, batches)
    again = mixed((1000,), **now)
    again.load_state_dict(loader.state_dict(), strict=False)
    for _ in range(3):
        found += taken(again)
    # One source in a random order: none of its samples comes twice before all have come.
    whole = DataLoader(
        forebay.mix({"a": (numbers(1000), 1.0)}, samples=1000),
        batch_size=1000,
        seed=1,
        shuffle=True,
    )
    assert found == taken(whole)[: len(found)]


def test_a_state_of_an_object_without_one_is_refused_before_anything_changes():
    """The loader goes on where it was."""

    class Stateful(Squares):
        def state_dict(self):
            return {"at": 1}

        def load_state_dict(self, state):
            raise RuntimeError("it cannot be loaded")

    loader = DataLoader(Stateful(20), batch_size=4, seed=1)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    with pytest.raises(OptionError, match="that of a dataset, but Squares has no load_state_dict"):
        DataLoader(Squares(20), batch_size=4, seed=1).load_state_dict(state)
    next(iterator)
    with pytest.raises(RuntimeError, match="it cannot be loaded"):
        loader.load_state_dict(state)
    assert loader.state_dict()["batch"] == 2
    assert len(list(iterator)) == 3


def test_replay_refuses_what_it_cannot_make_again():
    """Batches before the weights, or the batch size, changed; others are right."""
    loader = mixed()
    iterator = iter(loader)
    first = [next(iterator)[0] for _ in range(3)]
    loader.set_weights({"a": 1, "b": 5})
    later = next(iterator)[0]
    assert torch.equal(loader.replay(epoch=0, batch=3)[0], later)
    with pytest.raises(OptionError, match="before the weights"):
        loader.replay(epoch=0, batch=2)
    again = mixed()
    again.load_state_dict(loader.state_dict())
    assert torch.equal(again.replay(epoch=0, batch=3)[0], later)
    assert len(first) == 3

    loader = DataLoader(numbers(), batch_size=4, shuffle=True, seed=1)
    taken(loader, 2)
    again = DataLoader(numbers(), batch_size=3, shuffle=True, seed=1)
    again.load_state_dict(loader.state_dict(), strict=False)
    assert torch.equal(again.replay(epoch=0, batch=2)[0], next(iter(again))[0])
    with pytest.raises(OptionError, match="or the batch size"):
        again.replay(epoch=0, batch=1)


EDITS = {
    "kind": ("made_with.kind", ["plan", [], None, 7]),
    "global batch size": ("made_with.global_batch_size", ["4", 4.5, float("nan"), -1]),
    "length": ("made_with.length", ["x", -1, 10**20]),
    "length of the epoch": ("kind_state.length", ["x", 10**20, -5]),
    "epoch": ("epoch", [1.5, "0", -1, 1 << 62, None, True]),
    "sample": ("sample", [10**9, -1]),
    "worker whose turn it is": ("kind_state.next_worker", [5, -1]),
    "set_epoch": ("kind_state.set_epoch", [[3], "x", True, 1 << 70]),
    "sampler": ("kind_state.sampler", [5, [{}], [{"generator": "!!"}], [{"generator": 3}], [5]]),
    "dataset": ("kind_state.dataset", [3]),
    "generator": ("kind_state.generator", ["!!", 5, "AAAA"]),
    "worker states": ("kind_state.worker_states", [[1], [["a", "b", "later"]]]),
    "weights": (
        "kind_state.mixture.weights",
        [[float("nan"), 1], [-1, 1], [0, 0], [1e308, 1e308], [1], [1, 1, 1], "ab", 3],
    ),
    "counts": ("kind_state.mixture.counts", [[1, 2, 3], [-1, 0], [float("inf"), 0], [0.5, 1]]),
    "since": ("kind_state.mixture.since", [-7, 10**30, float("inf"), "x"]),
    "mixture": ("kind_state.mixture", [None, 3, {}]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "value"),
    [
        pytest.param(path, value, id=f"{name} {value!r:.20}")
        for name, (path, values) in EDITS.items()
        for value in values
        if value != "plan"
    ],
)
def test_a_damaged_state_is_refused_when_it_is_loaded(path, value):
    """With an OptionError; the loader continues where it was."""
    loader = mixed()
    iterator = iter(loader)
    next(iterator)
    state = copy.deepcopy(loader.state_dict())
    place, *names = state, *path.split(".")
    for name in names[:-1]:
        place = place[name]
    place[names[-1]] = value
    with pytest.raises(OptionError):
        loader.load_state_dict(state, strict=False)
    next(iterator)
    assert loader.state_dict()["batch"] == 2


def test_epochs_may_be_named_by_any_integer():
    """As torch's own samplers take them; anything else is refused at once."""
    orders = []
    for epoch in (3, numpy.int64(3), torch.tensor(3)):
        loader = DataLoader(numbers(), batch_size=4, shuffle=True, seed=1)
        loader.sampler.set_epoch(epoch)
        orders.append(taken(loader))
    assert orders[0] == orders[1] == orders[2]
    with pytest.raises(TypeError):
        loader.sampler.set_epoch("x")


def test_a_loader_without_a_seed_takes_the_seed_of_each_state():
    """It was made with none, whatever state it has loaded before."""
    states = []
    for seed in (7, 8):
        loader = DataLoader(numbers(), batch_size=4, shuffle=True, seed=seed)
        expected = taken(loader)
        states.append((expected, loader.state_dict()))
    again = DataLoader(numbers(), batch_size=4, shuffle=True, on_error="skip")
    for seed, (_, state) in zip((7, 8), states, strict=True):
        again.load_state_dict(state)
        assert again.seed == seed


@pytest.mark.slow
def test_statistics_may_be_asked_for_by_another_thread():
    """While batches are taken."""
    errors, is_over = [], threading.Event()

    def ask():
        while not is_over.is_set():
            try:
                loader.statistics()
            except Exception as error:  # noqa: BLE001 - whatever it is
                errors.append(error)

    with DataLoader(Squares(3000), batch_size=2, num_workers=1, buffer="1MB") as loader:
        asking = threading.Thread(target=ask)
        asking.start()
        for _ in loader:
            pass
        is_over.set()
        asking.join(PATIENCE_S)
    assert errors == []


def test_a_mask_is_about_planned_samples():
    """An iterable dataset has none that are repeated."""

    class Few(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    loader = DataLoader(Few(), batch_size=2, seed=1)
    next(iter(loader))
    with pytest.raises(OptionError, match="not available for an iterable dataset"):
        loader.mask  # noqa: B018 - a property


def test_a_random_sampler_over_ranks_ends_with_its_samples():
    """The state counts no more samples than there are."""
    dataset = numbers(3)
    sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, seed=1, world_size=3, rank=0)
    iterator = iter(loader)
    next(iterator)
    assert loader.state_dict()["sample"] in (0, 3)
