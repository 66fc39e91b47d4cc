"""Faults planted one at a time in a copy of the source: do lives find them?

    planted.toml ──> a copy of src/ with one fault ──> a process that lives lives ──> failing life
                                                         the same life, without a fault: right?

A fault counts as found if a life fails with it, in one way at least twice, and never without it:
each is tried several times, since kills come at moments that differ. `python -m lives.planted
--help`, in `tests/`, tries the faults.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import left
from .__main__ import DOMAINS, domain_of
from .drawing import covering_lives, random_life
from .host import live_all
from .life import Life, life_from_json

_HERE = Path(__file__)
SOURCE = _HERE.parents[2] / "src"
# How often a life that fails is lived again, with the fault and without it.
_TRIES = 3
# The most lives.
_MOST = 1500
_ENDLESS_S = 1e9
# What a process gets to end.
_ENDING_S = 60.0


@dataclass(frozen=True)
class Fault:
    """One fault; `planted.toml` says what each attribute is."""

    name: str
    breaks: str
    past: str
    domain: str
    near: str
    file: str
    old: str
    new: str

    def plant(self, source: Path) -> None:
        """Put it into a copy of `src`."""
        path = source / "forebay" / self.file
        text = path.read_text()
        assert text.count(self.old) == 1, f"{self.name}: {text.count(self.old)} places in {path}"
        path.write_text(text.replace(self.old, self.new))


@dataclass(frozen=True)
class Found:
    """What lives said of a fault.

    Attributes:
        lives: How many lives it took, those that are not near it among them, or how many ended.
        by: The life that found it, in one line; empty if none did.
    """

    lives: int
    seconds: float
    by: str = ""
    kind: str = ""
    problem: str = ""

    def __str__(self) -> str:
        if not self.by:
            return f"not found in {self.lives} lives, {self.seconds:.0f} s"
        seed, first = self.by.split(":")[0], self.problem.partition("\n")[0][:120]
        return f"{self.lives} lives, {self.seconds:.0f} s: {seed} is {self.kind}: {first}"


def faults() -> list[Fault]:
    """Return all faults."""
    with _HERE.with_suffix(".toml").open("rb") as file:
        return [Fault(**each) for each in tomllib.load(file)["fault"]]


@contextmanager
def planted(fault: Fault | None) -> Iterator[Path]:
    """Yield a copy of `src` with a fault; None for one without."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        source = Path(folder, "src")
        shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
        if fault is not None:
            fault.plant(source)
        yield source


Numbered = tuple[int, Life]


def sought(
    fault: Fault, lives: Iterable[Numbered], seconds: float, jobs: int, patience: float
) -> Found:
    """Live lives with a fault until one fails for it."""
    began, most, again_s = time.monotonic(), 0, 0.0
    with planted(fault) as source, _living(source, lives, seconds, jobs, patience) as process:
        for said in _said(process):
            most, now = max(most, said["number"]), time.monotonic()
            if said["kind"] and _is_for(source, said, patience):
                took_s, life = now - began - again_s, life_from_json(said["life"])
                return Found(most, took_s, life.words(), said["kind"], said["problem"])
            again_s += time.monotonic() - now
        took_s = time.monotonic() - began - again_s
        if process.wait(_ENDING_S):  # what all lives import and rehearse fails
            return Found(0, took_s, "the rehearsal", "error", "it raises")
        return Found(most, took_s)


def _is_for(source: Path, said: dict[str, Any], patience: float) -> bool:
    """Return whether a life fails in the same way again with a fault, and never without it."""
    wanted, life = _kind_of(said), life_from_json(said["life"])
    again = [(0, life)] * _TRIES
    with _living(source, again, _ENDLESS_S, 1, patience) as process:
        if wanted not in map(_kind_of, _said(process)):
            return False
    with _living(SOURCE, again, _ENDLESS_S, 1, patience) as process:
        return not any(each["kind"] for each in _said(process))


def _kind_of(said: dict[str, Any]) -> tuple[str, str]:
    """Return in which way a life failed, without its numbers and names."""
    first = said["problem"].partition("\n")[0]
    return said["kind"], " ".join(re.findall(r"\b[a-z]{3,}\b", first)[:8])


@contextmanager
def _living(
    source: Path, lives: Iterable[Numbered], seconds: float, jobs: int, patience: float
) -> Iterator[subprocess.Popen[str]]:
    """Start a process that lives lives with a source; it prints how each ended, as JSON."""
    code = f"from lives import planted; planted.live({seconds}, {jobs}, {patience})"
    paths = os.pathsep.join(map(str, (source, _HERE.parents[1])))
    # What is ended in the middle of a write may leave a file while the folder is removed.
    temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with temporary as folder, Path(folder, "lives").open("w+") as file:
        file.writelines(f"{json.dumps([number, life.to_json()])}\n" for number, life in lives)
        file.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": paths, "TMPDIR": folder},
            stdin=file,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_HERE.parents[1],
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(_ENDING_S)


def _said(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    return map(json.loads, process.stdout)


def live(seconds: float, jobs: int, patience: float) -> None:
    """Live the lives that come from the standard input; print how each ended, as JSON."""
    signal.signal(signal.SIGTERM, _end)
    end, numbers = time.monotonic() + seconds, {}
    given = [json.loads(line) for line in sys.stdin]
    lives = [life_from_json(text) for _, text in given]
    for (number, _), life in zip(given, lives, strict=True):
        numbers[id(life)] = number
    until = itertools.takewhile(lambda _: time.monotonic() < end, lives)
    for verdict in live_all(domain_of(lives[0].domain), until, jobs, patience):
        said = {"number": numbers[id(verdict.life)], "life": verdict.life.to_json()}
        kind = "" if verdict.kind == "right" else verdict.kind
        print(json.dumps({**said, "kind": kind, "problem": verdict.problem}), flush=True)


def _end(*_: object) -> None:
    """End this process, with all that descends from it."""
    for process in left.descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    os._exit(0)


def lives_of(name: str, seed: int) -> list[Numbered]:
    """Return lives: those of all pairs first, and then random ones."""
    domain = domain_of(name)
    every = itertools.chain(
        covering_lives(domain),
        (random_life(domain, number) for number in itertools.count(seed)),
    )
    return [*itertools.islice(enumerate(every, 1), _MOST)]


def _is_near(life: Life, near: Sequence[str]) -> bool:
    """Return whether a life has these values, such as `data=tar|jsonl`, and these steps."""
    steps = {step.name for step in life.steps}
    for word in near:
        axis, is_value, values = word.partition("=")
        if not (life.setup[axis] in values.split("|") if is_value else word in steps):
            return False
    return True


def main() -> int:
    """Try the faults; return how many were not found."""
    parser = argparse.ArgumentParser(prog="python -m lives.planted", description=__doc__)
    parser.add_argument("--fault", action="append", help="its name; all if none is given")
    parser.add_argument("--domain", choices=DOMAINS)
    parser.add_argument("--seconds", type=float, default=600.0, help="for each fault, at most")
    parser.add_argument("--seed", type=int, default=1, help="of the lives at random")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="lives at once")
    parser.add_argument("--patience", type=float, default=2.0, help="multiplies limits of time")
    parser.add_argument("--near", action="store_true", help="only lives that may find the fault")
    parser.add_argument("--list", action="store_true", help="only list the faults")
    given = parser.parse_args()
    chosen = [
        fault
        for fault in faults()
        if fault.domain == (given.domain or fault.domain)
        and fault.name in (given.fault or [fault.name])
    ]
    missed, lives = 0, {}
    for fault in chosen:
        if given.list:
            print(f"{fault.name:22} {fault.domain:7} {fault.breaks}")
            continue
        if fault.domain not in lives:
            lives[fault.domain] = lives_of(fault.domain, given.seed)
        near = fault.near.split() if given.near else ()
        some = [each for each in lives[fault.domain] if _is_near(each[1], near)]
        found = sought(fault, some, given.seconds, given.jobs, given.patience)
        missed += not found.by
        print(f"{fault.name:22} {found}", flush=True)
    if not given.list:
        print(f"{len(chosen) - missed} of {len(chosen)} found")
    return missed


if __name__ == "__main__":
    sys.exit(main())
