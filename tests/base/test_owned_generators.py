"""Generators that a dataset owns: found wherever they are, and seeded with streams of their own."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import types
from dataclasses import dataclass
from multiprocessing import synchronize

import cloudpickle
import numpy as np
import pytest
import torch

from forebay.base.generator_search import FEW_ITEMS, MANY_ITEMS, others_in_process
from forebay.base.generators import OwnedGenerators


class Holder:
    """Has attributes."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Slotted:
    """Has a slot that is set, and one that is not."""

    __slots__ = ("empty", "rng")

    def __init__(self, rng):
        self.rng = rng


class OfTheClass:
    """All instances have one generator."""

    rng = np.random.RandomState(0)


MODULE_RNG = np.random.default_rng(0)


def uses_a_global():
    """Draw from a generator of the module."""
    return MODULE_RNG.random()


class Hostile:
    """Runs code wherever Python allows it."""

    @property
    def rng(self):
        raise AssertionError("a property was called")

    def __getattr__(self, name):
        raise AssertionError("__getattr__ was called")

    def __iter__(self):
        raise AssertionError("__iter__ was called")

    def __len__(self):
        raise AssertionError("__len__ was called")

    def __eq__(self, other):
        raise AssertionError("__eq__ was called")

    def __hash__(self):
        raise AssertionError("__hash__ was called")


class HostileDict(dict):
    """A dict whose methods are the user's."""

    def items(self):
        raise AssertionError("items was called")

    __iter__ = __len__ = items


@dataclass
class Fields:
    """A dataclass."""

    rng: object


KINDS = {
    "Generator": np.random.default_rng,
    "Generator of MT19937": lambda: np.random.Generator(np.random.MT19937()),
    "Generator of Philox": lambda: np.random.Generator(np.random.Philox()),
    "Generator of SFC64": lambda: np.random.Generator(np.random.SFC64()),
    "PCG64": np.random.PCG64,
    "PCG64DXSM": np.random.PCG64DXSM,
    "RandomState": np.random.RandomState,
    "Random": random.Random,
    "torch": torch.Generator,
}


def draw(generator):
    """Return numbers of all kinds that a generator may keep something of for the next one."""
    if isinstance(generator, random.Random):
        return [generator.gauss(0, 1), generator.random()]
    if isinstance(generator, torch.Generator):
        return [*torch.randn(3, generator=generator), *torch.rand(2, generator=generator)]
    if isinstance(generator, np.random.BitGenerator):
        return generator.random_raw(3).tolist()
    if isinstance(generator, np.random.RandomState):
        return [generator.randn(), *generator.random_sample(2)]
    # 32 bits at a time leave half a number behind.
    return [generator.integers(9, dtype=np.int32), generator.standard_normal(), generator.random()]


def around(value):
    """Return a function whose closure has a value."""
    return lambda: value


def circle(rng):
    """Return a list that contains itself."""
    first = [rng]
    first.append(first)
    return first


PLACES = {
    "attribute": lambda rng: Holder(transform=Holder(rng=rng)),
    "slot": Slotted,
    "list": lambda rng: [1, [rng]],
    "behind numbers": lambda rng: [*range(MANY_ITEMS - 1), rng],
    "behind lists": lambda rng: [*([] for _ in range(FEW_ITEMS)), Holder(rng=rng)],
    "tuple": lambda rng: (rng,),
    "dict": lambda rng: {"a": {0: rng}},
    "odd dict": lambda rng: HostileDict(a=rng),
    "set": lambda rng: {rng},
    "partial": lambda rng: functools.partial(print, rng),
    "keyword": lambda rng: functools.partial(print, end=rng),
    "closure": around,
    "default": lambda rng: lambda own=rng: own,
    "method": lambda rng: types.MethodType(print, Holder(rng=rng)),
    "dataclass": Fields,
    "beside a hostile object": lambda rng: [Hostile(), rng],
    "in a circle": circle,
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_draws_what_its_seed_says(kind):
    """Whatever it drew before, and something else with another seed."""
    generator = KINDS[kind]()
    owned = OwnedGenerators(dataset=Holder(rng=generator))
    assert owned.paths == ("dataset.rng",)
    found = []
    for seed in (2**63 + 5, 6, 2**63 + 5):
        owned.seed(seed)
        found.append(draw(generator))
        draw(generator)
    assert found[0] == found[2] != found[1]
    assert len(set(map(float, found[0]))) == len(found[0])


@pytest.mark.parametrize("place", PLACES)
def test_it_is_found_wherever_it_is(place):
    """Once, also if there are several ways to it; no code of the user runs."""
    generator = np.random.default_rng()
    root = PLACES[place](generator)
    owned = OwnedGenerators(dataset=root, collate_fn=[root, generator])
    assert len(owned.paths) == 1, owned.paths
    owned.seed(1)
    first = generator.random()
    owned.seed(1)
    assert generator.random() == first


@pytest.mark.parametrize("root", [functools.partial(print, 1), around(1), Slotted(1), Holder(a=1)])
def test_what_is_looked_at_is_pickled_as_before(root):
    """A function is recognized by that."""

    def state():
        return cloudpickle.dumps(root)

    before = state()
    OwnedGenerators(dataset=root)
    assert state() == before


def test_those_of_classes_and_modules_are_found():
    """A library may keep one for all its transforms; a function, one next to it."""
    owned = OwnedGenerators(dataset=[OfTheClass(), OfTheClass()], collate_fn=uses_a_global)
    assert owned.paths == ("collate_fn.MODULE_RNG", "dataset[0].__class__.OfTheClass.rng")


def test_the_global_ones_do_not_count():
    """They are seeded anyway."""
    root = [random._inst, np.random.mtrand._rand, torch.default_generator, random.random]
    assert OwnedGenerators(dataset=root).paths == ()


def test_streams_of_neighbouring_seeds_and_paths_are_independent():
    """No correlation beyond what 4,096 pairs of random numbers have."""
    holders = {str(at): np.random.default_rng() for at in range(16)}
    owned = OwnedGenerators(**holders)
    drawn = []
    for seed in np.random.default_rng(0).integers(1 << 63, size=256).tolist():
        owned.seed(seed)
        drawn.append([each.random() for each in holders.values()])
    correlations = np.corrcoef(np.array(drawn).T) - np.eye(16)
    assert np.abs(correlations).max() < 0.3
    assert np.abs(np.mean(drawn) - 0.5) < 0.02


def test_a_generator_and_its_bit_generator_are_one():
    """They share a state."""
    generator = np.random.default_rng()
    assert len(OwnedGenerators(dataset=[generator, generator.bit_generator]).paths) == 1
    assert len(OwnedGenerators(dataset=[generator.bit_generator, generator]).paths) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_restored(kind):
    """With what a generator keeps of its last number."""
    generator = KINDS[kind]()
    owned = OwnedGenerators(dataset=generator)
    draw(generator)
    with owned.kept():
        found = draw(generator)
        owned.seed(3)
    assert draw(generator) == found


def rows(count):
    """Return samples of datasets of many kinds: as ImageFolder lists them, and as JSON has them."""
    pairs = [(f"{at}.jpg", at % 10) for at in range(count)]
    return {
        "strings": [path for path, _ in pairs],
        "tuples": pairs,
        "dicts": [{"file": path, "boxes": [[0, 1]]} for path, _ in pairs],
        "nested": [[[pair] for pair in pairs[at : at + 99]] for at in range(0, count, 99)],
        "by name": {path: [label] for path, label in pairs},
        "objects": [Holder(path=path, boxes=[label]) for path, label in pairs],
    }


@pytest.mark.slow
def test_transforms_are_found_beside_a_long_list():
    """Also if it comes before them, whatever it has."""
    for name, samples in rows(40_000).items():
        rng = np.random.default_rng()
        owned = OwnedGenerators(dataset=Holder(samples=samples, transform=[Holder(rng=rng)]))
        assert owned.paths == ("dataset.transform[0].rng",), name


def test_of_a_long_list_whose_samples_have_generators_all_are_found():
    """A sample of them says that it is so."""
    samples = [Holder(rng=random.Random(at)) for at in range(FEW_ITEMS * 9)]
    owned = OwnedGenerators(dataset=[{}, samples])
    assert len(owned.paths) == len(samples)
    assert {f"dataset[1][{at}].rng" for at in range(len(samples))} == set(owned.paths)


@functools.lru_cache
def shared_generator():
    """Return the generator of all who ask."""
    return random.Random(0)


IN_A_LIST, SETTINGS = [np.random.default_rng(0)], types.SimpleNamespace(augment=OfTheClass())
IN_A_PARTIAL = functools.partial(np.random.RandomState.random_sample, np.random.RandomState(0))


class Static:
    """Draws from a generator of its class."""

    rng = random.Random(0)

    @classmethod
    def number(cls):
        """Draw."""
        return cls.rng.random()


class UsesGlobals:
    """Its method draws from what the module has."""

    def __init__(self, draw):
        self.draw = draw

    def __getitem__(self, index):
        return self.draw()


def from_a_list():
    """Draw."""
    return IN_A_LIST[0].random()


def from_a_namespace():
    """Draw."""
    return SETTINGS.augment.rng.random_sample()


def from_a_partial():
    """Draw."""
    return IN_A_PARTIAL()


def from_another_function():
    """Draw."""
    return [uses_a_global() for _ in range(2)]


def from_a_class():
    """Draw."""
    return Static.number()


def from_a_cached_function():
    """Draw."""
    return shared_generator().random()


GLOBALS = (
    *(from_a_list, from_a_namespace, from_a_partial),
    *(from_another_function, from_a_class, from_a_cached_function),
)


@pytest.mark.parametrize("place", GLOBALS)
def test_what_the_globals_of_a_function_hold_is_found(place):
    """In its code, in functions that this names, and in their code."""
    shared_generator()
    dataset = UsesGlobals(place)
    owned = OwnedGenerators(dataset=dataset)
    assert len(owned.paths) == 1, owned.paths
    owned.seed(1)
    first = dataset[0]
    owned.seed(1)
    assert dataset[0] == first


def test_a_name_does_not_depend_on_what_is_found_besides():
    """Code that names modules and their attributes is read in its order."""
    program = (
        "import functools, random, sys, types; module = types.ModuleType('held');"
        "module.one, module.two = random.Random(), random.Random(); sys.modules['held'] = module\n"
        "def draw(): import held; return held.one, held.two\n"
        "from forebay.base.generators import OwnedGenerators; "
        "print(OwnedGenerators(dataset=draw).paths)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": str(seed)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in range(3)
    }
    assert found == {b"('dataset.held.one', 'dataset.held.two')\n"}


def test_a_process_lists_what_nothing_reaches():
    """Those that are known, the global ones, and names of temporary files and locks are not."""
    tempfile.mktemp()  # so that it has a generator
    multiprocessing.get_context("fork").Lock()  # the same
    known, hidden, of_torch = random.Random(0), np.random.default_rng(0), torch.Generator()
    holder = Holder(hidden=hidden, of_torch=of_torch)
    found = others_in_process([known], {})
    every = set(map(id, found.values()))
    assert {id(hidden), id(of_torch)} <= every
    assert every.isdisjoint(
        map(id, (known, random._inst, torch.default_generator, tempfile._name_sequence.rng))
    )
    assert id(synchronize.SemLock._rand.rng) not in every
    assert holder.hidden is next(each for name, each in found.items() if ".hidden" in name)


class OwnRandom(random.Random):
    """Its `seed` is the user's."""

    calls = 0

    def seed(self, *args):
        """Count the calls."""
        self.calls += 1


def test_the_users_own_method_is_not_called():
    """Neither to seed nor to restore."""
    own = OwnRandom()
    before = own.calls
    owned = OwnedGenerators(dataset=own)
    owned.seed(1)
    first = own.random()
    with owned.kept():
        owned.seed(1)
    owned.seed(1)
    assert own.random() == first
    assert own.calls == before
