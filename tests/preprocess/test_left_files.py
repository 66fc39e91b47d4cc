"""`out` is a folder: what a function leaves in it is published, whoever wrote it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from driving import here, make_inputs, published, staged

import forebay


def run(work, inputs, output, **options):
    options = {"num_workers": 0, "progress": False, **options}
    return forebay.preprocess(work, inputs, output, **options)


@pytest.fixture
def inputs(tmp_path):
    return make_inputs(tmp_path / "in", 3)


def texts(output):
    return {name: body.decode() for name, body in published(Path(output)).items()}


def destinations(report):
    return report.metadata.column("destination").to_pylist()


def convert(in_path, out_dir):
    """Do as a function does that knows nothing of forebay."""
    out_dir.mkdir(parents=True, exist_ok=True)
    with open(os.path.join(out_dir, f"{Path(in_path).stem}.up"), "w") as file:
        file.write(in_path.read_text().upper())


WAYS = {
    "os.path.join": lambda source, out: Path(os.path.join(out, source.name)).write_text("x"),
    "a path": lambda source, out: (Path(out) / source.name).write_text("x"),
    "a slash": lambda source, out: (out / source.name).write_text("x"),
    "a string": lambda source, out: Path(f"{out}/{source.name}").write_text("x"),
    "a method": lambda source, out: out.joinpath(source.name).write_text("x"),
    "out.file": lambda source, out: out.file(source.name).write_text("x"),
    "shutil": shutil.copy,
    "a link is resolved": lambda source, out: Path(os.path.realpath(out), source.name).write_text(
        "x"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_out_is_a_path_in_every_way(tmp_path, inputs, way):
    """Each input has an empty folder; its one file is its output, and in its row."""

    def work(source, out):
        before = len(os.listdir(out)) if way is not WAYS["out.file"] else 0
        way(source, out)
        return {"before": before}

    (tmp_path / "link").symlink_to(tmp_path)
    report = run(work, inputs, tmp_path / "link" / "out")
    assert (report.done, report.failures) == (3, ())
    assert destinations(report) == ["0000.txt", "0001.txt", "0002.txt"] == [*texts(report.output)]
    assert report.metadata.column("before").to_pylist() == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"concurrency": 2, "num_workers": 1}])
def test_a_function_of_two_paths_works_as_it_is(tmp_path, inputs, options):
    """In this process, in workers, and in threads of a worker."""
    report = run(convert, inputs, tmp_path / "out", **options)
    assert texts(tmp_path / "out") == {f"000{k}.up": f"LINE 0 OF {k}\n" for k in range(3)}
    assert destinations(report) == ["0000.up", "0001.up", "0002.up"]
    assert not staged(tmp_path / "out")


def test_into_a_bucket_as_into_a_folder(tmp_path, inputs, memory):
    """Trees, too."""

    def tree(source, out):
        convert(source, out / source.stem / "a")
        (out / source.stem / "b").write_text("b")
        return {"n": 1}

    report = run(tree, inputs, "memory://bucket/out")
    assert destinations(report) == ["0000", "0001", "0002"]
    assert memory.cat("/bucket/out/0001/a/0001.up") == b"LINE 0 OF 1\n"
    assert len([name for name in memory.find("/bucket/out") if ".forebay" not in name]) == 7


TOOL = """
import sys
for number in range(3):
    open(sys.argv[1] % number, "w").write(str(number))
"""


def test_a_tool_writes_files_by_a_pattern(tmp_path, inputs):
    """Without rows, each file is one; with one row, that names the folder which has all."""

    def frames(source, out):
        folder = out / source.stem
        folder.mkdir()
        subprocess.run([sys.executable, "-c", TOOL, folder / "%05d.jpg"], check=True)

    def counted(source, out):
        frames(source, out)
        return {"frames": 3}

    report = run(frames, [inputs / "0000.txt"], tmp_path / "out")
    assert destinations(report) == [f"0000/0000{k}.jpg" for k in range(3)]
    report = run(counted, [inputs / "0001.txt"], tmp_path / "counted")
    assert report.metadata.to_pylist() == [
        {"source": str(inputs / "0001.txt"), "destination": "0001", "frames": 3}
    ]
    assert [*texts(tmp_path / "counted")] == [f"0001/0000{k}.jpg" for k in range(3)]


def test_rows_name_files_and_folders_that_were_left(tmp_path, inputs):
    """As paths or strings, in lists, and a folder."""

    def work(source, out):
        (out / "d" / source.stem).mkdir(parents=True)
        (out / "d" / source.stem / "x").write_text("x")
        (out / source.name).write_text("x")
        return {"destination": out / "d" / source.stem, "files": [f"{out}/{source.name}"]}

    report = run(work, [inputs / "0000.txt"], tmp_path / "out")
    (row,) = report.metadata.to_pylist()
    assert (row["destination"], row["files"]) == ("d/0000", ["0000.txt"])
    (found,) = forebay.from_table(tmp_path / "out")
    assert Path(found["destination"], "x").read_text() == "x"


def shape(source, out):
    """Write a shapefile, which is three files, of which it names one."""
    path = out.file(f"{source.stem}.shp")
    for ending in (".shp", ".shx", ".dbf"):
        path.with_suffix(ending).write_text(source.stem + ending)
    return {"n": 1}


def of_speaker(source, out):
    (out / "speaker").mkdir()
    (out / "speaker" / source.name).write_text("x")
    return {"n": 1}


def test_one_file_in_a_folder_of_several_inputs_is_named_itself(tmp_path, inputs):
    """The next step opens what `destination` names: not a folder with the files of others."""
    report = run(of_speaker, inputs, tmp_path / "out")
    assert destinations(report) == [f"speaker/{each.name}" for each in sorted(inputs.iterdir())]


@pytest.mark.parametrize("folder", ["", "shapes/", "{}/"])
def test_files_beside_a_named_one_are_outputs_of_the_same_input(tmp_path, inputs, folder):
    """Of each input, also of the first that leaves any; and the row names the one."""

    def work(source, out):
        path = out.file(folder.format(source.stem) + f"{source.stem}.shp")
        for ending in (".shp", ".shx", ".dbf"):
            path.with_suffix(ending).write_text(source.stem + ending)
        return {"n": 1}

    report = run(work, inputs, tmp_path / "out")
    stems = ["0000", "0001", "0002"]
    assert texts(tmp_path / "out") == {
        f"{folder.format(stem)}{stem}{ending}": stem + ending
        for stem in stems
        for ending in (".dbf", ".shp", ".shx")
    }
    assert destinations(report) == [f"{folder.format(stem)}{stem}.shp" for stem in stems]


def test_a_file_of_the_same_name_beside_two_named_ones_is_a_collision(tmp_path, inputs):
    """Not the file of the first input overwritten by that of the second."""

    def work(source, out):
        path = out.file(source.name)
        path.write_text("x")
        path.with_name("schema.json").write_text(source.name)

    report = run(work, inputs, tmp_path / "out")
    assert (report.done, report.failed) == (0, 3)
    assert "output 'schema.json' is claimed by two inputs" in report.failures[0].message
    assert "out / source.stem / 'schema.json'" in report.failures[0].message
    assert texts(tmp_path / "out") == {}


def test_a_folder_may_be_left_at_a_named_path(tmp_path, inputs):
    """As zarr does, which makes a folder where it is given a name."""

    def work(source, out):
        path = out.file(f"{source.stem}.zarr")
        (path / "c").mkdir(parents=True)
        (path / ".zgroup").write_text("{}")
        (path / "c" / "0").write_text("0")
        (path / "empty").mkdir()
        return {"chunks": 1}

    report = run(work, inputs, tmp_path / "out")
    assert destinations(report) == ["0000.zarr", "0001.zarr", "0002.zarr"]
    assert len(texts(tmp_path / "out")) == 6
    assert sorted(os.listdir(tmp_path / "out" / "0001.zarr")) == [".zgroup", "c"]


def test_both_ways_make_one_folder(tmp_path, inputs):
    """Files that were named, and files in the folder, whichever came first; one file once."""

    def work(source, out):
        first = source.stem == "0001"
        if first:
            (out / "a1").write_text("a")
        out.file(f"{source.stem}/b").write_text("b")
        (out / source.stem / "c").write_text("c") if first else None
        out.file(f"{source.stem}.d").write_text("d")
        (out / f"{source.stem}.e").write_text("e")
        if source.stem == "0002":
            (out / f"{source.stem}.d").write_text("another")

    (tmp_path / "out" / "0002").mkdir(parents=True)  # so that its files are in a shared folder
    report = run(work, inputs, tmp_path / "out")
    assert report.done == 2
    assert "'0002.d' was written to out.file('0002.d'), and in the folder" in (
        report.failures[0].message
    )
    expected = {"0000.d", "0000.e", "0000/b", "0001.d", "0001.e", "0001/b", "0001/c", "a1"}
    assert texts(tmp_path / "out").keys() == expected


def leave_link(out):
    (out / "link").symlink_to("/etc/passwd")


def leave_folder_link(out):
    (out / "d").symlink_to("/etc")


def leave_pipe(out):
    os.mkfifo(out / "pipe")


def leave_socket(out):
    os.chdir(out)
    socket.socket(socket.AF_UNIX).bind("socket")


def leave_link_for_itself(out):
    shutil.rmtree(out)
    out.symlink_to(out.parents[3] / "precious")


def leave_table(out):
    (out / "Metadata.parquet").write_text("x")


def leave_private(out):
    (out / ".forebay").mkdir()
    (out / ".forebay" / "ledger.sqlite").write_text("x")


REFUSED = {
    leave_link: "left a link in its output folder: 'link'",
    leave_folder_link: "left a link in its output folder: 'd'",
    leave_pipe: "left a pipe, a socket or a device in its output folder: 'pipe'",
    leave_socket: "left a pipe, a socket or a device in its output folder: 'socket'",
    leave_link_for_itself: "a link in the place of its output folder",
    leave_table: "'Metadata.parquet' has a name reserved for forebay",
    leave_private: "'.forebay' has a name reserved for forebay",
}

OUTSIDE = {
    "above": lambda source, out: (out / "../x").write_text("x"),
    "above a folder": lambda source, out: (out / "a/../../x").write_text("x"),
    "the input": lambda source, out: (out / source.absolute()).write_text("x"),
    "joined": lambda source, out: out.joinpath("a", "../../x").write_text("x"),
}


@pytest.mark.parametrize("work", OUTSIDE.values(), ids=OUTSIDE)
def test_a_path_outside_of_the_folder_is_refused(tmp_path, inputs, work):
    """A file there would be lost, or be the input itself; a detour within the folder is none."""
    before = [each.read_text() for each in sorted(inputs.iterdir())]
    report = run(work, inputs, tmp_path / "out", retries=0)
    assert report.failed == 3
    assert "would leave the output folder" in report.failures[0].message
    assert [each.read_text() for each in sorted(inputs.iterdir())] == before

    assert run(lambda source, out: out / (out / "..a/../b"), inputs, tmp_path / "in it").done == 3


def test_a_folder_that_is_removed_fails_the_input(tmp_path, inputs):
    """In words, and with nothing left behind."""
    report = run(lambda source, out: shutil.rmtree(out), inputs, tmp_path / "out", retries=0)
    assert report.failed == 3
    assert "removed its output folder" in report.failures[0].message
    assert not staged(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("way", [out_first := "beside a named file", "in the folder"])
@pytest.mark.parametrize(("leave", "words"), REFUSED.items(), ids=lambda one: str(one)[:24])
def test_what_cannot_be_published_fails_the_input_in_words(tmp_path, inputs, leave, words, way):
    """And nothing of it is kept; the next input is not affected."""

    (tmp_path / "precious" / "folder").mkdir(parents=True)
    (tmp_path / "precious" / "file").write_text("x")

    def work(source, out):
        path = out.file(source.name) if way == out_first else out / source.name
        path.write_text("x")
        if source.stem == "0001":
            leave(path.parent)

    report = run(work, inputs, tmp_path / "out", retries=0)
    assert any(words in failure.message for failure in report.failures)
    removed = leave is leave_link_for_itself and way == out_first  # with what was staged there
    assert [*texts(tmp_path / "out")] == ["0000.txt", "0002.txt"][removed:]
    assert here("verify", tmp_path / "out")[0] == 0
    assert sorted(os.listdir(tmp_path / "precious")) == ["file", "folder"]


def test_a_file_beside_the_folder_is_not_lost_without_a_word(tmp_path, inputs):
    """As of a function that takes the path of a file; one that leaves nothing is fine."""

    def work(source, out):
        if source.stem == "0001":
            out.with_suffix(".wav").write_text("x")
        os.listdir(out)

    report = run(work, inputs, tmp_path / "out", retries=0)
    assert (report.done, report.failed) == (2, 1)
    assert ".wav' beside it" in report.failures[0].message


def test_what_a_failed_try_left_is_not_published(tmp_path, inputs):
    """Neither with the next try, nor with the next input."""

    def work(source, out):
        path = out.file(source.name)
        path.with_suffix(".scratch").write_text("x")
        if source.stem == "0001":
            raise ValueError("no")
        path.with_suffix(".scratch").unlink()
        path.write_text("x")

    report = run(work, inputs, tmp_path / "out", retries=2)
    assert (report.done, report.failed) == (2, 1)
    assert [*texts(tmp_path / "out")] == ["0000.txt", "0002.txt"]


def tree(source, out):
    """Write a folder of files as deep as the input says."""
    for number, line in enumerate(source.read_text().splitlines()):
        (out / source.stem / "a" / str(number)).mkdir(parents=True)
        (out / source.stem / "a" / str(number) / "line").write_text(line)


def test_a_changed_input_replaces_its_folder(tmp_path, inputs):
    """What it leaves no more is gone, with the folders that were needed for it; all is verified."""
    output = tmp_path / "out"
    (inputs / "0001.txt").write_text("one\ntwo\n")
    run(tree, inputs, output)
    assert len(texts(output)) == 4
    (inputs / "0001.txt").write_text("three\n")
    report = run(tree, inputs, output)
    assert report.resumed == 2
    assert texts(output)["0001/a/0/line"] == "three"
    assert sorted(os.listdir(output / "0001" / "a")) == ["0"]
    assert here("verify", output)[0] == 0
    (output / "0002" / "a" / "0" / "line").unlink()
    assert here("verify", output)[0] == 3
    assert run(tree, inputs, output).resumed == 2
    assert len(texts(output)) == 3


def test_a_folder_that_is_there_already_takes_the_files(tmp_path, inputs):
    """It is not replaced, and what is in it stays."""
    (tmp_path / "out" / "0001" / "a").mkdir(parents=True)
    (tmp_path / "out" / "0001" / "a" / "mine").write_text("mine")
    run(tree, inputs, tmp_path / "out")
    assert texts(tmp_path / "out").keys() == {
        "0001/a/mine",
        "0000/a/0/line",
        "0001/a/0/line",
        "0002/a/0/line",
    }
    assert not staged(tmp_path / "out")


def test_out_goes_to_another_process_as_a_path(tmp_path, inputs):
    """A function may hand its folder to a pool of its own."""
    import pickle

    def work(source, out):
        path = pickle.loads(pickle.dumps(out))
        assert isinstance(path, Path)
        (path / source.name).write_text("x")
        assert not hasattr(out, "pack")

    assert run(work, inputs, tmp_path / "out").failures == ()


@pytest.mark.slow
@pytest.mark.parametrize("count", [2000, pytest.param(100_000, marks=pytest.mark.thorough)])
def test_an_input_may_leave_very_many_files(tmp_path, inputs, count):
    """They are published by one rename."""

    def work(source, out):
        os.makedirs(f"{out}/many/{'d/' * 50}")
        for number in range(count):
            os.close(os.open(f"{out}/many/{number}", os.O_CREAT | os.O_WRONLY))
        Path(f"{out}/many/{'d/' * 50}", "deep").write_text("x")
        return {"files": count}

    report = run(work, [inputs / "0000.txt"], tmp_path / "out")
    assert (report.failures, destinations(report)) == ((), ["many"])
    assert len(os.listdir(tmp_path / "out" / "many")) == count + 1
    assert here("verify", tmp_path / "out")[0] == 0
