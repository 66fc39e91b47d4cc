"""The shortest life that still fails: steps are removed, values made simple, numbers small."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from .drawing import allowed
from .life import Domain, Life, Step


def shrink(domain: Domain, life: Life, fails: Callable[[Life], bool], tries: int = 200) -> Life:
    """Return a life that fails like this one and is as short and simple as was found.

    Args:
        fails: Whether a life fails in the same way.
        tries: At most so many lives are lived.
    """
    left = tries
    progress = True
    while progress and left > 0:
        progress = False
        for simpler in _simpler(domain, life):
            left -= 1
            if fails(simpler):
                life, progress = simpler, True
                break
            if left == 0:
                break
    return dataclasses.replace(life, seed=f"{life.seed}, shrunk")


def _simpler(domain: Domain, life: Life) -> Iterator[Life]:
    """Yield lives that are one change simpler, the largest changes first."""
    for steps in _shorter(life.steps):
        yield dataclasses.replace(life, steps=steps)
    for axis, values in domain.AXES.items():
        for value in values[: values.index(life.setup[axis])]:
            setup = {**life.setup, axis: value}
            if allowed(domain, setup, known=True):
                yield dataclasses.replace(life, setup=setup)
    for number, step in enumerate(life.steps):
        for draw in (0, step.draw // 2) if step.draw > 1 else (0,) * step.draw:
            steps = list(life.steps)
            steps[number] = Step(step.name, draw)
            yield dataclasses.replace(life, steps=steps)


def _shorter(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Yield the history without its end, then without halves, quarters, single steps."""
    size = len(steps) // 2
    while size:
        for start in range(len(steps) - size, -1, -size):
            yield [*steps[:start], *steps[start + size :]]
        size //= 2
