"""What a sample draws, and who holds what it draws from."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch

from . import loader_held
from .loader_held import fresh, number

GENERATORS: dict[str, object] = {}

Draw = Callable[[], float]


def begin() -> None:
    """Make all generators new that modules hold: no two trainers begin with equal ones."""
    loader_held.begin()
    GENERATORS.update({library: fresh(library) for library in ("python", "numpy", "torch")})
    random.seed()
    np.random.seed()
    torch.seed()


class Global:
    """Draws from a library's global generator."""

    def __init__(self, library: str) -> None:
        self.library = library

    def __call__(self) -> float:
        if self.library == "python":
            return random.random()
        if self.library == "numpy":
            return float(np.random.random())
        return float(torch.rand((), dtype=torch.float64))


class Owned:
    """Draws from a generator in an attribute."""

    def __init__(self, library: str) -> None:
        self.generator = fresh(library)

    def __call__(self) -> float:
        return number(self.generator)


class Listed:
    """Draws from a generator in containers."""

    def __init__(self, library: str) -> None:
        self.held = {"all": [None, fresh(library)]}

    def __call__(self) -> float:
        return number(self.held["all"][1])


class OfGlobal:
    """Draws from a generator that is a global of this module."""

    def __init__(self, library: str) -> None:
        self.library = library

    def __call__(self) -> float:
        return number(GENERATORS[self.library])


class OfModule(OfGlobal):
    """Draws from a generator that is a global of another module."""

    def __call__(self) -> float:
        return number(loader_held.GENERATORS[self.library])


class Helped(OfGlobal):
    """Draws by a function that calls one that uses a global."""

    def __call__(self) -> float:
        return _helper(self.library)


def _helper(library: str) -> float:
    return _deeper(library)


def _deeper(library: str) -> float:
    return number(GENERATORS[library])


def _closure(library: str) -> Draw:
    generator = fresh(library)
    return lambda: number(generator)


def nothing() -> float:
    """Draw nothing."""
    return 0.0


_HOLDERS: dict[str, Callable[[str], Draw]] = {
    "attribute": Owned,
    "list": Listed,
    "closure": _closure,
    "global": OfGlobal,
    "module": OfModule,
    "helper": Helped,
    "collate": Owned,
}


def draw_of(draws: str, holder: str) -> Draw:
    """Return what a sample, or a batch, draws with.

    Args:
        draws: Nothing, or the library, with `own-` if it is not the library's global generator.
        holder: Who holds the generator.
    """
    if draws == "nothing" or holder == "sampler":
        return nothing
    if draws.startswith("own-"):
        return _HOLDERS[holder](draws.removeprefix("own-"))
    return Global(draws)
