"""A state that was changed is refused, or gives exactly the samples that it names."""

from __future__ import annotations

import copy
import itertools
import json
from dataclasses import replace

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, RandomSampler

import forebay
from forebay import DataLoader, OptionError

COUNT, SIZE, TAKEN = 30, 4, 3
SOURCES = {"a": (range(50), 2.0), "b": (range(50, 90), 1.0)}


class Numbers(IterableDataset):
    """The numbers in order, without a state."""

    def __iter__(self):
        return iter(range(COUNT))


def generator():
    return torch.Generator().manual_seed(6)


LOADERS = {
    "plan": lambda: DataLoader(range(COUNT), SIZE, shuffle=True, seed=5),
    "plan with a drawn seed": lambda: DataLoader(range(COUNT), SIZE, True, on_error="skip"),
    "plan, drop_last": lambda: DataLoader(range(COUNT), SIZE, True, seed=5, drop_last=True),
    "rank": lambda: DataLoader(
        range(COUNT), SIZE // 2, True, seed=5, drop_last=True, world_size=2, rank=1
    ),
    "mixture": lambda: DataLoader(forebay.mix(SOURCES, samples=COUNT), SIZE, True, seed=5),
    "sampler": lambda: DataLoader(range(COUNT), SIZE, sampler=range(COUNT), seed=5),
    "torch in order": lambda: DataLoader(range(COUNT), SIZE),
    "torch": lambda: DataLoader(range(COUNT), SIZE, shuffle=True, generator=generator()),
    "torch sampler": lambda: DataLoader(
        range(COUNT), SIZE, sampler=RandomSampler(range(COUNT), generator=generator())
    ),
    "iterable": lambda: DataLoader(Numbers(), SIZE),
    "iterable with a seed": lambda: DataLoader(Numbers(), SIZE, seed=5),
}


def state_after(kind, batches):
    """The state after some batches of the second epoch."""
    loader = LOADERS[kind]()
    list(loader)
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    return json.loads(json.dumps(loader.state_dict()))


def samples_of(iterable):
    """The samples of an epoch that must end: a loader of few samples has few batches."""
    batches = list(itertools.islice(iterable, 2 * COUNT))
    assert len(batches) < 2 * COUNT
    return [sample for batch in batches for sample in batch.tolist()]


def named_by(loader, state):
    """The samples that a state of a planned loader names, by the definition of the plan."""
    plan = loader.sampler.plan
    own = state["kind_state"]
    length, seed, origin = own["length"] or COUNT, state["seed"], own["origin"]
    if own["mixture"] is not None:
        mixture = replace(plan.mixture, **own["mixture"])
        first = origin + state["sample"]
        return mixture.indices(seed, True, first, length - state["sample"]).tolist()
    epoch = state["epoch"] if loader.sampler.epoch is None else loader.sampler.epoch
    blocks = replace(plan, length=length, seed=seed, drop_last=False).blocks(epoch)
    order = [index for block in blocks for index in block.indices.ravel().tolist()]
    rest = order[state["sample"] :]
    size = state["made_with"]["global_batch_size"]
    whole = [rest[at : at + size] for at in range(0, len(rest), size)]
    if state["made_with"]["drop_last"]:
        whole = [each for each in whole if len(each) == size]
    own = size // 2 if loader.world_size else 0  # of rank 1
    return [index for each in whole for index in each[own:]]


def assert_exactly(kind, loader):
    """What follows is what the loaded state says: its rest of the epoch."""
    state = loader.state_dict()
    first = state["sample"] if state["kind_state"]["counts_samples"] else state["batch"] * SIZE
    try:
        found = samples_of(loader)
    except OptionError:  # of a dataset's iterator, which did not exist before
        assert kind.startswith("iterable")
        return
    if kind in ("torch", "torch sampler"):  # the state of a generator decides the order
        assert len(found) == len(set(found)) == max(COUNT - first, 0)
        assert set(found) <= set(range(COUNT))
    elif hasattr(loader.sampler, "plan") and state["seed"] is not None:
        assert found == named_by(loader, state)
    elif state["seed"] is None and hasattr(loader.sampler, "plan"):  # nothing was drawn yet
        assert sorted(found) == list(range(COUNT))
    else:
        assert found == list(range(COUNT))[first:]


# ---- single values ------------------------------------------------------------------------------

FORGED = {
    "length 0": ("kind_state.length", 0),
    "length, a dict": ("kind_state.length", {}),
    "length of half": ("kind_state.length", COUNT // 2),
    "length of billions": ("kind_state.length", 1 << 33),
    "length of 9 EB": ("kind_state.length", (1 << 60) - 1),
    "length 2^63": ("kind_state.length", 1 << 63),
    "a sample further": ("sample", TAKEN * SIZE + 1),
    "a batch further": ("batch", TAKEN + 1),
    "no batch": ("batch", 0),
    "no seed": ("seed", None),
    "another kind's generator": ("kind_state.generator", "AA=="),
    "workers": ("made_with.num_workers", 3),
    "states of workers": ("kind_state.worker_states", [["a", None, "within", 0, 3, None, None]]),
    "a list of sources": ("made_with.sources", [1]),
    "an epoch beyond 64 bits": ("kind_state.set_epoch", 1 << 70),
    "a mixture": ("kind_state.mixture", {"weights": [1.0], "since": 0, "counts": []}),
}


@pytest.mark.parametrize(("path", "value"), FORGED.values(), ids=FORGED)
def test_a_forged_value_is_refused_by_name(path, value):
    """Strict or not: nothing is allocated, and the loader stays where it is."""
    state = state_after("plan", TAKEN)
    *above, name = path.split(".")
    place = state
    for each in above:
        place = place[each]
    place[name] = value
    for strict in (True, False):
        loader = LOADERS["plan"]()
        before = loader.state_dict()
        with pytest.raises(OptionError, match=r"the state is damaged: ValueError: ") as caught:
            loader.load_state_dict(state, strict=strict)
        words = {"batch": "sample"}
        assert words.get(name, name) in str(caught.value)
        assert loader.state_dict() == before


@pytest.mark.parametrize("kind", LOADERS)
def test_a_state_without_a_value_is_refused(kind):
    """None of them is assumed: the epoch would begin again, for example."""
    state = state_after(kind, TAKEN)
    for place in (state, state["made_with"], state["kind_state"]):
        for name in [each for each in place if each != "version"]:
            value = place.pop(name)
            with pytest.raises(OptionError, match=f"the state is damaged: .*{name}"):
                LOADERS[kind]().load_state_dict(state)
            place[name] = value
    LOADERS[kind]().load_state_dict(state)


def test_the_length_of_an_epoch_must_be_that_of_the_dataset():
    """Strict: also where the epoch began with fewer samples, as a state can say."""
    state = state_after("plan", TAKEN)
    grown = DataLoader(range(COUNT + 5), SIZE, shuffle=True, seed=5)
    grown.load_state_dict(state, strict=False)
    iterator = iter(grown)
    next(iterator)
    later = grown.state_dict()
    again = DataLoader(range(COUNT + 5), SIZE, shuffle=True, seed=5)
    with pytest.raises(OptionError, match=r"^the state has 30 samples, the loader has 35 samples"):
        again.load_state_dict(later)
    again.load_state_dict(later, strict=False)
    assert samples_of(again) == samples_of(iterator)


def test_a_generators_state_that_is_missing_is_refused():
    """The rest of the epoch would have another order."""
    for kind, name in (("torch", "generator"), ("torch sampler", "sampler")):
        state = state_after(kind, TAKEN)
        state["kind_state"][name] = None
        with pytest.raises(OptionError, match="it has no state of "):
            LOADERS[kind]().load_state_dict(state)


def test_the_state_of_an_iterator_that_has_none_is_refused():
    """It is known only when the dataset is iterated."""
    state = state_after("iterable", TAKEN)
    state["kind_state"]["worker_states"] = [[None, {"at": 3}, "within", 0, 3, None, None]]
    loader = LOADERS["iterable"]()
    loader.load_state_dict(state)
    with pytest.raises(OptionError, match=r"a dataset's iterator, but range_iterator has no"):
        iter(loader)


class Stateful(Dataset):
    """Numbers with a state; and an attribute that a mixture has, too."""

    lengths = numpy.arange(COUNT)

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return index

    def state_dict(self):
        return {"at": 1}

    def load_state_dict(self, state):
        assert state == {"at": 1}


def test_the_states_of_workers_are_for_as_many_workers():
    """At the end of an epoch their number may change, also where each has a state."""
    options = {"persistent_workers": True, "multiprocessing_context": "fork"}
    with DataLoader(Stateful(), SIZE, num_workers=1, **options) as loader:
        list(loader)
        state = loader.state_dict()
    assert len(state["kind_state"]["worker_states"]) == 1
    with DataLoader(Stateful(), SIZE, num_workers=2, **options) as loader:
        loader.load_state_dict(state)
        assert samples_of(loader) == list(range(COUNT))


def test_only_a_mixture_has_sources():
    """A dataset of the user's may have lengths of its own, of any type."""
    loader = DataLoader(Stateful(), SIZE, seed=5)
    next(iter(loader))
    state = loader.state_dict()
    assert state["made_with"]["sources"] is None
    again = DataLoader(Stateful(), SIZE, seed=5)
    again.load_state_dict(json.loads(json.dumps(state)))
    assert samples_of(again) == list(range(SIZE, COUNT))


def test_more_batches_than_an_iterable_dataset_has_end_its_epoch():
    """A dataset that has become shorter, or a state that says so: there is no rest."""
    state = {**state_after("iterable", 1), "batch": 1 << 50, "sample": SIZE << 50}
    state["kind_state"]["worker_states"] = [[None, None, "within", SIZE << 50, 0, None, None]]
    loader = LOADERS["iterable"]()
    loader.load_state_dict(state)
    assert samples_of(loader) == []
    assert samples_of(loader) == list(range(COUNT))


# ---- the whole structure ------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.integers(-2, 2 * COUNT), st.sampled_from([1 << bits for bits in (31, 32, 59, 60, 63, 64)])
)
LEAVES = st.one_of(
    st.none(), st.booleans(), NUMBERS, st.floats(), st.sampled_from(["", "plan", "torch", "within"])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["state", "generator", "a", "kind"]), inner, max_size=2),
    ),
    max_leaves=4,
)


def paths_of(value, path=()):
    """The paths of all values within a state."""
    yield path
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths_of(each, (*path, key))


@st.composite
def forgeries(draw, kind):
    """A state with up to three changes anywhere in it."""
    state = copy.deepcopy(STATES[kind, draw(st.sampled_from([0, 1, TAKEN]))])
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from([each for each in paths_of(state) if each]))
        place = state
        for key in path[:-1]:
            place = place[key]
        how = draw(st.sampled_from(["change", "change", "change", "copy", "remove"]))
        if how == "remove":
            del place[path[-1]]
        elif how == "change":
            place[path[-1]] = draw(VALUES)
        else:
            other = state
            for key in draw(st.sampled_from(list(paths_of(state)))):
                other = other[key]
            place[path[-1]] = copy.deepcopy(other)
    return state


STATES = {(kind, batches): state_after(kind, batches) for kind in LOADERS for batches in (0, 1, 3)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOADERS)
def test_a_forged_state_is_refused_or_exactly_right(kind):
    """Whatever was changed in it, strict or not."""

    @settings(derandomize=True, database=None)
    @given(forgeries(kind), st.booleans())
    def check(state, strict):
        loader = LOADERS[kind]()
        before = loader.state_dict()
        try:
            loader.load_state_dict(state, strict=strict)
        except OptionError:
            assert loader.state_dict() == before
        else:
            assert_exactly(kind, loader)

    check()


class Kept(RandomSampler):
    """Has a state."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(
    ("sampler", "batches"), [(Kept, [[1], False]), (Kept, [[]]), (RandomSampler, [[1]])]
)
@pytest.mark.parametrize("arguments", [{}, {"seed": 5}], ids=str)
def test_what_a_sampler_drew_is_lists_and_of_one_with_a_state(sampler, batches, arguments):
    """It is refused when it is loaded, not by an error of Python's when a batch is made."""
    own = sampler(range(COUNT), generator=generator())
    loader = DataLoader(range(COUNT), SIZE, sampler=own, **arguments)
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    state["kind_state"]["drawn"] = [batches, False]
    with pytest.raises(OptionError, match=r"the state is damaged: .*what a sampler drew"):
        loader.load_state_dict(state)


class Positioned(Kept):
    """Continues at its position, as samplers of torch's users do."""

    at = 0

    def __iter__(self):
        while self.at < COUNT:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def ranked(ranks):
    """Return the loader of the first of some ranks, with a sampler that keeps its position."""
    sampler = Positioned(range(COUNT))
    world = {} if ranks == 1 else {"world_size": ranks, "rank": 0}
    return DataLoader(range(COUNT), 6 // ranks, sampler=sampler, seed=5, **world)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (1, 1)])
def test_a_sampler_with_a_state_goes_from_one_rank_to_several_between_epochs_alone(before, after):
    """One rank keeps the sampler's position in the epoch, several that before the epoch."""
    loader = ranked(before)
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    other = ranked(after)
    if (before == 1) != (after == 1):
        with pytest.raises(OptionError, match=r"^the state was saved by (one|several) rank"):
            other.load_state_dict(state)
        list(iterator)
        other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert samples_of(other)[: 6 // after] == list(range(6 // after))
    else:
        other.load_state_dict(state)
        assert samples_of(other)[: 6 // after] == list(range(12, 12 + 6 // after))
