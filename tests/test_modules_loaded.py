"""How much of forebay a small run loads, in the calling process: each module takes time to import.

A number that grows needs a reason: what only some runs need is imported where they need it.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

START = """
import sys
import torch
import forebay

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.tensor([float(index) ** 2])

def work(path, out):
    return {"size": path.stat().st_size}

out = sys.argv[1]
"""
END = """
print(*sorted(name for name in sys.modules if name.partition(".")[0] == "forebay"), sep="\\n")
"""
PREPROCESS = "forebay.preprocess(work, [__file__], out, num_workers=1, progress=False)"
LOADER = """
with forebay.DataLoader(
    Squares(), batch_size=4, num_workers=1, shuffle=True, seed=0, buffer="10MB"
) as loader:
    list(loader)
"""
CACHE = "forebay.cache(Squares(), out, num_workers=1, progress=False)"
OPEN_CACHE = "forebay.open_cache(out)[0]"
PREDICT = "forebay.predict(torch.nn.Linear(1, 2), Squares(), out, num_workers=1, progress=False)"


def loaded_by(code, folder):
    """Return the modules of forebay that a program has loaded at its end."""
    script = folder / "program.py"
    script.write_text(f"{START}{code}{END}")
    command = [sys.executable, script, folder / "out"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("first", "code", "most"),
    [
        ("", PREPROCESS, 75),
        ("", LOADER, 62),
        (CACHE, OPEN_CACHE, 30),
        ("", PREDICT, 100),
    ],
    ids=["preprocess", "loader", "open_cache", "predict"],
)
def test_a_small_run_loads_few_modules(tmp_path, first, code, most):
    """Those that it needs; the message names what was loaded."""
    if first:
        loaded_by(first, tmp_path)
    names = loaded_by(code, tmp_path)
    assert "forebay" in names
    assert len(names) <= most, f"{len(names)} modules, at most {most} allowed: {' '.join(names)}"


def test_the_parts_of_a_report_are_imported_when_asked_for(tmp_path):
    """And then they are there, also in a copy that is sent elsewhere."""
    ask = """
import pickle
copy = pickle.loads(pickle.dumps(report))
assert str(copy.diagnosis) == str(report.diagnosis) and copy.details == report.details
assert report.details["settings"]["resume"] == "True"
"""
    for call in (PREPROCESS, PREDICT):
        folder = tmp_path / call[8:15]
        folder.mkdir()
        asked_for = {"forebay.observe.diagnosis", "forebay.show.report"}
        assert not asked_for & {*loaded_by(call, folder)}
        folder = tmp_path / f"{call[8:15]}-asked"
        folder.mkdir()
        assert asked_for <= {*loaded_by(f"report = {call}{ask}", folder)}
