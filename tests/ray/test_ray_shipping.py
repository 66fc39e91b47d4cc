"""Code on its way to the nodes: of scripts, notebooks, modules of a project, installed packages."""

from __future__ import annotations

import importlib
import linecache
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from clusters import ray, start_driver
from driving import SOURCE, finish, make_inputs, published

import forebay
from forebay.loading.remote import BatchHosting
from forebay.options import Ray
from forebay.pools.ray_shipping import shipped

MODULE = """
import tool_of_tests

FACTOR = 3

def work(source, out):
    text = tool_of_tests.loud(source.read_text()) * FACTOR
    out.file(source.name).write_text(text)
    return {"length": len(text)}
"""
TOOL = "def loud(text):\n    return text.upper()\n"


def load_elsewhere(payload, source, folder):
    """Load bytes in an interpreter that has forebay and nothing of ours; run source over them."""
    script = f"import pickle, sys; found = pickle.loads(sys.stdin.buffer.read())\n{source}"
    return subprocess.run(
        [sys.executable, "-c", script],
        input=payload,
        capture_output=True,
        cwd=folder,
        env={"PYTHONPATH": SOURCE, "PATH": "/usr/bin:/bin"},
    )


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Return a way to make a module in a folder, import it, and take its folder away."""
    made = []

    def make(folder, **sources):
        (tmp_path / folder).mkdir()
        for name, source in sources.items():
            (tmp_path / folder / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path / folder)
        found = [importlib.import_module(name) for name in sources]
        made.extend(sources)
        monkeypatch.undo()
        return found

    yield make
    for name in made:
        sys.modules.pop(name, None)


# ---- what is in the bytes -----------------------------------------------------------------------


@pytest.mark.slow
def test_modules_of_the_project_travel_along(modules, tmp_path):
    """Those that a module uses too: the receiver has neither."""
    _, main = modules("project", tool_of_tests=TOOL, main_of_tests=MODULE)
    payload = shipped(main.work)
    ended = load_elsewhere(payload, "print(found.__globals__['FACTOR'], found.__name__)", "/")
    assert ended.stdout == b"3 work\n", ended.stderr


@pytest.mark.slow
def test_an_installed_package_travels_by_name(modules, tmp_path):
    """Its code stays where it is: every node must have it."""
    (tool,) = modules("site-packages", tool_of_tests=TOOL)
    payload = shipped(tool.loud)
    assert len(payload) < 100
    assert b"tool_of_tests" in payload and b"upper" not in payload
    ended = load_elsewhere(payload, "", "/")
    assert b"ModuleNotFoundError: No module named 'tool_of_tests'" in ended.stderr


def test_a_project_that_holds_the_package_travels_without_it(tmp_path):
    """As with `pip install --target`: modules beside the package are the project's."""
    shutil.copytree(Path(SOURCE) / "forebay", tmp_path / "forebay")
    (tmp_path / "tool_of_tests.py").write_text(TOOL)
    script = (
        "import forebay, tool_of_tests; from forebay.pools.ray_shipping import shipped; "
        "print(len(shipped(tool_of_tests.loud)), len(shipped(forebay.Ray)), forebay.__file__)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    by_value, by_name, package = ended.stdout.split()
    assert Path(package).is_relative_to(tmp_path)
    assert int(by_value) > 200 > int(by_name)


def test_a_function_of_the_package_itself_travels_by_name():
    """Every node has forebay; its classes must be the same ones there."""
    payload = shipped(Ray)
    assert pickle.loads(payload) is Ray
    assert b"num_cpus" not in payload


def test_modules_are_by_value_no_longer_than_for_that(modules):
    """What the user pickles afterwards is pickled as ever."""
    import cloudpickle

    before = cloudpickle.list_registry_pickle_by_value()
    (tool,) = modules("project", tool_of_tests=TOOL)
    assert len(shipped(tool.loud)) > len(cloudpickle.dumps(tool.loud))
    assert cloudpickle.list_registry_pickle_by_value() == before


def test_a_module_may_have_several_names_or_another_than_its_own(modules, monkeypatch):
    """As aliases in `sys.modules` have; an object in place of a module is no obstacle."""
    import cloudpickle

    before = cloudpickle.list_registry_pickle_by_value()
    tool, other = modules("project", tool_of_tests=TOOL, other_of_tests=TOOL)
    monkeypatch.setitem(sys.modules, "alias_of_tests", tool)
    monkeypatch.setattr(other, "__name__", "gone_of_tests")
    stand_in = SimpleNamespace(__file__=tool.__file__)
    monkeypatch.setitem(sys.modules, "object_of_tests", stand_in)
    assert len(shipped(tool.loud)) > 100
    assert cloudpickle.list_registry_pickle_by_value() == before


# ---- on a cluster -------------------------------------------------------------------------------

SCRIPT = """
from pathlib import Path
import forebay

FACTOR = 3

def loud(text):
    return text.upper() * FACTOR

def work(source, out):
    out.file(source.name).write_text(loud(source.read_text()))

if __name__ == "__main__":
    here = Path(__file__).parent
    report = forebay.preprocess(work, here / "in", here / "out", backend="ray")
    print(report.done)
"""


@pytest.mark.slow
def test_a_function_of_a_script_runs_on_the_nodes(cluster, tmp_path):
    """With what it uses of the script; and nothing is said but what forebay says."""
    err = check_driver(SCRIPT, cluster, tmp_path)
    assert not [line for line in err.splitlines() if not line.startswith("forebay: ")], err


def check_driver(source, cluster, folder):
    """Run a driver, whose inputs must come out loud, three times over; return its stderr."""
    inputs = make_inputs(folder / "in", 4)
    code, out, err = finish(start_driver(cluster, source, folder))
    assert (code, out) == (0, "4\n"), err
    expected = {p.name: (p.read_text().upper() * 3).encode() for p in inputs.iterdir()}
    assert published(folder / "out") == expected
    return err


NOTEBOOK = """
import linecache, sys
from pathlib import Path

CELL = '''
import forebay

factor = 3

def work(source, out):
    out.file(source.name).write_text(source.read_text().upper() * factor)
'''
name = "<ipython-input-1-0123456789ab>"
linecache.cache[name] = (len(CELL), None, CELL.splitlines(True), name)
exec(compile(CELL, name, "exec"), globals())
here = Path.cwd()
print(forebay.preprocess(work, here / "in", here / "out", backend="ray").done)
"""


@pytest.mark.slow
def test_a_function_of_a_notebook_runs_on_the_nodes(cluster, tmp_path):
    """Its source is in no file."""
    check_driver(NOTEBOOK, cluster, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_function_of_a_local_module_runs_on_nodes_that_lack_it(modules, tmp_path):
    """Its files are gone before anything starts."""
    _, main = modules("project", tool_of_tests=TOOL, main_of_tests=MODULE)
    for path in (tmp_path / "project").glob("*.py"):
        path.unlink()
    linecache.clearcache()
    inputs = make_inputs(tmp_path / "in", 4)
    report = forebay.preprocess(main.work, inputs, tmp_path / "out", backend="ray", progress=False)
    assert report.done == 4
    assert (tmp_path / "out" / "0001.txt").read_text() == "LINE 0 OF 1\n" * 3


# ---- large things -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_large_dataset_is_put_into_the_store_once(monkeypatch):
    """However many workers there are, and for the proof as well."""
    puts = []
    put = ray.put

    def noted(thing):
        puts.append(thing)
        return put(thing)

    monkeypatch.setattr(ray, "put", noted)
    dataset = [float(number) for number in range(1000)]
    options = {"num_workers": 4, "seed": 1, "backend": forebay.Ray(num_cpus=0.25)}
    with forebay.DataLoader(dataset, 10, **options) as loader:
        assert len(list(loader)) == 100
    hostings = [each for each in puts if isinstance(each, BatchHosting)]
    assert len(hostings) == 1
    assert len(puts) == 2  # and the proof


# ---- without a cluster --------------------------------------------------------------------------

ALONE = SCRIPT.replace(
    "import forebay\n",
    """import forebay
from functools import cache
from ray._private import services

# As on a machine where there is none: others may run theirs beside this test.
services.find_gcs_addresses = cache(frozenset)
services.find_bootstrap_address = lambda folder: None
""",
)


@pytest.mark.slow
def test_a_cluster_is_started_where_there_is_none(tmp_path):
    """On this machine, and it is said so; nothing of it is left."""
    make_inputs(tmp_path / "in", 4)
    code, out, err = finish(start_driver(None, ALONE, tmp_path))
    assert (code, out) == (0, "4\n"), err
    assert "forebay: no Ray cluster was found, so one was started on this machine: " in err
    assert " CPUs, " in err


HOSTILE = """
from importlib.util import find_spec
import forebay

NAMES = ("json", "random", "torch")

def work(source, out):
    found = [find_spec(name).origin for name in NAMES]
    assert not any(origin.startswith("{data}") for origin in found), found

if __name__ == "__main__":
    print(forebay.preprocess(work, "{data}/in", "{data}/out", backend="ray", progress=False))
"""


@pytest.mark.slow
def test_files_of_the_working_folder_do_not_stand_in_for_modules(cluster, tmp_path):
    """Although Ray puts that folder first: neither on the node nor in the worker."""
    data, code = tmp_path / "data", tmp_path / "code"
    make_inputs(data / "in", 2)
    for name in ("json", "random", "torch"):
        (data / f"{name}.py").write_text(f"open({str(data / 'told')!r}, 'a').write({name!r})\n")
    code.mkdir()
    script = code / "script.py"
    script.write_text(HOSTILE.replace("{data}", str(data)))
    done = subprocess.run(
        [sys.executable, script],
        cwd=data,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE, "RAY_ADDRESS": cluster.address},
    )
    assert done.returncode == 0, done.stderr
    assert "2 done, 0 failed" in done.stdout
    assert not (data / "told").exists(), (data / "told").read_text()
