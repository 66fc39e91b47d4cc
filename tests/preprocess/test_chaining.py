"""The table that one step writes is the manifest of the next, from any working folder."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from driving import WORKS, call, make_inputs
from works import size_of_destination

import forebay
from forebay.runs.preprocess import retry


def first_step(source, out):
    """Write a piece for each input; the table names it relative to its folder."""
    piece = out.file(f"pieces/{source.stem}.txt")
    piece.write_text("x" * (1 + int(source.stem)))
    return {"destination": piece}


@pytest.fixture
def thumbs(tmp_path):
    """The output folder of a first step, made from another working folder."""
    inputs = make_inputs(tmp_path / "in", 3)
    forebay.preprocess(first_step, inputs, tmp_path / "thumbs", num_workers=0, progress=False)
    return tmp_path / "thumbs"


@pytest.fixture(params=["here", "above", "elsewhere"])
def named(request, thumbs, tmp_path, monkeypatch):
    """The folder's name as seen from a working folder: in it, above it, or far away."""
    (tmp_path / "far").mkdir()
    folder = {"here": thumbs, "above": tmp_path, "elsewhere": tmp_path / "far"}[request.param]
    monkeypatch.chdir(folder)
    return Path(os.path.relpath(thumbs, folder))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["", "metadata.parquet"], ids=["folder", "table"])
def test_preprocess_gets_rows_whose_files_open(named, tmp_path, what):
    """By the folder's name or the table's; the row itself stays as it was written."""
    report = forebay.preprocess(
        size_of_destination, named / what, tmp_path / "next", num_workers=0, progress=False
    )
    assert (report.done, report.failed) == (3, 0), report
    assert report.metadata["size"].to_pylist() == [1, 2, 3]
    assert report.metadata["source"].to_pylist() == [f"pieces/000{n}.txt" for n in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["", "metadata.parquet"], ids=["folder", "table"])
def test_from_table_and_predict_get_the_same_rows(named, tmp_path, what):
    """Both read the table that `preprocess` reads."""
    sizes = [Path(row["destination"]).stat().st_size for row in forebay.from_table(named / what)]
    assert sizes == [1, 2, 3]

    def load(row):
        return torch.tensor([float(Path(row["destination"]).stat().st_size)])

    forebay.predict(
        lambda batch: batch[:, 0],
        named / what,
        tmp_path / "predictions",
        load=load,
        num_workers=0,
        progress=False,
    )
    table = pq.read_table(tmp_path / "predictions")
    assert table["prediction"].to_pylist() == [1.0, 2.0, 3.0]


@pytest.mark.slow
def test_the_command_line_chains_too(named, tmp_path):
    """In workers, which may have another working folder."""
    code, _, err = call(
        "preprocess", f"{WORKS}:size_of_destination", named, tmp_path / "next", "--num-workers", 2
    )
    assert (code, err) == (0, "")
    assert pq.read_table(tmp_path / "next" / "metadata.parquet")["size"].to_pylist() == [1, 2, 3]


def test_a_file_of_the_working_folder_is_not_taken_for_an_output(thumbs, tmp_path, monkeypatch):
    """One that has the same relative name; neither when it changes."""
    far = tmp_path / "far"
    (far / "pieces").mkdir(parents=True)
    (far / "pieces" / "0001.txt").write_text("another file")
    monkeypatch.chdir(far)
    options = {"num_workers": 0, "progress": False}
    report = forebay.preprocess(size_of_destination, thumbs, tmp_path / "next", **options)
    assert report.metadata["size"].to_pylist() == [1, 2, 3]
    (far / "pieces" / "0001.txt").write_text("changed")
    (thumbs / "pieces" / "0002.txt").write_text("four")
    report = forebay.preprocess(size_of_destination, thumbs, tmp_path / "next", **options)
    assert (report.metadata["size"].to_pylist(), report.resumed) == ([1, 2, 4], 2)


def test_retry_finds_the_files_of_the_earlier_step(thumbs, tmp_path, monkeypatch):
    """The folder of the table is remembered, also as seen from another working folder."""
    piece = thumbs / "pieces" / "0001.txt"
    piece.unlink()
    monkeypatch.chdir(thumbs)
    options = {"num_workers": 0, "progress": False}
    report = forebay.preprocess(size_of_destination, ".", tmp_path / "next", **options)
    assert report.failed == 1
    piece.write_text("back")
    monkeypatch.chdir(tmp_path)
    report = retry(size_of_destination, "next", **options)
    assert report.failed == 0
    assert report.metadata["size"].to_pylist() == [1, 4, 3]


def test_a_table_that_was_moved_with_its_files_is_the_same_inputs(thumbs, tmp_path):
    """Nothing is redone because a folder has another name."""
    options = {"num_workers": 0, "progress": False}
    forebay.preprocess(size_of_destination, thumbs, tmp_path / "next", **options)
    thumbs.rename(tmp_path / "moved")
    report = forebay.preprocess(
        size_of_destination, tmp_path / "moved", tmp_path / "next", **options
    )
    assert (report.done, report.resumed) == (3, 3)


def test_an_output_folder_without_its_table_is_an_error(tmp_path):
    """Its files are half of what a run is to make, or no inputs at all, as predictions are."""
    (tmp_path / "x").mkdir()
    (tmp_path / "in").write_text("x")

    def stop(source, out):
        raise ValueError("stopped")

    with pytest.raises(ValueError, match="stopped"):
        forebay.preprocess(
            stop, [tmp_path / "in"], tmp_path / "out", max_failures=0, num_workers=0,
            progress=False,
        )  # fmt: skip
    with pytest.raises(forebay.InputError) as caught:
        forebay.preprocess(size_of_destination, tmp_path / "out", tmp_path / "next")
    assert "this output folder of forebay's holds no metadata table\n" in str(caught.value)
    assert "'" + str(tmp_path / "out" / "**" / "*") + "'" in str(caught.value)


def test_the_files_of_an_output_folder_are_named_by_a_glob(thumbs, tmp_path, monkeypatch):
    """A folder without a ledger is its files, whatever they are called."""
    monkeypatch.chdir(tmp_path)

    def name_of(source, out):
        return {"name": source.name}

    options = {"num_workers": 0, "progress": False}
    report = forebay.preprocess(name_of, "thumbs/**/*.txt", "next", **options)
    assert report.metadata["name"].to_pylist() == ["0000.txt", "0001.txt", "0002.txt"]
    plain = make_inputs(tmp_path / "plain", 1)
    (plain / "metadata.csv").write_text("a\n1\n")
    report = forebay.preprocess(name_of, plain, "other", **options)
    assert report.metadata["name"].to_pylist() == ["0000.txt", "metadata.csv"]


def test_a_table_in_a_bucket_is_chained_by_its_url(thumbs, tmp_path, memory):
    """By the table's URL, and by the folder's."""
    for path in (*thumbs.rglob("*.txt"), thumbs / "metadata.parquet"):
        memory.pipe(f"/thumbs/{path.relative_to(thumbs)}", path.read_bytes())
    memory.pipe("/thumbs/.forebay/ledger.sqlite", b"a copy")

    def destination(row, out):
        return {"at": row["destination"]}

    for number, url in enumerate(["memory://thumbs", "memory://thumbs/metadata.parquet"]):
        report = forebay.preprocess(
            destination, url, tmp_path / f"next{number}", num_workers=0, progress=False
        )
        expected = [f"memory://thumbs/pieces/000{n}.txt" for n in range(3)]
        assert report.metadata["at"].to_pylist() == expected


@pytest.mark.parametrize("form", ["parquet", "csv", "jsonl"])
def test_infinities_and_missing_numbers_go_through_all_steps(tmp_path, form):
    """The level of silence in dB is minus infinity. A row of JSON lines has it as null."""
    levels = {"0000": float("-inf"), "0001": float("inf"), "0002": float("nan")}
    options = {"num_workers": 0, "progress": False, "metadata": form}

    def measure(source, out):
        return {"level": levels[source.stem]}

    def louder(row, out):
        level = row["level"] if form == "jsonl" else float(row["level"] or "nan")
        return {"level": level, "is_silent": level == float("-inf")}

    first, second = tmp_path / "first", tmp_path / "second"
    forebay.preprocess(measure, make_inputs(tmp_path / "in", 3), first, **options)
    report = forebay.preprocess(louder, first / f"metadata.{form}", second, **options)
    assert report.failed == 0
    found = report.metadata["level"].to_pylist()
    assert repr(found) == ("[None, None, None]" if form == "jsonl" else "[-inf, inf, nan]")
    assert report.metadata["is_silent"].to_pylist() == [form != "jsonl", False, False]
