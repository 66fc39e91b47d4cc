"""Seeds as functions of where a sample stands in the stream, never of who makes it. PURE.

The mixing is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
2014): each number of the path is added to the state, and the state is scrambled.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

# What a seed is for; part of its path, so that equal numbers elsewhere never meet.
ORDER, SAMPLE, COLLATE, SAMPLER, WORKER = range(5)


def seed_of(seed: int, *path: int) -> int:
    """Return 64 bits that depend on `seed` and on every number of the path, in order."""
    state = _scrambled(seed & _MASK)
    for step in path:
        state = _scrambled((state + _GOLDEN * (step + 1)) & _MASK)
    return state


def _scrambled(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
