"""Inputs, functions and names that cannot work: refused at once, or failed one by one."""

from __future__ import annotations

import codecs
import os
import re
import signal
from functools import partial
from pathlib import Path

import pandas
import pyarrow
import pytest
from driving import make_inputs, published
from works import copy, nothing

import forebay
from forebay.errors import InputError, OptionError

# On Python 3.12 and newer, a fork beside threads is warned of.
pytestmark = [
    pytest.mark.usefixtures("forked_workers"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


def run(work, inputs, output, **options):
    return forebay.preprocess(work, inputs, output, progress=False, **{"num_workers": 0, **options})


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def three(tmp_path):
    """Three good inputs."""
    return make_inputs(tmp_path / "in", 3)


def manifest(tmp_path, body):
    path = tmp_path / "m.csv"
    path.write_bytes(body if isinstance(body, bytes) else body.encode())
    return path


def nothing_was_made(output):
    return not output.exists() or published(output) == {}


# ---- paths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_missing_files_fail_alone(three, output, workers):
    """Among good inputs, each is one failure of kind "input", tried once."""
    paths = [three / "0000.txt", three / "no.txt", three / "no" / "folder", three / "0002.txt"]
    report = run(copy, paths, output, num_workers=workers)
    assert (report.done, report.failed) == (2, 2)
    assert [(each.kind, each.error, each.attempts) for each in report.failures] == [
        ("input", "FileNotFoundError", 1),
        ("input", "FileNotFoundError", 1),
    ]
    assert [each.source for each in report.failures] == [str(path) for path in paths[1:3]]


def test_an_input_that_vanishes_after_listing_fails_alone(three, output):
    """The first one removes the last."""

    def remove_last(source, out):
        (source.parent / "0002.txt").unlink(missing_ok=True)

    report = run(remove_last, three, output)
    assert (report.done, report.failed) == (2, 1)
    assert report.failures[0].kind == "input"


def test_an_empty_file_is_an_input_like_any_other(three, output):
    """What an empty file means is the function's business."""
    (three / "0001.txt").write_bytes(b"")
    report = run(copy, three, output)
    assert report.metadata["bytes"].to_pylist()[1] == 0
    assert (output / "0001.txt").read_bytes() == b""


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: folder / "nowhere", "no such file or folder"),
        (lambda folder: [], "the list is empty"),
        (lambda folder: str(folder / "*.wav"), "matches nothing"),
        (lambda folder: folder / "empty", "no files in this folder"),
        (lambda folder: 7, "int instead of paths"),
        (lambda folder: [1, 2], "int instead of a path"),
    ],
)
def test_inputs_that_are_none_are_an_error(tmp_path, output, make, words):
    """Said before anything is made."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=words):
        run(nothing, make(tmp_path), output)
    assert nothing_was_made(output)


def test_an_input_listed_twice_is_an_error(three, output):
    """It would be worked on twice, and claim its outputs twice."""
    with pytest.raises(InputError, match="listed twice"):
        run(copy, [three / "0000.txt", three / "0001.txt", three / "0000.txt"], output)
    assert nothing_was_made(output)


NAMES = [
    "with space.txt",
    "new\nline.txt",
    "ümläut-日本.txt",
    "tab\t'quote\".txt",
    "-dash.txt",
    "%41.txt",
]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("form", ["parquet", "csv", "jsonl"])
def test_odd_names_come_through_whole(tmp_path, output, workers, form):
    """As source, as output, in every format of the table."""
    folder = tmp_path / "in"
    folder.mkdir()
    for name in NAMES:
        (folder / name).write_text(name)
    report = run(copy, folder, output, num_workers=workers, metadata=form)
    assert report.done == len(NAMES)
    assert set(report.metadata["destination"].to_pylist()) == set(NAMES)
    assert published(output) == {name: name.encode() for name in NAMES}


# ---- manifests ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("", "no header"),
        ("path,label\n", "no rows"),
        ("path,path\na,b\n", "two columns are called 'path'"),
        ("path,\na,b\n", "column 2 has no name"),
        ("path,label\na,x\nb\n", "line 3: 1 field where the header has 2"),
        ("path,label\na,x\nb,y,z\n", "line 3: 3 fields where the header has 2"),
        ('path\n"a\n', "line 2: not CSV"),
        (b"path\ncaf\xe9\n", r"line 2: byte 8 \(0xe9\) is not UTF-8"),
        (codecs.BOM_UTF16_LE + "path\na\n".encode("utf-16-le"), "UTF-16"),
        ("path\na\nb\na\n", "listed twice"),
        (b"path\na\0b\n", "line 2: a NUL byte"),
    ],
)
def test_a_bad_manifest_is_an_error_that_names_the_place(tmp_path, output, body, words):
    """File, line and reason; nothing is worked on."""
    with pytest.raises(InputError, match=words):
        run(nothing, manifest(tmp_path, body), output)
    assert nothing_was_made(output)


def test_a_bad_line_far_down_loses_nothing_that_was_done(tmp_path, output):
    """The listing is refused as a whole, and the earlier run stands."""
    path = manifest(tmp_path, "path\na\nb\n")
    run(nothing, path, output)
    manifest(tmp_path, "path\na\nb\nc,d\n")
    with pytest.raises(InputError, match="line 4"):
        run(nothing, path, output)
    manifest(tmp_path, "path\na\nb\n")
    assert run(nothing, path, output).resumed == 2


def test_a_bad_line_does_not_cost_the_earlier_run_on_restart(tmp_path, output):
    """Starting over begins when the inputs are known to be good."""
    path = manifest(tmp_path, "name\na\nb\n")
    run(write_name, path, output)
    manifest(tmp_path, "name\na\nb\nc,d\n")
    with pytest.raises(InputError, match="line 4"):
        run(write_name, path, output, redo="*")
    assert sorted(published(output)) == ["a", "b"]


def write_name(row, out):
    out.file(row["name"]).write_text("x")


def test_a_mark_and_blank_lines_in_a_manifest_do_no_harm(tmp_path, output):
    """What Excel and editors add is not data."""
    path = manifest(tmp_path, codecs.BOM_UTF8 + b"path,label\r\n\r\na,x\r\n\r\n\r\nb,y\r\n")
    table = run(length, path, output).metadata
    assert table.column_names == ["path", "label", "source", "destination", "length"]
    assert table["label"].to_pylist() == ["x", "y"]


def length(row, out):
    return {"length": len(row)}


def test_a_column_that_is_missing_fails_where_the_function_wants_it(tmp_path, output):
    """Which columns there must be is known to the function alone."""
    report = run(write_name, manifest(tmp_path, "path\na\n"), output)
    assert (report.failures[0].error, report.failures[0].message) == ("KeyError", "'name'")


# ---- functions ----------------------------------------------------------------------------------


def three_arguments(source, out, more):
    pass


@pytest.mark.parametrize("work", [three_arguments, lambda: None])
def test_a_function_with_other_arguments_is_refused(three, output, work):
    """Before anything starts, with its signature."""
    with pytest.raises(OptionError, match=r"cannot be called as .*\(source, out\)"):
        run(work, three, output)
    assert nothing_was_made(output)


@pytest.mark.parametrize("work", [None, 7, "split.py:split"])
def test_what_is_no_function_is_refused(three, output, work):
    """Also a text that would be one on the command line."""
    with pytest.raises(OptionError):
        run(work, three, output)


class Opaque:
    """Nothing that JSON knows."""


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": Opaque()}, "metadata 'a' is not JSON-serializable: Opaque"),
        ({"a": [1, {"b": 1j}]}, "metadata 'a' is not JSON-serializable: complex"),
        ({"a": {(1, 2): 3}}, "metadata 'a' is not JSON-serializable"),
        ({"a": {1: "x", "1": "y"}}, "a dict with the keys 1 and '1', one string in JSON"),
        ([{"a": 1}, 2], "metadata must all be dicts"),
        (
            {"a": pandas.DataFrame({"a": [1, 2]})},
            "metadata 'a' is not JSON-serializable: DataFrame",
        ),
        ({"a": pyarrow.table({"a": [1, 2]})}, "metadata 'a' is not JSON-serializable: Table"),
        (Opaque(), "metadata 'metadata' is not JSON-serializable"),
    ],
)
def test_metadata_that_cannot_be_json_fails_its_input(three, output, value, words):
    """The column and the type are named, and its outputs are not published."""

    def work(source, out):
        out.file(source.name).write_text("x")
        return value

    report = run(work, [three / "0000.txt"], output, num_workers=0)
    (failure,) = report.failures
    assert failure.error == "TypeError"
    assert words in failure.message
    assert published(output) == {}


BACKENDS = {
    "workers": {"num_workers": 1, "retries": 0},
    "tried again": {"num_workers": 1},
    "threads": {"num_workers": 1, "backend": "thread"},
    "concurrency": {"num_workers": 1, "concurrency": 3},
    "here": {"num_workers": 0},
}


def write_and_return(value, source, out):
    """Write a file, and return what cannot be stored for one of the inputs."""
    (out / source.name).write_text("x")
    return {"a": value if source.name == "0003.txt" else 1}


@pytest.mark.slow
@pytest.mark.parametrize("options", BACKENDS.values(), ids=BACKENDS)
def test_an_input_whose_metadata_cannot_be_stored_fails_alone(tmp_path, output, options):
    """With its own reason: the input after it has a folder that is there and empty."""
    inputs = make_inputs(tmp_path / "in", 9)
    report = run(partial(write_and_return, Opaque()), inputs, output, **options)
    assert [(each.source, each.error) for each in report.failures] == [
        (str(inputs / "0003.txt"), "TypeError")
    ]
    assert "metadata 'a' is not JSON-serializable: Opaque" in report.failures[0].message
    assert report.done == 8
    assert len([name for name in published(output) if name.endswith(".txt")]) == 8


def alarm_is_set():
    return signal.getitimer(signal.ITIMER_REAL)[0] > 0


def leave_traces(folder, source, out):
    """Change what a process has of its own, and fail; return what the next input finds."""
    umask = os.umask(0o077)
    os.umask(umask)
    found = os.getcwd(), umask, alarm_is_set(), os.listdir(out)
    os.umask(0o077)
    os.chdir(folder)
    if not alarm_is_set():
        signal.setitimer(signal.ITIMER_REAL, 1000)
    (out / "a.txt").write_text("x")
    if source.name == "0001.txt":
        raise ValueError("no good")
    return {"found": str(found), "destination": (out / "a.txt").rename(out / source.name)}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 0])
def test_an_input_finds_its_process_as_the_first_one_did(tmp_path, output, three, workers):
    """Its directory, file mode mask and alarm, and an empty folder, whatever one before did."""
    before = os.umask(0o022)
    os.umask(before)
    work = partial(leave_traces, str(tmp_path))
    report = run(work, three, output, num_workers=workers, retries=0)
    assert [each.error for each in report.failures] == ["ValueError"]
    found = str((os.getcwd(), before, alarm_is_set() and not workers, []))
    assert report.metadata.column("found").to_pylist() == [found, found]


kept = []


def write_late(source, out):
    """Write to a path of the input before, as a thread of it might."""
    before = [path for path in kept if path.parent.is_dir()]
    late = [path.write_text("late") for path in before]
    kept[:] = [Path(out) / "late.txt"]
    (out / source.name).write_text("x")
    late += [path.write_text("late") for path in before if path.parent.is_dir()]
    return {"late": len(late)}


def test_what_an_input_left_running_writes_nothing_for_another(output, three):
    """A folder with something in it is not used again, and its name is used once."""
    report = run(write_late, three, output)
    assert report.metadata.column("late").to_pylist() == [0, 1, 1]
    assert not [name for name in published(output) if "late" in name]


# ---- names of outputs ---------------------------------------------------------------------------


def write_as(name, source, out):
    out.file(name).write_text(source.name)


BAD_NAMES = [
    ("../x", "would leave the output folder"),
    ("a/../../x", "would leave the output folder"),
    ("/tmp/x", "would leave the output folder"),
    ("", "is not the name of a file"),
    (".", "would leave the output folder"),
    (None, "is not the name of a file"),
    (b"x", "is not the name of a file"),
    ("a\0b", "holds a NUL character"),
    (".forebay/x", "reserved for forebay"),
    ("./.forebay/ledger.sqlite", "reserved for forebay"),
    ("metadata.parquet", "reserved for forebay"),
    ("metadata.csv", "reserved for forebay"),
]


@pytest.mark.parametrize(("name", "words"), BAD_NAMES)
def test_a_name_that_is_not_an_outputs_fails_its_input(three, output, name, words):
    """Of kind "output", tried once, and nothing is written anywhere."""
    before = sorted(output.parent.rglob("*"))
    report = run(partial(write_as, name), [three / "0000.txt"], output)
    (failure,) = report.failures
    assert (failure.kind, failure.error, failure.attempts) == ("output", "OutputError", 1)
    assert re.search(words, failure.message)
    after = [path for path in sorted(output.parent.rglob("*")) if output not in path.parents]
    assert [path for path in after if path != output] == before


def claim(names, source, out):
    for name in names[source.stem]:
        out.file(name).write_text(source.stem)


CLAIMS = {"0000": ["a", "same"], "0001": ["same", "b"], "0002": ["c"]}
ORDERS = [(2, True), (0, False), (0, True), pytest.param(1, False, marks=pytest.mark.thorough)]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "backwards"), ORDERS)
def test_two_inputs_that_claim_one_name_both_fail(three, output, workers, backwards):
    """Whichever comes first, for any number of workers; and neither leaves a file."""
    paths = sorted(three.iterdir(), reverse=backwards)
    report = run(partial(claim, CLAIMS), paths, output, num_workers=workers)
    assert published(output) == {"c": b"0002"}
    assert sorted(failure.source for failure in report.failures) == [
        str(three / "0000.txt"),
        str(three / "0001.txt"),
    ]
    for failure in report.failures:
        assert failure.kind == "output"
        assert "output 'same' is claimed by two inputs" in failure.message


def test_a_claim_on_what_an_earlier_run_published_fails_both(three, output):
    """The new input is not better than the old one, nor the other way round."""
    work = partial(claim, CLAIMS)
    first = run(work, [three / "0000.txt", three / "0002.txt"], output)
    assert first.failed == 0
    second = run(work, sorted(three.iterdir()), output)
    assert (second.done, second.failed) == (1, 2)
    assert published(output) == {"c": b"0002"}


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "backwards"), ORDERS)
def test_a_file_where_another_input_needs_a_folder_stops_no_run(three, output, workers, backwards):
    """One of the two may be kept; the run ends, and so does the next."""
    paths = sorted(three.iterdir(), reverse=backwards)
    work = partial(claim, {"0000": ["a"], "0001": ["a/b"], "0002": ["c"]})
    for _ in range(2):
        report = run(work, paths, output, num_workers=workers)
        assert (report.done, report.failed) == (2, 1)
        assert report.failures[0].kind == "output"
        assert len(published(output)) == 2


def test_a_file_where_an_earlier_run_made_a_folder_fails_its_input(three, output):
    """What is published stays."""
    work = partial(claim, {"0000": ["a/b"], "0001": ["a"], "0002": ["a/b/c"]})
    assert run(work, [three / "0000.txt"], output).done == 1
    report = run(work, sorted(three.iterdir()), output)
    assert (report.done, report.failed) == (1, 2)
    assert published(output) == {"a/b": b"0000"}


def test_a_name_asked_for_and_not_written_fails_its_input(three, output):
    """Whoever asks for a path means to write there."""

    def ask(source, out):
        out.file("x")

    (failure,) = run(ask, [three / "0000.txt"], output).failures
    assert "'x'" in failure.message
    assert "never wrote it" in failure.message
    assert "put the ending into the name" in failure.message


@pytest.mark.parametrize("what", ["link", "folder"])
def test_what_is_no_file_at_the_staged_path_fails_its_input(three, output, what):
    """A link could lead anywhere; it is removed, and what it leads to is not."""
    target = three.parent / "precious"
    target.write_text("precious")

    def leave(source, out):
        path = out.file("x")
        path.symlink_to(target) if what == "link" else path.mkdir()

    (failure,) = run(leave, [three / "0000.txt"], output).failures
    words = "left a link" if what == "link" else "never wrote it"  # an empty folder is no output
    assert (failure.kind, words in failure.message) == ("output", True)
    assert published(output) == {}
    assert target.read_text() == "precious"


def test_a_link_out_of_the_output_folder_is_not_followed(three, output):
    """Its input fails and names the link; nothing is written beyond it."""
    outside = three.parent / "outside"
    outside.mkdir()
    output.mkdir()
    (output / "sub").symlink_to(outside)
    (failure,) = run(partial(write_as, "sub/x"), [three / "0000.txt"], output).failures
    assert "a symbolic link leads to" in failure.message
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_stands_there_already_is_never_overwritten(three, output, kind):
    """A user's own under an output's name stays; the input fails and says so."""
    output.mkdir()
    other = three.parent / "other"
    other.write_text("the user's own")
    place = output / "0001.txt"
    if kind == "file":
        place.write_text("the user's own")
    elif kind == "folder":
        place.mkdir()
    else:
        place.symlink_to(other)
    report = run(copy, three, output)
    (failure,) = report.failures
    assert (report.done, failure.source) == (2, str(three / "0001.txt"))
    assert "exists already" in failure.message
    assert place.is_dir() if kind == "folder" else place.read_text() == "the user's own"
    assert other.read_text() == "the user's own"
