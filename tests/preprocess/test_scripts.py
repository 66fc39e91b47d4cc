"""Functions of scripts that use `forebay` itself: they reach the workers, however these start."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap

import cloudpickle
import pytest
from driving import call, finish, make_inputs, start

import forebay

SCRIPT = textwrap.dedent(
    """
    import sys
    import threading

    import forebay


    def work(source, out):
        if source.name == "bad.txt":
            raise forebay.InputError("no good")
        return {"is_function": callable(forebay.preprocess)}


    class Numbers:
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return [index, forebay.PackedSequence.__name__]


    if __name__ == "__main__":
        if "thread" in sys.argv:  # workers are then not forked from this process
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        if "spawn" in sys.argv:
            loader = forebay.DataLoader(
                Numbers(), batch_size=2, num_workers=1, multiprocessing_context="spawn"
            )
            print(len(list(loader)))
        report = forebay.preprocess(work, sys.argv[1], sys.argv[2], num_workers=2, progress=False)
        print(report.done, report.failed)
    """
)


@pytest.fixture
def inputs(tmp_path):
    folder = make_inputs(tmp_path / "in", 3)
    (folder / "bad.txt").write_text("bad")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("way", ["", "thread", pytest.param("spawn", marks=pytest.mark.thorough)])
def test_a_script_may_use_the_package_in_its_function(tmp_path, inputs, way):
    """Forked workers, those of an interpreter of their own, and spawned ones."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = finish(start(inputs, tmp_path / "out", way, program=(script,)))
    expected = "2\n3 1\n" if way == "spawn" else "3 1\n"
    assert done == (0, expected, "")


@pytest.mark.slow
def test_a_program_without_a_file_may_use_it_too(tmp_path, inputs):
    """As in a notebook, where the function is nowhere but in `__main__`."""
    done = subprocess.run(
        [sys.executable, "-", inputs, tmp_path / "out"],
        input=SCRIPT,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "3 1\n", "")


@pytest.mark.slow
def test_the_command_line_takes_such_a_function(tmp_path, inputs):
    """By its file; one input fails with the package's own error."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    code, out, err = call(
        "preprocess", f"{script}:work", inputs, tmp_path / "out", "--num-workers", 2
    )
    assert (code, err) == (3, "")
    assert out.startswith("3 done, 1 failed")
    assert "bad.txt: InputError: no good" in out


def test_cloudpickle_sends_the_package_by_its_name():
    """By value it would take along all that was imported of it."""
    namespace: dict[str, object] = {}
    exec("import forebay\ndef work():\n    return forebay", namespace)
    payload = cloudpickle.dumps(namespace["work"])
    assert cloudpickle.loads(payload)() is forebay
    assert len(payload) < 1000


TENSORS = """
import torch

WEIGHT = torch.ones(512, 512)
MEAN = (WEIGHT @ WEIGHT).mean()  # uses torch's threads, in the process that workers are forked from


def multiply(source, out):
    return {"mean": float((WEIGHT @ WEIGHT).mean()), "threads": torch.get_num_threads()}
"""

LATE = """
def multiply(source, out):
    import torch

    return {"mean": float(torch.full((2,), 512.0).mean()), "threads": torch.get_num_threads()}
"""


@pytest.mark.slow
@pytest.mark.parametrize("source", [TENSORS, LATE], ids=["before the fork", "in the function"])
def test_torch_uses_one_thread_in_a_worker(tmp_path, monkeypatch, inputs, source):
    """A forked process would wait forever for threads that only its parent has."""
    (tmp_path / "tensors.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensors", raising=False)
    module = importlib.import_module("tensors")
    report = forebay.preprocess(
        module.multiply, inputs, tmp_path / "out", num_workers=1, timeout=60, progress=False
    )
    rows = report.metadata.to_pylist()
    assert {(row["mean"], row["threads"]) for row in rows} == {(512.0, 1)}
    assert (report.done, report.failed) == (4, 0)


POOLS = textwrap.dedent(
    """
    import multiprocessing
    import sys
    import threading
    from concurrent.futures import ProcessPoolExecutor

    import forebay


    def square(number):
        return number * number


    def work(source, out):
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(1) as executor, context.Pool(1) as pool:
            return {"made": [*executor.map(square, [3]), *pool.map(square, [4])]}


    if __name__ == "__main__":
        if "thread" in sys.argv:
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        report = forebay.preprocess(
            work, [sys.argv[1]], sys.argv[2], num_workers=1, retries=0, progress=False
        )
        print(report.failures or report.metadata["made"].to_pylist())
    """
)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["", "thread"])
def test_a_function_of_a_script_may_start_pools_of_its_own(tmp_path, inputs, way):
    """They pickle the script's functions by their names, in forked workers and in new ones."""
    script = tmp_path / "script.py"
    script.write_text(POOLS)
    done = finish(start(inputs / "bad.txt", tmp_path / "out", way, program=(script,)))
    assert done == (0, "[[9, 16]]\n", "")


def test_a_call_that_importing_a_module_makes_again_is_made_once(tmp_path, inputs):
    """A new interpreter refuses the call that the import makes, so a fork takes its place."""
    module = tmp_path / "imported.py"
    module.write_text(
        "import sys, threading, forebay\n"
        "def work(source, out): ...\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "report = forebay.preprocess(work, sys.argv[1], sys.argv[2], num_workers=1)\n"
        "print(report.done)\n"
    )
    script = tmp_path / "script.py"
    script.write_text("import imported\n")
    code, out, err = finish(start(inputs, tmp_path / "out", program=(script,)))
    assert (code, out) == (0, "4\n")
    assert "another run holds" not in err
