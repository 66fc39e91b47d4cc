"""Run lives in which every pair of values occurs; see the package's docstring."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PARTS = 4


def live_part(which: str, part: int, parts: int) -> None:
    """Live a part of the lives, in a process that has no threads; fail with what it prints."""
    arguments = ["--domain", "run", which, "--part", f"{part}/{parts}", "--jobs", "2"]
    ran = subprocess.run(
        [sys.executable, "-m", "lives", *arguments, "--patience", "4"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "'right'" in ran.stdout


@pytest.mark.parametrize("part", range(1, PARTS + 1))
def test_a_run_keeps_what_is_done_through_every_pair_of_setups_and_steps(part):
    """Whatever inputs and functions are, and what happens: done work stays, and rows are right.

    `python -m lives --domain run --life p17`, in `tests/`, repeats the life that a report names.
    """
    live_part("--pairs", part, PARTS)


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(1, 4 * PARTS + 1))
def test_a_run_keeps_what_is_done_through_every_triple_of_setups(part):
    """The same with every triple of values."""
    live_part("--triples", part, 4 * PARTS)
