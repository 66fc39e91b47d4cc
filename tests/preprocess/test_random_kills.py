"""SIGKILL at random, of workers and of the driver, for each kind of short work.

Afterwards every output is there once and whole, and the table has the bytes of a run that was left
alone: tasks and answers travel in groups, and a death in the middle of one must not show.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from driving import (
    PATIENCE_S,
    WORKS,
    await_no_processes,
    call,
    change_some,
    here,
    make_inputs,
    published,
    staged,
    start,
)

# By kind: the function, and the number of inputs.
KINDS = {"one file": ("copy_alone", 600), "a row": ("row_alone", 600), "5 ms": ("burn", 150)}
DONE, FAILURES = 0, 3


def command(kind, inputs, output):
    return [
        "preprocess",
        f"{WORKS}:{KINDS[kind][0]}",
        inputs,
        output,
        "--num-workers",
        2,
        "--quiet",
    ]


def children(pid):
    """Return the processes whose parent is `pid`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == pid:
                found.append(int(entry.name))
    return found


def kill_one_of(process, chance):
    """Kill the driver, or one of its workers if there is any; return whether it was the driver."""
    workers = [worker for zygote in children(process.pid) for worker in children(zygote)]
    if workers and chance.random() < 0.5:
        with suppress(ProcessLookupError):  # it may just have ended
            os.kill(chance.choice(workers), signal.SIGKILL)
        return False
    process.kill()
    return True


@pytest.mark.full  # as in test_kills.py
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kind", "total"),
    [("one file", 2), *(pytest.param(kind, 20, marks=pytest.mark.thorough) for kind in KINDS)],
)
def test_kills_at_random_leave_the_same_table(tmp_path, kind, total):
    """Nothing is lost, nothing is there twice, and no process or staged file is left."""
    inputs = make_inputs(tmp_path / "in", KINDS[kind][1])
    began = time.monotonic()
    code, _, err = call(*command(kind, inputs, tmp_path / "undisturbed"))
    assert code == DONE, err
    took = time.monotonic() - began
    output, chance, kills = tmp_path / "out", random.Random(f"{kind} {total}"), 0
    while kills < total:
        process = start(*command(kind, inputs, output))
        was_driver = False
        try:
            process.communicate(timeout=chance.uniform(0.2, 1.1) * took)
        except subprocess.TimeoutExpired:
            was_driver = kill_one_of(process, chance)
            _, err = process.communicate(timeout=PATIENCE_S)
            kills += 1
        if not was_driver:
            assert process.returncode in (DONE, FAILURES), err
            change_some(inputs, 50, chance)
        await_no_processes()
    assert here(*command(kind, inputs, output))[0] == DONE
    expected = published(tmp_path / "undisturbed")
    assert published(output) == expected
    table = "metadata.parquet"
    assert (output / table).read_bytes() == (tmp_path / "undisturbed" / table).read_bytes()
    assert not staged(output)
    files = f"{len(expected):,} output{'s' * (len(expected) != 1)} checked"
    assert here("verify", output)[:2] == (DONE, f"{files}: 0 missing, 0 altered, 0 orphans\n")
    await_no_processes()
