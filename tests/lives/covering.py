"""Few setups and histories in which every combination occurs. PURE.

Pairs are covered greedily, as AETG does (Cohen et al., IEEE TSE 23(7), 1997): of several random
completions of a combination that is not covered yet, the one that covers most others is taken.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

Axes = Mapping[str, Sequence[str]]
Setup = dict[str, str]
Allowed = Callable[[Mapping[str, str], str], bool]
Combination = tuple[tuple[str, str], ...]  # (axis, value), in the order of the axes

# Random completions of one combination, of which the best is taken.
_CANDIDATES = 12
# Attempts to complete a combination before it counts as impossible.
_ATTEMPTS = 60


def combinations(axes: Axes, strength: int) -> Iterator[Combination]:
    """Yield every combination of values of `strength` axes."""
    for names in itertools.combinations(axes, strength):
        for values in itertools.product(*(axes[name] for name in names)):
            yield tuple(zip(names, values, strict=True))


def covered_by(setup: Setup, axes: Axes, strength: int) -> Iterable[Combination]:
    """Return the combinations that occur in a setup."""
    return itertools.combinations([(name, setup[name]) for name in axes], strength)


def completed(
    part: Mapping[str, str],
    axes: Axes,
    allowed: Allowed,
    draw: random.Random,
) -> Setup | None:
    """Give the other axes values at random; None if no attempt is allowed.

    Args:
        part: Values of some axes.
        allowed: Whether values of some axes may occur together, if they may without that of the
            axis that is named.
    """
    others = [name for name in axes if name not in part]
    for _ in range(_ATTEMPTS):
        setup = dict(part)
        draw.shuffle(others)
        for name in others:
            values = [value for value in axes[name] if allowed({**setup, name: value}, name)]
            if not values:
                break
            setup[name] = draw.choice(values)
        else:
            return {name: setup[name] for name in axes}
    return None


def covering(
    axes: Axes,
    allowed: Allowed,
    strength: int = 2,
    seed: int = 0,
    cost: Callable[[Setup], float] = lambda _: 1.0,
) -> list[Setup]:
    """Return setups in which each combination that is allowed occurs.

    Args:
        allowed: As in `completed`; without a name, of all values.
        strength: How many axes a combination has: 2 for pairs.
        cost: How long a life with a setup takes, relative to others.
    """
    draw = random.Random(seed)
    missing = {part for part in combinations(axes, strength) if allowed(dict(part), "")}
    order = sorted(missing)
    draw.shuffle(order)
    setups: list[Setup] = []
    for part in order:
        if part not in missing:
            continue
        found = [completed(dict(part), axes, allowed, draw) for _ in range(_CANDIDATES)]
        candidates = [setup for setup in found if setup is not None]
        missing.discard(part)  # impossible, if there are no candidates
        if candidates:
            gains = [missing.intersection(covered_by(one, axes, strength)) for one in candidates]
            worth = [len(gain) / cost(one) for gain, one in zip(gains, candidates, strict=True)]
            best = worth.index(max(worth))
            missing -= gains[best]
            setups.append(candidates[best])
    return setups


class StepPairs:
    """Histories in which each pair of steps in a row occurs once before any occurs twice."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()

    def history(self, steps: Sequence[str], length: int, draw: random.Random) -> list[str]:
        """Return the names of a history's steps.

        Args:
            steps: Those that the setup allows.
        """
        names = [draw.choice(steps)]
        while len(names) < length:
            fresh = [name for name in steps if (names[-1], name) not in self.seen]
            ahead = [name for name in fresh if self._has_fresh(name, steps)]
            name = draw.choice(ahead or fresh or steps)
            self.seen.add((names[-1], name))
            names.append(name)
        return names

    def _has_fresh(self, name: str, steps: Sequence[str]) -> bool:
        return any((name, after) not in self.seen for after in steps)
