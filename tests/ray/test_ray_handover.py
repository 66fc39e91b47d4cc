"""Runs of preprocess that are killed and finished: on a cluster, or begun there and ended here."""

from __future__ import annotations

import os
import random

import pytest
from click.testing import CliRunner
from clusters import start_driver, until, zygotes
from driving import WORKS, calls, finish, make_inputs, published, staged, start
from works import copy, split

from forebay.cli import cli
from runs import run, table

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]

BEGIN = """
import os
import forebay
from pathlib import Path

def work(source, out):
    import os, time
    file = os.open(source.parent.with_name("calls"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{source.name}\\n".encode())
    os.close(file)
    if int(source.stem) >= 20 and not source.parent.with_name("go on").exists():
        time.sleep(600)
    out.file(source.name).write_bytes(source.read_bytes())
    return {"bytes": source.stat().st_size}

here = Path(__file__).parent
forebay.preprocess(work, here / "in", here / "out", backend=os.environ["BACKEND"], progress=False)
"""


@pytest.mark.parametrize(("first", "second"), [("process", "ray"), ("ray", "process")])
def test_a_run_begun_in_one_place_is_finished_in_the_other(cluster, first, second, tmp_path):
    """Killed half way: nothing that was done is redone, and the table is that of one run."""
    inputs = make_inputs(tmp_path / "in", 40)
    process = start_driver(cluster, BEGIN, tmp_path, BACKEND=first)
    try:
        until(lambda: process.poll() is not None or recorded(tmp_path / "out") == 20)
        until(lambda: process.poll() is not None or len(published(tmp_path / "out")) == 20)
        assert process.poll() is None, process.communicate()
        done = set(published(tmp_path / "out"))
        before = calls(tmp_path)
    finally:
        process.kill()
        process.communicate()
    until(lambda: not zygotes())
    await_no_drivers(process)
    (tmp_path / "go on").touch()
    code, _, err = finish(start_driver(cluster, BEGIN, tmp_path, BACKEND=second))
    assert code == 0, err
    again = calls(tmp_path)[len(before) :]
    assert len(done) == 20 and not done & set(again)
    assert published(tmp_path / "out") == {p.name: p.read_bytes() for p in inputs.iterdir()}
    run(copy, inputs, tmp_path / "undisturbed", backend="process", num_workers=1)
    assert table(tmp_path / "out") == table(tmp_path / "undisturbed")
    assert not staged(tmp_path / "out")


def recorded(output):
    """Return how many inputs the ledger calls done; 0 where there is none yet."""
    from forebay.errors import LedgerError
    from forebay.outputs.places import snapshot_of

    try:
        return snapshot_of(output).counts.done
    except LedgerError:
        return 0


def await_no_drivers(process):
    """Wait for the local workers of a driver that was killed."""
    until(lambda: not group_of(process.pid))


def group_of(group):
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getpgid(int(name)) == group:
                found.append(name)
        except OSError:
            continue
    return found


KILLS = 3


def test_kills_of_the_driver_leave_no_trace(cluster, tmp_path):
    """At random moments: every output once and whole, the same table, nothing staged."""
    inputs = make_inputs(tmp_path / "in", 60, lines=2)
    output = tmp_path / "out"
    chance = random.Random(4)
    words = ["preprocess", f"{WORKS}:split", inputs, output, "--backend", "ray", "--quiet"]
    words += ["--address", cluster.address]
    for _ in range(KILLS):
        process = start(*words)
        least = recorded(output) + chance.randrange(1, 12)
        until(lambda p=process, n=least: p.poll() is not None or recorded(output) >= n)
        process.kill()
        process.communicate()
        until(lambda: not zygotes())
    code, _, err = finish(start(*words))
    assert code == 0, err
    run(split, inputs, tmp_path / "undisturbed", backend="process", num_workers=2)
    assert published(output) == published(tmp_path / "undisturbed")
    assert table(output) == table(tmp_path / "undisturbed")
    assert not staged(output)
    result = CliRunner().invoke(cli, ["verify", str(output)], standalone_mode=False)
    assert result.output == "120 outputs checked: 0 missing, 0 altered, 0 orphans\n"
