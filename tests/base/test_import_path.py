"""Files of the working folder never stand in for modules of Python's, wherever workers run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import forebay
from forebay.base import process

SOURCE = str(Path(forebay.__file__).parents[1])
NAMES = ("json", "random", "torch", "tempfile", "socket", "selectors")

# Beside a script, in a folder that is not the working one.
NEIGHBOUR = """
import importlib.util, os, sys
from forebay.pools.events import Answer

class Job:
    keeps_tasks = False
    def open(self, incarnation, worker_id): pass
    def close(self): pass
    def run(self, assignment):
        found = {name: importlib.util.find_spec(name).origin for name in assignment.payload}
        flags = sys.flags.optimize, sys.flags.dont_write_bytecode, sys.warnoptions
        return Answer((found, flags, sys.path, os.environ.get("PYTHONSAFEPATH")), 1)
"""
SCRIPT = """
import json, multiprocessing, os, sys, threading
from forebay.pools.events import TaskFinished
from forebay.pools.events import Assignment
from forebay.pools.processes import ProcessPool
from neighbour import Job

if __name__ == "__main__":
    start, names = sys.argv[1], sys.argv[2:]
    over = threading.Event()
    if start == "threads":
        threading.Thread(target=over.wait).start()
    if start in ("threads", "auto"):
        pool = ProcessPool(Job(), 1)
    elif start == "fork":
        pool = ProcessPool(Job(), 1, start)
    else:
        pool = ProcessPool(Job(), 1, multiprocessing.get_context(start))
    pool.start(0, 0)
    pool.send(0, [Assignment(0, 1, names)])
    events = []
    while not any(isinstance(event, TaskFinished) for event in events):
        events += pool.wait(None)
    pool.close()
    over.set()
    there, here = events[-1].result, Job().run(Assignment(0, 1, names)).result
    print(json.dumps([there, here]))
"""


def lay_out(folder, names):
    """Make modules that tell that they were run; return the file in which they do."""
    folder.mkdir(exist_ok=True)
    told = folder / "told.txt"
    for name in names:
        (folder / f"{name}.py").write_text(
            f"with open({str(told)!r}, 'a') as file: file.write({name + ' '!r})\n"
            f"raise ImportError('not the {name} that was meant')\n"
        )
    return told


def run(*command, folder, **environment):
    """Run Python in a folder; return what it printed."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": SOURCE} | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def script(tmp_path):
    """A script and the module that it imports from its own folder."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "neighbour.py").write_text(NEIGHBOUR)
    path = tmp_path / "code" / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("start", ["auto", "threads", "fork", "spawn", "forkserver"])
def test_workers_import_what_the_script_imports(script, tmp_path, start):
    """Not what lies in the working folder; and the user's own module is found."""
    told = lay_out(tmp_path / "data", NAMES)
    out = run(script, start, *NAMES, folder=tmp_path / "data")
    there, here = json.loads(out)
    assert not told.exists(), told.read_text()
    assert there == here
    assert all(str(tmp_path) not in origin for origin in there[0].values())


def test_a_new_interpreter_gets_the_flags_of_this_one(script, tmp_path):
    """Asserts that are left out stay out, and warnings that are errors stay errors."""
    flags = ("-O", "-B", "-W", "error::UserWarning")
    there, here = json.loads(run(*flags, script, "threads", "json", folder=tmp_path))
    assert there == here
    assert there[1] == [1, 1, ["error::UserWarning"]]


def test_a_safe_path_that_the_user_has_set_stays_set(script, tmp_path):
    """In spawned workers too, which start with one anyway."""
    path = os.pathsep.join([SOURCE, str(script.parent)])
    environment = {"PYTHONSAFEPATH": "yes", "PYTHONPATH": path}
    out = run(script, "spawn", "json", folder=tmp_path, **environment)
    there, here = json.loads(out)
    assert there[3] == here[3] == "yes"


WORK = """
import importlib.util
import its_neighbour

def work(source, out):
    found = {name: importlib.util.find_spec(name).origin for name in ("json", "random")}
    assert not any(origin.startswith({folder!r}) for origin in found.values()), found
    assert its_neighbour.THERE
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", ["forebay", "python -m"])
@pytest.mark.parametrize("named", ["{folder}/work_here.py:work", "work_here:work"])
def test_the_command_line_takes_modules_of_the_working_folder_after_pythons_own(
    tmp_path, program, named
):
    """The function and its neighbours are found there; a json.py beside them is not run."""
    folder = tmp_path / "data"
    told = lay_out(folder, ("json", "random"))
    (folder / "work_here.py").write_text(WORK.replace("{folder!r}", repr(str(folder))))
    (folder / "its_neighbour.py").write_text("THERE = True\n")
    (folder / "a.txt").write_text("a\n")
    command = ["-m", "forebay"]
    if program == "forebay":  # what an installer makes
        command = [tmp_path / "forebay"]
        command[0].write_text("from forebay.cli import main; main()\n")
    options = ("--num-workers", 1, "--quiet")
    out = run(
        *command,
        *("preprocess", named.format(folder=folder), folder / "a.txt", tmp_path / "out", *options),
        folder=folder,
    )
    assert not told.exists(), told.read_text()
    assert out.startswith("1 done")


def test_a_folder_is_added_between_the_standard_library_and_installed_packages(monkeypatch):
    """Once; and where there is no standard library on the path, first."""
    library = os.path.dirname(os.__file__)
    path = ["/code", "/python.zip", library, f"{library}/lib-dynload", f"{library}/site-packages"]
    monkeypatch.setattr(sys, "path", list(path))
    process.add_folder("/data")
    process.add_folder("/data")
    assert sys.path == [*path[:4], "/data", path[4]]
    monkeypatch.setattr(sys, "path", ["/code"])
    process.add_folder("/data")
    assert sys.path == ["/data", "/code"]


def test_the_standard_library_first_changes_no_other_order(monkeypatch):
    """What the user has put first comes after Python's own, in the same order."""
    library = os.path.dirname(os.__file__)
    monkeypatch.setattr(sys, "path", ["", "/code", library, f"{library}/site-packages"])
    assert process.standard_library_first() == [
        *(library, "", "/code"),
        f"{library}/site-packages",
    ]
    assert sys.path[0] == ""


def test_the_private_function_of_pythons_that_lists_flags_is_there():
    """A new version of Python may change it; multiprocessing uses the same."""
    from forebay.pools.zygote_handle import _interpreter_flags

    assert all(isinstance(flag, str) for flag in _interpreter_flags())


def test_rays_addition_to_the_path_is_taken_back(monkeypatch):
    """Unless the driver has its working folder on the path too."""
    pytest.importorskip("ray", reason="needs forebay[ray]")
    from forebay.pools.ray_shipping import leave_out

    for path, left in (([], ["/b"]), (["/data"], ["/data", "/b"]), ([""], ["/data", "/b"])):
        monkeypatch.setattr(sys, "path", ["/data", "/b"])
        leave_out("/data", path)
        assert sys.path == left
