"""How much of forebay a small run loads, in the calling process: each module takes time to import.

A number that grows needs a reason: what only some runs need is imported where they need it.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import pytest

import forebay

WORK = """
def work(path, out):
    return {"size": path.stat().st_size}
"""
# The page of `forebay top` is another matter: a busy machine would write it, after a second.
SQUARES = """
import math, torch
import forebay.loader

forebay.loader.PUBLISH_S = math.inf

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.tensor([float(index) ** 2])
"""
LOADED = """
def tell():
    print(json.dumps([name for name in sys.modules if name.partition(".")[0] == "forebay"]))

tell()
"""
PREPROCESS = "report = forebay.preprocess(work, [__file__], out, num_workers=1, progress=False)"
LOADER = """
with forebay.DataLoader(
    Squares(), batch_size=4, num_workers=1, shuffle=True, seed=0, buffer="10MB"
) as loader:
    list(loader)
"""
OPEN_CACHE = "forebay.open_cache(out)[0]"
PREDICT = """
report = forebay.predict(torch.nn.Linear(1, 2), Squares(), out, num_workers=1, progress=False)
"""
ASK = """
import pickle
copy = pickle.loads(pickle.dumps(report))
assert str(copy.diagnosis) == str(report.diagnosis) and copy.details == report.details
assert report.details["settings"]["backend"] == "process"
tell()
"""
# What a program defines and does, what it does afterwards, and how many modules are loaded between.
PROGRAMS = {
    "preprocess": (WORK, PREPROCESS, ASK, 84),
    "loader": (SQUARES, LOADER, "", 86),
    "open_cache": ("", OPEN_CACHE, "", 30),
    "predict": (SQUARES, PREDICT, ASK, 145),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Return the modules of forebay that a program has loaded, once it ran and at its end."""

    @functools.cache
    def loaded_by(name):
        folder = tmp_path_factory.mktemp(name)
        if name == "open_cache":
            forebay.cache([1.0, 2.0], folder / "out", num_workers=0, progress=False)
        definitions, call, after, _ = PROGRAMS[name]
        script = folder / "program.py"
        start = "import json, sys\nimport forebay\nout = sys.argv[1]\n"
        script.write_text(f"{start}{definitions}\n{call}\n{LOADED}{after}")
        command = [sys.executable, script, folder / "out"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return loaded_by


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_small_run_loads_few_modules(loaded, name):
    """Those that it needs; the message names what was loaded."""
    names, most = loaded(name)[0], PROGRAMS[name][-1]
    assert "forebay" in names
    assert len(names) <= most, f"{len(names)} modules, at most {most} allowed: {' '.join(names)}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["preprocess", "predict"])
def test_the_parts_of_a_report_are_imported_when_asked_for(loaded, name):
    """And then they are there, also in a copy that is sent elsewhere."""
    before, after = loaded(name)
    asked_for = {"forebay.observe.diagnosis", "forebay.show.report"}
    assert not asked_for & {*before}
    assert asked_for <= {*after}
