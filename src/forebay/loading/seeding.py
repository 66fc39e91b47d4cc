"""Random numbers as the three usual generators give them: seeded, and left as they were found."""

from __future__ import annotations

import os
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
    # The other half: numpy's generator is the same as torch's, which reads the low 32 bits alone,
    # so from one seed both would draw the same numbers.
    np.random.seed(seed >> 32)
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


# Whose turn it is to have the process's generators. There is one set of them for all threads, so
# those that seed them, and those that draw beside them, have to take turns.
_turn = threading.RLock()
_waiting: set[int] = set()  # the threads that want it


def _renew_turn() -> None:
    global _turn  # noqa: PLW0603 - one for all loaders of the process
    _turn = threading.RLock()


os.register_at_fork(after_in_child=_renew_turn)
os.register_at_fork(after_in_child=_waiting.clear)


def abandoned(thread: threading.Thread) -> bool:
    """Free the turn that an abandoned thread may have; return whether it was waiting for its own.

    One that waits cannot have it, and whoever has it is the one that hangs.
    """
    if thread.ident in _waiting:
        return True
    _renew_turn()
    return False


@contextmanager
def generators_taken() -> Iterator[None]:
    """Have the generators for the block, with no worker thread at them."""
    with _turn:
        yield


@contextmanager
def generators_kept() -> Iterator[None]:
    """Have the generators for the block, and leave them as they were found."""
    turn, thread = _turn, threading.get_ident()
    _waiting.add(thread)
    with turn:
        _waiting.discard(thread)
        outer = _states()
        try:
            yield
        finally:
            if turn is _turn:  # else they are no longer this thread's to set
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

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Have them for the block."""
        with generators_kept():
            if self._mine is None:
                seed_generators(self._seed)
            else:
                _set_states(self._mine)
            try:
                yield
            finally:
                self._mine = _states()
