"""Lives in which every pair of values of two axes, and of two steps in a row, occurs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PARTS = 6


def live_part(domain: str, which: str, part: int, parts: int) -> None:
    """Live a part of the lives, in a process that has no threads; fail with what it prints."""
    arguments = ["--domain", domain, which, "--part", f"{part}/{parts}", "--jobs", "2"]
    ran = subprocess.run(
        [sys.executable, "-m", "lives", *arguments, "--patience", "6"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "'right'" in ran.stdout


# Thorough while oracles do not know yet that a look at one batch begins no epoch, and which shards
# are made again once they are back.
@pytest.mark.thorough
@pytest.mark.parametrize("part", range(1, PARTS + 1))
def test_a_loader_keeps_its_promises_through_every_pair_of_setups_and_steps(part):
    """Whatever two things meet, batches are what the documents say, and nothing is left.

    `make life DOMAIN=loader SEED=p17` repeats the life that a report names.
    """
    live_part("loader", "--pairs", part, PARTS)


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(1, PARTS + 1))
def test_a_run_keeps_what_is_done_through_every_pair_of_setups_and_steps(part):
    """Whatever inputs and functions are, and what happens: done work stays, and rows are right.

    `make life DOMAIN=run SEED=p17` repeats the life that a report names.
    """
    live_part("run", "--pairs", part, PARTS)


@pytest.mark.thorough
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("domain", ["loader", "run"])
@pytest.mark.parametrize("part", range(1, 4 * PARTS + 1))
def test_every_triple_of_setups_is_right(domain, part):
    """The same with every triple of values."""
    live_part(domain, "--triples", part, 4 * PARTS)
