"""A life, and what a domain of lives has to have."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

# Says one sentence of a history, such as "takes 3 batches: 4 8 1".
Say = Callable[[str], None]


@dataclass(frozen=True)
class Step:
    """One step of a history.

    Attributes:
        name: What is done.
        draw: What the details follow from, such as how many batches are taken. Whatever its
            value, and whatever came before, the step means something: so steps can be removed.
    """

    name: str
    draw: int = 0


@dataclass(frozen=True)
class Life:
    """A setup and a history.

    Attributes:
        seed: What it was drawn from, as `python -m lives --life` takes it.
        setup: A value of each axis.
    """

    domain: str
    seed: str
    setup: Mapping[str, str]
    steps: Sequence[Step]

    def words(self) -> str:
        """Return the life in one line."""
        setup = " ".join(f"{axis}={value}" for axis, value in self.setup.items())
        steps = ", ".join(f"{step.name}({step.draw})" for step in self.steps)
        return f"{self.domain} {self.seed}: {setup}; {steps}"

    def to_json(self) -> str:
        """Return the life as JSON, for a test of its own."""
        steps = [[step.name, step.draw] for step in self.steps]
        return json.dumps(
            {"domain": self.domain, "seed": self.seed, "setup": self.setup, "steps": steps}
        )


def life_from_json(text: str) -> Life:
    """Return the life that `Life.to_json` wrote."""
    read = json.loads(text)
    steps = [Step(name, draw) for name, draw in read["steps"]]
    return Life(read["domain"], read["seed"], read["setup"], steps)


class WrongError(Exception):
    """The oracle disagrees: what came is not what the documents promise."""


@dataclass(frozen=True)
class Excluded:
    """Values that do not occur together.

    Attributes:
        reason: Why: what the documents refuse, or, for a fault that is known, what is wrong.
        values: The values of each axis, all of which must match; several are separated by spaces.
        step: A step that must occur too, if any.
    """

    reason: str
    values: Mapping[str, str]
    step: str = ""

    def matches(self, part: Mapping[str, str]) -> bool:
        """Return whether a setup, or a part of one, is of this kind."""
        return all(part.get(axis, "") in _split(values) for axis, values in self.values.items())


@functools.cache
def _split(values: str) -> frozenset[str]:
    return frozenset(values.split())


class Domain(Protocol):
    """A family of lives: the modules `loader_lives` and `run_lives` are two.

    Attributes:
        NAME: What it is called.
        AXES: The values of each axis, the simplest first: lives are shrunk towards it.
        STEPS: The names of all steps.
        LENGTH: How many steps a life has.
        LIMIT_S: Seconds after which a life hangs, on an idle machine.
        EXCLUDED: What does not occur because it is refused or has no meaning.
        KNOWN: Faults that are known: lives that have them are left out until they are fixed.
    """

    NAME: str
    AXES: Mapping[str, Sequence[str]]
    STEPS: Sequence[str]
    LENGTH: int
    LIMIT_S: float
    EXCLUDED: Sequence[Excluded]
    KNOWN: Sequence[Excluded]

    def applies(self, step: str, setup: Mapping[str, str]) -> bool:
        """Return whether a step means something with a setup."""
        ...

    def prepare(self) -> None:
        """Import what all lives use, in the process that is forked for each of them."""
        ...

    def prepare_for(self, life: Life) -> None:
        """Start what a life shares with others, in the same process."""
        ...

    def live(self, life: Life, folder: Path, say: Say) -> None:
        """Live a life in an empty folder.

        Raises:
            WrongError: The oracle disagrees.
        """
        ...


@dataclass(frozen=True)
class Verdict:
    """How a life ended.

    Attributes:
        kind: "right", or why it failed: "wrong" (the oracle disagrees), "error" (an exception
            that the oracle does not expect), "hang", "left" (processes that outlive it), "died".
        problem: In words; empty if it is right.
        history: What it said, a sentence a line.
        output: What it and its processes printed; with a hang, the stacks of all threads.
    """

    life: Life
    kind: str
    problem: str = ""
    history: str = ""
    output: str = ""
    seconds: float = field(default=0.0, compare=False)

    def fault(self) -> str:
        """Return what went wrong, without numbers: the same for lives that have one fault."""
        lines = [line for line in self.problem.splitlines() if line and not line.startswith(" ")]
        ends = {lines[0], lines[-1]} if lines else ()
        return " ".join([self.kind, *sorted(re.sub(r"[^a-zA-Z ]+", "", line) for line in ends)])

    def report(self) -> str:
        """Return all of it in words."""
        return (
            f"{self.life.words()}\n{self.kind}: {self.problem}\n--- history\n{self.history}"
            f"--- output\n{self.output}"
        )
