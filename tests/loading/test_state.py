"""`state_dict`: where the loader stands; and the epochs that follow from it."""

from __future__ import annotations

import json

import pytest
from datasets import Squares
from same import assert_same
from streams import (
    BATCHES,
    CARRYING,
    COUNT,
    WAYS,
    Asked,
    Noisy,
    assert_same_epochs,
    epochs_of,
    resumed,
    taken,
)

from forebay import DataLoader, OptionError

# A machine of few cores is warned of several workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def shuffled(**way):
    """A shuffled loader of a seed: 7 batches."""
    return DataLoader(Noisy(COUNT), batch_size=3, shuffle=True, seed=5, **way)


# ---- with a seed --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("way", ["2 workers", "here", "persistent", "bytes ahead", "threads ahead"])
def test_a_state_may_be_taken_at_any_batch(way):
    """At each of them the rest of the epoch follows, and then the next epoch; none is touched."""
    expected = epochs_of(shuffled(), 2)
    states = []
    with shuffled(**WAYS[way]) as loader:
        states.append(loader.state_dict())
        iterator = iter(loader)
        states.append(loader.state_dict())
        for _ in range(BATCHES):
            next(iterator)
            states.append(loader.state_dict())
        assert next(iterator, None) is None
        states.append(loader.state_dict())
    places = [(state["epoch"], state["batch"]) for state in states]
    # After the last batch the next epoch comes, whether the loop has seen the end or not.
    assert places == [(0, 0), *((0, batch) for batch in range(BATCHES)), (1, 0), (1, 0)]
    for state in states[:-2]:
        again = resumed(state, shuffled)
        assert_same_epochs(epochs_of(again, 2), [expected[0][state["batch"] :], expected[1]])
    for state in states[-2:]:
        assert_same_epochs(epochs_of(resumed(state, shuffled), 1), expected[1:])


@pytest.mark.slow
def test_a_state_is_the_same_for_all_ways():
    """It knows nothing of workers, backends and buffers; and is small."""
    states = set()
    for way in ("here", "2 workers", "bytes ahead", "threads"):
        with shuffled(**WAYS[way]) as loader:
            iterator, _ = taken(loader, 1, 2)
            states.add(json.dumps(loader.state_dict()))
            del iterator
    (state,) = states
    assert len(state) < 700


def test_a_state_that_was_loaded_is_the_state():
    """Before the first batch, and after each further one."""
    loader = shuffled()
    taken(loader, 1, 3)
    again = resumed(loader.state_dict(), shuffled)
    assert again.state_dict() == loader.state_dict()
    assert (again.statistics().epoch, again.statistics().batch) == (1, 3)
    iterator = iter(again)
    assert again.state_dict() == loader.state_dict()
    next(iterator)
    assert (again.state_dict()["epoch"], again.state_dict()["batch"]) == (1, 4)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{"seed": 0}, {}], ids=["seed", "no seed"])
@pytest.mark.parametrize("workers", [0, 2])
def test_loading_a_state_touches_no_data(workers, arguments):
    """At batch 900 of 1000, only what is handed out from there on is asked for."""
    loader = DataLoader(Asked(2000), batch_size=2, shuffle=True, **arguments)
    iterator, _ = taken(loader, 0, 900)
    state, expected = loader.state_dict(), [batch.tolist() for batch in iterator]
    dataset = Asked(2000)

    def make():
        return DataLoader(dataset, batch_size=2, shuffle=True, num_workers=workers, **arguments)

    with resumed(state, make) as again:
        assert dataset.total() == 0
        assert [batch.tolist() for batch in again] == expected
    assert dataset.total() == 200
    assert len(expected) == 100


@pytest.mark.slow
def test_a_state_may_be_loaded_in_the_middle_of_an_epoch():
    """The loop that was under way is told to end, and the loader is elsewhere."""
    expected = epochs_of(shuffled(), 2)
    for way in ("here", "2 workers", "bytes ahead"):
        with shuffled(**WAYS[way]) as loader:
            iterator, _ = taken(loader, 1, 2)
            state = loader.state_dict()
            next(iterator)
            loader.load_state_dict(state)
            with pytest.raises(RuntimeError, match="ended by"):
                next(iterator)
            assert_same(list(loader), expected[1][2:])
            loader.load_state_dict({**state, "epoch": 0, "batch": 6, "sample": 18})
            assert_same(list(loader), expected[0][6:])


def test_after_a_break_the_state_is_where_it_broke_off():
    """For whoever stops at a number of steps."""
    expected = epochs_of(shuffled(), 2)
    loader = shuffled()
    for number, _ in enumerate(loader):
        if number == 2:
            break
    state = loader.state_dict()
    assert_same_epochs(epochs_of(resumed(state, shuffled), 2), [expected[0][3:], expected[1]])


REFUSED = {
    "version": ({"version": 99}, "^the state has version 99, and this forebay reads version 4\n"),
    "no version": (
        {"version": None},
        "^the state has no version, so no forebay.DataLoader saved it\n",
    ),
    "seed": ({"seed": 6}, "^the state has seed=6, the loader has seed=5\n"),
    "kind": (
        DataLoader(Noisy(COUNT), batch_size=3).state_dict(),
        "^the state was saved by a loader with only torch's arguments; this one is a loader with "
        "seed=",
    ),
    "nonsense": ({"batch": "many"}, "^the state is damaged: ValueError"),
}


@pytest.mark.parametrize(("changes", "words"), REFUSED.values(), ids=REFUSED)
def test_a_state_of_something_else_is_refused(changes, words):
    """And changes nothing."""
    loader = shuffled()
    taken(loader, 1, 2)
    before = loader.state_dict()
    with pytest.raises(OptionError, match=words) as caught:
        loader.load_state_dict({**before, **changes})
    assert "Nothing was changed." in str(caught.value)
    assert loader.state_dict() == before


def test_a_state_with_a_seed_is_refused_by_a_loader_by_torchs_arguments_alone():
    """It could not keep the promise."""
    with pytest.raises(
        OptionError,
        match=r"^the state was saved by a loader with seed=.* with only torch's arguments\n",
    ):
        DataLoader(Noisy(COUNT)).load_state_dict(shuffled().state_dict())


# ---- samplers and datasets that have something to carry -----------------------------------------


# Each of them without workers, and in one of the other ways.
USUAL = {
    "generator": "2 workers",
    "generator, drawn from step by step": "ahead",
    "weights": "ahead",
    "position": "2 workers",
    "batch sampler": "ahead",
}
assert USUAL.keys() == CARRYING.keys()


class Curriculum(Squares):
    """A dataset with a state."""

    level = 0

    def state_dict(self):
        return {"level": self.level}

    def load_state_dict(self, state):
        self.level = state["level"]

    def __getitem__(self, index):
        return index, self.level


@pytest.mark.parametrize("arguments", [{"seed": 0}, {}], ids=["seed", "no seed"])
def test_a_dataset_with_a_state_is_carried(arguments, num_workers):
    """The trainer's copy of it, before workers get theirs."""
    dataset = Curriculum(4)
    loader = DataLoader(dataset, **arguments)
    iter(loader)
    dataset.level = 3
    state = loader.state_dict()
    again = resumed(state, lambda: DataLoader(Curriculum(4), num_workers=num_workers, **arguments))
    with again:
        assert [tuple(map(int, batch)) for batch in again] == [(number, 3) for number in range(4)]
