"""How many files somebody has to read to follow one thing that forebay does.

Counted are the files of the package in which a function ran, in the calling process: worker
processes, and what only importing a file runs, are left out. A number that grows needs a reason:
what is always run together stays together, and what is rarely run is elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import forebay
from kit.range_server import RangeServer

# What each of these does between two calls of `walk`, and how many files may run a function there.
MOST = {
    "input": 42,
    "columns": 28,
    "prediction": 86,
    "batch": 44,
    "diagnosis": 10,
    "bucket sample": 8,
}
PROGRAM = '''
import json, os, sys, threading
import torch
import forebay
from forebay.observe.record import BaseTrace

# The page of `forebay top` is another walk, which a busy machine would take after a second.
BaseTrace.show = lambda *_: None

ran, walks, package = {}, {}, forebay.__path__[0]

def note(frame, event, argument, optimized=1):
    """Have the file of a function that begins; bodies of modules and classes are no functions."""
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(package) or code.co_filename in ran:
        return
    if code.co_flags & optimized and not is_import(frame):
        ran[code.co_filename] = code.co_name

def is_import(frame):
    """Tell whether a module's body has called this, which another program may have done before."""
    while frame := frame.f_back:
        if frame.f_code.co_name == "<module>" and frame.f_globals["__name__"] != "__main__":
            return True
    return False

def forget():
    """Note nothing in a worker."""
    threading.setprofile(None)
    sys.setprofile(None)

def walk(name, run):
    """Return what `run` does, and note which files it passed."""
    ran.clear()
    result = run()
    walks[name] = {path[len(package) + 1:]: function for path, function in sorted(ran.items())}
    return result

def work(path, out):
    # In the worker: on a busy machine the work would seem long enough to hash its input.
    forebay.runs.job.HASHED_AFTER_S = float("inf")
    return {"size": path.stat().st_size}

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.tensor([float(index) ** 2])

def epoch(dataset, workers, **options):
    with forebay.DataLoader(dataset, 4, shuffle=True, seed=0, num_workers=workers, **options) as it:
        list(it)

def diagnosed(dataset):
    with forebay.DataLoader(dataset, 4, num_workers=1) as loader:
        list(loader)
        return walk("diagnosis", loader.diagnose)

folder, bucket = sys.argv[1:]
options = {"num_workers": 1, "progress": False}
dataset = Squares()
model = torch.nn.Linear(1, 2)
values = {"x": torch.arange(64), "name": [str(at) for at in range(64)]}
table = forebay.from_table(values, columns=["x", "name"])
os.register_at_fork(after_in_child=forget)
threading.setprofile(note)
sys.setprofile(note)
walk("input", lambda: forebay.preprocess(work, [__file__], folder + "/files", **options))
walk("columns", lambda: epoch(table, 0))
walk("prediction", lambda: forebay.predict(model, dataset, folder + "/predictions", **options))
walk("batch", lambda: epoch(dataset, 2, buffer="10MB"))
diagnosed(dataset)
samples = forebay.open_cache(bucket)
samples[0]
walk("bucket sample", lambda: samples[1])
print(json.dumps(walks))
'''


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    """Run each once; return the files and, for each, a function that ran, by the walk's name."""
    folder = tmp_path_factory.mktemp("walks")
    images = [np.full((64, 64), at) for at in range(64)]
    forebay.cache(images, folder / "bucket" / "cache", num_workers=0, progress=False)
    script = folder / "program.py"
    script.write_text(PROGRAM)
    with RangeServer(folder) as endpoint:
        done = subprocess.run(
            [sys.executable, script, folder, "s3://bucket/cache"],
            env=os.environ | endpoint.environment,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", MOST)
def test_few_files_take_part(walks, name):
    """As many as somebody can hold in the head; the message names them."""
    files = walks[name]
    assert files
    words = ", ".join(f"{path} ({function})" for path, function in files.items())
    assert len(files) <= MOST[name], f"{len(files)} files, at most {MOST[name]} allowed: {words}"
