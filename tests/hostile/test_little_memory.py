"""A system that grants little memory (`ulimit -v`): an error in words; nothing is aborted."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pyarrow
import pytest

from forebay.errors import OutputError
from forebay.predicting import part_writer
from forebay.predicting.outputs import rows_of_outputs

# The limit is set after everything is loaded, below what `check_memory` asks for as the least. What
# a process has freed is there again without asking, so that small rows would be written without it.
PROGRAM = """
import json, os, resource, sys
from pathlib import Path
import torch
import forebay
from forebay.errors import OutputError

def rows(path, out):
    return {"number": int(path.name)}

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.full((3,), float(index))

def double(batch):
    return 2 * batch

def preprocess(output):
    return forebay.preprocess(rows, "in", output, num_workers=0, progress=False)

def predict(output):
    return forebay.predict(double, Numbers(), output, num_workers=0, progress=False)

if __name__ == "__main__":
    os.chdir(sys.argv[1])
    Path("in").mkdir()
    for number in range(4):
        Path("in", str(number)).touch()
    preprocess("loaded"), predict("loaded-too")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    for call in (preprocess, predict):
        resource.setrlimit(resource.RLIMIT_AS, (used + (48 << 20), before[1]))
        try:
            call(call.__name__)
            said = ""
        except OutputError as error:
            said = str(error)
        resource.setrlimit(resource.RLIMIT_AS, before)
        print(json.dumps([said, call(call.__name__).done]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is not kept elsewhere")
def test_rows_that_do_not_fit_are_an_error_and_are_written_by_the_next_call(tmp_path):
    """Of `preprocess` and `predict`; Arrow would abort the process in a destructor."""
    script = tmp_path / "little.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    preprocessed, predicted = map(json.loads, done.stdout.splitlines())
    for said, count in (preprocessed, predicted):
        assert "the system grants less; see `ulimit -v`" in said
        assert count == 4
    assert preprocessed[0].startswith("the metadata table ")
    assert predicted[0].startswith("predictions of 4 samples cannot be written")


@pytest.mark.parametrize("error", [MemoryError, pyarrow.ArrowMemoryError])
def test_memory_that_arrow_does_not_get_is_an_error_of_the_output(error, monkeypatch, tmp_path):
    """Also if it has no message."""

    def refuse(nbytes):
        raise error

    monkeypatch.setattr(part_writer, "check_memory", refuse)
    writer = part_writer.PartWriter(lambda: tmp_path / "part.parquet", None)
    writer.add(rows_of_outputs({"a": np.zeros(2)}, [0, 1], {})[0])
    with pytest.raises(OutputError, match=r"predictions of 2 samples .* not enough memory"):
        writer.__exit__(None, None, None)
