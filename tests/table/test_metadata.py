"""The metadata table: its columns, its types, and the same bytes every time."""

from __future__ import annotations

import csv
import io
import json
import math
import threading
from itertools import permutations

import pyarrow as pa
import pytest
from pyarrow import parquet

from forebay.base.arrow_arrays import (
    FLOAT,
    INT,
    MIXED,
    NULL,
    STR,
    Kind,
    common_kind,
    final_kind,
    kind_of,
)
from forebay.base.table_files import TableFile
from forebay.base.table_formats import format_of
from forebay.errors import InputError, OutputError
from forebay.inputs.tables import read_table
from forebay.runs import metadata_table as module
from forebay.runs.metadata_table import write_metadata

FORMATS = ["parquet", "csv", "jsonl"]


def write(path, records, columns=()):
    """Write a table in the format of the path's ending from (source, row, list of dicts)."""
    packed = [
        (source, row and json.dumps(row), json.dumps(given)) for source, row, given in records
    ]
    write_metadata(path, path.suffix[1:], tuple(columns), lambda: packed)


def table_of_rows(tmp_path, records, columns=(), form="parquet"):
    path = tmp_path / f"metadata.{form}"
    write(path, records, columns)
    return read_table(path)


def types(table):
    return {field.name: str(field.type) for field in table.schema}


@pytest.mark.parametrize("form", FORMATS)
def test_columns_are_the_manifests_then_source_destination_and_the_users(tmp_path, form):
    """In that order, the user's as they first appear, and missing values are null."""
    table = table_of_rows(
        tmp_path,
        [
            ("a.wav", {"path": "a.wav", "label": "dog"}, [{"destination": "a1", "z": 1}]),
            ("b.wav", {"path": "b.wav", "label": "cat"}, [{"b": "x"}, {"z": 3, "label": "owl"}]),
            ("c.wav", {"path": "c.wav", "label": "cow"}, []),
        ],
        ("path", "label"),
        form,
    )
    assert table.to_pylist() == [
        {
            "path": "a.wav",
            "label": "dog",
            "source": "a.wav",
            "destination": "a1",
            "z": 1,
            "b": None,
        },
        {
            "path": "b.wav",
            "label": "cat",
            "source": "b.wav",
            "destination": None,
            "z": None,
            "b": "x",
        },
        {
            "path": "b.wav",
            "label": "owl",
            "source": "b.wav",
            "destination": None,
            "z": 3,
            "b": None,
        },
    ]
    assert table.column_names == ["path", "label", "source", "destination", "z", "b"]


def test_a_manifest_without_paths_keeps_its_own_source(tmp_path):
    """Where an input has no path, the column `source` is what the manifest says, or null."""
    records = [("", {"source": "radio"}, [{}])]
    assert table_of_rows(tmp_path, records, ["source"])["source"].to_pylist() == ["radio"]
    assert table_of_rows(tmp_path, [("", {"n": 1}, [{}])], ["n"])["source"].to_pylist() == [None]


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        ([1, None, 2], "int64", [1, None, 2]),
        ([1, 2.5], "double", [1.0, 2.5]),
        ([True, None], "bool", [True, None]),
        ([None, None], "string", [None, None]),
        (["a", None], "string", ["a", None]),
        (["a", 1], "string", ['"a"', "1"]),
        ([True, 1], "string", ["true", "1"]),
        ([1 << 63, 5], "string", [str(1 << 63), "5"]),
        ([-(1 << 63)], "int64", [-(1 << 63)]),
        ([[1], [], None], "list<element: int64>", [[1], [], None]),
        ([[1], [2.5]], "list<element: double>", [[1.0], [2.5]]),
        ([[1, "a"], [None]], "list<element: string>", [["1", '"a"'], [None]]),
        ([[], []], "list<element: string>", [[], []]),
        ([[1], 1], "string", ["[1]", "1"]),
        (
            [{"b": 1}, {"a": "x", "b": 2.5}],
            "struct<b: double, a: string>",
            [{"b": 1.0, "a": None}, {"b": 2.5, "a": "x"}],
        ),
        ([{}, {}], "string", ["{}", "{}"]),
        ([{}, {"a": 1}], "struct<a: int64>", [{"a": None}, {"a": 1}]),
        ([{"a": 1}, [1]], "string", ['{"a": 1}', "[1]"]),
    ],
)
def test_each_column_has_the_least_type_that_holds_it(tmp_path, values, kind, expected):
    """What has no common type becomes JSON text, so nothing is lost."""
    records = [("s", None, [{"x": value} for value in values])]
    table = table_of_rows(tmp_path, records)
    assert types(table)["x"] == kind
    assert table["x"].to_pylist() == expected
    as_jsonl = table_of_rows(tmp_path, records, form="jsonl")
    assert as_jsonl["x"].to_pylist() == expected


def test_a_struct_with_hundreds_of_fields_is_data_not_a_type(tmp_path):
    """A dictionary keyed by words does not become ten thousand columns."""
    rows = [{"x": {f"word{k}": 1}} for k in range(300)]
    table = table_of_rows(tmp_path, [("s", None, rows)])
    assert types(table)["x"] == "string"
    assert json.loads(table["x"][7].as_py()) == {"word7": 1}


def test_joining_kinds_does_not_depend_on_their_order():
    """Any order of values ends in the same type, up to the order of fields."""
    values = [None, 1, 2.5, "a", True, [1], [None], {"a": 1}, {"b": [2.5]}, 1 << 70, {}]
    for one, two, three in permutations(values, 3):
        left = common_kind(common_kind(kind_of(one), kind_of(two)), kind_of(three))
        right = common_kind(kind_of(three), common_kind(kind_of(two), kind_of(one)))
        assert final_kind(left) == final_kind(right)
    assert common_kind(INT, FLOAT) is FLOAT
    assert common_kind(STR, INT) == MIXED
    assert final_kind(Kind("list", NULL)) == Kind("list", STR)


@pytest.mark.parametrize("form", FORMATS)
def test_tables_larger_than_a_group_of_rows_are_whole(tmp_path, form, monkeypatch):
    """Rows pass by in groups, and none is lost between two; a late type counts for all."""
    monkeypatch.setattr("forebay.base.arrow_arrays.GROUP_ROWS", 10)
    monkeypatch.setattr(module, "GROUP_ROWS", 10)
    monkeypatch.setattr(module, "PAGE_ROWS", 4)
    records = [(f"{k}", None, [{"x": k}]) for k in range(1, 25)] + [("", None, [{"x": 0.5}])]
    table = table_of_rows(tmp_path, records, form=form)
    assert table["x"].to_pylist() == [*map(float, range(1, 25)), 0.5]
    assert types(table)["x"] == "double"


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_a_table_without_rows_has_its_columns(tmp_path, form):
    """A job in which every input failed still leaves a table."""
    table = table_of_rows(tmp_path, [("a", {"label": 1}, [])], ["label"], form)
    assert types(table) == {"label": "string", "source": "string", "destination": "string"}
    assert table.num_rows == 0


def test_a_jsonl_table_without_rows_is_an_empty_file(tmp_path):
    """The format has no place for columns alone; reading it back is no error."""
    assert table_of_rows(tmp_path, [], ["label"], "jsonl").num_rows == 0
    assert (tmp_path / "metadata.jsonl").read_bytes() == b""


def test_csv_is_what_any_reader_expects(tmp_path):
    """Quotes, commas and line ends of any kind survive; lists are JSON, null is empty."""
    text = 'a "quoted", cell\r\nwith\rline\nends'
    path = tmp_path / "metadata.csv"
    write(path, [("é.wav", None, [{"text": text, "ok": True, "n": None, "l": [1, "ü"]}])])
    data = path.read_bytes()
    assert data.startswith("source,destination,text,ok,n,l\né.wav,,".encode())
    assert data.endswith(',true,,"[1, ""ü""]"\n'.encode())
    with path.open(newline="", encoding="utf-8") as file:
        assert next(csv.DictReader(file))["text"] == text
    assert read_table(path)["text"].to_pylist() == [text]


def test_csv_cells_may_be_long(tmp_path):
    """A transcript beyond the csv module's own limit is read back."""
    table = table_of_rows(tmp_path, [("s", None, [{"x": "long" * 50_000}])], form="csv")
    assert len(table["x"][0].as_py()) == 200_000


def test_csv_numbers_are_read_only_if_they_are_written_like_numbers(tmp_path):
    """A code with leading zeros stays text."""
    rows = [{"code": "007", "n": 7, "b": True, "f": 1e-7, "big": str(1 << 70)}]
    table = table_of_rows(tmp_path, [("s", None, rows)], form="csv")
    assert table.to_pylist()[0] == {
        "source": "s", "destination": None, "code": "007", "n": 7, "b": True, "f": 1e-7,
        "big": str(1 << 70),
    }  # fmt: skip


def test_truth_values_in_csv_may_be_written_as_pandas_does(tmp_path):
    """The string "False" would count as true."""
    path = tmp_path / "labels.csv"
    path.write_text("a,b,c\nTrue,true,True\nFalse,FALSE,yes\n,,\n")
    assert read_table(path).to_pydict() == {
        "a": [True, False, None],
        "b": [True, False, None],
        "c": ["True", "yes", None],
    }


def test_whole_numbers_among_others_are_floats_in_csv(tmp_path):
    """As in JSONL; spreadsheets write 1.0 as 1."""
    path = tmp_path / "numbers.csv"
    path.write_text("a,b,codes\n1,-2,1\n2.5,,007\n,0.5,2.5\n")
    assert read_table(path).to_pydict() == {
        "a": [1.0, 2.5, None],
        "b": [-2.0, None, 0.5],
        "codes": ["1", "007", "2.5"],
    }


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (["0.5", "1.0E-5"], [0.5, 1e-5]),
        (["1.6E+12", "3"], [1.6e12, 3.0]),
        ([".5", "-.5"], [0.5, -0.5]),
        (["5.", "5.e1"], [5.0, 50.0]),
        (["+3", "-0"], [3, 0]),
        (["+2.5", "NaN"], [2.5, math.nan]),
        (["Infinity", "-INF"], [math.inf, -math.inf]),
        ([" 1", "2 "], [1, 2]),
        (["\ttrue", "False"], [True, False]),
        ([" x", " 1"], [" x", " 1"]),
        (["1_000", "2"], ["1_000", "2"]),
        (["1,5", "2"], ["1,5", "2"]),
        (["e5", "."], ["e5", "."]),
        (["+", "-"], ["+", "-"]),
    ],
)
def test_numbers_in_csv_are_read_as_every_program_writes_them(tmp_path, cells, values):
    """Java, Excel, R and NumPy differ; what is no number in them stays as it is."""
    path = tmp_path / "numbers.csv"
    path.write_text("a,b\n" + "".join(f'x,"{cell}"\n' for cell in cells))
    found = read_table(path)["b"].to_pylist()
    assert [*map(repr, found)] == [*map(repr, values)]


def test_jsonl_keeps_values_as_they_were_returned(tmp_path):
    """One object a line with all columns; what differs in type stays different."""
    path = tmp_path / "metadata.jsonl"
    write(path, [("ü", None, [{"x": 1}, {"x": "a"}, {"y": {"k": []}}])])
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0] == '{"source": "ü", "destination": null, "x": 1, "y": null}'
    assert [json.loads(line)["x"] for line in lines] == [1, "a", None]
    assert json.loads(lines[2])["y"] == {"k": []}


@pytest.mark.parametrize("form", FORMATS)
def test_text_that_is_not_unicode_is_escaped(tmp_path, form):
    """A foreign file name cannot bring down the table at the end of a job."""
    odd = "caf\udce9"
    records = [(odd, None, [{"destination": "ok", odd: [odd], "s": {odd: odd}}])]
    table = table_of_rows(tmp_path, records, form=form)
    assert table["source"].to_pylist() == ["caf\\udce9"]
    assert "caf\\udce9" in table.column_names


@pytest.mark.parametrize("form", FORMATS)
def test_keys_that_are_not_unicode_keep_their_values(tmp_path, form):
    """At any depth; two that are escaped alike are kept as JSON."""
    odd, clean = "caf\udce9", "caf\\udce9"
    nested = {"list": [{odd: [{odd: 1}]}], odd: {"x": odd}}
    table = table_of_rows(
        tmp_path, [("s", None, [{"s": nested, "two": {odd: 1, clean: 2}}])], form=form
    )
    (found,), (two,) = table["s"].to_pylist(), table["two"].to_pylist()
    found = json.loads(found) if form == "csv" else found
    escaped = json.loads(json.dumps(nested).replace("\\udce9", "\\\\udce9"))
    assert found == (nested if form == "csv" else escaped)
    assert json.loads(two) == {odd: 1, clean: 2}


@pytest.mark.parametrize("form", FORMATS)
def test_a_table_that_cannot_be_finished_leaves_the_earlier_one(tmp_path, form, monkeypatch):
    """An error in either pass changes nothing and leaves no litter."""
    path = tmp_path / f"metadata.{form}"
    write(path, [("a", None, [{"x": 1}])])
    before = path.read_bytes()

    passes = []

    def records():
        passes.append(path)
        yield ("b", None, '[{"x": 2}]')
        yield ("c", None, '[{"x": 0.5}]')  # so that there is a second pass
        if len(passes) == last:
            raise OSError(28, "No space left on device")
        yield ("d", None, '[{"x": 3}]')

    monkeypatch.setattr(module, "GROUP_ROWS", 1)
    monkeypatch.setattr(module, "PAGE_ROWS", 1)
    for last in (1, 2):
        passes.clear()
        with pytest.raises(OutputError, match="cannot be written: No space left on device"):
            write_metadata(path, form, (), records)
        assert len(passes) == last
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("form", FORMATS)
def test_a_long_table_is_read_once_unless_its_kinds_change(tmp_path, form, monkeypatch):
    """Its bytes are those that two passes write, whichever group has the other kinds."""
    monkeypatch.setattr(module, "GROUP_ROWS", 2)
    monkeypatch.setattr(module, "PAGE_ROWS", 3)
    alike = [[{"x": at, "y": None if at < 4 else "y"}] for at in range(9)]
    later = [*alike[:8], [{"x": 0.5, "z": True}]]
    for name, rows, expected in (("alike", alike, 1), ("later", later, 2)):
        passes = []

        def records(rows=rows, passes=passes):
            passes.append(1)
            return iter([(f"{at}", None, json.dumps(each)) for at, each in enumerate(rows)])

        path = tmp_path / f"{name}.{form}"
        write_metadata(path, form, (), records)
        assert len(passes) == expected
        found = read_table(path)
        assert found["x"].to_pylist() == [each["x"] for (each,) in rows]
        assert found["y"].to_pylist() == [each.get("y") for (each,) in rows]
    kinds = {"x": "double", "z": "bool"}
    assert {each: str(found.schema.field(each).type) for each in kinds} == kinds


@pytest.mark.parametrize("form", FORMATS)
def test_the_rows_of_a_long_table_are_read_again_in_the_second_pass(tmp_path, form, monkeypatch):
    """The same values come out, odd ones too."""
    values = ["x", "\udcff", 1 << 70, 0.1, float("inf"), None, True, [1, {"a": None}], {"b": "\n"}]
    records = [(f"{at}", None, [{"v": value, f"c{at}": at}]) for at, value in enumerate(values)]
    write(tmp_path / f"short.{form}", records)
    monkeypatch.setattr(module, "PAGE_ROWS", 2)
    monkeypatch.setattr(module, "GROUP_ROWS", 3)
    write(tmp_path / f"long.{form}", records)
    short, long = (read_table(tmp_path / f"{name}.{form}") for name in ("short", "long"))
    assert long.equals(short)
    assert len([*tmp_path.iterdir()]) == 2


def test_unknown_formats_are_named(tmp_path):
    """Reading does not guess."""
    with pytest.raises(InputError, match="does not exist"):
        read_table(tmp_path / "metadata.csv")
    (tmp_path / "t.xlsx").write_text("")
    with pytest.raises(InputError, match="is not a metadata table"):
        read_table(tmp_path / "t.xlsx")


def test_parquet_files_hold_the_table_alone(tmp_path):
    """No schema of Arrow's, no pandas, no time: any reader sees plain columns."""
    import pyarrow.parquet

    write(tmp_path / "metadata.parquet", [("a", None, [{"x": 1}])])
    assert pyarrow.parquet.read_metadata(tmp_path / "metadata.parquet").metadata is None
    assert module.GROUP_ROWS == 65_536


def test_a_parquet_table_is_read_by_the_calling_thread(tmp_path):
    """A thread of Arrow that still has the file when the interpreter ends aborts the process."""
    path = tmp_path / "t.parquet"
    parquet.write_table(pa.table({f"c{at}": list(range(1000)) for at in range(20)}), path)
    threads = set()

    class Watched(io.FileIO):
        def read(self, *size):
            threads.add(threading.get_ident())
            return super().read(*size)

    file, form = TableFile("t.parquet", lambda: Watched(path)), format_of(path.name)
    assert form.arrow(file).num_rows == sum(1 for _ in form.rows(file)) == 1000
    assert threads == {threading.get_ident()}
