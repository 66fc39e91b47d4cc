"""`from_table(columns=)`: equal columns, whatever holds them, and errors before any batch."""

from __future__ import annotations

import datetime
import decimal
import json
import os
import pickle
import shutil
from itertools import chain

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from pyarrow import csv, feather, parquet
from torch.utils.data import Subset

from forebay import ChangedError, DataLoader, InputError, OptionError, collate, from_table
from forebay.shards.blocks import ShardBlocks

ROWS = 10
TABLE = pa.table(
    {
        "age": np.arange(ROWS),
        "height": np.linspace(1.5, 2.0, ROWS),
        "name": [f"ü{row}" for row in range(ROWS)],
    }
)
NAMES = ["height", "name", "age"]


def arrow_file(path, table, *, is_stream):
    opened = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    with opened(path, table.schema) as writer:
        writer.write_table(table, 3)
    return path


def output_of_preprocess(path):
    path.mkdir()
    parquet.write_table(TABLE, path / "metadata.parquet")
    return path


def lines_of_json(path):
    path.write_text("".join(json.dumps(row) + "\n" for row in TABLE.to_pylist()))
    return str(path)


# Each makes a table in one of the forms, given a folder.
FORMS = {
    "pyarrow": lambda _: TABLE,
    "pandas": lambda _: TABLE.to_pandas(),
    "polars": lambda _: pl.DataFrame(TABLE),
    "polars in chunks": lambda _: pl.concat(
        [pl.DataFrame(TABLE[:4]), pl.DataFrame(TABLE[4:])], rechunk=False
    ),
    "arrays": lambda _: {name: TABLE[name].to_numpy(zero_copy_only=False) for name in NAMES},
    "lists": lambda _: TABLE.to_pydict(),
    "tensors": lambda _: {
        "age": torch.arange(ROWS),
        "height": torch.from_numpy(TABLE["height"].to_numpy().copy()),
        "name": TABLE["name"].to_pylist(),
    },
    "dicts": lambda _: TABLE.to_pylist(),
    "csv": lambda folder: csv.write_csv(TABLE, folder / "t.csv") or folder / "t.csv",
    "jsonl": lambda folder: lines_of_json(folder / "t.jsonl"),
    "parquet": lambda folder: (
        parquet.write_table(TABLE, folder / "t.parquet", row_group_size=3) or folder / "t.parquet"
    ),
    "output folder": lambda folder: output_of_preprocess(folder / "out"),
    "arrow file": lambda folder: arrow_file(folder / "t.arrow", TABLE, is_stream=False),
    "arrow stream": lambda folder: arrow_file(folder / "t.arrow", TABLE, is_stream=True),
    "feather": lambda folder: (
        feather.write_feather(TABLE, folder / "t.feather") or folder / "t.feather"
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_sample_has_the_columns_that_were_named(form, tmp_path):
    """In that order, with tensors for numbers; a negative index counts from the end."""
    dataset = from_table(FORMS[form](tmp_path), columns=NAMES)
    assert len(dataset) == ROWS
    for row in (0, 4, -1):
        sample, expected = dataset[row], TABLE.take([row % ROWS]).to_pylist()[0]
        assert list(sample) == NAMES
        assert sample["height"].dtype is torch.float64 and sample["age"].dtype is torch.int64
        values = {
            name: getattr(each, "item", lambda each=each: each)() for name, each in sample.items()
        }
        assert values == {name: expected[name] for name in NAMES}
    with pytest.raises(IndexError):
        dataset[ROWS]


@pytest.mark.parametrize("form", FORMS)
def test_a_dataset_of_columns_is_pickled(form, tmp_path):
    """For workers that are not forked; of a mapped file there is only the path."""
    dataset = from_table(FORMS[form](tmp_path), columns=NAMES)
    pickled = pickle.dumps(dataset)
    assert repr(pickle.loads(pickled)[3]) == repr(dataset[3])
    if "arrow " in form:
        assert len(pickled) < 1000


@pytest.mark.parametrize("make", [np.asarray, torch.as_tensor], ids=["array", "tensor"])
def test_arrays_are_used_as_they_are(make):
    """There is no copy of them: a change is seen."""
    values = make(np.arange(6.0).reshape(3, 2))
    dataset = from_table({"a": values}, columns=["a"])
    values[1, 1] = 99.0
    assert dataset[1]["a"].tolist() == [2.0, 99.0]


def test_arrays_of_any_layout_have_the_same_values():
    """Strides, the other order of bytes, and three dimensions."""
    whole = np.arange(24).reshape(4, 3, 2)
    arrays = {
        "strided": np.arange(8)[::2],
        "transposed": np.arange(8).reshape(2, 4).T,
        "swapped": np.arange(4).astype(">i2"),
        "deep": whole,
        "bool": np.array([True, False, True, True]),
        "bytes": np.array([b"a", b"bb", b"", b"c"]),
        "words": np.array(["a", "bb", "", "c"]),
    }
    dataset = from_table(arrays, columns=list(arrays))
    for name, values in arrays.items():
        found = [dataset[row][name] for row in range(4)]
        assert [
            getattr(each, "tolist", lambda each=each: each)() for each in found
        ] == values.tolist()


NESTED = {
    "structs": [{"x": 1}, {"x": None}, {"x": 3}],
    "lists of strings": [["x"], [], ["y", "z"]],
    "lists of structs": [[{"x": [1.5], "y": "a"}], [], [{"x": [], "y": None}]],
    "null": [["x"], None, []],
}


@pytest.mark.parametrize("name", NESTED)
def test_lists_and_structs_are_python_values(name):
    """In a row, in a batch, and from several chunks."""
    chunk = pa.array(NESTED[name])
    dataset = from_table(pa.table({"a": pa.chunked_array([chunk, chunk])}), columns=["a"])
    assert [dataset[row]["a"] for row in range(6)] == NESTED[name] * 2
    with DataLoader(dataset, batch_size=4) as loader:
        assert next(iter(loader))["a"] == [*NESTED[name], NESTED[name][0]]


def test_arrays_of_any_shape_are_tensors():
    """As predictions and caches store them; a batch of unlike ones says what to do."""
    values = [np.ones((2, 3)), np.zeros((0, 3)), np.ones((2, 3))]
    lists = {
        "data": pa.array([each.ravel().tolist() for each in values], pa.large_list(pa.float64())),
        "shape": pa.array([each.shape for each in values], pa.list_(pa.int64())),
    }
    table = pa.table({"a": pa.StructArray.from_arrays(lists.values(), [*lists])})
    dataset = from_table(table, columns=["a"])
    assert [tuple(dataset[row]["a"].shape) for row in range(3)] == [(2, 3), (0, 3), (2, 3)]
    assert dataset.columns.take([0, 2])["a"].shape == (2, 2, 3)
    assert dataset.columns.counts("a").tolist() == [2, 0, 2]
    with pytest.raises(InputError, match=r"shape \(2, 3\) and one of \(0, 3\)"):
        dataset.columns.take([0, 1])


TIMES = [datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)] * 2
# Columns that no batch can have, and what is said.
REFUSED = {
    "dates": (pa.array(TIMES, pa.date32()), "has the type date32"),
    "times": (pa.array(TIMES), "times to integers"),
    "decimals": (pa.array([decimal.Decimal("1.5")] * 2), "decimals to floats"),
    "nothing": (pa.nulls(2), "has the type null"),
    "null": (pa.array([1, None]), "'a' is null in row 1.*1 of its rows"),
    "null bool": (pa.array([None, True]), "'a' is null in row 0"),
    "null string": (pa.array(["x", None]), "'a' is null in row 1"),
    "null category": (pa.array(["x", None]).dictionary_encode(), "'a' is null in row 1"),
    "null list": (pa.array([[1], None]), "'a' is null in row 1"),
    "null in a list": (pa.array([[1], [2, None]]), "'a' has a null in the list of row 1"),
    "null in a fixed list": (pa.array([[1, 1], [2, None]], pa.list_(pa.int8(), 2)), "row 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_column_that_makes_no_batch_is_refused_at_once(name):
    """With the type, or the row, and what to do."""
    values, words = REFUSED[name]
    with pytest.raises(InputError, match=f"(?s)column 'a'.*{words}|{words}"):
        from_table(pa.table({"a": values}), columns=["a"])
    # Other columns of that table can be used.
    assert from_table(pa.table({"a": values, "b": [1, 2]}), columns=["b"])[1]["b"] == 2


@pytest.mark.parametrize("form", FORMS)
def test_a_column_that_does_not_exist_is_named_with_one_like_it(form, tmp_path):
    """And with all of them."""
    table = FORMS[form](tmp_path)
    with pytest.raises(InputError, match=r"no column is called 'heigth'; one is 'height'\n.*'age'"):
        from_table(table, columns=["age", "heigth"])


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ([], "must be a list of names"),
        ("age", r"columns='age' is not valid; it must be a list"),
        ([1], "must be a list of names"),
        (["age", "age"], "names a column twice"),
    ],
)
def test_impossible_names_are_refused(columns, words):
    """A single string is not a list of its letters."""
    with pytest.raises(OptionError, match=words):
        from_table(TABLE, columns=columns)


def test_what_is_for_rows_is_refused_with_columns():
    """`load` would be called for each row, and `folder` is for a destination."""
    for other in ({"load": print}, {"folder": "."}):
        with pytest.raises(OptionError, match=r"columns= makes batches by column"):
            from_table(TABLE, columns=["age"], **other)


@pytest.mark.parametrize("form", ["pyarrow", "pandas", "polars", "parquet", "arrow file"])
def test_a_table_without_rows_is_an_error(form, tmp_path, monkeypatch):
    """As for rows."""
    monkeypatch.setitem(globals(), "TABLE", TABLE[:0])
    with pytest.raises(InputError, match="has no rows"):
        from_table(FORMS[form](tmp_path), columns=["age"])


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"a": [1, 2], "b": [1]}, "columns have different lengths"),
        ({"a": torch.ones(2, requires_grad=True), "b": [1, 2]}, "column 'a' cannot be read"),
        ({"a": [{}, "x"], "b": [1, 2]}, "column 'a' cannot be read"),
        ({"a": 3, "b": [1]}, "column 'a' cannot be read"),
        (7, "got int instead of a table"),
        (pd.DataFrame([[1, 2, 3]], columns=["a", "a", "b"]), "2 columns are called 'a'"),
        (pd.DataFrame({"a": [1, "x", {}], "b": 0}), "pyarrow cannot read it"),
    ],
)
def test_a_table_that_cannot_be_used_is_an_error(table, words):
    """It says which column, and why."""
    with pytest.raises(InputError, match=words):
        from_table(table, columns=["a", "b"])


@pytest.mark.parametrize("name", ["t.parquet", "t.arrow", "t.feather"])
def test_a_damaged_file_is_an_error(name, tmp_path):
    """Cut, or something else."""
    whole = tmp_path / name
    FORMS["parquet" if name == "t.parquet" else "arrow file"](tmp_path)
    if name == "t.feather":
        shutil.move(tmp_path / "t.arrow", whole)
    data = whole.read_bytes()
    for part in (data[: len(data) // 2], b"something else", b""):
        whole.write_bytes(part)
        with pytest.raises(InputError, match=f"{name}: it cannot be"):
            from_table(whole, columns=["age"])
    with pytest.raises(InputError, match="does not exist"):
        from_table(tmp_path / f"no_{name}", columns=["age"])


# ---- several files -------------------------------------------------------------------------------


def parquet_file(path, table):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path, row_group_size=2)
    return path


def arrow_in_folders(path, table):
    path.parent.mkdir(parents=True, exist_ok=True)
    return arrow_file(path, table, is_stream=path.stem.endswith("b"))


WRITERS = {"parquet": parquet_file, "arrow": arrow_in_folders}


@pytest.fixture(params=WRITERS)
def several(request, tmp_path):
    """A folder with the rows of TABLE in four files, one of them empty; returns it and a suffix."""
    write, suffix = WRITERS[request.param], request.param
    write(tmp_path / "data" / f"c.{suffix}", TABLE[7:])
    write(tmp_path / "data" / f"a.{suffix}", TABLE[:3])
    write(tmp_path / "data" / "b" / f"b.{suffix}", TABLE[3:7])
    write(tmp_path / "data" / "b" / f"x.{suffix}", TABLE[:0])
    (tmp_path / "data" / ".hidden").mkdir()
    (tmp_path / "data" / "README.md").write_text("words")
    return tmp_path / "data", suffix


@pytest.mark.parametrize("way", ["folder", "glob", "braces", "list", "parts of a list"])
def test_several_files_are_one_table_in_the_order_of_their_paths(several, way):
    """A folder with its folders, patterns, and lists, which are sorted, too."""
    folder, suffix = several
    location = {
        "folder": folder,
        "glob": f"{folder}/**/*.{suffix}",
        "braces": f"{folder}/{{c,a,b/b}}.{suffix}",
        "list": [folder / f"c.{suffix}", folder / "b" / f"b.{suffix}", folder / f"a.{suffix}"],
        "parts of a list": [f"{folder}/[ac].{suffix}", folder / "b"],
    }[way]
    dataset = from_table(location, columns=NAMES)
    assert [dataset[row]["name"] for row in range(len(dataset))] == TABLE["name"].to_pylist()
    batch = next(iter(DataLoader(dataset, batch_size=ROWS)))
    assert batch["age"].tolist() == list(range(ROWS)) and batch["height"].dtype is torch.float64
    assert repr(pickle.loads(pickle.dumps(dataset))[5]) == repr(dataset[5])


def test_several_files_that_do_not_fit_into_memory_are_read_by_row_groups(tmp_path, monkeypatch):
    """Each when it is needed, and not if another file took its place."""
    for number in range(3):
        parquet_file(tmp_path / f"{number}.parquet", TABLE.slice(4 * number, 4))
    monkeypatch.setattr("forebay.inputs.chosen_columns.memory_for_files", lambda: 10)
    dataset = from_table(tmp_path, columns=["age", "name"])
    assert [dataset[row]["age"].item() for row in range(ROWS)] == list(range(ROWS))
    assert [each["name"] for each in dataset.__getitems__([9, 0, 5])] == ["ü9", "ü0", "ü5"]
    assert pickle.loads(pickle.dumps(dataset))[9]["age"] == 9
    parquet_file(tmp_path / "2.parquet", TABLE)
    with pytest.raises(ChangedError, match=r"2\.parquet' changed after it was indexed"):
        pickle.loads(pickle.dumps(dataset))[8]


def test_files_with_different_types_are_named_with_the_column(several):
    """Both files, whatever comes between them; and a file without the column."""
    folder, suffix = several
    other = TABLE.set_column(0, "age", TABLE["age"].cast(pa.int32()))
    WRITERS[suffix](folder / f"d.{suffix}", other)
    with pytest.raises(
        InputError,
        match=rf"column 'age' is of type int64 in '.*a\.{suffix}', and of type int32 in '.*d\.",
    ):
        from_table(folder, columns=NAMES)
    assert len(from_table(folder, columns=["name"])) == 2 * ROWS
    WRITERS[suffix](folder / f"d.{suffix}", TABLE.drop_columns("age"))
    with pytest.raises(InputError, match=rf"d\.{suffix}: no column is called 'age'"):
        from_table(folder, columns=NAMES)


def test_files_that_cannot_be_read_by_column_are_named(tmp_path):
    """Of another format, of two formats, or none at all."""
    parquet_file(tmp_path / "a.parquet", TABLE)
    (tmp_path / "b.jsonl").write_text("{}")
    with pytest.raises(InputError, match=r"b\.jsonl' is no Parquet or Arrow file"):
        from_table(tmp_path, columns=["age"])
    (tmp_path / "b.jsonl").unlink()
    arrow_file(tmp_path / "c.arrow", TABLE, is_stream=False)
    with pytest.raises(InputError, match=r"a\.parquet' and '.*c\.arrow' are files of two formats"):
        from_table(tmp_path, columns=["age"])
    assert len(from_table(tmp_path / "*.parquet", columns=["age"])) == ROWS
    with pytest.raises(InputError, match="no shards"):
        from_table(tmp_path / "x*.parquet", columns=["age"])


@pytest.mark.parametrize("suffix", WRITERS)
def test_categories_of_several_files_need_not_be_the_same(tmp_path, suffix):
    """Each file has its own numbers for them."""
    for name, words in (("a", ["x", "y"]), ("b", ["y", "z", "x"])):
        table = pa.table({"word": pa.array(words).dictionary_encode()})
        WRITERS[suffix](tmp_path / f"{name}.{suffix}", table)
    dataset = from_table(tmp_path, columns=["word"])
    assert [dataset[row]["word"] for row in range(5)] == ["x", "y", "y", "z", "x"]


def test_a_folder_of_tables_without_columns_says_what_reads_it(tmp_path):
    """It is no output folder of preprocess, whose table has that name."""
    WRITERS["parquet"](tmp_path / "a.parquet", pa.table({"x": [1, 2]}))
    with pytest.raises(InputError, match="no metadata table") as caught:
        from_table(tmp_path)
    assert "from_table needs columns=; and open_shards reads" in str(caught.value)


@pytest.mark.parametrize("suffix", WRITERS)
def test_lists_of_several_lengths_say_how_to_pad_them(tmp_path, suffix):
    """The column, and the collate_fn that makes batches of it, also across files."""
    for name, rows in (("a", [[1, 2]]), ("b", [[3]])):
        WRITERS[suffix](tmp_path / f"{name}.{suffix}", pa.table({"tokens": rows}))
    dataset = from_table(tmp_path, columns=["tokens"])
    with pytest.raises(RuntimeError) as caught:
        next(iter(DataLoader(dataset, batch_size=2)))
    assert "field tokens is a tensor of shape (1,)" in (words := "".join(caught.value.__notes__))
    assert "collate_fn=by_field(tokens=pad())" in words
    rule = collate.by_field({"tokens": collate.pad()})
    assert next(iter(DataLoader(dataset, batch_size=2, collate_fn=rule)))["tokens"].tolist() == [
        [1, 2],
        [3, 0],
    ]


# ---- more than the memory ------------------------------------------------------------------------

LARGE, GROUP = 800, 40


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A Parquet file of which this machine's memory holds only a row group or two."""
    table = pa.table(
        {
            "number": np.arange(LARGE),
            "word": [f"w{row}" for row in range(LARGE)],
            "list": [list(range(row % 3)) for row in range(LARGE)],
        }
    )
    parquet.write_table(table, tmp_path / "large.parquet", row_group_size=GROUP)
    monkeypatch.setattr("forebay.inputs.chosen_columns.memory_for_files", lambda: 100)
    return tmp_path / "large.parquet"


@pytest.fixture
def groups_read(monkeypatch):
    """The numbers of the row groups that are read, in order."""
    read, actual = [], ShardBlocks.prepared

    def prepared(self, block, data):
        read.append(block)
        return actual(self, block, data)

    monkeypatch.setattr(ShardBlocks, "prepared", prepared)
    return read


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:from_table.*order is random:RuntimeWarning")
def test_row_groups_are_read_as_they_are_needed(large, groups_read):
    """The samples are those of a table in memory, in order and in any other."""
    names = ["number", "word", "list"]
    dataset, same = (
        from_table(large, columns=names),
        from_table(parquet.read_table(large), columns=names),
    )
    assert repr(dataset).startswith(f"<ColumnDataset: {LARGE} rows, 3 columns")
    assert dataset.columns.types == same.columns.types
    assert [repr(dataset[row]) for row in range(LARGE)] == [repr(same[row]) for row in range(LARGE)]
    assert groups_read == list(range(LARGE // GROUP)), "each row group once"
    rows = [733, 2, 799, 2, 0, -1]
    assert repr(dataset.__getitems__(rows)) == repr(same.__getitems__(rows))
    assert repr(pickle.loads(pickle.dumps(dataset))[7]) == repr(same[7])


@pytest.mark.filterwarnings("ignore:from_table.*order is random:RuntimeWarning")
def test_row_groups_without_rows_are_left_out(large):
    """Programs that write a table piece by piece leave some, also the first one."""
    table = parquet.read_table(large)
    with parquet.ParquetWriter(large, table.schema) as writer:
        for part in (table[:0], table[:40], table[:0], table[40:]):
            writer.write_table(part)
    dataset = from_table(large, columns=["number"])
    rows = [0, 39, 40, LARGE - 1]
    assert [each["number"].item() for each in dataset.__getitems__(rows)] == rows


def test_a_random_order_of_row_groups_is_warned_of_once(large, monkeypatch):
    """Each batch reads most of the file; an Arrow file is mapped instead."""
    monkeypatch.setattr("forebay.caching.block_dataset.KEPT_BYTES", 0)
    dataset = from_table(large, columns=["number"])
    rows = [(row * 41) % LARGE for row in range(100)]
    with pytest.warns(RuntimeWarning, match=r"(?s)order is random.*Arrow file") as caught:
        samples = [dataset[row] for row in rows]
    assert len(caught) == 1
    assert [each["number"].item() for each in samples] == rows


def test_a_file_that_is_replaced_while_row_groups_are_read_is_an_error(large):
    """Rather than rows of two tables, with the length of one."""
    dataset = from_table(large, columns=["number"])
    assert dataset[0]["number"] == 0
    parquet.write_table(pa.table({"number": np.zeros(LARGE, np.int64)}), large)
    with pytest.raises(ChangedError, match="changed after it was indexed"):
        dataset[LARGE - 1]


@pytest.mark.parametrize("names", [["number"], ["word", "number"]])
def test_a_loader_shuffles_row_groups_by_windows(large, groups_read, monkeypatch, names):
    """Each is decoded about once an epoch, not for each batch; a state continues the order."""
    monkeypatch.setattr("forebay.shards.dataset.DECODED_WINDOW", 20_000)
    monkeypatch.setattr("forebay.caching.block_dataset.KEPT_BYTES", 40_000)
    dataset = from_table(large, columns=names)
    groups_read.clear()
    with DataLoader(dataset, batch_size=20, shuffle=True, seed=1) as loader:
        batches = iter(loader)
        first = [next(batches)["number"].tolist() for _ in range(7)]
        state = loader.state_dict()
        rest = [batch["number"].tolist() for batch in batches]
    assert sorted(chain(*first, *rest)) == list(range(LARGE)) != [*chain(*first, *rest)]
    assert sorted({*groups_read}) == list(range(LARGE // GROUP))
    assert len(groups_read) < 3 * LARGE // GROUP  # an exact shuffle would decode some 500
    with DataLoader(dataset, batch_size=20, shuffle=True, seed=1) as loader:
        loader.load_state_dict(state)
        assert [batch["number"].tolist() for batch in loader] == rest


def test_lists_of_several_lengths_in_row_groups_are_padded(large):
    """Or the error names their column; equal ones are a tensor."""
    dataset = from_table(large, columns=["list"])
    with pytest.raises(InputError, match=r"column 'list' has a list of 0 and one of 1 in these"):
        dataset.columns.take(range(8))
    with pytest.raises(RuntimeError) as caught:
        next(iter(DataLoader(dataset, batch_size=8)))
    assert "collate_fn=by_field(list=pad())" in "".join(caught.value.__notes__)
    rule = collate.by_field(list=collate.pad())
    assert next(iter(DataLoader(dataset, 3, collate_fn=rule)))["list"].shape == (3, 2)
    alike = [*range(2, LARGE, 3)]
    batch = next(iter(DataLoader(Subset(dataset, alike), batch_size=40)))  # of three row groups
    assert batch["list"].tolist() == [[0, 1]] * 40


def test_a_mapped_file_is_still_the_same_after_another_took_its_place(tmp_path):
    """In this process; another one, which would map the other file, has an error."""
    path = FORMS["arrow file"](tmp_path)
    dataset = from_table(path, columns=["age"])
    pickled = pickle.dumps(dataset)
    other = arrow_file(tmp_path / "other.arrow", TABLE[5:], is_stream=False)
    os.replace(other, path)
    assert [dataset[row]["age"].item() for row in range(ROWS)] == list(range(ROWS))
    with pytest.raises(InputError, match="was changed while it was in use"):
        pickle.loads(pickled)


def test_memory_that_is_too_small_for_a_file_at_a_url_is_an_error(memory, monkeypatch):
    """A URL is read once, to its end; row groups could not be read later."""
    with memory.open("/t.parquet", "wb") as file:
        parquet.write_table(TABLE, file)
    assert len(from_table("memory://t.parquet", columns=["age"])) == ROWS
    monkeypatch.setattr("forebay.inputs.chosen_columns.memory_for_files", lambda: 10)
    with pytest.raises(InputError, match=r"1 column of 10 rows take .* or more, and 10 B"):
        from_table("memory://t.parquet", columns=["age"])
