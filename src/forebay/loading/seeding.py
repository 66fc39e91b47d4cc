"""Random numbers as the three usual generators give them: seeded, and left as they were found."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.worker import _generate_state


def seed_generators(seed: int) -> None:
    """Seed `random`, numpy's global generator and torch's, from 64 bits."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # torch.manual_seed also reaches for devices, at a hundred times the cost.
    torch.default_generator.manual_seed(seed)


def seed_worker(base_seed: int, lane: int) -> int:
    """Seed a worker as torch seeds its own; return the seed."""
    seed = base_seed + lane
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(_generate_state(base_seed, lane))
    return seed


def _states() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def _set_states(states: tuple[Any, Any, torch.Tensor]) -> None:
    state, array_state, tensor_state = states
    random.setstate(state)
    np.random.set_state(array_state)
    torch.default_generator.set_state(tensor_state)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leave the generators as they are found, whatever the block does."""
    outer = _states()
    try:
        yield
    finally:
        _set_states(outer)


class PrivateGenerators:
    """Gives a piece of code generators of its own: a block goes on where the last one ended.

    The process's generators are as before after each block.

    Args:
        seed: 64 bits to begin with.
    """

    def __init__(self, seed: int) -> None:
        """Begin with `seed`."""
        self._seed = seed
        self._mine: tuple[Any, Any, torch.Tensor] | None = None
        self._outer: Any = None

    def __enter__(self) -> None:
        self._outer = _states()
        if self._mine is None:
            seed_generators(self._seed)
        else:
            _set_states(self._mine)

    def __exit__(self, *error: object) -> None:
        self._mine = _states()
        _set_states(self._outer)


class SharedGenerators:
    """Lets one thread at a time have the process's generators, which are as before afterwards.

    There is one set of them for all threads, so those that seed them have to take turns.
    """

    _turn = threading.Lock()  # one for all loaders of the process

    def __init__(self) -> None:
        """Wait for nothing yet."""
        self._outer: Any = None

    def __enter__(self) -> None:
        self._turn.acquire()
        self._outer = _states()

    def __exit__(self, *error: object) -> None:
        _set_states(self._outer)
        self._turn.release()
