"""`python -m lives`, in `tests/`: live lives, and say which failed.

python -m lives --seconds 600 --seed 1        random lives, from this number on
python -m lives --pairs                       those in which every pair occurs
python -m lives --life p17 --domain loader    one life again, with what it says
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator

from .drawing import covering_lives, life_of, random_life
from .host import live_all, live_one
from .life import Domain, Life, Verdict
from .shrinking import shrink

DOMAINS = ("loader", "run")


def domain_of(name: str) -> Domain:
    """Return a domain by its name."""
    return importlib.import_module(f"lives.{name}_lives")


def _lives(domain: Domain, arguments: argparse.Namespace, end: float) -> Iterator[Life]:
    known = arguments.known
    if arguments.pairs or arguments.triples:
        number, parts = map(int, arguments.part.split("/"))
        lives = covering_lives(domain, "t" if arguments.triples else "p", known=known)
        yield from lives[number - 1 :: parts]
        return
    for seed in itertools.count(arguments.seed):
        if time.monotonic() > end:
            return
        yield random_life(domain, seed, known=known)


def _once(domain: Domain, arguments: argparse.Namespace) -> int:
    """Repeat one life."""
    life = life_of(domain, arguments.life, known=arguments.known)
    verdict = live_one(domain, life, arguments.patience)
    print(verdict.report())
    if arguments.shrink and verdict.kind != "right":
        _print_shrunk(domain, verdict, arguments.patience)
    return verdict.kind != "right"


def _print_shrunk(domain: Domain, verdict: Verdict, patience: float) -> None:
    def fails(life: Life) -> bool:
        return live_one(domain, life, patience).fault() == verdict.fault()

    shortest = shrink(domain, verdict.life, fails)
    print("--- shrunk")
    print(live_one(domain, shortest, patience).report())
    print(shortest.to_json())


def main() -> int:
    """Run what the arguments say; return 1 if a life failed."""
    parser = argparse.ArgumentParser(prog="python -m lives", description=__doc__)
    parser.add_argument("--domain", choices=DOMAINS, action="append")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pairs", action="store_true", help="lives that cover all pairs")
    parser.add_argument("--triples", action="store_true", help="lives that cover all triples")
    parser.add_argument("--part", default="1/1", help="of these, so many of so many parts")
    parser.add_argument("--life", help="repeat this one")
    parser.add_argument("--known", action="store_true", help="lives with known faults, too")
    parser.add_argument("--shrink", action="store_true", help="shrink the lives that fail")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--patience", type=float, default=2.0, help="multiplies limits of time")
    parser.add_argument("--stop", action="store_true", help="end at the first that fails")
    arguments = parser.parse_args()
    domains = [domain_of(name) for name in arguments.domain or DOMAINS]
    if arguments.life:
        return _once(domains[0], arguments)
    failed = 0
    for domain in domains:
        began = time.monotonic()
        kinds: Counter[str] = Counter()
        lives = _lives(domain, arguments, began + arguments.seconds / len(domains))
        for verdict in live_all(domain, lives, arguments.jobs, arguments.patience):
            kinds[verdict.kind] += 1
            if verdict.kind != "right":
                print(verdict.report(), flush=True)
                if arguments.shrink:
                    _print_shrunk(domain, verdict, arguments.patience)
                if arguments.stop:
                    return 1
        took = time.monotonic() - began
        rate = kinds.total() / took * 60
        print(f"{domain.NAME}: {kinds.total()} lives in {took:.0f} s, {rate:.0f} a minute")
        print(f"  {dict(kinds)}", flush=True)
        failed += kinds.total() - kinds["right"]
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
