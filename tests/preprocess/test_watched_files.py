"""Every file that a row names is watched, and what a function changes in its own input."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

import forebay
from forebay.runs.job import _file_time as file_time
from forebay.runs.job import _may_have_changed as may_have_changed

QUIET = {"num_workers": 0, "progress": False}


@pytest.fixture(autouse=True)
def _pairs(tmp_path, monkeypatch):
    """A current folder with three images in "d", each with a mask and two views."""
    monkeypatch.chdir(tmp_path)
    Path("d").mkdir()
    for number in range(3):
        for name in ("image", "mask", "left", "right"):
            write(f"d/{number}.{name}", f"{name}{number}")


def write(path, text):
    """Write a file with a time that it did not have."""
    Path(path).write_text(text)
    write.ns += 1_000_000_000
    os.utime(path, ns=(write.ns, write.ns))


write.ns = 1_700_000_000_000_000_000


def pairs():
    return [
        {"id": k, "image": f"d/{k}.image", "mask": f"d/{k}.mask", "kind": "a"} for k in range(3)
    ]


def with_path():
    return [{"path": f"d/{k}.image", "mask_path": f"d/{k}.mask"} for k in range(3)]


def with_lists():
    return [{"image": f"d/{k}.image", "views": [f"d/{k}.left", f"d/{k}.mask"]} for k in range(3)]


def as_csv():
    """A table beside its files, which are relative to it."""
    frame = pd.DataFrame(pairs()).map(lambda each: str(each).removeprefix("d/"))
    frame.to_csv("d/m.csv", index=False)
    return "d/m.csv"


def as_jsonl():
    Path("m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in with_lists()))
    return "m.jsonl"


def read(row):
    """Return what all files of a row say."""
    values = [each for x in row.values() for each in (x if isinstance(x, list) else [x])]
    return {"text": "".join(Path(x).read_text() for x in values if os.path.isfile(str(x)))}


@pytest.mark.parametrize("make", [pairs, with_path, with_lists, as_csv, as_jsonl])
def test_a_second_file_of_a_row_that_changed_has_the_row_done_again(make):
    """Also in a list, beside a column with a usual name, and relative to the table."""
    run = lambda: forebay.preprocess(read, make(), "out", **QUIET)  # noqa: E731
    first = run().metadata.column("text").to_pylist()
    assert all("mask" in each for each in first)
    assert run().resumed == 3
    write("d/1.mask", "other!")
    report = run()
    assert report.resumed == 2
    text = report.metadata.column("text").to_pylist()
    assert text == [first[0], first[1].replace("mask1", "other!"), first[2]]
    os.remove("d/2.mask")
    report = run()
    assert (report.resumed, len(report.unseen)) == (3, 1)


@pytest.mark.parametrize("verb", ["cache", "predict", "predict from dataset"])
def test_samples_of_rows_have_all_their_files_watched(verb):
    """As the rows of `preprocess`."""

    def load(row):
        return torch.tensor([float(len(read(row)["text"]))])

    def made():
        if verb == "cache":
            dataset = forebay.from_table(pairs(), load)
            return [float(each) for each in forebay.cache(dataset, "out", **QUIET)]
        data = pairs() if verb == "predict" else forebay.from_table(pairs(), load)
        given = {"load": load} if verb == "predict" else {}
        forebay.predict(lambda batch: batch[:, 0], data, "out", **given, **QUIET)
        return pq.read_table("out").column("prediction").to_pylist()

    assert made() == [11.0, 11.0, 11.0]
    write("d/1.mask", "longer than that")
    assert made() == [11.0, 22.0, 11.0]


@pytest.mark.parametrize("there", [True, False], ids=["empty", "none"])
def test_rows_stay_while_the_folder_of_one_of_their_files_is_away(there):
    """They are known by the columns that had files before, and none is done again."""
    for name in ("images", "masks"):
        Path(name).mkdir()
        for number in range(3):
            write(f"{name}/{number}.{name[:3]}", name)
    rows = [{"image": f"images/{k}.ima", "mask": f"masks/{k}.mas"} for k in range(3)]

    def run():
        made = lambda row: {"n": len(Path(row["image"]).read_text())}  # noqa: E731
        return forebay.preprocess(made, rows, "out", **QUIET)

    sources = run().metadata.column("source").to_pylist()
    os.rename("images", "away")
    if there:
        Path("images").mkdir()
    report = run()
    assert (report.resumed, report.failed) == (3, 0)
    assert report.metadata.column("source").to_pylist() == sources
    if there:
        Path("images").rmdir()
    os.rename("away", "images")
    assert run().resumed == 3


def test_the_origin_of_a_tables_files_is_not_watched():
    """A later step is done again when its own inputs change."""
    copy = lambda path, out: out.file(path.name).write_text(path.read_text()) and None  # noqa: E731
    forebay.preprocess(copy, "d/*.image", "one", **QUIET)
    again = lambda row: {"text": Path(row["destination"]).read_text()}  # noqa: E731
    assert forebay.preprocess(again, "one", "two", **QUIET).done == 3
    write("d/1.image", "touched")
    assert forebay.preprocess(again, "one", "two", **QUIET).resumed == 3


def in_place(path):
    path.write_text(path.read_text().upper())
    return {"text": path.read_text()}


def beside(path):
    folder = Path(path)
    (folder / "more").mkdir(exist_ok=True)
    (folder / "more" / "series.nii").write_text("x" * len([*folder.glob("*.image")]))
    return {"n": len([*folder.iterdir()])}


def of_row(row):
    Path(row["mask"]).write_text(Path(row["mask"]).read_text() + "!")
    return {"text": Path(row["mask"]).read_text()}


@pytest.mark.parametrize(
    ("function", "inputs"),
    [(in_place, "d/*.image"), (beside, ["d"]), (of_row, pairs)],
    ids=["file", "folder", "row"],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_that_changes_its_own_input_is_not_called_again_for_ever(
    function, inputs, workers
):
    """The input is recorded as it is afterwards, and the report says so; other changes count."""

    def run():
        given = inputs() if callable(inputs) else inputs
        return forebay.preprocess(function, given, "out", num_workers=workers, progress=False)

    first = run()
    (note,) = first.notes
    assert f"changed while {function.__name__} worked on" in note
    second = run()
    assert (second.resumed, second.notes) == (second.done, ())
    write("d/1.image", "of somebody else")
    assert run().resumed == second.done - 1
    assert run().resumed == second.done


def test_a_change_at_once_is_noticed():
    """The clock is that of the file system, which is behind others by up to a kernel's tick."""
    for number in range(200):
        since = file_time()
        Path(f"d/new{number}").touch()
        assert may_have_changed(f"d/new{number}", since)
