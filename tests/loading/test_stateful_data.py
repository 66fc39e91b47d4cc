"""States of the user's datasets, iterators and samplers, kept as torchdata's loader keeps them."""

from __future__ import annotations

import copy
import functools
import json
import random

import pytest
import torch
from datasets import Squares
from streams import resumed, taken
from torch.utils.data import IterableDataset, RandomSampler, get_worker_info

from forebay import DataLoader, OptionError

# A machine of few cores is warned of several workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def worker_id():
    """Return the worker that this runs in; 0 in the main process."""
    info = get_worker_info()
    return 0 if info is None else info.id


def flat(batches):
    """Return the numbers of all batches in one list."""
    return [number for batch in batches for number in batch.tolist()]


def rest_and_epochs(loader, iterator=None, epochs=2):
    """Return the rest of an iterator, if there is one, and whole epochs after it."""
    rest = [] if iterator is None else [flat(iterator)]
    return rest + [flat(loader) for _ in range(epochs)]


# ---- iterable datasets --------------------------------------------------------------------------


class Onward(IterableDataset):
    """Four numbers an epoch, counted on from epoch to epoch; worker w begins at 100 w."""

    def __init__(self):
        self.position = self.given = 0

    def __iter__(self):
        while self.given < 4:
            self.given += 1
            self.position += 1
            yield 100 * worker_id() + self.position
        self.given = 0

    def state_dict(self):
        return {"position": self.position, "given": self.given}

    def load_state_dict(self, state):
        self.position, self.given = state["position"], state["given"]


ONWARD = {
    "workers": {"num_workers": 2},
    "here": {},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "buffer": {"num_workers": 2, "buffer": "1MB"},
}


def onward(**arguments):
    """A loader of it: two batches for each worker."""
    return DataLoader(Onward(), batch_size=2, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("way", ONWARD)
def test_an_iterable_dataset_goes_on_from_the_end_of_an_epoch(way):
    """A position that continues across epochs continues where copies of the dataset live on."""
    with onward(**ONWARD[way]) as loader:
        for _ in range(3):
            list(loader)
        state = loader.state_dict()
        assert (state["epoch"], state["batch"]) == (3, 0)
        expected = rest_and_epochs(loader)
    assert expected[0][0] == (1 if way == "workers" else 13)  # torch makes new copies there
    with resumed(state, lambda: onward(**ONWARD[way])) as again:
        assert rest_and_epochs(again) == expected


class Levels(Squares):
    """Samples that show an attribute, which is in the state."""

    level = 0

    def __getitem__(self, index):
        return torch.tensor([index, self.level])

    def state_dict(self):
        return {"level": self.level}

    def load_state_dict(self, state):
        self.level = state["level"]


class StreamOfLevels(IterableDataset):
    """The same, one after the other."""

    level = position = 0

    def __iter__(self):
        while self.position < 6:
            self.position += 1
            yield torch.tensor([self.position, self.level])
        self.position = 0

    def state_dict(self):
        return {"level": self.level, "position": self.position}

    def load_state_dict(self, state):
        self.level, self.position = state["level"], state["position"]


LEVELS = pytest.mark.parametrize("kind", ["iterable", "map-style"])


@functools.cache
def levels_after(kind, way):
    """Return the levels in the rest of the epoch, and in the next one, from several states.

    The trainer sets the level to 3, and makes the loader that goes on with a dataset of level 0.
    """

    def make():
        return DataLoader(StreamOfLevels() if kind == "iterable" else Levels(6), **ONWARD[way])

    with make() as loader:
        loader.dataset.level = 3
        states = [loader.state_dict()]
        iterator = iter(loader)
        states.append(loader.state_dict())
        for _ in iterator:
            states.append(loader.state_dict())
        states.append(loader.state_dict())
        del iterator
    found = []
    for state in [*states[:3], *states[-3:]]:
        with resumed(state, make) as again:
            found.append([{int(batch[0, 1]) for batch in epoch} for epoch in (again, again)])
    return found


@pytest.mark.slow
@LEVELS
@pytest.mark.parametrize("way", ["workers", "here", "persistent"])
def test_what_the_trainer_set_on_a_dataset_holds_for_the_rest_of_the_epoch(kind, way):
    """Before the first batch and at each of them; also for workers that had handed out none."""
    found = levels_after(kind, way)[:-1]
    # An iterable dataset has nothing left after its last batch.
    assert [rest for rest, _ in found if rest] == [{3}] * sum(bool(rest) for rest, _ in found)


@pytest.mark.slow
@LEVELS
@pytest.mark.parametrize("way", ["workers", "here", "persistent"])
def test_what_the_trainer_set_on_a_dataset_holds_for_the_next_epoch(kind, way):
    """Workers that do not persist get new copies of the trainer's dataset, as it was then."""
    found = levels_after(kind, way)
    assert [following for _, following in found] == [{3}] * len(found)


class Restarting(IterableDataset):
    """Ten numbers from a dataset that is its own iterator and begins anew in `__iter__`."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        self.position = 0
        return self

    def __next__(self):
        if self.position == 10:
            raise StopIteration
        self.position += 1
        return self.position - 1

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Reading:
    """An iterator over ten numbers from `added` on, with a state."""

    def __init__(self, added):
        self.position, self.added = 0, added

    def __iter__(self):
        return self

    def __next__(self):
        if self.position == 10:
            raise StopIteration
        self.position += 1
        return self.position - 1 + self.added

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class ReadByAnother(IterableDataset):
    """A dataset without a state, whose iterator has one."""

    def __iter__(self):
        return Reading(0)


class BothHaveStates(IterableDataset):
    """A dataset with a state that its iterator needs when it is made; the iterator has its own."""

    added = 0

    def __iter__(self):
        return Reading(self.added)

    def state_dict(self):
        return {"added": self.added}

    def load_state_dict(self, state):
        self.added = state["added"]


class FilledWhereItIsRead(Restarting):
    """The same, without any position before `__iter__`: the trainer's object has none."""

    def __init__(self):
        pass

    def __iter__(self):
        self.position = getattr(self, "position", 0)
        return self


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("kind", [Restarting, ReadByAnother, BothHaveStates, FilledWhereItIsRead])
def test_an_iterator_goes_on_after_six_of_ten(kind, workers):
    """It gives 6 to 9, whether the state is the dataset's or the iterator's; then 0 to 9."""

    def make():
        return DataLoader(kind(), num_workers=workers)

    each = max(workers, 1)
    with make() as loader:
        iterator, first = taken(loader, 0, 6 * each)
        assert flat(first) == [number for number in range(6) for _ in range(each)]
        state = loader.state_dict()
        del iterator
    with resumed(state, make) as again:
        assert flat(again) == [number for number in range(6, 10) for _ in range(each)]
        if workers or kind is not FilledWhereItIsRead:  # the same object is at its end
            assert flat(again) == [number for number in range(10) for _ in range(each)]


class Counted(Squares):
    """Samples that count how many were read, in an attribute that the first one makes."""

    made_once = True

    def __getitem__(self, index):
        self.read = getattr(self, "read", 0) + 1
        return torch.tensor([index, self.read])

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.read = state["read"]


@pytest.mark.parametrize("arguments", [{}, {"seed": 0}], ids=["torch's arguments", "seed"])
def test_a_dataset_that_is_filled_only_in_workers_has_no_state_before(arguments):
    """Its `state_dict` raises in the trainer, where there is nothing to save."""

    def make():
        return DataLoader(Counted(8), num_workers=1, **arguments)

    with make() as loader:
        assert loader.state_dict()["kind_state"]["dataset"] is None
        iterator, _ = taken(loader, 0, 3)
        state = loader.state_dict()
        rest = [batch.tolist() for batch in iterator]
    with resumed(state, make) as again:
        batches = [batch.tolist() for batch in again]
    if arguments:  # samples depend on the seed alone, so the states of copies are not kept
        assert [each[0][0] for each in batches] == [each[0][0] for each in rest]
    else:
        assert batches == rest
        assert rest[0] == [[3, 4]]


def test_a_dataset_that_cannot_say_its_state_here_is_an_error():
    """Without workers it is this object whose state would be lost."""
    with pytest.raises(OptionError, match=r"^no state can be made: Counted.state_dict\(\) raised"):
        DataLoader(Counted(8)).state_dict()


def test_the_state_of_the_dataset_is_restored_before_its_iterator_is_made():
    """The iterator is made of what the dataset was, and then goes on."""
    loader = DataLoader(BothHaveStates())
    loader.dataset.added = 50
    iterator, _ = taken(loader, 0, 6)
    again = resumed(loader.state_dict(), lambda: DataLoader(BothHaveStates()))
    assert flat(again) == flat(iterator) == [56, 57, 58, 59]


class Parts(IterableDataset):
    """Four parts of five numbers; the state is what was read of each part that this copy reads.

    As in Hugging Face's IterableDataset, every iteration begins where the loaded state ends.
    """

    def __init__(self):
        self.read = [0] * 4
        self.begin = None

    def __iter__(self):
        info = get_worker_info()
        own = range(4) if info is None else range(info.id, 4, info.num_workers)
        self.read = [0] * len(own) if self.begin is None else list(self.begin)
        for at, part in enumerate(own):
            for number in range(self.read[at], 5):
                self.read[at] += 1
                yield 10 * part + number

    def state_dict(self):
        return {"read": list(self.read)}

    def load_state_dict(self, state):
        self.begin = state["read"]


@pytest.mark.slow
@pytest.mark.parametrize("batches", [1, 3, 8])
def test_the_trainers_copy_of_a_dataset_that_was_not_read_stays_unread(batches):
    """Its state has other parts than those of workers, which would begin there."""

    def make():
        return DataLoader(Parts(), batch_size=2, num_workers=2)

    with make() as loader:
        iterator, _ = taken(loader, 0, batches)
        state = loader.state_dict()
        rest, whole = flat(iterator), flat(loader)
    with resumed(state, make) as again:
        assert again.dataset.begin is None
        assert flat(again) == rest
        assert flat(again) == whole


# ---- random state that the dataset restores -----------------------------------------------------


def state_of_generators():
    """Return the states of torch's and Python's generators as data for JSON."""
    version, internal, gauss = random.getstate()
    return torch.get_rng_state().tolist(), [version, list(internal), gauss]


def set_generators(state):
    """Restore them."""
    torch.set_rng_state(torch.tensor(state[0], dtype=torch.uint8))
    version, internal, gauss = state[1]
    random.setstate((version, tuple(internal), gauss))


def draw(number):
    """Return a number, and what two generators give."""
    return torch.tensor([number, torch.rand(1).item(), random.random()], dtype=torch.float64)


class DrawingStream(IterableDataset):
    """Eight samples that are drawn, with the generators in the state."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        while self.position < 8:
            self.position += 1
            yield draw(self.position)
        self.position = 0

    def state_dict(self):
        return {"position": self.position, "generators": state_of_generators()}

    def load_state_dict(self, state):
        self.position = state["position"]
        set_generators(state["generators"])


class DrawingSamples(Squares):
    """The same, asked for by index."""

    def __getitem__(self, index):
        return draw(index)

    def state_dict(self):
        return {"generators": state_of_generators()}

    def load_state_dict(self, state):
        set_generators(state["generators"])


@pytest.mark.usefixtures("_generators")
@pytest.mark.parametrize("make_dataset", [DrawingStream, lambda: DrawingSamples(8)])
@pytest.mark.parametrize("epochs", [0, 1])
def test_random_state_that_a_dataset_restores_stays(make_dataset, epochs):
    """Without workers, the rest of the epoch is drawn as it would have been."""

    def make():
        return DataLoader(make_dataset(), batch_size=2)

    loader = make()
    iterator, _ = taken(loader, epochs, 2)
    state = loader.state_dict()
    expected = torch.cat(list(iterator))
    torch.manual_seed(99)
    random.seed(99)
    assert torch.equal(torch.cat(list(resumed(state, make))), expected)


# ---- map-style datasets -------------------------------------------------------------------------


class Tally(Squares):
    """A dataset that numbers the samples it was asked for, and keeps the list in its state."""

    def __init__(self, count=12):
        super().__init__(count)
        self.asked = []

    def __getitem__(self, index):
        self.asked.append(index)
        return torch.tensor([index, len(self.asked)])

    def state_dict(self):
        return {"asked": self.asked}  # the list itself, not a copy

    def load_state_dict(self, state):
        self.asked = state["asked"]


TALLIES = {
    "workers": {"num_workers": 2},
    "here": {},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}


def tally(**arguments):
    """A loader of it: six batches."""
    return DataLoader(Tally(), batch_size=2, **arguments)


def lists(batches):
    """Return batches as lists."""
    return [batch.tolist() for batch in batches]


@pytest.mark.slow
@pytest.mark.parametrize("way", TALLIES)
@pytest.mark.parametrize(
    ("epochs", "batches"),
    [(0, 3), (1, 0), *(pytest.param(*at, marks=pytest.mark.thorough) for at in ((0, 1), (1, 1)))],
)
def test_the_workers_copies_of_a_map_style_dataset_are_saved(way, epochs, batches):
    """Each goes on from what it was after its last batch that was handed out."""
    arguments = TALLIES[way]
    with tally(**arguments) as loader:
        iterator, _ = taken(loader, epochs, batches)
        state = loader.state_dict()
        expected = [lists(iterator), lists(loader)]
        del iterator
    with resumed(state, lambda: tally(**arguments)) as again:
        assert [lists(again), lists(again)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("way", TALLIES)
def test_a_state_that_is_kept_does_not_change(way):
    """Neither by the batches that come after it, nor by loading it and going on."""
    arguments = TALLIES[way]
    with tally(**arguments) as loader:
        iterator, _ = taken(loader, 0, 3)
        state = loader.state_dict()
        kept = copy.deepcopy(state)
        list(iterator)
        assert state == kept
        del iterator
    with tally(**arguments) as again:
        again.load_state_dict(state)
        list(again)
        list(again)
    assert state == kept


# ---- persistent workers -------------------------------------------------------------------------


def shuffled(generator=None, **arguments):
    """A shuffled loader by torch's arguments alone: six batches of one sample."""
    arguments = {"num_workers": 2, "persistent_workers": True, **arguments}
    return DataLoader(range(6), shuffle=True, generator=generator, **arguments)


@pytest.mark.slow
@pytest.mark.usefixtures("_generators")
@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_with_persistent_workers_the_order_of_an_epoch_is_the_same_after_a_resume(
    own, begins, epochs
):
    """From an epoch's end, and from `iter()` before the first batch; whosever generator it is."""

    def make():
        return shuffled(torch.Generator().manual_seed(3) if own else None)

    torch.manual_seed(8)
    with make() as loader:
        for _ in range(epochs):
            list(loader)
        iterator = iter(loader) if begins else None
        state, generators = loader.state_dict(), torch.get_rng_state()
        expected = rest_and_epochs(loader, iterator, epochs=2 if begins else 3)
        del iterator
    torch.manual_seed(99)
    with resumed(state, make) as again:
        if not own and not begins:  # the global generator is the user's to restore
            torch.set_rng_state(generators)
        if begins and not own:
            assert flat(again) == expected[0]
        else:
            assert rest_and_epochs(again, epochs=3) == expected


# ---- a loader that is made otherwise ------------------------------------------------------------

KINDS = {
    "plan": {"seed": 4, "shuffle": True},
    "plan in order": {"seed": 4},
    "buffer": {"seed": 4, "shuffle": True, "num_workers": 2, "buffer": "1MB"},
    "torch": {"shuffle": True},
    "torch in order": {},
    "torch with workers": {"shuffle": True, "num_workers": 2},
    "sampler": {"seed": 4},
}


def made(kind, count=20, batch_size=4, **arguments):
    """A loader of numbers; what is by torch's rules has a generator of its own."""
    arguments = {**KINDS[kind], **arguments}
    if kind == "sampler":
        arguments["sampler"] = RandomSampler(range(count))
    if arguments.get("shuffle") and "seed" not in arguments:
        arguments["generator"] = torch.Generator().manual_seed(6)
    return DataLoader(range(count), batch_size, **arguments)


def after_two_batches(kind):
    """Return the state after two batches of the second epoch, their samples, and what follows."""
    with made(kind) as loader:
        iterator, first = taken(loader, 1, 2)
        state = loader.state_dict()
        return state, flat(first), [flat(iterator), flat(loader), flat(loader)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_without_strict_a_state_of_samples_may_be_saved_and_loaded_again(kind):
    """In the middle of an epoch whose batches had two sizes."""
    state, _, expected = after_two_batches(kind)
    with made(kind, batch_size=3) as loader:
        loader.load_state_dict(state, strict=False)
        iterator, second = taken(loader, 0, 2)
        again = json.loads(json.dumps(loader.state_dict()))
        assert again["sample"] == 8 + 6
        del iterator
    for batch_size in (3, 5):
        with made(kind, batch_size=batch_size) as loader:
            loader.load_state_dict(again, strict=batch_size == 3)
            assert flat(second) + flat(loader) == expected[0]
            assert flat(loader) == expected[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_without_strict_an_epoch_ends_with_the_samples_it_began_with(kind):
    """A dataset grew from 20 samples to 23: this epoch has its 20, and the next one has 23."""
    state, first, expected = after_two_batches(kind)
    with made(kind, count=23) as loader:
        loader.load_state_dict(json.loads(json.dumps(state)), strict=False)
        rest = flat(loader)
        assert sorted(first + rest) == list(range(20))
        assert rest == expected[0]
        assert sorted(flat(loader)) == list(range(23))
        assert len(list(loader)) == 6
        loader.load_state_dict(state, strict=False)
        iterator, third = taken(loader, 0, 1)
        again = json.loads(json.dumps(loader.state_dict()))
        del iterator
    with made(kind, count=23) as loader:
        with pytest.raises(OptionError, match=r"^the state has 20 samples, the loader has 23"):
            loader.load_state_dict(again)  # its epoch still has 20
        loader.load_state_dict(again, strict=False)
        assert flat(third) + flat(loader) == expected[0]
        assert sorted(flat(loader)) == list(range(23))


DIFFERENCES = {
    "batch size": (
        {"batch_size": 8},
        r"^the state has global batches of 4 samples, the loader has global batches of 8 s",
        "Use batch_size=4",
    ),
    "length": (
        {"count": 23},
        r"^the state has 20 samples, the loader has 23 samples\n",
        "Make the loader as it was",
    ),
    "drop_last": (
        {"drop_last": True},
        r"^the state has drop_last=False, the loader has drop_last=True\n",
        "Make the loader as it was",
    ),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
@pytest.mark.parametrize("kind", ["plan", "torch"])
def test_a_loader_that_is_made_otherwise_is_refused_with_both_values(kind, difference):
    """The error says where the state was taken and both ways on; nothing has changed."""
    state, _, _ = after_two_batches(kind)
    arguments, words, way = DIFFERENCES[difference]
    loader = made(kind, **arguments)
    before = loader.state_dict()
    with pytest.raises(OptionError, match=words) as caught:
        loader.load_state_dict(state)
    text = str(caught.value)
    assert "It was taken in epoch 1 after 2 batches (8 samples). Nothing was changed" in text
    assert way in text
    assert "load_state_dict(state, strict=False)" in text
    assert loader.state_dict() == before
