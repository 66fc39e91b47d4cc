"""Files that an earlier forebay has written are opened, and mean what they meant."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path

import pyarrow.parquet
import pytest
from click.testing import CliRunner
from earlier_files import (
    BLOCKS,
    LOADERS,
    ROWS,
    SHARD_SAMPLES,
    SHARD_TIME,
    Things,
    kept_blocks,
    loaded,
    plain_thing,
    report_of_loader,
    rest_of,
    run_outputs,
    run_predictions,
)

import forebay
from forebay.cli import cli

FILES = Path(__file__).with_name("files")
STATES = json.loads((FILES / "states.json").read_text())


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Return a copy, as the working folder: recorded paths are relative."""
    shutil.copytree(FILES, tmp_path / "files")
    shard = tmp_path / "files" / "shards" / "part-000.tar"
    os.utime(shard, (SHARD_TIME, SHARD_TIME))  # a clone has others
    monkeypatch.chdir(tmp_path / "files")
    return tmp_path / "files"


def contents(folder):
    """Return the files of a folder, without those that forebay keeps for itself; tables as rows."""
    paths = [path for path in folder.rglob("*") if path.is_file() and ".forebay" not in path.parts]
    return {str(path.relative_to(folder)): content(path) for path in paths}


def content(path):
    """Return what a file holds; another version of pyarrow writes the same rows as other bytes."""
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_table(path).to_pylist()
    return path.read_bytes()


@pytest.mark.parametrize("kind", LOADERS)
def test_a_state_continues_with_the_same_batches(kind, files):
    """In this epoch and the next, also those that are drawn by the seed."""
    known = STATES[kind]
    assert rest_of(loaded(LOADERS[kind](), known["state"])) == known["rest"]


def test_a_state_has_been_kept_of_each_kind():
    """The test of the test."""
    assert STATES.keys() == LOADERS.keys()


def test_a_cache_is_opened():
    """Each sample has its values and their types."""
    cached, samples = forebay.open_cache(FILES / "cache"), Things()
    found = [plain_thing(cached[at]) for at in range(len(cached))]
    assert found == [plain_thing(samples[at]) for at in range(len(samples))]


def test_an_index_of_shards_is_opened(files):
    """The shards are found unchanged, and read where it says."""
    opened = forebay.open_shards("shards", index="index", progress=False)
    assert [(sample["__key__"], sample["txt"]) for sample in opened] == [
        (str(at), f"text {at}".encode()) for at in range(SHARD_SAMPLES)
    ]


def test_the_ledger_of_a_run_is_continued(files):
    """What is done stays done, what failed is known, and the files are the same."""
    before = contents(files / "outputs")
    status = CliRunner().invoke(cli, ["status", "outputs"], standalone_mode=False)
    assert status.return_value == 0 and "3 of 4" in status.output
    failures = CliRunner().invoke(cli, ["failures", "outputs"], standalone_mode=False)
    assert "ValueError: not this one" in failures.output
    report = run_outputs(files / "outputs")
    assert (report.done, report.resumed, report.failed) == (3, 3, 1)
    assert contents(files / "outputs") == before


def test_predictions_are_continued(files):
    """No sample is predicted again, and the columns are the same."""
    before = contents(files / "predictions")
    report = run_predictions(files / "predictions")
    assert (report.done, report.resumed, report.failed) == (3, 3, 0)
    assert contents(files / "predictions") == before
    table = pyarrow.parquet.read_table(files / "predictions")
    assert table["twice"].to_pylist() == [1.0, 3.0, 5.0]


def test_reports_are_replaced(files):
    """As reports of forebay's own, of loaders and of runs."""
    report_of_loader(Path("loader.html"), epochs=2)
    run_outputs(Path("new"), ROWS[:2]).save("run.html")


def test_blocks_on_a_disk_are_read(files):
    """So a new version need not fetch them again."""
    found = kept_blocks(files / "blocks")
    for number, block in enumerate(BLOCKS):
        read = bytearray(len(block))
        assert found.read(number, memoryview(read), zlib.crc32(block)) and read == block
