"""Faults planted one at a time in a copy of the source: do lives find them?

    planted.toml ──> a copy of src/ with one fault ──> a process that lives lives ──> failing life
                                                         the same life, without a fault: right?

A fault counts as found if a life fails with it, in one way at least twice, and never without it:
each is tried several times, since kills come at moments that differ. `python -m lives.planted
--help`, in `tests/`, tries the faults.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .__main__ import DOMAINS, domain_of
from .drawing import covering_lives, life_of, random_life
from .host import live_all
from .life import Domain, Life

_HERE = Path(__file__)
SOURCE = _HERE.parents[2] / "src"
# How often a life that fails is lived again, with the fault and without it.
_TRIES = 5
# What a process gets to end.
_ENDING_S = 60.0


@dataclass(frozen=True)
class Fault:
    """One fault; `planted.toml` says what each attribute is."""

    name: str
    breaks: str
    past: str
    domain: str
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
        lives: How many lives ended until one found it, or in all.
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


def sought(fault: Fault, seconds: float, jobs: int, seed: int, patience: float) -> Found:
    """Live lives with a fault until one fails for it."""
    began, lives, again_s = time.monotonic(), 0, 0.0
    with planted(fault) as source:
        process = _started(source, f"live({fault.domain!r}, {seconds}, {jobs}, {seed}, {patience})")
        try:
            assert process.stdout is not None
            for line in process.stdout:
                said = json.loads(line)
                lives, now = said["lives"], time.monotonic()
                if said["kind"] and _is_for(source, said, patience):
                    took_s = now - began - again_s
                    return Found(lives, took_s, said["words"], said["kind"], said["problem"])
                again_s += time.monotonic() - now
        finally:
            process.terminate()
            process.wait(_ENDING_S)
    return Found(lives, time.monotonic() - began - again_s)


def _is_for(source: Path, said: dict[str, Any], patience: float) -> bool:
    """Return whether a life fails in the same way again with a fault, and never without it."""
    wanted = _kind_of(said)
    return wanted in _again(source, said, patience) and not any(
        each[0] for each in _again(SOURCE, said, patience)
    )


def _again(source: Path, said: dict[str, Any], patience: float) -> Iterator[tuple[str, str]]:
    """Live a life again, several times; yield in which way it failed each time."""
    name, seed = said["life"]
    process = _started(source, f"again({name!r}, {seed!r}, {_TRIES}, {patience})")
    try:
        assert process.stdout is not None
        for line in process.stdout:
            yield _kind_of(json.loads(line))
    finally:
        process.terminate()
        process.wait(_ENDING_S)


def _kind_of(said: dict[str, Any]) -> tuple[str, str]:
    """Return in which way a life failed, without its numbers and names."""
    first = said["problem"].partition("\n")[0]
    return said["kind"], " ".join(re.findall(r"\b[a-z]{3,}\b", first)[:8])


def _started(source: Path, call: str) -> subprocess.Popen[str]:
    """Start a process that calls a function of this module; it prints lines of JSON."""
    code = (
        "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit());"
        f"from lives import planted; planted.{call}"
    )
    paths = os.pathsep.join(map(str, (source, _HERE.parents[1])))
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
        cwd=_HERE.parents[1],
    )


def live(name: str, seconds: float, jobs: int, seed: int, patience: float) -> None:
    """Live lives for a time, those of all pairs first; print how each ended, as JSON."""
    domain, end = domain_of(name), time.monotonic() + seconds
    _print_all(domain, _until(end, _lives(domain, seed)), jobs, patience)


def again(name: str, seed: str, tries: int, patience: float) -> None:
    """Live one life several times; print how it ended each time, as JSON."""
    domain = domain_of(name)
    _print_all(domain, [life_of(domain, seed)] * tries, 1, patience)


def _print_all(domain: Domain, lives: Iterable[Life], jobs: int, patience: float) -> None:
    for number, verdict in enumerate(live_all(domain, lives, jobs, patience), 1):
        life, kind = verdict.life, "" if verdict.kind == "right" else verdict.kind
        said = {"lives": number, "kind": kind, "problem": verdict.problem}
        said |= {"life": [domain.NAME, life.seed], "words": life.words()}
        print(json.dumps(said), flush=True)


def _lives(domain: Domain, seed: int) -> Iterator[Life]:
    yield from covering_lives(domain)
    for number in itertools.count(seed):
        yield random_life(domain, number)


def _until(end: float, lives: Iterator[Life]) -> Iterator[Life]:
    return itertools.takewhile(lambda _: time.monotonic() < end, lives)


def main() -> int:
    """Try the faults; return how many were not found."""
    parser = argparse.ArgumentParser(prog="python -m lives.planted", description=__doc__)
    parser.add_argument("--fault", action="append", help="its name; all if none is given")
    parser.add_argument("--domain", choices=DOMAINS)
    parser.add_argument("--seconds", type=float, default=600.0, help="for each fault, at most")
    parser.add_argument("--seed", type=int, default=1, help="of the lives at random")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="lives at once")
    parser.add_argument("--patience", type=float, default=2.0, help="multiplies limits of time")
    parser.add_argument("--list", action="store_true", help="only list the faults")
    given = parser.parse_args()
    chosen = [
        fault
        for fault in faults()
        if fault.domain == (given.domain or fault.domain)
        and fault.name in (given.fault or [fault.name])
    ]
    missed = 0
    for fault in chosen:
        if given.list:
            print(f"{fault.name:22} {fault.domain:7} {fault.breaks}")
            continue
        found = sought(fault, given.seconds, given.jobs, given.seed, given.patience)
        missed += not found.by
        print(f"{fault.name:22} {found}", flush=True)
    if not given.list:
        print(f"{len(chosen) - missed} of {len(chosen)} found")
    return missed


if __name__ == "__main__":
    sys.exit(main())
