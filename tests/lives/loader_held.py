"""Generators that a module holds, from which samples of the loader lives draw."""

from __future__ import annotations

import random

import numpy as np
import torch

# By library. `begin` makes them new in each process that trains, so that no two begin alike.
GENERATORS = {}


def fresh(library: str) -> object:
    """Return a generator without a seed, as users make them."""
    if library == "python":
        return random.Random()
    if library == "numpy":
        return np.random.default_rng()
    generator = torch.Generator()
    generator.seed()
    return generator


def begin() -> None:
    """Make the generators of this module new."""
    for library in ("python", "numpy", "torch"):
        GENERATORS[library] = fresh(library)


begin()


def number(generator: object) -> float:
    """Draw a number from a generator of any library."""
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), dtype=torch.float64, generator=generator))
    return float(generator.random())
