"""What forebay looks for in a user's dataset: its style, and random generators of its own."""

from __future__ import annotations

import ctypes
import functools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

from forebay.base.randomness import TORCH_BITS, numpy_and_torch, seed_of_text


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
    return getattr(dataset, "__getitems__", None)


def sequence_rows(dataset: Any) -> dict[str, Any]:
    """Return the datasets of `pack_sequences` and `batch_by_length`: this one, or those it mixes.

    The name of one that is not in a mixture is "dataset".
    """
    kind = getattr(sys.modules.get("forebay.lengths"), "SequenceRows", None)
    parts = dataset.datasets if is_mixture(dataset) else {"dataset": dataset}
    return {name: each for name, each in parts.items() if type(each) is kind}


def cached_samples(dataset: Any) -> Any | None:
    """Return a dataset if it is one of `cache` or `open_cache`, else None."""
    caching = sys.modules.get("forebay.caching.dataset")
    return dataset if caching is not None and type(dataset) is caching.CachedDataset else None


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

# How many objects are looked at; those nearest to the roots come first.
MOST_OBJECTS = 20_000
# A container whose first items are numbers or strings is taken to have nothing else.
LOOKED_AT = 100

_PLAIN = (str, bytes, bytearray, memoryview, int, float, complex, type(None), ModuleType, range)
_128_BITS = (1 << 128) - 1
# The multiplier of PCG64, odd and without a pattern (O'Neill, 2014).
_SPREAD = 0x2360ED051FC65DA44385DF649FCCF645

# Py_TPFLAGS_HEAPTYPE: the class was made by a class statement, or by an extension.
_HEAP_TYPE = 1 << 9


class OwnedGenerators:
    """The generators that some objects own."""

    def __init__(self, **roots: Any) -> None:
        """Find them; no code of the user is called."""
        found = dict(_found(roots))
        self.paths = tuple(found)
        # Each with what its seeds are combined with, and what seeds it.
        self.parts = tuple(
            (each, seed_of_text(path), _setter(each, path)) for path, each in found.items()
        )

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self.parts)

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

    def states(self) -> list[Any]:
        """Return copies of the states."""
        return [state_of(each) for each, _, _ in self.parts]

    def restore(self, states: Sequence[Any]) -> None:
        """Set the generators to states that `states` returned."""
        for (generator, _, _), state in zip(self.parts, states, strict=True):
            set_state(generator, state)


# ---- finding -----------------------------------------------------------------------------------


def _found(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the path and each generator, those nearest to the roots first."""
    kinds, known = _kinds()
    waiting = deque((name, value) for name, value in roots.items())
    kept = []  # so that no ID is used again
    for _ in range(MOST_OBJECTS):
        if not waiting:
            return
        path, value = waiting.popleft()
        if id(value) in known:
            continue
        known.add(id(value))
        kept.append(value)
        if issubclass(type(value), kinds):
            # A Generator and its bit generator have one state.
            inner = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", None)
            if inner is None or id(inner) not in known:
                known.add(id(inner))
                kept.append(inner)
                yield path, value
        else:
            waiting.extend(_inside(path, value, kinds))


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


def _inside(path: str, value: Any, kinds: tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    """Yield what an object refers to, and the paths of that."""
    for kind in (dict, list, tuple, deque, set, frozenset):
        if issubclass(type(value), kind):
            yield from _items(path, value, kind)
            break
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


def _items(path: str, value: Any, kind: Any) -> Iterator[tuple[str, Any]]:
    """Yield the items of a container that are not numbers or strings, by the methods of `kind`."""
    pairs = dict.items(value) if kind is dict else enumerate(kind.__iter__(value))
    has_others = False
    for at, (name, each) in enumerate(pairs):
        if at == LOOKED_AT and not has_others:
            return
        if not issubclass(type(each), _PLAIN):
            has_others = True
            # Sets have no order, so their generators share a path.
            name = "" if kind in (set, frozenset) else name if type(name) in (str, int) else at
            yield f"{path}[{name}]", each


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
    if isinstance(own, dict):
        for name, each in list(own.items()):
            if not issubclass(type(each), _PLAIN):
                yield f"{path}.{name}", each
    for kind in type(value).__mro__:
        if not kind.__flags__ & _HEAP_TYPE:  # built into Python: its slots are not of the user
            continue
        for name, slot in vars(kind).items():
            if isinstance(slot, MemberDescriptorType):
                try:
                    each = slot.__get__(value)
                except AttributeError:  # not assigned yet
                    continue
                if not issubclass(type(each), _PLAIN):
                    yield f"{path}.{name}", each
            elif issubclass(type(slot), (FunctionType, *kinds)):
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


def state_of(generator: Any) -> Any:
    """Return a copy of the state of a generator of `random`, numpy or torch."""
    if isinstance(generator, random.Random):
        return random.Random.getstate(generator)
    if hasattr(generator, "manual_seed"):
        return generator.get_state()
    if hasattr(generator, "get_state"):  # a RandomState also has the second of two normal numbers
        return generator.get_state(legacy=False)
    return getattr(generator, "bit_generator", generator).state


def set_state(generator: Any, state: Any) -> None:
    """Set a generator to a state that `state_of` returned."""
    if isinstance(generator, random.Random):
        random.Random.setstate(generator, state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        getattr(generator, "bit_generator", generator).state = state
