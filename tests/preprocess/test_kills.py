"""SIGKILL, of the driver, of workers and of the zygote: nothing is lost, damaged or left behind."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import pytest
from crash_points import POINTS
from driving import (
    PATIENCE_S,
    WORKS,
    await_no_processes,
    finish,
    here,
    make_inputs,
    published,
    staged,
    start,
    table,
    undisturbed_run,
)

INPUTS = 60
CRASHES = Path(__file__).with_name("crash_points.py")


def split(inputs, output, *options):
    """Return the arguments of the run under test."""
    return ["preprocess", f"{WORKS}:split", inputs, output, "--num-workers", 4, "--quiet", *options]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run that was not killed: its inputs, its outputs, its table, and the seconds it took."""
    return undisturbed_run(tmp_path_factory.mktemp("undisturbed"), INPUTS, split, published)


def verify(output):
    """Return the exit code of `forebay verify` and what it says."""
    code, out, err = here("verify", output)
    return code, out + err


def assert_all_whole(found, expected):
    """Whatever is published is whole, and nothing else is there."""
    torn = [name for name, body in found.items() if expected.get(name) != body]
    assert not torn


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_every_point_of_a_commit_is_made_good(undisturbed, tmp_path, point):
    """Before, between and after flush, record, publish and table; even in the repair itself."""
    inputs, expected, expected_table, _ = undisturbed
    output = tmp_path / "out"
    first, _, err = finish(start(*split(inputs, output), program=(CRASHES, point)))
    assert first == -signal.SIGKILL, err
    assert_all_whole(published(output), expected)
    # The second may have nothing left to do there.
    second, _, err = finish(start(*split(inputs, output), program=(CRASHES, point)))
    assert second in (-signal.SIGKILL, 0), err
    assert_all_whole(published(output), expected)
    code, said = verify(output)
    assert " 0 missing, 0 altered" in said
    code, _, err = here(*split(inputs, output))
    assert code == 0, err
    assert published(output) == expected
    assert table(output) == expected_table
    assert not staged(output)
    assert verify(output)[0] == 0


@pytest.mark.slow
def test_a_kill_between_the_last_input_and_the_table_leaves_no_stale_table(tmp_path):
    """A table of an earlier run stands there; the next call knows that it is out of date."""
    inputs = make_inputs(tmp_path / "in", 10)
    output = tmp_path / "out"
    assert here(*split(inputs, output))[0] == 0
    (inputs / "more.txt").write_text("one more\n")
    code, _, _ = finish(start(*split(inputs, output), program=(CRASHES, "before the table")))
    assert code == -signal.SIGKILL
    assert here(*split(inputs, output))[0] == 0
    assert here(*split(inputs, tmp_path / "fresh"))[0] == 0
    assert table(output) == table(tmp_path / "fresh")


class Gates:
    """Where the first inputs of a run wait, and who waits there."""

    def __init__(self, folder):
        self.folder = folder
        os.mkfifo(folder / "here")
        os.mkfifo(folder / "go")
        # For both, or the other end would wait to be opened.
        self.here = os.open(folder / "here", os.O_RDWR)

    def arrivals(self, count):
        """Wait for so many workers: pairs of a worker's process id and its zygote's."""
        text = b""
        while text.count(b"\n") < count:
            ready, _, _ = select.select([self.here], [], [], PATIENCE_S)
            assert ready, f"only these came: {text!r}"
            text += os.read(self.here, 4096)
        return [tuple(map(int, line.split()[:2])) for line in text.decode().splitlines()]

    def close(self):
        os.close(self.here)


@pytest.fixture
def gates(tmp_path):
    gates = Gates(tmp_path)
    yield gates
    gates.close()


@pytest.fixture
def waiting_run(tmp_path, gates):
    """A run whose three workers wait at gates, with more inputs to come."""
    inputs = make_inputs(tmp_path / "in", 9)
    for name in "abc":
        (inputs / f"0000-gate-{name}.txt").write_text("waits\n")
    process = start(
        "preprocess", f"{WORKS}:wait_at_gate", inputs, tmp_path / "out", "--num-workers", 3
    )
    return process, gates.arrivals(3)


def assert_all_done(process, output):
    code, out, err = finish(process)
    assert (code, err) == (0, "")
    assert out.startswith("12 done, 0 failed")
    assert len(published(output)) == 12
    assert not staged(output)
    await_no_processes()


@pytest.mark.slow
def test_a_zygote_and_a_worker_killed_together_are_replaced(waiting_run, tmp_path):
    """Both at once, the worker first."""
    process, workers = waiting_run
    os.kill(workers[1][0], signal.SIGKILL)
    os.kill(workers[0][1], signal.SIGKILL)
    assert_all_done(process, tmp_path / "out")


@pytest.mark.slow
def test_a_killed_driver_takes_waiting_workers_along(waiting_run, tmp_path):
    """Workers in the midst of an input do not outlive their driver, nor hold its folder."""
    process, _ = waiting_run
    process.kill()
    process.communicate()
    await_no_processes()
    again = start(
        "preprocess", f"{WORKS}:wait_at_gate", tmp_path / "in", tmp_path / "out", "--num-workers", 3
    )
    assert_all_done(again, tmp_path / "out")
