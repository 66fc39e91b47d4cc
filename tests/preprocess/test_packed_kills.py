"""SIGKILL while outputs are packed: no member is doubled, lost or torn, the table is the same."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from crash_points import PACKING_POINTS, POINTS
from driving import (
    await_no_processes,
    call,
    change_some,
    finish,
    is_killed_after,
    make_inputs,
    start,
    table,
    undisturbed_run,
)
from packing import members, opened

from forebay.ledger.ledger import Ledger
from forebay.outputs.shards import intact_members

INPUTS = 120
PACKING = Path(__file__).with_name("packing.py")
CRASHES = Path(__file__).with_name("crash_points.py")

pytestmark = pytest.mark.usefixtures("readers_closed")


def pack(inputs, output):
    """Return the arguments of the run under test."""
    return ["preprocess", f"{PACKING}:pack_lines", inputs, output, "--num-workers", 3, "--quiet"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run that was not killed: its inputs, members, table, and the seconds it took."""
    return undisturbed_run(tmp_path_factory.mktemp("undisturbed"), INPUTS, pack, members)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("total", [3, pytest.param(20, marks=pytest.mark.thorough)])
def test_kills_of_the_driver_lose_and_double_no_member(undisturbed, tmp_path, total):
    """At any moment, with inputs that change in between; what is published is always whole."""
    inputs, expected, expected_table, took = undisturbed
    output, chance, kills = tmp_path / "out", random.Random(7), 0
    while kills < total:
        process = start(*pack(inputs, output), WORK_PAUSE_S="0.02")
        if is_killed_after(chance.uniform(0.2, 1.3 * took + 0.5), process):
            kills += 1
        else:
            assert members(output) == expected
            change_some(inputs, 20, chance)
        await_no_processes()
        assert members(output, was_killed=True).items() <= expected.items()
    code, _, err = call(*pack(inputs, output))
    assert code == 0, err
    assert members(output) == expected
    assert opened(output, expected) == expected
    assert table(output) == expected_table
    assert not (output / ".forebay" / "packed").exists()


@pytest.mark.slow
def test_killed_workers_leave_nothing_in_their_shards(undisturbed, tmp_path):
    """What they had packed of an input is cut off; their other inputs stay done."""
    inputs, expected, expected_table, _ = undisturbed
    output, chance = tmp_path / "out", random.Random(8)
    process = start(*pack(inputs, output), WORK_PAUSE_S="0.02")
    kills = 0
    while process.poll() is None and kills < 4:
        found = workers_of(process.pid)
        if found and (output / ".forebay" / "packed" / "00000.tar").exists():
            os.kill(chance.choice(found), signal.SIGKILL)
            kills += 1
        time.sleep(0.1)
    code, _, err = finish(process)
    assert (code, kills > 0) == (0, True), err  # a busy machine may end the job before the rest
    assert members(output) == expected
    assert opened(output, expected) == expected
    assert table(output) == expected_table


def workers_of(driver: int) -> list[int]:
    """Return the processes that have a shard open."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != driver:
            try:
                files = [os.readlink(each) for each in Path("/proc", name, "fd").iterdir()]
            except OSError:
                continue
            if any("/.forebay/packed/" in file for file in files):
                found.append(int(name))
    return found


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """Inputs of which one changed after a run over them; that run's output, and a fresh one."""
    folder = tmp_path_factory.mktemp("changed")
    inputs = make_inputs(folder / "in", 10, lines=2)
    code, _, err = call(*pack(inputs, folder / "before"))
    assert code == 0, err
    (inputs / "0003.txt").write_text("one\nmore\nline\n")
    code, _, err = call(*pack(inputs, folder / "fresh"))
    assert code == 0, err
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "again", [True, pytest.param(False, marks=pytest.mark.thorough)], ids=["again", "at first"]
)
@pytest.mark.parametrize(
    "point",
    [*PACKING_POINTS]
    + [pytest.param(point, marks=pytest.mark.thorough) for point in POINTS if "record" in point],
)
def test_a_kill_at_each_point_of_packing(changed, tmp_path, point, again):
    """The next run ends as if nothing had happened, whatever was half done."""
    inputs, output = changed / "in", tmp_path / "out"
    if again:
        shutil.copytree(changed / "before", output)
    code, _, _ = finish(start(*pack(inputs, output), program=(CRASHES, point)))
    assert code == -signal.SIGKILL
    await_no_processes()
    code, _, err = call(*pack(inputs, output))
    assert code == 0, err
    expected = members(changed / "fresh")
    assert len(expected) == 21
    assert members(output) == expected
    assert opened(output, expected) == expected
    assert table(output) == table(changed / "fresh")
    assert not (output / ".forebay" / "packed").exists()
    with Ledger.open(output / ".forebay") as ledger:
        assert len(list(intact_members(ledger, str(output)))) == 21
