"""A ledger is data, whoever wrote it: errors in words, and nothing outside is touched."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from itertools import cycle

import pytest
from doctored import CALLS, contents, doctor, run, verify

from forebay.errors import ForebayError, LedgerError
from forebay.ledger.lock import Holder
from forebay.ledger.records import Counts
from forebay.ledger.snapshot import Snapshot, read_entries, read_failures, read_snapshot

OUTSIDE = ["../outside/precious", "sub/../../outside/precious", "{tmp}/outside/precious"]
NO_NAMES = ["", ".", "./sub/a", "sub//a", "sub/a\0", b"sub/\xff", b"\xff"]
OWN = [".forebay/ledger.sqlite", ".forebay/lock", ".forebay/staging"]
FILE_CHANGE = "INSERT INTO file_changes VALUES(?, ?)"
DEEP = "[" * 100_000


def named(name, tmp_path):
    return name.replace("{tmp}", str(tmp_path)) if isinstance(name, str) else name


def staged(output, name="w/x"):
    path = output / ".forebay" / "staging" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("staged")
    return f".forebay/staging/{name}"


def refused(inputs, output, words=r"which|damaged"):
    """Every call is an error in words."""
    for call in CALLS.values():
        with pytest.raises(LedgerError, match=words):
            call(inputs, output)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OUTSIDE, *NO_NAMES, *OWN])
def test_a_pending_removal_stays_in_the_folder(tmp_path, inputs, output, outside, name):
    """Any other name is an error that shows it, and nothing at all is removed."""
    doctor(output, FILE_CHANGE, "sub/b", None)
    doctor(output, FILE_CHANGE, named(name, tmp_path), None)
    refused(inputs, output)
    assert {"sub/a", "sub/b", "metadata.parquet"} <= set(contents(output))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OUTSIDE, *NO_NAMES, *OWN])
def test_a_pending_rename_goes_into_the_folder(tmp_path, inputs, output, outside, name):
    """Never to another name."""
    doctor(output, FILE_CHANGE, named(name, tmp_path), staged(output))
    refused(inputs, output)


NOT_STAGED = ["sub/a", ".forebay/stagingx/a", ".forebay/staging/../../../outside/precious"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OUTSIDE, *NO_NAMES, *OWN, *NOT_STAGED])
def test_a_pending_rename_comes_from_the_staging_folder(tmp_path, inputs, output, outside, name):
    """Nothing else is moved into the folder, nor within it."""
    doctor(output, FILE_CHANGE, "new", named(name, tmp_path))
    refused(inputs, output)
    assert "new" not in contents(output)


@pytest.mark.parametrize("name", [*OUTSIDE, *NO_NAMES[:-2]])
def test_names_of_outputs_are_checked_wherever_they_are_read(
    tmp_path, inputs, output, outside, name
):
    """Those of an input by whoever proves it, those of all by whoever starts over."""
    text = json.dumps([[named(name, tmp_path), 1]])
    doctor(output, "UPDATE inputs SET outputs = ? WHERE ordinal = 1", text)
    with pytest.raises(LedgerError, match="which"):
        verify(output)
    doctor(output, "UPDATE outputs SET name = ? WHERE ordinal = 1", named(name, tmp_path))
    with pytest.raises(LedgerError, match="which"):
        run(inputs, output, redo="*")


WRONG = ["{}", '{"a": 1}', '[["x"]]', '[["x", "much"]]', '[["x", 1e999]]', "7", "not JSON", DEEP]


@pytest.mark.slow
@pytest.mark.parametrize("value", [*WRONG[1:], b"\xff\xfe"])
@pytest.mark.parametrize("column", ["outputs", "metadata"])
def test_a_done_input_with_anything_in_its_columns_is_an_error(inputs, output, column, value):
    """Wrong types, huge numbers, truncated or endless JSON, bytes: never a raw error."""
    doctor(output, f"UPDATE inputs SET {column} = ? WHERE ordinal = 1", value)
    (inputs / "d").write_text("d")  # so that the table is written again
    with pytest.raises(ForebayError):
        run(inputs, output)


@pytest.mark.parametrize("value", [*WRONG[2:], None, b"\xff\xfe"])
def test_a_failure_that_is_none_is_an_error(output, value):
    """For whoever looks at it."""
    doctor(output, "UPDATE inputs SET error = ? WHERE state = 2", value)
    with pytest.raises(LedgerError):
        list(read_failures(output / ".forebay"))


@pytest.mark.slow
@pytest.mark.parametrize("key", ["work", "verb", "call", "columns", "_counts", "tables"])
def test_meta_may_be_anything(inputs, output, key):
    """A run, a retry, a restart or a check ends well or in words."""
    values = ['{"code": 5}', '[["x", "much"]]', "7", "not JSON", DEEP, b"\xff", "[1e999, 0, 0]"]
    for value, call in zip(values, cycle(CALLS.values()), strict=False):
        doctor(output, "INSERT OR REPLACE INTO meta VALUES(?, ?)", key, value)
        with suppress(ForebayError):
            call(inputs, output)


@pytest.mark.parametrize(
    "run", ["not JSON", "7", "[]", '{"began": "x"}', '{"done": {}}', '{"done": 1e999}', DEEP]
)
def test_the_state_of_a_run_with_a_damaged_record_is_an_error(run):
    """`forebay status` says which record it is."""
    snapshot = Snapshot(Counts(3, 1, 0), {"run": run}, Holder("here", 1))
    with pytest.raises(LedgerError, match="the ledger's record of the run is damaged"):
        snapshot.text(0.0)


@pytest.mark.parametrize("ordinal", [0, -(1 << 63), (1 << 63) - 1])
def test_ordinals_may_be_anything(inputs, output, ordinal):
    """Whatever SQLite can hold."""
    doctor(output, "UPDATE inputs SET ordinal = ? WHERE ordinal = 3", ordinal)
    for call in CALLS.values():
        with suppress(ForebayError):
            call(inputs, output)
    with suppress(ForebayError):
        list(read_entries(output / ".forebay"))


def test_a_table_definition_that_is_not_utf8_is_damage(inputs, output):
    """SQLite quotes it in its message, which Python then cannot decode."""
    file = output / ".forebay" / "ledger.sqlite"
    whole = file.read_bytes()
    assert b"CREATE TABLE meta" in whole
    file.write_bytes(whole.replace(b"CREATE TABLE meta", b"CREATE \xffABLE meta"))
    refused(inputs, output, "damaged")


def test_text_that_is_not_utf8_is_damage(inputs, output):
    """What SQLite takes for text and Python does not."""
    doctor(output, "UPDATE inputs SET source = CAST(x'ff' AS TEXT) WHERE ordinal = 1")
    with pytest.raises(LedgerError, match="is damaged"):
        run(inputs, output)


@pytest.mark.parametrize(
    "sql",
    [
        "CREATE TRIGGER t AFTER DELETE ON file_changes BEGIN DELETE FROM inputs; END",
        "CREATE VIEW v AS SELECT 1",
        "ALTER TABLE meta ADD COLUMN more TEXT DEFAULT 'x'",
        "DROP TABLE outputs",
    ],
)
def test_a_ledger_has_its_own_tables_and_no_others(inputs, output, sql):
    """A trigger or a view could do anything, for as long as it likes."""
    doctor(output, sql)
    for call in CALLS.values():
        with pytest.raises(LedgerError, match="not those of a ledger"):
            call(inputs, output)
    with pytest.raises(LedgerError, match="not those of a ledger"):
        read_snapshot(output / ".forebay")


def test_a_journal_cannot_have_another_file_deleted(inputs, output, outside):
    """SQLite deletes the file that the journal of a commit to several databases names."""
    page = 4096
    magic = bytes.fromhex("d9d505f920a163d7")
    header = magic + struct.pack(">IIIII", 0, 0, 1, 512, page)
    name = str(outside / "precious").encode()
    record = struct.pack(">I", (1 << 30) // page + 1) + name + struct.pack(">I", len(name))
    record += struct.pack(">I", sum(name)) + magic
    journal = output / ".forebay" / "ledger.sqlite-journal"
    journal.write_bytes(header.ljust(512, b"\0") + record)
    for call in CALLS.values():
        with pytest.raises(LedgerError, match="names another file"):
            call(inputs, output)
    with pytest.raises(LedgerError, match="names another file"):
        read_snapshot(output / ".forebay")
