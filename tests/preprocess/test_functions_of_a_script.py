"""What the functions of a script hold reaches the workers, by value or by a fork of the script."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from driving import await_no_processes, finish, make_inputs, start

SCRIPT = Path(__file__).with_name("functions_of_a_script.py")
COUNT = 3


def results(folder, group, *kill):
    """Run the script; return what it printed."""
    code, out, err = finish(start(folder, group, *kill, program=(SCRIPT,)))
    assert code in (0, -signal.SIGKILL), err
    return json.loads(out) if out else None


@pytest.mark.slow
@pytest.mark.parametrize("group", ["by value", "by fork"])
def test_each_function_returns_what_it_returns_in_a_loop(tmp_path, group):
    """With its globals, closures and attributes, whether they can be pickled or not."""
    make_inputs(tmp_path / "in", COUNT)
    found = results(tmp_path, group)
    assert found["failures"] == []
    assert found["made"] == found["loop"]
    assert len(found["loop"]) == COUNT


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("group", ["by fork", "by value"])
def test_a_killed_script_continues(tmp_path, group):
    """The same script again does the rest, and its table is that of a loop."""
    make_inputs(tmp_path / "in", COUNT)
    assert results(tmp_path, group, "kill") is None
    await_no_processes()
    found = results(tmp_path, group, "kill")
    assert found["made"] == found["loop"]
