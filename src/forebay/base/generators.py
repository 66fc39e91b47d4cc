"""The random generators that a program has besides the global ones, found and seeded.

    OwnedGenerators(dataset=…)   those that objects reach; in a worker process, all that it has
    … .seed(number)              before each sample
    with … .kept(): …            their states are as before afterwards

Each generator has numbers of its own, which depend on the seed and on its path: two transforms do
not draw the same numbers, and one that is added does not change the others.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from forebay.base.generator_search import Search, others_in_process
from forebay.base.process import is_worker
from forebay.base.randomness import TORCH_BITS, seed_of_text

_128_BITS = (1 << 128) - 1
# The multiplier of PCG64, odd and without a pattern (O'Neill, 2014).
_SPREAD = 0x2360ED051FC65DA44385DF649FCCF645


class OwnedGenerators:
    """The generators that some objects reach; in a worker process, all that it has.

    Attributes:
        paths: What each is called.
        parts: Each generator, with what its seeds are combined with, and what seeds it.
        others: What those are called that only the search of the process found, by ID.
    """

    def __init__(
        self,
        before: OwnedGenerators | None = None,
        others: Mapping[int, str] | None = None,
        **roots: Any,
    ) -> None:
        """Find them; no code of the user is called.

        Args:
            before: What was found of the same roots, which keep their names.
            others: What another process, which was forked from the same one, calls some.
        """
        self._roots, self.others = roots, dict[int, str]()
        self.paths: tuple[str, ...] = ()
        self.parts: tuple[tuple[Any, int, Callable[[int], object]], ...] = ()
        # Long containers without generators, by ID, with their lengths.
        self._empty: dict[int, tuple[Any, int]] = {} if before is None else before._empty
        known = {} if before is None else dict(zip(map(id, before), before.paths, strict=True))
        found = Search(self._empty).found(roots)
        for path, each in list(found.items()):
            if (name := known.get(id(each), path)) not in found:  # it is kept elsewhere now
                found[name] = found.pop(path)
        if is_worker():
            hidden = others_in_process(found.values(), {**(others or {}), **known})
            self.others = {id(each): name for name, each in hidden.items()}
            found |= hidden
        self.paths = tuple(found)
        self.parts = tuple(
            (each, seed_of_text(path), _setter(each, path)) for path, each in found.items()
        )

    def __iter__(self) -> Iterator[Any]:
        return (each for each, _, _ in self.parts)

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self.parts)

    def grown(self) -> OwnedGenerators | None:
        """Return those that there are now, if some are new; else None.

        Many datasets make a generator when they first need it, in a worker.
        """
        now = OwnedGenerators(self, **self._roots)
        return None if set(map(id, self)).issuperset(map(id, now)) else now

    def seed(self, seed: int) -> None:
        """Seed each from 64 bits, which must look random, and from its path."""
        for _, number, set_seed in self.parts:
            set_seed(seed ^ number)

    def states(self) -> list[Any]:
        """Return a copy of the state of each."""
        return [*map(generator_state, self)]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the states of the generators at the end of the block."""
        states = self.states()
        try:
            yield
        finally:
            for generator, state in zip(self, states, strict=True):
                set_state(generator, state)


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
    if type(bits) not in (numpy.random.PCG64, numpy.random.PCG64DXSM):

        def seed_bits(seed: int) -> None:
            bits.state = type(bits)(seed).state

        return seed_bits
    increment = (seed_of_text(f"{path} inc") * _SPREAD & _128_BITS) | 1
    inner = {"state": 0, "inc": increment}
    state = {"bit_generator": type(bits).__name__, "state": inner, "has_uint32": 0, "uinteger": 0}

    def seed_pcg(seed: int) -> None:
        inner["state"] = seed * _SPREAD & _128_BITS
        bits.state = state

    return seed_pcg


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
