"""Seeds as functions of a sample's position in the plan, never of the worker. PURE.

The mixing is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
2014): each number of the path is added to the state, and the state is scrambled.
"""

from __future__ import annotations

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15

# The purpose of a seed: the first number of its path, so that different uses never coincide.
ORDER, SAMPLE, COLLATE, SAMPLER, WORKER, SOURCES, DEVICE = range(7)


def seed_of(seed: int, *path: int) -> int:
    """Return 64 bits that depend on `seed` and on every number of the path, in order."""
    state = scrambled(seed & MASK)
    for step in path:
        state = child_seed(state, step)
    return state


def child_seed(seed: int, step: int) -> int:
    """Return what `seed_of` returns for a path that is one step longer than that of `seed`."""
    value = (seed + GOLDEN * (step + 1)) & MASK  # `scrambled`, without the call: once per sample
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def worker_seed_of(seed: int, epoch: int) -> int:
    """Return the base seed of the workers of an iterable dataset in an epoch.

    It has 62 bits, so that a worker ID can be added.
    """
    return seed_of(seed, WORKER, epoch) >> 2


def scrambled(value: int) -> int:
    """Return 64 bits in which every bit depends on every bit of `value`."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)
