"""Listing inputs: every form that a user may give, and every way in which one can be wrong."""

from __future__ import annotations

import csv
import datetime
import decimal
import gc
import gzip
import json
import os
import re
import zipfile
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

import forebay
from forebay.errors import InputError
from forebay.inputs.listing import list_inputs
from forebay.inputs.manifests import check_columns, open_manifest
from forebay.inputs.search import folder_identity
from forebay.ledger.identity import NOT_SEEN
from forebay.ledger.records import Input


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str | Path, content: str | bytes = "x") -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def sources(inputs: object) -> list[str]:
    return [one.source for one in list_inputs(inputs)]


def rows(inputs: object) -> list[str | None]:
    return [one.row for one in list_inputs(inputs)]


def stamp(path: str | Path) -> str:
    status = os.stat(path)
    return f"{status.st_size}:{status.st_mtime_ns}"


def refused(inputs: object) -> str:
    with pytest.raises(InputError) as caught:
        list(list_inputs(inputs))
    return str(caught.value)


# ---- paths -------------------------------------------------------------------------------------


def test_a_list_keeps_its_order_and_says_what_each_path_is(folder):
    """One bad path among many is marked, not raised; a name may hold anything UTF-8 can."""
    write("ä b\n.wav", "four")
    (folder / "d").mkdir()
    listing = list_inputs(["gone", Path("ä b\n.wav"), "d", "gone", "a\0b", "ä b\n.wav/x"])
    assert list(listing) == [
        Input("gone", None, NOT_SEEN),
        Input("ä b\n.wav", None, stamp("ä b\n.wav")),
        Input("d", None, NOT_SEEN),  # an empty folder
        Input("gone", None, NOT_SEEN),
        Input("a\0b", None, NOT_SEEN),
        Input("ä b\n.wav/x", None, NOT_SEEN),
    ]
    assert (listing.kind, listing.columns) == ("paths", ())
    assert listing.description == "a list of 6 paths"


def test_a_generator_can_be_walked_twice_and_a_set_is_sorted(folder):
    """The order must be the same in the next run, whatever gave the paths."""
    listing = list_inputs(name for name in "ba")
    assert [one.source for one in listing] == [one.source for one in listing] == ["b", "a"]
    assert sources({"c", Path("a"), "b"}) == ["a", "b", "c"]


@pytest.mark.parametrize("bad", [None, 3, b"a", {"path": "a"}])
def test_an_element_that_is_no_path_is_named_by_its_position(bad):
    """The message says where in the list it is and what it is."""
    kind = type(bad).__name__
    assert refused(["a", bad]).startswith(f"inputs[1]: got {kind} instead of a path\n")


@pytest.mark.parametrize("bad", [None, 3, b"a", {"a": 1}])
def test_inputs_that_are_no_paths_at_all_are_refused(bad):
    """Nothing is iterated that was not meant to be."""
    assert refused(bad).startswith(f"inputs: got {type(bad).__name__} instead of paths\n")


def test_a_folder_is_listed_sorted_by_whole_path_without_what_is_hidden(folder):
    """Files of sub-folders stand where their paths sort, not where the folders' names do."""
    for name in ("d/a/z", "d/a.b", "d/a", "d/a0", "d/b/c/y", "d/.h", "d/.g/x", "d/é x"):
        if name != "d/a":
            write(name)
    (folder / "d" / "empty").mkdir()
    expected = ["d/a.b", "d/a/z", "d/a0", "d/b/c/y", "d/é x"]
    assert sources("d") == expected == sorted(expected)
    assert sources(Path("d")) == sources("d/") == expected
    assert sources(str(folder / "d"))[0] == str(folder / "d" / "a.b")
    assert list_inputs("d/").description == "d/"


def test_links_in_a_folder_are_followed_but_not_in_circles(folder):
    """A dangling link is a missing file, not nothing; a pipe is no input."""
    write("other/f")
    write("d/a")
    os.symlink("../other", "d/linked")
    os.symlink("..", "d/up")
    os.symlink("nowhere", "d/gone")
    os.mkfifo("d/pipe")
    found = {one.source: one.identity for one in list_inputs("d")}
    assert found["d/gone"] == NOT_SEEN
    assert {"d/a", "d/linked/f", "d/up/other/f"} <= set(found)
    assert not any("pipe" in name or name.startswith("d/up/d/") for name in found)


def test_a_folder_that_cannot_be_read_is_not_left_out_in_silence(folder):
    """Losing a sub-folder's inputs would go unnoticed."""
    write("d/s/a").parent.chmod(0)
    try:
        if os.access("d/s", os.R_OK):
            pytest.skip("root may read everything")
        assert refused("d").startswith("'d/s': it cannot be listed")
    finally:
        Path("d/s").chmod(0o700)


def test_a_glob_is_sorted_and_leaves_folders_out(folder):
    """`**` reaches every depth and repeats nothing."""
    for name in ("d/b.wav", "d/a.wav", "d/s/c.wav", "d/n.txt"):
        write(name)
    Path("d/x.wav").mkdir()
    listing = list_inputs("d/*.wav")
    assert list(listing) == [Input(n, None, stamp(n)) for n in ("d/a.wav", "d/b.wav")]
    assert listing.description == "d/*.wav"
    assert sources("d/**/**/*.wav") == ["d/a.wav", "d/b.wav", "d/s/c.wav"]
    assert refused("d/*.mp3").startswith("d/*.mp3: this glob matches nothing\n")
    with pytest.raises(InputError) as caught:
        list_inputs("d/*.mp3")
    assert caught.value.__context__ is None, "one traceback, of this error alone"
    assert refused("d/*.mp3").endswith(" To look in all folders below: 'd/**/*.mp3'.")
    assert "To look in" not in refused("d/**/*.mp3")
    assert refused("d/x*").startswith("d/x*: this glob matches folders only\n")
    assert refused("d/x*").endswith(
        " To process each of them as one input: 'd/x*/'. To look in all folders below: 'd/x*/**/*'."
    )
    (folder_input,) = list_inputs("d/x*/")
    assert (folder_input.source, folder_input.identity) == ("d/x.wav", NOT_SEEN)
    assert refused("d/a*/").startswith("d/a*/: this glob matches nothing\n")


def test_a_name_with_glob_characters_that_exists_is_taken_literally(folder):
    """`take[1].wav` is a file, and `[x]` may be a folder."""
    write("take[1].wav")
    write("take1.wav")
    write("[x]/a")
    assert sources("take[1].wav") == ["take[1].wav"]
    assert sources("[x]") == ["[x]/a"]


# ---- URLs --------------------------------------------------------------------------------------


def test_a_url_is_a_folder_a_glob_a_file_or_a_manifest(memory, tmp_path):
    """Sources are whole URLs, sorted, hidden ones left out."""
    for name in ("/d/b.wav", "/d/s/a.wav", "/d/.h/x.wav"):
        memory.pipe(name, b"12")
    memory.pipe("/m.csv", b"path,n\na.wav,1\n")
    assert sources("memory://d") == ["memory:///d/b.wav", "memory:///d/s/a.wav"]
    assert sources("memory://d/*.wav") == ["memory:///d/b.wav"]
    assert sources("memory://d/b.wav") == ["memory://d/b.wav"]
    manifest = list_inputs("memory://m.csv")
    assert list(manifest) == [Input("a.wav", '{"path":"a.wav","n":"1"}', NOT_SEEN)]
    assert manifest.description == "manifest memory://m.csv"
    with zipfile.ZipFile(tmp_path / "m.zip", "w") as archive:
        archive.writestr("m.csv", "path,n\na.wav,1\n")
    assert list(list_inputs(f"zip://m.csv::{tmp_path / 'm.zip'}")) == list(manifest)
    for bad in ("memory://gone", "memory://d/*.mp3"):
        assert refused(bad).startswith(bad + ": no ")


def test_the_identity_of_a_url_is_the_same_from_a_folder_and_a_list(memory):
    """And it changes when the object does."""
    memory.pipe("/d/a", b"12")
    (first,) = list_inputs("memory://d")
    assert re.fullmatch(r"2:\S+", first.identity)
    gone, again, folder = list_inputs(["memory://d/gone", first.source, "memory://d"])
    assert (gone.identity, again, folder.identity) == (NOT_SEEN, first, "directory")
    memory.pipe("/d/a", b"345")
    assert next(iter(list_inputs("memory://d"))).identity != first.identity


def test_an_etag_is_preferred_to_size_and_age(memory, monkeypatch):
    """What a store says of the content itself beats its time stamps."""
    memory.pipe("/d/a", b"12")
    plain = memory.info
    monkeypatch.setattr(memory, "info", lambda path: {**plain(path), "ETag": '"abc"'})
    assert next(iter(list_inputs(["memory://d/a"]))).identity == "abc"


def test_a_chain_of_urls_keeps_its_outer_part(folder):
    """The files of an archive are found again by their sources."""
    with zipfile.ZipFile("z.zip", "w") as archive:
        archive.writestr("d/a.txt", "hi")
    assert sources("zip://d::z.zip") == ["zip://d/a.txt::z.zip"]
    assert next(iter(list_inputs(sources("zip://d::z.zip")))).identity.startswith("2")


def test_an_unknown_protocol_is_refused():
    """The message says what to look at."""
    assert refused("nonsense://x").startswith("nonsense://x: it cannot be reached")
    assert refused(["nonsense://x"]).startswith("nonsense://x: it cannot be reached")


# ---- csv ---------------------------------------------------------------------------------------


def test_a_csv_manifest_gives_rows_in_order_with_the_identity_of_their_files(folder):
    """Paths are looked for from the current folder, then from the manifest's."""
    write("here.wav", "1")
    write("m/there.wav", "22")
    write("m/data.csv", '﻿label,file\r\n\r\nä,here.wav\r\n"a\n""b"",",there.wav\r\n7,gone\r\n')
    listing = list_inputs("m/data.csv")
    assert (listing.kind, listing.columns) == ("rows", ("label", "file"))
    assert listing.description == "manifest m/data.csv"
    assert list(listing) == [
        Input("here.wav", '{"label":"ä","file":"here.wav"}', stamp("here.wav")),
        Input("there.wav", r'{"label":"a\n\"b\",","file":"there.wav"}', stamp("m/there.wav")),
        Input("gone", '{"label":"7","file":"gone"}', NOT_SEEN),
    ]
    assert list(listing) == list(listing)


def test_the_path_column_is_chosen_by_name(folder):
    """`destination` wins: the metadata of one stage is the next one's manifest."""
    write("m.csv", "input,path,source,destination\nI,P,S,D\nI,P,S,\nI,P,,\n")
    assert sources("m.csv") == ["D", "S", "P"]
    write("n.csv", "text,label\na,b\n")
    assert list(list_inputs("n.csv")) == [Input("", '{"text":"a","label":"b"}', "")]


def test_a_row_whose_path_is_a_folder_or_a_url_or_text_is_no_failure(folder):
    """Only the function knows what the column means."""
    Path("d").mkdir()
    write("m.csv", f"input\nd\ns3://b/k\n{'long ' * 99}\n")
    write("d/x")
    assert [one.identity for one in list_inputs("m.csv")] == [folder_identity("d"), "", NOT_SEEN]


def test_a_folder_named_like_a_manifest_is_a_folder(folder):
    """`x.csv/` holds files."""
    write("x.csv/a")
    assert sources("x.csv") == ["x.csv/a"]


def test_a_list_that_holds_a_manifest_takes_the_file_itself(folder):
    """The way to work on .csv files."""
    write("m.csv", "a\n1\n")
    assert list(list_inputs(["m.csv"])) == [Input("m.csv", None, stamp("m.csv"))]


def test_a_huge_cell_is_read_and_the_limit_of_csv_stays_the_users(folder):
    """csv's own limit is 131072 characters, for the whole process."""
    limit = csv.field_size_limit()
    write("m.csv", f"text\n{'y' * 2_000_000}\nz\n")
    seen = []
    for one in list_inputs("m.csv"):
        assert csv.field_size_limit() == limit
        seen.append(len(json.loads(one.row)["text"]))
    assert seen == [2_000_000, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "m.csv: no header\n"),
        ("\n\n", "m.csv: no header\n"),
        ("a,b\n", "m.csv: no rows\n"),
        ("a,b,a\n1,2,3\n", "m.csv: two columns are called 'a'\n"),
        ('a;b\n1;"2"\n', "m.csv: its header is one column, 'a;b': fields are separated by"),
        ("a\tb\n1\t2\n", "m.csv: its header is one column, 'a\\tb': fields are separated by"),
        ("a|b\nx|y\n", "m.csv: its header is one column, 'a|b': fields are separated by commas"),
        ("a|x, y|z\nb|no|z\n", "m.csv: fields are separated by commas, and here they seem to be"),
        (",path\n0,a\n", "m.csv: column 1 has no name\n  Give every column a name. pandas"),
        ("a.wav,cat\nb.wav,dog\n", "m.csv: its first line seems to be a row, not a header: 'a.w"),
        ("a.wav\nb.WAV\n", "m.csv: its first line seems to be a row, not a header: 'a.wav'"),
        ("# mine\npath,label\na,b\n", "m.csv: its first line is a comment\n"),
        ("a,,c\n1,2,3\n", "m.csv: column 2 has no name\n"),
        ("a, \n1,2\n", "m.csv: column 2 has no name\n"),
        ("a,b\n1,2\n1,2,3\n", "m.csv, line 3: 3 fields where the header has 2\n"),
        ('a,b\n\n"1\n2",2\n1\n', "m.csv, line 5: 1 field where the header has 2\n"),
        ("a,b\n1,2\n3,\0\n", "m.csv, line 3: a NUL byte\n"),
        ('a\n1\n"2\n3\n', "m.csv, line 3: not CSV: "),
        (b"a,b\n1,2\n3,caf\xe9\n", "m.csv, line 3: byte 13 (0xe9) is not UTF-8\n"),
        ("a,b\n1,2\n".encode("utf-16"), "m.csv: it is UTF-16 (it starts with"),
    ],
)
def test_a_csv_manifest_that_is_wrong_is_refused_with_its_line(folder, content, message):
    """Nothing is guessed: a shifted column would label a whole data set wrongly."""
    write("m.csv", content)
    text = refused("m.csv")
    assert text.startswith(message)
    if "UTF-" in message:
        assert "Save it as UTF-8" in text


@pytest.mark.parametrize(("name", "content"), [("m.csv", "a,b\n1,\0\n"), ("m.jsonl", "{\n")])
def test_a_manifest_that_is_wrong_is_closed_when_the_error_is_raised(folder, name, content):
    """Not when the garbage collector finds the error."""
    write(name, content)
    gc.disable()
    try:
        with pytest.raises(InputError) as error:
            sources(name)
        opened = {os.path.realpath(f"/proc/self/fd/{at}") for at in os.listdir("/proc/self/fd")}
    finally:
        gc.enable()
    assert str(folder / name) not in opened, error


def test_a_csv_manifest_with_other_characters_is_no_error(folder):
    """What separates fields elsewhere may be part of a text, and a name may have a dot."""
    write("m.csv", "path,v1.top\na|b,c.wav\n#x,d;e\n")
    assert sources("m.csv") == ["a|b", "#x"]


TEXTS = {
    "csv": "path,n\na.wav,1\nb.wav,2\n",
    "tsv": "path\tn\na.wav\t1\nb.wav\t2\n",
    "jsonl": '{"path":"a.wav","n":"1"}\n{"path":"b.wav","n":"2"}\n',
}
TEXTS["ndjson"] = TEXTS["jsonl"]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("form", TEXTS)
def test_tables_of_text_are_read_by_their_usual_endings(folder, form, packed):
    """The same rows are the same inputs; `from_table` and an archive's table read them, too."""
    data = TEXTS[form].encode()
    name = f"m.{form.upper()}" + ".gz" * packed
    write(name, gzip.compress(data) if packed else data)
    assert rows(name) == ['{"path":"a.wav","n":"1"}', '{"path":"b.wav","n":"2"}']
    assert rows(f"file://{folder}/{name}") == rows(name)
    assert [row["path"] for row in forebay.from_table(name)] == ["a.wav", "b.wav"]


def test_a_damaged_compressed_table_is_an_error(folder):
    """Truncated, or not compressed at all."""
    write("m.csv.gz", gzip.compress(b"path\n" + os.urandom(20_000).hex().encode())[:-4000])
    assert refused("m.csv.gz").startswith("m.csv.gz: it cannot be decompressed: ")
    write("m.csv.gz", b"path\na.wav\n")
    assert refused("m.csv.gz").startswith("m.csv.gz: it cannot be read: Not a gzipped file")


OTHERS = ("arrow", "ipc", "H5", "npz", "pkl", "db", "feather")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("l.txt", "a.wav\n\nb.wav\n", r"its lines seem to be paths, .*\n.*splitlines"),
        ("l.json", '{"path":"a"}\n{"path":"b"}\n', r"each of its lines is a JSON .*\n.*\.jsonl"),
        ("l.json", '[\n  {"path":"a"}\n]\n', r"it is a JSON list of objects\n.*json\.load"),
        ("l.json", '["a.wav",\n"b.wav"]', r"it is a JSON list of strings\n.*json\.load"),
        *((f"t.{each}", "PK", r"may hold many inputs, .*\n.* a list of dicts") for each in OTHERS),
    ],
)
def test_a_file_that_lists_inputs_in_another_way_is_no_single_input(folder, name, content, words):
    """The error says how its lines become inputs, and how the file itself does."""
    write(name, content)
    assert re.search(words, refused(name))
    assert f"pass it in a list: ['{name}']" in refused(name)
    assert sources([name]) == [name]
    url = f"file://{folder}/{name}"
    assert re.search(words, refused(url))
    assert f"pass it in a list: ['{url}']" in refused(url)


@pytest.mark.parametrize(
    ("name", "content"),
    [("t.txt", "A text.\nOf two lines.\n"), ("t.json", '{\n"a": 1}\n'), ("t.json", "[1]")],
)
def test_a_text_is_a_single_input(folder, name, content):
    """Whoever processes documents tries one first."""
    write(name, content)
    assert sources(name) == [name]


def test_a_path_of_windows_is_explained(folder):
    """Its error alone would show the path as it is in the list."""
    assert "separated by '/'" in refused("data\\a.wav")


@pytest.mark.slow
def test_a_late_bad_byte_is_counted_from_the_start_of_the_file(folder):
    """The decoder itself counts from the start of a chunk."""
    write("m.csv", b"a\n" + b"12345\n" * 50_000 + b"\xff\n")
    assert refused("m.csv").startswith("m.csv, line 50002: byte 300002 (0xff) is not UTF-8\n")


def test_a_manifest_that_may_not_be_read_is_refused(folder):
    """The system's own words are in the message."""
    write("m.csv", "a\n1\n").chmod(0)
    if os.access("m.csv", os.R_OK):
        pytest.skip("root may read everything")
    assert "Permission denied" in refused("m.csv")


# ---- jsonl -------------------------------------------------------------------------------------


def test_a_jsonl_manifest_keeps_its_values_and_knows_all_its_columns(folder):
    """A key that a row lacks stays away: a later column changes no earlier row."""
    lines = ['{"b":1.5,"file":"x y"}', "", '{"n":null,"b":{"z":[true]},"a":"ä"}', '{"a":"\u2028"}']
    write("m.jsonl", "﻿" + "\r\n".join(lines))
    listing = list_inputs("m.jsonl")
    assert listing.columns == ("b", "file", "n", "a")
    assert [one.row for one in listing] == [
        '{"b":1.5,"file":"x y"}',
        '{"b":{"z":[true]},"n":null,"a":"ä"}',
        '{"a":"\u2028"}',
    ]
    assert [one.source for one in listing] == ["x y", "", ""]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "m.jsonl: no rows"),
        ("{}\n", "m.jsonl: no rows with a key"),
        ('{"a":1}\n{"a":\n', "m.jsonl, line 2: not JSON: "),
        ('{"a":1}\n\n[1]\n', "m.jsonl, line 3: a JSON list instead of an object\n"),
        ('{"a":NaN}\n', "m.jsonl, line 1: not JSON: NaN is not valid JSON"),
        ('{"a":1,"a":2}\n', "m.jsonl, line 1: not JSON: an object has the same key twice"),
        ('{"a":1}\n{"a":1e999}\n', "m.jsonl, line 2: not JSON: 1e999 is more than a"),
        ('{"a":"\\ud800"}\n', "m.jsonl, line 1: a value that JSON in UTF-8 cannot hold"),
        ('{"a":' + "[" * 100_000, "m.jsonl, line 1: not JSON: "),
        (b'{"a":1}\n{"a":"\xff"}\n', "m.jsonl, line 2: byte 14 (0xff) is not UTF-8\n"),
        ('{"":1}\n', "m.jsonl: column 1 has no name"),
    ],
)
def test_a_jsonl_manifest_that_is_wrong_is_refused_with_its_line(folder, content, message):
    """What Python's parser lets through and JSON does not is refused, too."""
    write("m.jsonl", content)
    assert refused("m.jsonl").startswith(message)


@pytest.mark.parametrize("depth", [500, 800, 950, 5000])
def test_a_value_nested_too_deep_is_refused_with_its_line(folder, depth):
    """How deep that is depends on Python; what parses it may allow more than what looks at it."""
    write("m.jsonl", '{"a":1}\n{"a":' + "[" * depth + "]" * depth + "}\n")
    message = "m.jsonl, line 2: accepted"
    try:
        list(list_inputs("m.jsonl"))
    except InputError as error:
        message = str(error)
    assert message.startswith("m.jsonl, line 2")


# ---- parquet -----------------------------------------------------------------------------------


def test_a_parquet_manifest_gives_json_rows(folder):
    """Dates, times and decimals become text, NaN (a missing number to pandas) null."""
    utc = datetime.UTC
    table = pyarrow.table(
        {
            "path": ["a", "b"],
            "day": [datetime.date(2024, 1, 2), None],
            "at": [datetime.datetime(2024, 1, 2, 3, tzinfo=utc), None],
            "cost": [decimal.Decimal("1.50"), None],
            "x": [float("nan"), 2.5],
            "tags": [["u", "v"], []],
        }
    )
    parquet.write_table(table, "m.parquet")
    listing = list_inputs("m.parquet")
    assert listing.columns == ("path", "day", "at", "cost", "x", "tags")
    assert [one.row for one in listing] == [
        '{"path":"a","day":"2024-01-02","at":"2024-01-02T03:00:00+00:00",'
        '"cost":"1.50","x":null,"tags":["u","v"]}',
        '{"path":"b","day":null,"at":null,"cost":null,"x":2.5,"tags":[]}',
    ]


def test_a_parquet_manifest_of_many_batches_is_read_whole(folder):
    """Rows keep their order across batches and row groups."""
    parquet.write_table(pyarrow.table({"n": range(5000)}), "m.parquet", row_group_size=1700)
    assert rows("m.parquet") == [f'{{"n":{n}}}' for n in range(5000)]


@pytest.mark.parametrize("kind", ["binary", "nested", "fixed"])
def test_bytes_in_a_parquet_manifest_are_refused_by_their_column(folder, kind):
    """JSON has no bytes, and guessing an encoding would damage them."""
    columns = {
        "binary": pyarrow.array([b"x"]),
        "nested": pyarrow.array([[{"k": b"x"}]]),
        "fixed": pyarrow.array([b"x"], pyarrow.binary(1)),
    }
    parquet.write_table(pyarrow.table({"a": [1], "image": columns[kind]}), "m.parquet")
    assert refused("m.parquet").startswith("m.parquet: column 'image' holds bytes (")


def test_a_parquet_manifest_that_is_wrong_is_refused_by_name(folder):
    """No error of pyarrow's own gets through, wherever the file is torn."""
    parquet.write_table(pyarrow.table({"a": ["text"] * 9}), "whole.parquet", compression="none")
    whole = Path("whole.parquet").read_bytes()
    for content in (b"", b"PAR1", whole[:-20], whole[:4] + b"\xff" * 40 + whole[44:]):
        write("m.parquet", content)
        assert refused("m.parquet").startswith("m.parquet: pyarrow cannot read it: ")
    twice = pyarrow.Table.from_arrays([pyarrow.array([1])] * 2, names=["a", "a"])
    parquet.write_table(twice, "m.parquet")
    assert refused("m.parquet").startswith("m.parquet: two columns are called 'a'\n")
    parquet.write_table(pyarrow.table({"a": pyarrow.array([], "int64")}), "m.parquet")
    assert refused("m.parquet").startswith("m.parquet: no rows\n")


# ---- all of them -------------------------------------------------------------------------------


class Compared(str):
    """A name that counts with how many others it is compared."""

    count = 0

    def __eq__(self, other):
        Compared.count += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


def test_a_hundred_thousand_columns_are_checked_in_linear_time():
    """A JSONL file of sparse features may have as many: each name is looked up once."""
    check_columns("m.jsonl", [Compared(f"feature {number}") for number in range(100_000)])
    assert Compared.count < 1000  # where two have one place in a table of hashes
    with pytest.raises(InputError, match="two columns are called 'a'"):
        check_columns("m.jsonl", ["a", "b", "a"])


def test_a_manifest_is_read_as_a_stream():
    """Rows come out before the file has been read: memory does not grow with its rows."""
    import io

    opened: list[io.BytesIO] = []

    def open_file() -> io.BytesIO:
        opened.append(io.BytesIO(b"a\n" + b"12345\n" * 200_000))
        return opened[-1]

    manifest = open_manifest("m.csv", open_file, None)
    stream = iter(manifest.inputs())
    assert next(stream).row == '{"a":"12345"}'
    assert opened[-1].tell() < 100_000
    stream.close()
    assert all(file.closed for file in opened)


def test_a_first_line_of_every_message_is_short(folder):
    """It stands alone in a log."""
    write("m.csv", "a,b\n1,2\n1,2,3\n")
    for inputs in ("m.csv", "gone", [None], [], 3):
        first, *rest = refused(inputs).splitlines()
        assert len(first) <= 100
        assert rest
        assert re.match(r"\S+", first)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_pipe_is_no_manifest(folder: Path, suffix: str) -> None:
    """To open one waits for a writer, perhaps for ever."""
    os.mkfifo(f"rows{suffix}")
    Path(f"null{suffix}").symlink_to("/dev/zero")
    for name in (f"rows{suffix}", f"null{suffix}"):
        with pytest.raises(InputError, match=f"{name}: it is a pipe or a device"):
            list_inputs(name)
