"""The files that rows name are watched and opened, whatever their column is called."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pandas as pd
import pytest

import forebay

QUIET = {"num_workers": 0, "progress": False}


def measure(row, out):
    path = row["image"]
    out.file(f"{Path(path).stem}.txt").write_text(Path(path).read_text())
    return {"text": Path(path).read_text()}


@pytest.fixture
def names(tmp_path, monkeypatch):
    """Six files in a folder of the working folder; their paths."""
    monkeypatch.chdir(tmp_path)
    Path("d").mkdir()
    found = [f"d/{number}.jpg" for number in range(6)]
    for name in found:
        Path(name).write_text(name)
    return found


def as_csv(rows):
    Path("m.csv").write_text("label,image\n" + "".join(f"{a},{b}\n" for a, b in rows))
    return "m.csv"


def as_frame(rows):
    return pd.DataFrame(rows, columns=["label", "image"])


def as_dicts(rows):
    return as_frame(rows).to_dict("records")


each_table = pytest.mark.parametrize("make", [as_csv, as_frame, as_dicts])


@each_table
def test_a_changed_file_is_done_again_and_one_that_is_away_stays(names, make):
    """As behind a column that is called `path`."""
    table = make([("x", name) for name in names])
    report = forebay.preprocess(measure, table, "out", **QUIET)
    assert report.metadata["source"].to_pylist() == names
    Path(names[3]).write_text("changed")
    os.remove(names[4])
    report = forebay.preprocess(measure, table, "out", **QUIET)
    assert (report.done, report.resumed, report.failed) == (6, 5, 0)
    texts = [*names[:3], "changed", *names[4:]]
    assert report.metadata["text"].to_pylist() == texts


@each_table
def test_files_that_are_all_away_lose_nothing(names, make):
    """Nothing then says which column names them; when they are back, nothing is done."""
    table = make([("x", name) for name in names])
    forebay.preprocess(measure, table, "out", **QUIET)
    before = Path("out/metadata.parquet").read_bytes()
    os.rename("d", "away")
    report = forebay.preprocess(measure, table, "out", **QUIET)
    assert (report.done, report.resumed, report.failed) == (6, 6, 0)
    assert Path("out/metadata.parquet").read_bytes() == before
    assert len([*Path("out").glob("*.txt")]) == 6
    os.rename("away", "d")
    assert forebay.preprocess(measure, table, "out", **QUIET).resumed == 6


def test_a_dataset_is_the_same_while_its_files_are_away(names):
    """A cache of it is found, as one of rows with a `path` is."""
    rows = as_dicts([("x", name) for name in names])

    def read():
        dataset = forebay.from_table(rows, lambda row: Path(row["image"]).read_text())
        return [*forebay.cache(dataset, "cache", **QUIET)]

    assert read() == names
    os.rename("d", "away")
    assert read() == names


@pytest.mark.parametrize("column", ["image", "path", "file"])
def test_a_path_relative_to_the_table_is_opened_there(names, column):
    """By a function and by a dataset; the table has it as it was written."""
    Path("d/m.jsonl").write_text(
        "".join(json.dumps({column: Path(name).name}) + "\n" for name in names)
    )

    def work(row, out):
        return {"text": Path(row[column]).read_text()}

    report = forebay.preprocess(work, "d/m.jsonl", "out", **QUIET)
    assert report.metadata["text"].to_pylist() == names
    assert report.metadata[column].to_pylist() == [Path(name).name for name in names]
    Path(names[0]).write_text("changed")
    assert forebay.preprocess(work, "d/m.jsonl", "out", **QUIET).resumed == 5
    dataset = forebay.from_table("d/m.jsonl", lambda row: Path(row[column]).read_text())
    assert [*dataset][1:] == names[1:]
    assert dataset.source_of(1) == os.path.abspath(names[1])


def test_a_column_of_texts_names_no_files(names):
    """Even if one of them happens to be the name of a file."""
    rows = [("word", name) for name in ("cat", "dog", "d/0.jpg")]
    report = forebay.preprocess(lambda row, out: {"n": 1}, as_frame(rows), "out", **QUIET)
    assert report.metadata["source"].to_pylist() == [None] * 3
    assert forebay.from_table(as_frame(rows)).source_of(0) == "0"
