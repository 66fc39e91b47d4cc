"""Random numbers that depend on the input alone, not on which worker met it, or when."""

from __future__ import annotations

import random
import sys
import zlib
from typing import Any


def seed_everything(key: str) -> None:
    """Seed `random`, and numpy and torch if they are loaded, from an input's key."""
    seed = zlib.crc32(key.encode("utf-8", "surrogatepass"))
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)
    torch = sys.modules.get("torch")
    if torch is not None:
        # torch.manual_seed also reaches for devices, at a hundred times the cost.
        torch.default_generator.manual_seed(seed)


def generator_states() -> list[Any]:
    """Return the states of the generators that `seed_everything` changes."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    return [
        random.getstate(),
        None if numpy is None else numpy.random.get_state(),
        None if torch is None else torch.default_generator.get_state(),
    ]


def restore_generators(states: list[Any]) -> None:
    """Undo what `seed_everything` did since `generator_states`."""
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])
    if states[2] is not None:
        sys.modules["torch"].default_generator.set_state(states[2])
