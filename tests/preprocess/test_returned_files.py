"""Functions as people have them: `f(source)`, built-ins, partials, and files that are returned."""

from __future__ import annotations

import functools
import operator
import os
from pathlib import Path

import pytest
from driving import here, make_inputs, published, table

import forebay
from forebay.errors import OptionError
from forebay.runs.returned import files_in


def run(work, inputs, output, **options):
    options = {"num_workers": 0, "progress": False, **options}
    return forebay.preprocess(work, inputs, output, **options)


@pytest.fixture
def inputs(tmp_path):
    return make_inputs(tmp_path / "in", 3)


def rows(report):
    return [
        {name: value for name, value in row.items() if name != "source"}
        for row in report.metadata.to_pylist()
    ]


def size(source):
    """Take one argument, and return metadata."""
    return {"size": source.stat().st_size}


class Sizes:
    """A callable object."""

    def __call__(self, path):
        return {"size": path.stat().st_size}


def power(path, exponent, *, base=1):
    return {"size": path.stat().st_size * base**exponent}


ONE_ARGUMENT = {
    "a function": size,
    "a callable object": Sizes(),
    "a method": Sizes().__call__,
    "a partial": functools.partial(power, exponent=2),
    "a keyword": functools.partial(power, exponent=2, base=1),
    "a default": lambda path, factor=1: {"size": path.stat().st_size * factor},
}


@pytest.mark.slow
@pytest.mark.parametrize("work", ONE_ARGUMENT.values(), ids=ONE_ARGUMENT)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_of_the_source_alone_returns_metadata(tmp_path, inputs, work, workers):
    """Whatever it is; what has a default keeps it."""
    report = run(work, inputs, tmp_path / "out", num_workers=workers)
    assert rows(report) == [{"destination": None, "size": 12}] * 3


@pytest.mark.parametrize("workers", [0, 1])
def test_a_builtin_is_called_with_the_path(tmp_path, inputs, workers):
    """`os.path.getsize`, and one that has no signature to look at."""
    report = run(os.path.getsize, inputs, tmp_path / "out", num_workers=workers)
    assert [row["metadata"] for row in rows(report)] == [12, 12, 12]
    report = run(operator.attrgetter("stem"), inputs, tmp_path / "stem", num_workers=workers)
    assert [row["metadata"] for row in rows(report)] == ["0000", "0001", "0002"]


def test_a_second_parameter_gets_the_folder_if_it_needs_it(tmp_path, inputs):
    """Or if its name says that it is one; otherwise it keeps its default."""

    def optional(path, out_dir=None):
        (out_dir / path.name).write_text("x")

    def verbose(path, verbose=False):
        return {"verbose": verbose}

    assert run(optional, inputs, tmp_path / "a").done == 3
    assert [row["verbose"] for row in rows(run(verbose, inputs, tmp_path / "b"))] == [False] * 3

    def three(a, b, c):
        pass

    with pytest.raises(OptionError, match=r"as three\(source\) or three\(source, out\): m"):
        run(three, inputs, tmp_path / "c")
    with pytest.raises(OptionError, match="the sample and the output"):
        forebay.preprocess(Numbers(), output=tmp_path / "d", save=size)


class Numbers:
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return index


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_files_that_a_function_writes_elsewhere_are_its_outputs(tmp_path, inputs, workers):
    """In the table, by their paths; verified; and the report says once what a kill can do."""
    target = tmp_path / "wav"
    target.mkdir()

    def convert(path):
        made = target / f"{path.stem}.wav"
        made.write_text(path.read_text().upper())
        return made

    report = run(convert, inputs, tmp_path / "out", num_workers=workers)
    assert [row["destination"] for row in rows(report)] == [
        str(target / f"000{k}.wav") for k in range(3)
    ]
    (note,) = report.notes
    name = "test_files_that_a_function_writes_elsewhere_are_its_outputs.<locals>.convert"
    assert note.startswith(f"3 outputs were written by {name} itself, such as '{target}/000")
    assert "(source, out), and write to out / '000" in note
    assert here("verify", tmp_path / "out")[:2] == (
        0,
        "3 outputs checked: 0 missing, 0 altered, 0 orphans\n",
    )
    (target / "0001.wav").write_text("altered")
    code, said, _ = here("verify", tmp_path / "out", "--altered", "redo")
    assert code != 0 and f"altered  {target / '0001.wav'}: 12 bytes" in said
    report = run(convert, inputs, tmp_path / "out", num_workers=workers)
    assert (report.resumed, (target / "0001.wav").read_text()) == (2, "LINE 0 OF 1\n")
    (found, *_) = forebay.from_table(tmp_path / "out")
    assert Path(found["destination"]).read_text() == "LINE 0 OF 0\n"


def test_files_elsewhere_are_never_removed(tmp_path, inputs):
    """Neither when an input changes or fails, nor by redo="*"."""
    target = tmp_path / "wav"
    target.mkdir()

    def convert(path):
        made = target / f"{path.stem}-{len(path.read_text())}.wav"
        made.write_text("x")
        if "bad" in path.read_text():
            raise ValueError("bad")
        return made, {"n": 1}

    run(convert, inputs, tmp_path / "out")
    (inputs / "0001.txt").write_text("longer than before")
    (inputs / "0002.txt").write_text("bad")
    run(convert, inputs, tmp_path / "out", retries=0)
    run(convert, inputs, tmp_path / "out", retries=0, redo="*")
    assert sorted(os.listdir(target)) == [
        "0000-12.wav",
        "0001-12.wav",
        "0001-18.wav",
        "0002-12.wav",
        "0002-3.wav",
    ]


def test_a_file_written_into_the_output_folder_is_an_output_by_its_name(tmp_path, inputs):
    """Relative, removed with its input, and no orphan."""
    output = tmp_path / "out"
    output.mkdir()

    def convert(path):
        made = output / f"{path.stem}-{len(path.read_text())}.wav"
        made.write_text("x")
        return str(made), {"n": 1}

    report = run(convert, inputs, output)
    assert rows(report)[0] == {"destination": "0000-12.wav", "n": 1}
    assert here("verify", output)[0] == 0
    (inputs / "0001.txt").write_text("other")
    run(convert, inputs, output)
    assert [*published(output)] == ["0000-12.wav", "0001-5.wav", "0002-12.wav"]


def test_two_inputs_that_write_one_file_are_a_collision(tmp_path, inputs):
    """As for outputs in the folder: the second has overwritten the first."""

    def convert(path):
        (tmp_path / "same.wav").write_text(path.name)
        return tmp_path / "same.wav"

    report = run(convert, inputs, tmp_path / "out")
    assert (report.done, report.failed) == (0, 3)
    assert f"output '{tmp_path}/same.wav' is claimed by two" in report.failures[0].message
    assert (tmp_path / "same.wav").exists()


def frames(source, out):
    """Leave three files."""
    paths = [Path(out) / source.stem / f"{k}.jpg" for k in range(3)]
    paths[0].parent.mkdir()
    for path in paths:
        path.write_text("x")
    return paths


RETURNED = {
    "files": (lambda paths: paths, [{}, {}, {}]),
    "files and one dict": (lambda paths: (paths, {"n": 1}), [{"n": 1}] * 3),
    "files and dicts": (
        lambda paths: (paths, [{"n": k} for k in range(3)]),
        [{"n": 0}, {"n": 1}, {"n": 2}],
    ),
    "strings and a dict": (lambda paths: ([*map(str, paths)], {"n": 1}), [{"n": 1}] * 3),
    "files and none": (lambda paths: (paths, None), [{}, {}, {}]),
    "pairs": (lambda paths: [(each, {"n": 1}) for each in paths], [{"n": 1}] * 3),
    "one of them": (lambda paths: (paths[1], {"n": 1}), [{"n": 1}]),
    "one, and rows": (lambda paths: (paths[1], [{"n": 1}, {"n": 2}]), [{"n": 1}, {"n": 2}]),
}


@pytest.mark.slow
@pytest.mark.parametrize(("make", "expected"), RETURNED.values(), ids=RETURNED)
def test_files_and_metadata_are_returned_together(tmp_path, inputs, make, expected):
    """One dict for all files or one for each, also of files in the folder."""
    report = run(
        lambda source, out: make(frames(source, out)), [inputs / "0000.txt"], tmp_path / "o"
    )
    assert report.failures == ()
    names = [f"0000/{k}.jpg" for k in range(3)] if len(expected) == 3 else ["0000/1.jpg"] * 9
    assert rows(report) == [
        {"destination": name, **row} for name, row in zip(names, expected, strict=False)
    ]
    assert report.notes == ()


def test_the_folder_itself_is_returned(tmp_path, inputs):
    """It stands for all that is in it; a folder elsewhere for all files below it."""

    def all_of_it(source, out):
        frames(source, out)
        return out, {"n": 1}

    def elsewhere(source):
        frames(source, tmp_path)
        return tmp_path / source.stem

    one = [inputs / "0000.txt"]
    assert rows(run(all_of_it, one, tmp_path / "a")) == [{"destination": "0000", "n": 1}]
    report = run(elsewhere, one, tmp_path / "b")
    assert rows(report) == [{"destination": str(tmp_path / "0000")}]
    assert here("verify", tmp_path / "b")[1].startswith("3 outputs checked: 0 missing")


def test_what_is_no_file_is_metadata(tmp_path, inputs):
    """Strings alone, paths that do not exist, and the input itself is no output."""
    one = [inputs / "0000.txt"]
    report = run(lambda path: [str(path), "b"], one, tmp_path / "a")
    assert rows(report)[0]["metadata"] == [str(one[0]), "b"]
    report = run(lambda path: Path("/no/such"), one, tmp_path / "b")
    assert rows(report)[0]["metadata"] == "/no/such"
    report = run(lambda path: (path, {"n": 1}), one, tmp_path / "c")
    assert rows(report) == [{"destination": str(one[0]), "n": 1}]
    assert report.notes == ()
    assert here("verify", tmp_path / "c")[1].startswith("0 outputs checked")
    report = run(lambda path: ("label", {"n": 1}), one, tmp_path / "d", retries=0)
    assert "there is no file" in report.failures[0].message
    report = run(lambda s, o: (frames(s, o), [{"n": 1}] * 2), one, tmp_path / "f", retries=0)
    assert "3 files and 2 dicts" in report.failures[0].message
    report = run(lambda path: (Path("/dev/null"), {"n": 1}), one, tmp_path / "g", retries=0)
    assert "'/dev/null', which is no regular file" in report.failures[0].message


@pytest.mark.parametrize(
    "returned", [None, {}, {"a": 1}, [{"a": 1}], ["a", "b"], "a", 7, ("a", "b"), (1, 2), [1, 2], []]
)
def test_other_values_are_as_they_were(returned):
    """They are metadata, and the same object."""
    paths, metadata = files_in(returned)
    assert (paths, metadata is returned) == ([], True)


def test_files_elsewhere_with_an_output_in_a_bucket(tmp_path, inputs, memory):
    """They stay where they are, by their paths; what is in the folder is uploaded."""

    def work(source, out):
        (tmp_path / source.name).write_text("x")
        (out / source.name).write_text("x")
        return [tmp_path / source.name, out / source.name]

    report = run(work, inputs, "memory://bucket/out")
    assert [row["destination"] for row in rows(report)][:2] == [
        str(tmp_path / "0000.txt"),
        "0000.txt",
    ]
    assert len(report.notes) == 1
    assert memory.cat("/bucket/out/0000.txt") == b"x"


def test_a_function_of_one_argument_may_ask_for_the_output(tmp_path, inputs):
    """Deep within it, `get_output` returns the folder."""

    def work(source):
        (forebay.get_output() / source.name).write_text("x")

    assert run(work, inputs, tmp_path / "out").done == 3
    assert [*published(tmp_path / "out")] == ["0000.txt", "0001.txt", "0002.txt"]
    assert table(tmp_path / "out")


def test_files_beside_a_download(tmp_path, memory):
    """The download itself stands for its URL; what is written beside it would be lost, so fails."""
    memory.pipe("/in/a.txt", b"x")

    def convert(source):
        source.with_suffix(".up").write_text("X")
        return source.with_suffix(".up")

    report = run(lambda source: (source, {"n": 1}), "memory://in/*.txt", tmp_path / "itself")
    assert rows(report) == [{"destination": "memory:///in/a.txt", "n": 1}]
    report = run(convert, "memory://in/*.txt", tmp_path / "beside", retries=0)
    assert "wrote 'a.up' beside the download" in report.failures[0].message


async def returns_a_coroutine(source):
    return {"n": 1}


async def returns_a_generator(source):
    yield {"n": 1}


class CalledAsync:
    async def __call__(self, source, out):
        return {"n": 1}


@pytest.mark.parametrize("work", [returns_a_coroutine, returns_a_generator, CalledAsync()])
def test_async_functions_are_refused_in_words(tmp_path, inputs, work):
    """Nothing would run what they return; what returns it unseen fails in words, too."""
    with pytest.raises(OptionError, match="is async"):
        run(work, inputs, tmp_path / "out")

    def hidden(source, out):
        return returns_a_coroutine(source)

    report = run(hidden, inputs, tmp_path / "out", retries=0)
    assert "returned an object of type coroutine" in report.failures[0].message
