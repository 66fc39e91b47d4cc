"""What forebay looks for in a user's dataset: its style, and random generators of its own."""

from __future__ import annotations

import ctypes
import functools
import itertools
import random
import sys
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

from forebay.base.randomness import TORCH_BITS, numpy_and_torch, seed_of_text


def defines(thing: Any, *names: str) -> bool:
    """Return whether an object has methods of a protocol, by its class or as its own attributes.

    What its `__getattr__` answers does not count: that of a proxy, a mock or a dict with attributes
    may answer to any name.
    """
    own = getattr(thing, "__dict__", None)
    own = own if type(own) is dict else {}
    if isinstance(thing, type):
        return False
    return all(callable(own.get(name) or getattr(type(thing), name, None)) for name in names)


def is_map_style(dataset: object) -> bool:
    """Return whether samples have an index: whether there are `__getitem__` and `__len__`.

    An IterableDataset of torch may have a length, and inherits a `__getitem__` that only raises.
    """
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and isinstance(dataset, torch_data.IterableDataset):
        return False
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def getitems_of(dataset: Any) -> Any:
    """Return what reads several samples with one call; None if a dataset reads one at a time."""
    subset = getattr(sys.modules.get("torch.utils.data"), "Subset", None)
    if type(dataset) is subset and getitems_of(dataset.dataset) is None:
        return None  # its own one only calls `__getitem__` for each
    return dataset.__getitems__ if defines(dataset, "__getitems__") else None


def sequence_rows(dataset: Any) -> dict[str, Any]:
    """Return the datasets of `pack_sequences` and `batch_by_length`: this one, or those it mixes.

    The name of one that is not in a mixture is "dataset".
    """
    kind = getattr(sys.modules.get("forebay.lengths"), "SequenceRows", None)
    parts = dataset.datasets if is_mixture(dataset) else {"dataset": dataset}
    return {name: each for name, each in parts.items() if type(each) is kind}


def cached_samples(dataset: Any) -> Any | None:
    """Return what says how the samples of one of forebay's datasets are read by blocks.

    That is a dataset of `cache`, `open_cache` or `open_shards` itself. None for other ones, and
    for subclasses of these, whose samples may be others.
    """
    own = type(dataset).__module__.startswith("forebay.")
    return getattr(dataset, "by_blocks", None) if own else None


def is_mixture(dataset: object) -> bool:
    """Return whether a dataset was made by `forebay.mix`."""
    mixing = sys.modules.get("forebay.mixing")
    return mixing is not None and type(dataset) is mixing.MixedDataset


# ---- owned generators ----------------------------------------------------------------------------
# The random generators that a dataset or a function owns: find them, and seed them.
#
#   dataset.transform.rng                    a NumPy Generator or RandomState, random.Random,
#   function.__closure__, partial, list …    or torch.Generator, reachable without calling anything
#
# Libraries of augmentations have generators of their own, so seeding the global ones is not enough.
# Each generator has a stream that depends on the seed and on its path from the root, so that two
# transforms do not draw the same numbers, and one that is added does not change the others.

# How many objects are looked at. What lies in long containers comes last, so that a transform is
# found beside a list of a million samples.
MOST_OBJECTS = 20_000
# A container of more items is long: so many of each type in it are looked at, and in a container
# within such a sample a quarter as many. If a generator is found in a sample, all items are.
FEW_ITEMS = 100
SAMPLED = 64
# Of a container with more items than this, not even each type is looked at.
MANY_ITEMS = 10_000

_PLAIN = (str, bytes, bytearray, memoryview, int, float, complex, type(None), ModuleType, range)
_128_BITS = (1 << 128) - 1
# The multiplier of PCG64, odd and without a pattern (O'Neill, 2014).
_SPREAD = 0x2360ED051FC65DA44385DF649FCCF645

# Py_TPFLAGS_HEAPTYPE: the class was made by a class statement, or by an extension.
_HEAP_TYPE = 1 << 9


class OwnedGenerators:
    """The generators that some objects own.

    Attributes:
        paths: The path to each from a root.
        is_cut: Whether there were more objects than `MOST_OBJECTS`, so that some were not looked
            at.
    """

    def __init__(self, **roots: Any) -> None:
        """Find them; no code of the user is called."""
        self._roots = roots
        search = _Search(roots)
        found = dict(search.found())
        self.paths, self.is_cut = tuple(found), search.is_cut
        # Each with what its seeds are combined with, and what seeds it.
        self.parts = tuple(
            (each, seed_of_text(path), _setter(each, path)) for path, each in found.items()
        )

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self.parts)

    def grown(self) -> OwnedGenerators | None:
        """Return those that there are now, if some are new; else None.

        Many datasets make a generator when they first need it, in a worker.
        """
        now = OwnedGenerators(**self._roots)
        known = {id(each) for each, _, _ in self.parts}
        return None if known.issuperset(id(each) for each, _, _ in now.parts) else now

    def warn_if_cut(self, whose: str) -> None:
        """Warn if there are more objects than are searched."""
        if self.is_cut:
            warnings.warn(
                f"seed= may not reach all random generators of {whose}: the search for them ended "
                f"after {MOST_OBJECTS:,} objects, and found {len(self.parts):,}\n"
                "  Those in other objects are not seeded. print(loader.check()) shows whether "
                "samples differ; if they do, keep the generators nearer to the dataset, as in "
                "dataset.transform.rng.",
                stacklevel=2,
            )

    def seed(self, seed: int) -> None:
        """Seed each from 64 bits, which must look random, and from its path."""
        for _, number, set_seed in self.parts:
            set_seed(seed ^ number)

    def beside(self, set_seed: Callable[[int], None]) -> Callable[[int], None]:
        """Return a function that calls one with a seed, and seeds these generators, too."""
        if not self.parts:
            return set_seed

        def seed_all(seed: int) -> None:
            set_seed(seed)
            self.seed(seed)

        return seed_all

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the states of the generators at the end of the block."""
        states = [(each, generator_state(each)) for each, _, _ in self.parts]
        try:
            yield
        finally:
            for generator, state in states:
                set_state(generator, state)


# ---- finding -----------------------------------------------------------------------------------


class _Long(NamedTuple):
    """A long container, of which a sample is looked at.

    Attributes:
        items: All that may refer to a generator, with paths.
        outer: The long container that it was found in; None if it was found in none.
    """

    items: Iterator[tuple[str, Any]]
    outer: _Long | None

    def depth(self) -> int:
        """Return how many long containers it is in."""
        return 0 if self.outer is None else 1 + self.outer.depth()


class _Search:
    """A search for generators: first in what is near to the roots, then in long containers."""

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.is_cut = False
        self._kinds, self._known = _kinds()
        self._near: deque[tuple[str, Any, _Long | None]] = deque()
        self._near.extend((path, value, None) for path, value in roots.items())
        self._far: deque[tuple[str, Any, _Long | None]] = deque()  # in long containers
        self._all: deque[_Long] = deque()  # those of which everything is looked at

    def found(self) -> Iterator[tuple[str, Any]]:
        """Yield the path and each generator, those nearest to the roots first."""
        known, kinds = self._known, self._kinds
        kept: list[Any] = []  # so that no ID is used again
        for path, value, container in self._waiting():
            if id(value) in known:
                continue
            if len(kept) >= MOST_OBJECTS:
                self.is_cut = True
                return
            known.add(id(value))
            kept.append(value)
            if issubclass(type(value), kinds):
                # A Generator and its bit generator have one state.
                bits = getattr(value, "bit_generator", None)
                bits = bits or getattr(value, "_bit_generator", None)
                if bits is None or id(bits) not in known:
                    known.add(id(bits))
                    kept.append(bits)
                    self._look_at_all(container)
                    yield path, value
            else:
                self._look_into(path, value, container)

    def _waiting(self) -> Iterator[tuple[str, Any, _Long | None]]:
        """Yield the objects to look at."""
        while self._near or self._far or self._all:
            if self._near:
                yield self._near.popleft()
            elif self._far:
                yield self._far.popleft()
            elif (item := next(self._all[0].items, None)) is not None:
                yield *item, self._all[0].outer
            else:
                self._all.popleft()

    def _look_at_all(self, container: _Long | None) -> None:
        """Look at all items of a container in whose sample a generator was found."""
        while container is not None:
            if container not in self._all:
                self._all.append(container)
            container = container.outer

    def _look_into(self, path: str, value: Any, container: _Long | None) -> None:
        """Add what an object refers to."""
        near = self._near if container is None else self._far
        for kind in (dict, list, tuple, deque, set, frozenset):
            if issubclass(type(value), kind):
                if kind.__len__(value) > FEW_ITEMS:
                    long = _Long(_items(path, value, kind), container)
                    self._far.extend((*each, long) for each in _sample(path, value, kind, long))
                else:
                    near.extend((*each, container) for each in _items(path, value, kind))
                break
        near.extend((*each, container) for each in _inside(path, value, self._kinds))


def _kinds() -> tuple[tuple[type, ...], set[int]]:
    """Return the classes of generators, and the IDs of those that the process has anyway."""
    kinds: list[type] = [random.Random]
    known = {id(random._inst)}
    numpy_random, torch = numpy_and_torch()
    if numpy_random is not None:
        kinds += [numpy_random.Generator, numpy_random.RandomState, numpy_random.BitGenerator]
        known |= {id(numpy_random.mtrand._rand), id(numpy_random.get_bit_generator())}
    if torch is not None:
        kinds.append(torch.Generator)
        known.add(id(torch.default_generator))
    return tuple(kinds), known


def _items(
    path: str, value: Any, kind: Any, of: Iterable[tuple[Any, Any]] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield the items of a container that are not numbers or strings, by the methods of `kind`.

    Args:
        of: Keys or positions, and items; None for all.
    """
    for at, (name, each) in enumerate(_pairs(value, kind) if of is None else of):
        if not issubclass(type(each), _PLAIN):
            # Sets have no order, so their generators share a path.
            name = "" if kind in (set, frozenset) else name if type(name) in (str, int) else at
            yield f"{path}[{name}]", each


def _pairs(value: Any, kind: Any) -> Iterator[tuple[Any, Any]]:
    return iter(dict.items(value)) if kind is dict else enumerate(kind.__iter__(value))


def _sample(path: str, value: Any, kind: Any, long: _Long) -> Iterator[tuple[str, Any]]:
    """Yield some items of a long container, of each type."""
    length, most = kind.__len__(value), max(SAMPLED >> 2 * long.depth(), 2)
    of: Iterable[tuple[Any, Any]] | None = None
    if length > MANY_ITEMS and kind in (list, tuple):
        chosen = (*(length * at // most for at in range(most)), length - 1)
        of = ((at, kind.__getitem__(value, at)) for at in chosen)
    elif length > MANY_ITEMS:  # there is no way into the midst of it but a walk
        of = itertools.islice(_pairs(value, kind), most)
    of_type: Counter[type] = Counter()
    for item in _items(path, value, kind, of):
        of_type[type(item[1])] += 1
        if of_type[type(item[1])] <= most:
            yield item


def _inside(path: str, value: Any, kinds: tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    """Yield what an object refers to besides the items of a container, and the paths of that."""
    if isinstance(value, functools.partial):
        parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
        yield from ((f"{path}.{name}", each) for name, each in parts.items())
        return  # reading its `__dict__` would create one, and change what it is pickled as
    if isinstance(value, MethodType):
        yield f"{path}.__self__", value.__self__
        yield f"{path}.__func__", value.__func__
    elif isinstance(value, FunctionType):
        yield from _inside_function(path, value, kinds)
    yield from _attributes(path, value, kinds)


def _inside_function(
    path: str, function: FunctionType, kinds: tuple[type, ...]
) -> Iterator[tuple[str, Any]]:
    """Yield what a function refers to: variables around it, defaults, and globals by name."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{path}.{name}", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield f"{path}.__defaults__", function.__defaults__
    yield f"{path}.__kwdefaults__", function.__kwdefaults__
    for name in code.co_names:
        if name in function.__globals__:
            each = function.__globals__[name]
            if issubclass(type(each), kinds):
                yield f"{path}.{name}", each


def _attributes(path: str, value: Any, kinds: tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object and of its class, without calling a property."""
    if isinstance(value, type):
        return
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        own = {}
    for name, each in list(own.items()) if isinstance(own, dict) else ():
        if not issubclass(type(each), _PLAIN):
            yield f"{path}.{name}", each
    for kind in type(value).__mro__:
        if not kind.__flags__ & _HEAP_TYPE:  # built into Python: its slots are not of the user
            continue
        is_torchs = kind.__module__.partition(".")[0] == "torch"  # many methods, no generators
        wanted = kinds if is_torchs else (FunctionType, *kinds)
        for name, slot in vars(kind).items():
            if isinstance(slot, MemberDescriptorType):
                try:
                    each = slot.__get__(value)
                except AttributeError:  # not assigned yet
                    continue
                if not issubclass(type(each), _PLAIN):
                    yield f"{path}.{name}", each
            elif issubclass(type(slot), wanted):
                yield f"{path}.{name}", slot


# ---- seeding -----------------------------------------------------------------------------------


def _setter(generator: Any, path: str) -> Callable[[int], object]:
    """Return a function that seeds a generator from 64 bits."""
    if isinstance(generator, random.Random):
        # Not the method of a subclass, which is the user's.
        return functools.partial(random.Random.seed, generator)
    if hasattr(generator, "manual_seed"):
        return lambda seed: generator.manual_seed(seed & TORCH_BITS)
    numpy = sys.modules["numpy"]
    if isinstance(generator, numpy.random.RandomState):
        return lambda seed: generator.seed(seed >> 32)
    bits = getattr(generator, "bit_generator", generator)
    bits = getattr(bits.lock, "bits", bits)  # of `local_generators`: those that it stands for
    if type(bits) in (numpy.random.PCG64, numpy.random.PCG64DXSM):
        return _pcg64_setter(bits, seed_of_text(f"{path} inc"))

    def seed_bits(seed: int) -> None:
        bits.state = type(bits)(seed).state

    return seed_bits


class _Pcg64(ctypes.Structure):
    """`pcg64_state` of numpy/random/src/pcg64/pcg64.h."""

    _fields_ = (
        ("words", ctypes.POINTER(ctypes.c_uint64 * 4)),  # state and increment, low words first
        ("has_uint32", ctypes.c_int),
        ("uinteger", ctypes.c_uint32),
    )


def _pcg64_setter(bits: Any, stream: int) -> Callable[[int], object]:
    """Return a function that seeds a PCG64, in a quarter of the time of setting `state`."""
    memory = _Pcg64.from_address(bits.ctypes.state_address)
    increment = (stream * _SPREAD & _128_BITS) | 1
    at, move = ctypes.addressof(memory.words.contents), ctypes.memmove
    last = increment.to_bytes(16, "little")

    def seed(number: int) -> None:
        move(at, (number * _SPREAD & _128_BITS).to_bytes(16, "little") + last, 32)
        memory.has_uint32 = 0

    def seed_slowly(number: int) -> None:
        inner = {"state": number * _SPREAD & _128_BITS, "inc": increment}
        bits.state = {**before, "state": inner, "has_uint32": 0, "uinteger": 0}

    before = bits.state
    words = sum(word << 64 * at for at, word in enumerate(memory.words.contents))
    is_known = words == before["state"]["state"] | before["state"]["inc"] << 128
    return seed if is_known and sys.byteorder == "little" else seed_slowly


def generator_state(generator: Any) -> Any:
    """Return a copy of the state of a generator of `random`, numpy or torch."""
    if isinstance(generator, random.Random):
        return random.Random.getstate(generator)
    if hasattr(generator, "manual_seed"):
        return generator.get_state()
    if hasattr(generator, "get_state"):  # a RandomState also has the second of two normal numbers
        return generator.get_state(legacy=False)
    return getattr(generator, "bit_generator", generator).state


def set_state(generator: Any, state: Any) -> None:
    """Set a generator to a state that `generator_state` returned."""
    if isinstance(generator, random.Random):
        random.Random.setstate(generator, state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        getattr(generator, "bit_generator", generator).state = state
