"""A function gets what was listed, and an output names the files that it is published with."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow
import pytest
from driving import here, make_inputs, published

import forebay
from forebay.errors import InputError
from forebay.runs.returned import PIECE_ROWS

# On Python 3.12 and newer, a fork beside threads is warned of.
pytestmark = [
    pytest.mark.usefixtures("forked_workers"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def texts(tmp_path, monkeypatch):
    """Three files in `in`."""
    monkeypatch.chdir(tmp_path)
    make_inputs(Path("in"), 3)


NAMES = [f"in/{n:04d}.txt" for n in range(3)]


def run(work, inputs, output="out", **options):
    return forebay.preprocess(work, inputs, output, progress=False, **{"num_workers": 0, **options})


# ---- inputs -------------------------------------------------------------------------------------


def kind(path):
    return {"kind": type(path).__name__, "name": str(path)}


def of_text(path: str):
    return kind(path)


def of_path(path: Path, out):
    return kind(path)


STR, PATH = "str", type(Path()).__name__
LISTED = {
    "strings": (kind, NAMES, STR),
    "paths": (kind, [*map(Path, NAMES)], PATH),
    "both": (kind, [NAMES[0], *map(Path, NAMES[1:])], PATH),
    "a generator of strings": (kind, (each for each in NAMES), STR),
    "a set": (kind, set(NAMES), STR),
    "a series": (kind, pd.Series(NAMES), STR),
    "an array": (kind, np.array(NAMES), STR),
    "entries": (kind, None, PATH),  # of a folder, as `os.scandir` lists them
    "a folder": (kind, "in", PATH),
    "a glob": (kind, "in/*.txt", PATH),
    "annotated str": (of_text, "in", STR),
    "annotated str, paths": (of_text, [*map(Path, NAMES)], STR),
    "annotated Path": (of_path, NAMES, PATH),
}


@pytest.mark.parametrize(("work", "inputs", "expected"), LISTED.values(), ids=LISTED)
def test_a_function_gets_what_was_listed(work, inputs, expected):
    """Strings for strings, paths for paths; or what its parameter is annotated as."""
    inputs = os.scandir("in") if inputs is None else inputs
    rows = run(work, inputs).metadata.to_pylist()
    assert {row["kind"] for row in rows} == {expected}
    assert len(rows) == 3


def test_a_retry_gives_what_was_listed():
    """The folder knows what it was."""
    Path("in/0001.txt").unlink()
    assert run(kind, NAMES, retries=0).failed == 1
    Path("in/0001.txt").write_text("x")
    assert here("retry", "out", f"{__file__}:kind")[0] == 0
    assert {row["kind"] for row in forebay.from_table("out")} == {STR}


def join_strings(path, out):
    with open(out + "/" + path.split("/")[-1] + ".up", "w") as file:
        file.write("x")


def of_two_strings(in_path: str, out_path: str):
    target = out_path + "/" + in_path.split("/")[-1].replace(".txt", ".up")
    Path(target).write_text(target[:1] + out_path.rstrip("/")[:1])


@pytest.mark.parametrize("work", [join_strings, of_two_strings])
def test_out_may_be_used_as_a_string(work):
    """With `+`, and as a string if it is annotated as one."""
    assert run(work, NAMES).done == 3
    assert len([name for name in published(Path("out")) if name.endswith(".up")]) == 3


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (range(5), r"got int instead of a path\n  .*give rows: \[\{'number': each\}"),
        (np.arange(3), r"got int64 instead of a path\n  .*\{'number': each\}"),
        ([(NAMES[0], "b")], r"got tuple instead of a path\n  .*\{'image': a, 'mask': b\}"),
        (zip(NAMES, NAMES, strict=True), "got tuple instead of a path"),
        ([NAMES[:2], NAMES[2:]], r"got list instead of a path\n  .*batch_size="),
        ({"a": NAMES[0]}, r"got dict instead of paths\n  Give its values"),
    ],
)
def test_what_is_no_path_is_refused_with_the_next_step(inputs, words):
    """Whatever pools take, the message says how forebay takes it."""
    with pytest.raises(InputError, match=words):
        run(kind, inputs)


@pytest.mark.parametrize("ending", [".xlsx", ".ods", ".feather"])
def test_a_table_of_another_format_is_refused_with_the_next_step(ending):
    """In a list it is a file like any other."""
    Path(f"t{ending}").write_bytes(b"PK\x03\x04")
    with pytest.raises(InputError, match=r"pandas.read_excel"):
        run(kind, f"t{ending}")
    assert run(kind, [f"t{ending}"]).done == 1


class Rows:
    """A Dataset of dicts, as other libraries have them."""

    column_names = ("text", "n")

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return {"text": "ab"[index], "n": index}


LINES = "".join(json.dumps({"text": text, "n": n}) + "\n" for n, text in enumerate("ab")).encode()
PACKED = {
    "a.jsonl.gz": gzip.compress,
    "a.json.gz": gzip.compress,
    "a.jsonl.bz2": bz2.compress,
    "a.jsonl.xz": lzma.compress,
    "a.jsonl.zst": lambda data: pyarrow.Codec("zstd").compress(data, asbytes=True),
}


def text_of(row):
    return {"t": row["text"]}


@pytest.mark.parametrize("name", [*PACKED, "a Dataset", "several"])
def test_rows_come_from_any_manifest(name):
    """Compressed in any usual way, in several files, or in a Dataset of another library."""
    if name in PACKED:
        Path(name).write_bytes(PACKED[name](LINES))
    for number, line in enumerate(LINES.splitlines()):
        Path(f"part-{number}.jsonl").write_bytes(line)
    parts = ["part-0.jsonl", "part-1.jsonl"]
    inputs = {"a Dataset": Rows(), "several": forebay.from_table(parts)}.get(name, name)
    rows = run(text_of, inputs).metadata.select(["text", "n", "t"]).to_pylist()
    assert rows == [{"text": text, "n": n, "t": text} for n, text in enumerate("ab")]
    assert [*forebay.from_table("part-*.jsonl")] == [*forebay.from_table(parts)]


def test_a_damaged_archive_is_an_error_in_words():
    """It says which file cannot be decompressed."""
    for name, pack in PACKED.items():
        Path(name).write_bytes(pack(LINES)[:-9])
        with pytest.raises(InputError, match=name):
            run(text_of, name)


# ---- outputs that name themselves ---------------------------------------------------------------


def list_files(source, out):
    """Write a file, and lists of it as Kaldi and NeMo have them."""
    wav = out / f"{source.stem}.wav"
    wav.write_bytes(b"RIFF")
    (out / f"{source.stem}.scp").write_text(f"{source.stem} {wav}\n")
    (out / f"{source.stem}.json").write_text(json.dumps({"audio_filepath": str(wav.resolve())}))
    (out / f"{source.stem}.final").write_text(str(out.final(wav)))


def one_list(source, out):
    """Write one file, which is moved out of the folder of its input."""
    (out / f"{source.stem}.txt").write_text(f"{out}/{source.stem}.txt {out.file('a.wav').parent}")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_path_in_an_output_leads_to_the_published_file(workers):
    """Not to the folder in which it was staged, which is gone."""
    assert run(list_files, "in", num_workers=workers).done == 3
    for number in range(3):
        wav = Path("out", f"{number:04d}.wav").resolve()
        assert wav.exists()
        assert Path(f"out/{number:04d}.scp").read_text().split()[1] == str(wav)
        named = json.loads(Path(f"out/{number:04d}.json").read_text())
        assert named == {"audio_filepath": str(wav)}
        assert Path(f"out/{number:04d}.final").read_text() == str(wav)
    assert here("verify", "out")[0] == 0


def test_a_path_that_cannot_be_mended_fails_its_input(memory):
    """An output in a bucket has a URL, which `out.final` returns."""

    def with_url(source, out):
        (out / "a.txt").write_text(str(out.final("a.wav")))

    report = run(list_files, "in/0000.txt", "memory://bucket/out", retries=0)
    assert "Write out.final('a.wav') into the file" in report.failures[0].message
    assert run(with_url, "in/0000.txt", "memory://bucket/other").done == 1
    assert memory.cat("/bucket/other/a.txt") == b"memory://bucket/other/a.wav"


# ---- many rows of one input ---------------------------------------------------------------------

MANY = 2 * PIECE_ROWS + 5


def explode(source, out=None):
    """Yield many rows; for the first input, those of a file that it writes."""
    if out is not None and source.name == "0000.txt":
        (out / "all.txt").write_text("x")
    for n in range(MANY):
        yield {"n": n, "text": f"line\n{n}"}


@pytest.mark.parametrize("make", [explode, lambda source: [*explode(source)]])
def test_many_rows_of_one_input_are_all_in_the_table(make):
    """In their order, whether they were yielded or returned, with the output that they are of."""
    report = run(make, "in")
    rows = report.metadata.to_pylist()
    assert [row["n"] for row in rows] == [*range(MANY)] * 3
    assert rows[1]["text"] == "line\n1"
    places = {row["destination"] for row in rows[:MANY]}
    assert places == {"all.txt" if make is explode else None}
    assert run(make, "in").resumed == 3


def test_rows_of_two_kinds_fail_their_input():
    """Also where the other kind comes after many."""

    def mixed(source):
        yield from explode(source)
        yield 7

    report = run(mixed, "in/0000.txt", retries=0)
    assert (
        "metadata must all be dicts, or records with fields, but one of"
        in report.failures[0].message
    )


# ---- folders with a past ------------------------------------------------------------------------


def double(source, out):
    (out / source.name).write_text(source.read_text() * 2)


@pytest.fixture
def old(texts):
    """One file as the function writes it, one that is other, and a table of an earlier program."""
    Path("out").mkdir()
    Path("out/0000.txt").write_text(Path("in/0000.txt").read_text() * 2)
    Path("out/0001.txt").write_text("other")


def test_an_existing_file_of_the_same_content_is_taken_over(old):
    """One that is other is an error that names the argument, and stays."""
    report = run(double, "in", retries=0)
    (failure,) = report.failures
    assert failure.source == "in/0001.txt"
    assert "'0001.txt' exists already with other content" in failure.message
    assert "overwrite=True (--overwrite)" in failure.message
    assert "shutil.copy(out.final('0001.txt'), out / '0001.txt')" in failure.message
    assert Path("out/0001.txt").read_text() == "other"
    assert report.done == 2


def test_existing_files_are_replaced_if_that_is_asked_for(old):
    """The table of an earlier program, too."""
    Path("out/metadata.parquet").write_bytes(b"foreign")
    assert run(double, "in", overwrite=True).done == 3
    assert Path("out/0001.txt").read_text() == Path("in/0001.txt").read_text() * 2
    assert here("verify", "out")[0] == 0


def test_a_function_keeps_what_an_earlier_program_made(old):
    """By a copy of it, which takes its place."""

    def keep(source, out):
        done = out.final(source.name)
        (out / source.name).write_text(done.read_text() if done.exists() else "new")

    assert run(keep, "in").done == 3
    assert [Path(f"out/000{n}.txt").read_text() for n in (1, 2)] == ["other", "new"]


def test_verify_advises_to_prune_only_what_no_other_call_can_list():
    """Outputs of inputs that are there still may be those of another call."""
    run(double, "in")
    run(double, [*map(Path, NAMES[:2])])
    code, shown, _ = here("verify", "out")
    assert code == 3
    assert "may be of another call" in shown
    assert "prune" not in shown
    Path(NAMES[2]).unlink()
    assert "can be removed: forebay prune out" in here("verify", "out")[1]


def test_a_name_that_is_not_utf8_is_an_input_like_any_other():
    """The function gets it as it is; the table has it with escapes."""
    name = os.fsdecode(b"in/caf\xe9.txt")
    try:
        Path(name).write_text("x")
    except OSError:
        pytest.skip("this file system takes UTF-8 alone")
    report = run(double, "in")
    assert report.done == 4
    assert report.metadata.column("source").to_pylist()[-1] == r"in/caf\udce9.txt"
    assert Path("out", Path(name).name).read_text() == "xx"
    assert run(double, "in").resumed == 4
