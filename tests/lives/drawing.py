"""The lives of a domain, by seed. PURE.

p17   the 17th of those in which every pair of values and of steps in a row occurs
t17   the same for triples of values
17    at random
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping

from .covering import Allowed, StepPairs, completed, covering
from .life import Domain, Excluded, Life, Step

_MOST = 1 << 16
_STRENGTH = {"p": 2, "t": 3}


def allowed(domain: Domain, part: Mapping[str, str], *, known: bool) -> bool:
    """Return whether values may occur together.

    Args:
        known: Whether setups with faults that are known are allowed.
    """
    faults = () if known else [one for one in domain.KNOWN if not one.step]
    excluded = (*[one for one in domain.EXCLUDED if not one.step], *faults)
    return not any(one.matches(part) for one in excluded)


@functools.cache
def _allowing(domain: Domain, known: bool) -> Allowed:
    """Return the same as a function that looks only at what a new value concerns."""
    faults = () if known else [one for one in domain.KNOWN if not one.step]
    all_of_them = [one for one in (*domain.EXCLUDED, *faults) if not one.step]
    concerned: dict[str, dict[str, list[Excluded]]] = {}
    for one in all_of_them:
        for axis, values in one.values.items():
            for value in values.split():
                concerned.setdefault(axis, {}).setdefault(value, []).append(one)

    def allowed_with(part: Mapping[str, str], name: str) -> bool:
        some = concerned.get(name, {}).get(part[name], []) if name else all_of_them
        return not any(one.matches(part) for one in some)

    return allowed_with


def steps_of(domain: Domain, setup: Mapping[str, str], *, known: bool) -> list[str]:
    """Return the names of the steps that a history with a setup may have."""
    here = [one for one in domain.EXCLUDED if one.step and one.matches(setup)]
    if not known:
        here += [one for one in domain.KNOWN if one.step and one.matches(setup)]
    without = {one.step for one in here}
    return [name for name in domain.STEPS if name not in without and domain.applies(name, setup)]


@functools.cache
def _covering_lives(domain: Domain, prefix: str, known: bool) -> tuple[Life, ...]:
    draw = random.Random(0)
    pairs = StepPairs()
    lives = []
    setups = covering(
        domain.AXES,
        _allowing(domain, known),
        _STRENGTH[prefix],
        cost=getattr(domain, "cost", lambda _: 1.0),
    )
    for number, setup in enumerate(setups):
        names = pairs.history(steps_of(domain, setup, known=known), domain.LENGTH, draw)
        steps = [Step(name, draw.randrange(_MOST)) for name in names]
        lives.append(Life(domain.NAME, f"{prefix}{number}", setup, steps))
    return tuple(lives)


def covering_lives(domain: Domain, prefix: str = "p", *, known: bool = False) -> tuple[Life, ...]:
    """Return the lives in which every pair ("p") or triple ("t") of values occurs."""
    return _covering_lives(domain, prefix, known)


def random_life(domain: Domain, seed: int, *, known: bool = False) -> Life:
    """Return the life of a number."""
    draw = random.Random(seed)
    setup = None
    while setup is None:
        setup = completed({}, domain.AXES, _allowing(domain, known), draw)
    names = draw.choices(steps_of(domain, setup, known=known), k=draw.randint(2, domain.LENGTH))
    steps = [Step(name, draw.randrange(_MOST)) for name in names]
    return Life(domain.NAME, str(seed), setup, steps)


def life_of(domain: Domain, seed: str, *, known: bool = False) -> Life:
    """Return the life of a seed in any of the three forms."""
    if seed[0] in _STRENGTH:
        return covering_lives(domain, seed[0], known=known)[int(seed[1:])]
    return random_life(domain, int(seed), known=known)
