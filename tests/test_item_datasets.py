"""from_folder, from_table, from_ids: many items, and a function that loads one."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pandas
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

import forebay


def text_of(path):
    return path.read_text()


def tenfold(number):
    return torch.tensor(number * 10)


def name_and_number(row):
    return Path(row["destination"]).name, row["n"]


def list_of_lengths(texts):
    return torch.tensor([len(text) for text in texts])


def save_nothing(sample, out):
    return {}


def copy(source, out):
    out.file(f"copied/{source.name}").write_bytes(source.read_bytes())


@pytest.fixture
def folder(tmp_path):
    for name in ("b.txt", "b/x.wav", "a/c/d.wav", "a/.hidden", ".git/x.wav", "b/y.txt"):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "in"


# ---- from_folder


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("**/*", ["a/c/d.wav", "b.txt", "b/x.wav", "b/y.txt"]),
        ("**/*.wav", ["a/c/d.wav", "b/x.wav"]),
        ("*", ["b.txt"]),
        ("b/*", ["b/x.wav", "b/y.txt"]),
        ("**/c/**", ["a/c/d.wav"]),
    ],
)
def test_files_come_by_path_and_pattern(folder, pattern, names):
    """Hidden ones are left out, and `load` gets the file's absolute path."""
    assert list(forebay.from_folder(folder, text_of, pattern)) == names
    assert forebay.from_folder(folder, str, pattern)[0] == str(folder / names[0])


@pytest.mark.parametrize("pattern", ["**/*", "**/*.wav", "*", "b/*", "*/*.txt", "[ab]/**/*.wav"])
def test_a_glob_is_a_folder_and_a_pattern(folder, pattern):
    """With the files that both together have; a folder of that very name is a folder."""
    assert list(forebay.from_folder(f"{folder}/{pattern}", str)) == [
        *forebay.from_folder(folder, str, pattern)
    ]
    os.rename(folder / "b", folder / "*")
    assert list(forebay.from_folder(f"{folder}/*", text_of)) == ["b/x.wav", "b/y.txt"]
    with pytest.raises(forebay.InputError, match=r"no file in .* matches pattern='\*.no'"):
        forebay.from_folder(f"{folder}/*.no", str)


def test_the_folder_may_be_left_later(folder, monkeypatch):
    """Paths are absolute from the start."""
    monkeypatch.chdir(folder.parent)
    dataset = forebay.from_folder("in", text_of)
    monkeypatch.chdir("/")
    assert dataset[-1] == "b/y.txt"


def test_the_metadata_table_of_an_output_folder_is_no_sample(folder, tmp_path):
    """A file of that name in any other folder is one."""
    (folder / "metadata.csv").write_text("a")
    assert forebay.from_folder(folder, text_of, "*")[1] == "a"
    forebay.preprocess(copy, folder, tmp_path / "out", num_workers=0, progress=False)
    dataset = forebay.from_folder(tmp_path / "out", str)
    names = [str(Path(path).relative_to(tmp_path / "out")) for path in dataset]
    assert names == [
        "copied/b.txt",
        "copied/d.wav",
        "copied/metadata.csv",
        "copied/x.wav",
        "copied/y.txt",
    ]
    assert (tmp_path / "out" / "metadata.parquet").exists()


@pytest.mark.slow
def test_a_file_name_need_not_be_utf8(folder, tmp_path):
    """A loader, a cache and predict read it; a table of inputs cannot hold it, which is said."""
    path = folder / os.fsdecode(b"caf\xe9.txt")
    try:
        path.write_text("coffee")
    except OSError:
        pytest.skip("this file system takes UTF-8 alone")
    dataset = forebay.from_folder(folder, text_of, "*.txt")
    assert dataset.source_of(1) == str(path)
    assert list(forebay.DataLoader(dataset, batch_size=2, num_workers=1)) == [["b.txt", "coffee"]]
    cached = forebay.cache(dataset, tmp_path / "cache", num_workers=0, progress=False)
    assert list(cached) == ["b.txt", "coffee"]
    report = forebay.predict(list_of_lengths, dataset, tmp_path / "out", progress=False)
    assert report.done == 2
    table = parquet.read_table(tmp_path / "out" / "part-00000.parquet")
    assert table["source"].to_pylist()[1] == str(folder / r"caf\udce9.txt")
    with pytest.raises(
        forebay.InputError, match=r"caf\\udce9\.txt': its name is not UTF-8"
    ) as caught:
        forebay.preprocess(dataset, output=tmp_path / "saved", save=save_nothing, num_workers=0)
    assert "ledger" not in str(caught.value)


def test_folders_without_files_are_errors_at_once(folder):
    """Missing, a file, empty, and nothing that matches."""
    (folder / "empty").mkdir()
    for bad in ("missing", "b.txt", "empty"):
        with pytest.raises(forebay.InputError, match=bad):
            forebay.from_folder(folder / bad, text_of)
    with pytest.raises(forebay.InputError, match=r"no file in .* matches"):
        forebay.from_folder(folder, text_of, "*.flac")
    for pattern in ("../*", "/etc/*", ""):
        with pytest.raises(forebay.OptionError, match="relative path"):
            forebay.from_folder(folder, text_of, pattern)


# ---- from_table

ROWS = [{"destination": "p/1.pt", "n": 1}, {"destination": "/abs/2.pt", "n": 2}]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("by_folder", [False, True])
def test_rows_are_typed_and_know_where_outputs_are(tmp_path, suffix, by_folder):
    """The same rows from each format, named itself or by its folder."""
    path = tmp_path / f"metadata{suffix}"
    if suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(ROWS), path)
    elif suffix == ".csv":
        path.write_text("destination,n\np/1.pt,1\n/abs/2.pt,2\n")
    else:
        path.write_text('{"destination":"p/1.pt","n":1}\n{"destination":"/abs/2.pt","n":2}\n')
    source = tmp_path if by_folder else path
    assert list(forebay.from_table(source)) == [
        {"destination": str(tmp_path / "p/1.pt"), "n": 1},
        {"destination": "/abs/2.pt", "n": 2},
    ]
    assert forebay.from_table(source, name_and_number)[1] == ("2.pt", 2)


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_a_table_may_be_at_a_url(folder, tmp_path, memory, form):
    """Or the folder that it was written to; its outputs are opened from there."""
    inputs = sorted(folder.glob("b/*"))
    for output in (tmp_path / "local", "memory://bucket/out"):
        forebay.preprocess(copy, inputs, output, num_workers=0, metadata=form, progress=False)
    expected = list(forebay.from_table(tmp_path / "local"))
    for url in ("memory://bucket/out", f"memory://bucket/out/metadata.{form}"):
        rows = list(forebay.from_table(url))
        assert [row["source"] for row in rows] == [row["source"] for row in expected]
        for row, path in zip(rows, inputs, strict=True):
            assert row["destination"] == f"memory://bucket/out/copied/{path.name}"
            with forebay.open_output(row["destination"]) as file:
                assert file.read() == path.read_bytes()


def test_a_table_may_be_in_an_archive(tmp_path):
    """Its outputs are not: a relative destination stays as it is."""
    with zipfile.ZipFile(tmp_path / "tables.zip", "w") as archive:
        archive.writestr("t.csv", "destination,n\np/1.pt,1\n")
    dataset = forebay.from_table(f"zip://t.csv::{tmp_path / 'tables.zip'}")
    assert list(dataset) == [ROWS[0]]


def test_what_is_not_a_table_at_a_url_is_an_error_that_names_it(memory):
    """Also where a table is damaged, with the line; `from_folder` names the way for a URL."""
    memory.pipe("/b/torn.csv", b"a,b\n1\n")
    memory.pipe("/b/text.txt", b"a")
    errors = {
        "memory://b/torn.csv": "memory://b/torn.csv, line 2: 1 field where the header has 2",
        "memory://b/text.txt": "'memory://b/text.txt' is not a table",
        "memory://b/gone.csv": "memory://b/gone.csv: no such file or folder",
        "memory://b": "the folder 'memory://b' holds no metadata table",
        "nosuch://b/t.csv": "nosuch://b/t.csv: it cannot be reached",
    }
    for url, message in errors.items():
        with pytest.raises(forebay.InputError) as caught:
            forebay.from_table(url)
        assert str(caught.value).startswith(message)
    with pytest.raises(forebay.InputError, match="pass their URLs to from_ids"):
        forebay.from_folder("memory://b", text_of)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda path: forebay.predict(torch.abs, [torch.ones(1)], path, progress=False),
            "part-00000.parquet",
        ),
        (lambda path: forebay.cache([1], path, num_workers=0, progress=False), "open_cache("),
    ],
    ids=["predict", "cache"],
)
def test_an_output_folder_that_has_no_table_says_what_opens_it(tmp_path, make, words):
    """Also as the inputs of a run."""
    make(tmp_path / "out")
    for read in (forebay.from_table, lambda path: forebay.preprocess(len, path, tmp_path / "x")):
        with pytest.raises(forebay.InputError) as caught:
            read(tmp_path / "out")
        assert "writes no table\n" in str(caught.value) and words in str(caught.value)


def test_the_folder_of_a_table_in_memory_is_named(tmp_path):
    """A path that is absolute stays as it is."""
    found = list(forebay.from_table(pa.Table.from_pylist(ROWS), folder=tmp_path))
    assert found == [{**ROWS[0], "destination": str(tmp_path / "p/1.pt")}, ROWS[1]]


def test_a_table_in_memory_is_in_the_working_folder_if_none_is_named(tmp_path, monkeypatch):
    """That of the call; if the first path is not there, the table is from somewhere else."""
    table = pa.Table.from_pylist(ROWS)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(forebay.InputError) as caught:
        forebay.from_table(table)
    assert str(caught.value).startswith(
        f"the Table: its destination 'p/1.pt' is not in the working folder {tmp_path}\n"
    )
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "1.pt").touch()
    dataset = forebay.from_table(table)
    monkeypatch.chdir("/")
    assert dataset[0]["destination"] == str(tmp_path / "p/1.pt")


def test_tables_that_cannot_be_used_are_errors_at_once(tmp_path):
    """Missing, empty, torn, of two formats, or no table at all."""
    (tmp_path / "torn.csv").write_text("a,b\n1\n")
    (tmp_path / "open.csv").write_text('a\n1\n"2\n3\n')
    (tmp_path / "torn.jsonl").write_text('{"a": 1}\n{"a"')
    (tmp_path / "torn.parquet").write_text("PAR1")
    (tmp_path / "empty.csv").write_text("a,b\n")
    (tmp_path / "nothing.csv").write_text("")
    (tmp_path / "text.txt").write_text("a")
    for bad in (
        *(
            "torn.csv",
            "open.csv",
            "torn.jsonl",
            "torn.parquet",
            "empty.csv",
            "nothing.csv",
            "text.txt",
        ),
        *("missing.csv", "."),
    ):
        with pytest.raises(forebay.InputError):
            forebay.from_table(tmp_path / bad)
    for name in ("metadata.csv", "metadata.jsonl"):
        (tmp_path / name).write_text("a\n1\n")
    with pytest.raises(forebay.InputError, match=r"metadata\.csv and metadata\.jsonl"):
        forebay.from_table(tmp_path)


# ---- from_ids


def test_ids_are_loaded_with_their_labels():
    """From a mapping, a function, or none; IDs of any kind, arrays among them."""
    assert forebay.from_ids(["a", "b"], str.upper)[1] == "B"
    assert forebay.from_ids(["a", "b"], str.upper, {"b": 2, "a": 1})[-2] == ("A", 1)
    assert forebay.from_ids(iter("ab"), str.upper, ord)[0] == ("A", 97)
    numbers = forebay.from_ids(np.arange(3), tenfold)
    assert type(numbers.items[1]) is int
    assert list(map(int, numbers)) == [0, 10, 20]


def test_ids_without_labels_are_counted_at_once():
    """Not in the middle of an epoch."""
    with pytest.raises(forebay.InputError, match="2 of 3 IDs have no label; the first is 'b'"):
        forebay.from_ids(["a", "b", "c"], str.upper, {"a": 1})


def test_labels_whose_keys_are_of_another_type_are_shown():
    """IDs of a table are often numbers, and labels from JSON have strings as keys."""
    with pytest.raises(forebay.InputError, match="There are 2 labels, the first of them for '1'"):
        forebay.from_ids([1, 2], str, {"1": 0, "2": 1})


def test_a_series_is_no_mapping_but_its_index_may_hold_the_ids():
    """`dict(zip(ids, labels))` alone would give each ID the label of another."""
    labels = pandas.Series({"b": 1, "a": 0})
    with pytest.raises(forebay.OptionError, match=r"the IDs as its index: labels.to_dict\(\)"):
        forebay.from_ids(["a", "b"], str.upper, labels)
    assert list(forebay.from_ids(["a", "b"], str.upper, labels.to_dict())) == [("A", 0), ("B", 1)]


@pytest.mark.parametrize(
    ("ids", "load", "labels", "error"),
    [
        ([], tenfold, None, forebay.InputError),
        ("abc", tenfold, None, forebay.OptionError),
        ([1], "load", None, forebay.OptionError),
        ([1], tenfold, [1], forebay.OptionError),
    ],
)
def test_what_cannot_be_used_is_said_at_once(ids, load, labels, error):
    """No IDs, a text, no function, a list of labels."""
    with pytest.raises(error):
        forebay.from_ids(ids, load, labels)


# ---- all of them


def test_an_index_is_one_whole_number():
    """A slice is refused in words, and what is beyond the end is an IndexError."""
    dataset = forebay.from_ids([1, 2, 3], tenfold)
    assert dataset[np.int64(2)] == dataset[-1] == 30
    with pytest.raises(TypeError, match="Subset"):
        dataset[:2]
    with pytest.raises(IndexError, match="there are 3"):
        dataset[3]


def test_what_load_raises_names_the_item(folder):
    """Its type stays."""
    dataset = forebay.from_folder(folder, text_of)
    (folder / "b" / "x.wav").unlink()
    with pytest.raises(FileNotFoundError) as caught:
        dataset[2]
    assert caught.value.__notes__ == ["forebay: it was raised for item 2: 'b/x.wav'"]


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_load_what_this_process_would(folder, context):
    """It travels by pickle, too."""
    dataset = forebay.from_folder(folder, text_of)
    loader = forebay.DataLoader(
        dataset, batch_size=3, num_workers=2, multiprocessing_context=context
    )
    assert [name for batch in loader for name in batch] == list(dataset)


@pytest.mark.slow
def test_a_million_ids_are_some_bytes_each():
    """In memory and in the one pickle; ten million are ten times that."""
    count = 1_000_000
    ids = (f"sample-{k:08d}" for k in range(count))
    dataset = forebay.from_ids(ids, str.upper, labels=len)
    assert dataset.items.nbytes <= 20 * count  # 15 letters and 4 bytes for where they start
    buffers = []
    rest = pickle.dumps(dataset, protocol=5, buffer_callback=buffers.append)
    assert len(rest) < 2000
    assert sum(len(each.raw()) for each in buffers) == dataset.items.nbytes
    assert dataset[-1] == ("SAMPLE-00999999", 15)
