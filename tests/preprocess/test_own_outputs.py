"""The output folder is never part of the inputs, however it is reached."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from driving import make_inputs, published
from works import copy

import forebay
from forebay.errors import InputError, OptionError


def run(inputs, output, **options):
    return forebay.preprocess(
        shout, inputs, output, progress=False, **{"num_workers": 0, **options}
    )


def shout(source, out):
    path = Path(source["path"]) if isinstance(source, dict) else source
    out.file(f"{path.stem}-{len(str(path))}.txt").write_text(path.read_text().upper())


@pytest.fixture
def data(tmp_path):
    """A folder with four inputs, in which a user might well have the outputs, too."""
    make_inputs(tmp_path / "data", 3)
    make_inputs(tmp_path / "data" / "more", 1)
    return tmp_path / "data"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["out", "a/b"])
@pytest.mark.parametrize("glob", ["**/*.txt", "**/*", "*/*.txt"])
def test_a_glob_leaves_the_outputs_out(data, glob, where):
    """Four inputs stay four, also with the table and the outputs among the matches."""
    number = 1 if glob.startswith("*/") else 4
    for earlier in (0, number, number):
        report = run(f"{data}/{glob}", data / where)
        assert (report.done, report.failed, report.resumed) == (number, 0, earlier)
    assert len(published(data / where)) == number


def test_a_relative_glob_leaves_them_out_too(data, monkeypatch):
    """Whatever the current folder is, and whatever both are called from there."""
    monkeypatch.chdir(data / "more")
    for _ in range(2):
        assert run("../**/*.txt", "../out").done == 4


@pytest.mark.parametrize("link", ["parent", "output", "file"])
def test_a_link_does_not_lead_to_the_outputs(data, tmp_path, link):
    """To a folder above them, to them, or to one of them: the same call does nothing more."""
    output = tmp_path / "out"
    first = run(data, output)
    target = {"parent": tmp_path, "output": output, "file": min(output.glob("*.txt"))}[link]
    (data / "link").symlink_to(target)
    before = published(output)
    for _ in range(2):
        report = run(data, output)
        assert report.failed == 0
        assert all(published(output)[name] == body for name, body in before.items())
        assert report.done == first.done


def test_the_output_folder_may_be_a_link_itself(data, tmp_path):
    """Its own name and that of what it leads to are the same folder."""
    (tmp_path / "real").mkdir()
    (data / "out").symlink_to(tmp_path / "real")
    for _ in range(2):
        assert run(f"{data}/**/*.txt", tmp_path / "real").done == 4
        assert run(f"{data}/**/*.txt", data / "out").done == 4


@pytest.mark.slow
@pytest.mark.parametrize("form", ["list", "csv", "jsonl", "beside", "one"])
def test_an_output_that_is_named_as_an_input_is_an_error(data, tmp_path, form, monkeypatch):
    """In a list, in a manifest, or alone; with its name, before anything is done."""
    output = tmp_path / "out"
    run(data, output)
    before = published(output)
    paths = sorted([*data.glob("*.txt"), *output.glob("*.txt")])
    inputs = paths
    if form == "one":
        inputs = paths[-1]
    elif form != "list":
        folder = output if form == "beside" else tmp_path
        inputs = folder / ("m.jsonl" if form == "jsonl" else "m.csv")
        names = [os.path.relpath(path, folder) for path in paths]
        monkeypatch.chdir("/")
        if form == "jsonl":
            inputs.write_text("".join(json.dumps({"path": name}) + "\n" for name in names))
        else:
            inputs.write_text("\n".join(["path", *names]) + "\n")
    with pytest.raises(InputError, match="lies in the output folder"):
        run(inputs, output)
    assert published(output).items() >= before.items()
    assert run(data, output).resumed == 4


def test_inputs_that_all_lie_in_the_output_folder_are_an_error(data):
    """It is their folder, or one above."""
    for inputs in (data / "more", f"{data}/more/*"):
        with pytest.raises(InputError, match="all of its files lie in the output folder"):
            run(inputs, data)
    with pytest.raises(OptionError, match="lies in the input folder"):
        run(data, data)


def test_a_bucket_keeps_its_outputs_out_of_the_inputs(memory, machine):
    """By a glob they are left out, and in a list they are an error."""
    for number in range(3):
        memory.pipe_file(f"/bucket/{number}.txt", b"text")
    for _ in range(2):
        report = forebay.preprocess(
            copy_fetched, "memory://bucket/**/*.txt", "memory://bucket/out", num_workers=0,
            progress=False,
        )  # fmt: skip
        assert (report.done, report.failed) == (3, 0)
    with pytest.raises(InputError, match="lies in the output folder"):
        forebay.preprocess(
            copy_fetched, ["memory://bucket/out/0.txt"], "memory://bucket/out", num_workers=0,
            progress=False,
        )  # fmt: skip


def copy_fetched(source, out):
    out.file(source.name).write_bytes(source.read_bytes())


def test_folders_whose_names_begin_alike_are_apart(data):
    """`out` is no part of `output`, nor the other way round."""
    make_inputs(data / "output", 2)
    assert (
        forebay.preprocess(copy, data / "output", data / "out", num_workers=0, progress=False).done
        == 2
    )
