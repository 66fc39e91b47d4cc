"""Kills of a run that lists while it works."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from driving import PATIENCE_S, published
from small_pages import POINTS

ROWS = 400


def drive(manifest, output, *kill):
    script = str(Path(__file__).with_name("small_pages.py"))
    command = [sys.executable, script, str(manifest), str(output), *map(str, kill)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A manifest, and the folder of a run that nobody killed."""
    folder = tmp_path_factory.mktemp("whole")
    names = [f"{each:04}" for each in range(ROWS)]
    table = pyarrow.table({"name": names, "label": range(ROWS)})
    pyarrow.parquet.write_table(table, folder / "m.parquet", row_group_size=30)
    assert drive(folder / "m.parquet", folder / "out").stdout == f"{ROWS}\n"
    return folder


@pytest.mark.full  # as in test_kills.py
@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "times"),
    [
        *((point, 2) for point in POINTS),
        *(pytest.param(point, at, marks=pytest.mark.thorough) for point in POINTS for at in (1, 5)),
    ],
)
def test_a_run_that_is_killed_ends_with_the_same_folder(whole, tmp_path, point, times):
    """The same files, and the same table, byte for byte; nothing is done that was recorded."""
    manifest, output = whole / "m.parquet", tmp_path / "out"
    assert drive(manifest, output, point, times).returncode == -signal.SIGKILL
    ended = drive(manifest, output)
    assert (ended.stdout, ended.stderr) == (f"{ROWS}\n", "")
    assert published(output) == published(whole / "out")
    table = "metadata.parquet"
    assert (output / table).read_bytes() == (whole / "out" / table).read_bytes()
