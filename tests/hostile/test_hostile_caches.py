"""Shards and parts that somebody else made: errors in words, nothing read past their ends."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from doctored import contents, doctor

import forebay
from forebay.errors import ForebayError, InputError, LedgerError, OutputError


class Numbers:
    """Sample k is k, and a tensor whose length is k."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return {"number": index, "tensor": torch.ones(index % 3 + 1)}


def make(folder, **options):
    return forebay.cache(Numbers(), folder, num_workers=0, progress=False, **options)


def halve(batch):
    return batch["number"] / 2


def predict(folder, **options):
    data = [{"number": torch.tensor(float(k))} for k in range(6)]
    options = {"num_workers": 0, "progress": False, "part_size": 2, **options}
    return forebay.predict(halve, data, folder, **options)


def rewritten(path: Path, change):
    """Write a shard anew, with other words or columns."""
    with pa.OSFile(str(path)) as file:
        table = pa.ipc.open_file(file).read_all()
    table, options = change(table)
    with pa.OSFile(str(path), "wb") as file:
        with pa.ipc.new_file(file, table.schema, options=options) as writer:
            writer.write_table(table)


def told(**changes):
    def change(table):
        words = json.loads(table.schema.metadata[b"forebay"])
        for key, value in changes.items():
            words["columns"][-1][key] = value
        return table.replace_schema_metadata({"forebay": json.dumps(words)}), None

    return change


def without_last(table):
    words = json.loads(table.schema.metadata[b"forebay"])
    words["columns"].pop()
    table = table.drop_columns(table.column_names[-1])
    return table.replace_schema_metadata({"forebay": json.dumps(words)}), None


SHARDS = {
    "a negative shape": told(shape=[-1]),
    "a huge shape": told(shape=[1 << 62]),
    "another dtype": told(dtype="complex128"),
    "another kind": told(kind="array", dtype="O"),
    "another name": lambda table: (
        table.set_column(0, "x", table["number"]),
        None,
    ),
    "another type": lambda table: (
        table.set_column(0, "number", table["number"].cast(pa.uint64())),
        None,
    ),
    "no column": lambda table: (table.drop_columns(table.column_names[-1]), None),
    "a column less": without_last,
    "no words": lambda table: (table.replace_schema_metadata(None), None),
    "other words": lambda table: (table.replace_schema_metadata({"forebay": "[" * 9999}), None),
    "rows in another order": lambda table: (table.slice(0, 0), None),
    "compressed": lambda table: (table, pa.ipc.IpcWriteOptions(compression="lz4")),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", SHARDS.values(), ids=SHARDS)
def test_a_shard_that_says_what_it_does_not_hold_is_an_error(tmp_path, change):
    """It is named; a sample is right or none is given."""
    cached = make(tmp_path / "cache")
    rewritten(tmp_path / "cache" / "shard-00004.arrow", change)
    with pytest.raises(InputError, match=r"shard-00004\.arrow' cannot be read"):
        cached[4]
    assert cached[3]["number"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("call", [make, predict])
@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO file_changes VALUES('../outside/precious', NULL)",
        "INSERT INTO file_changes VALUES('new', '../outside/precious')",
        "INSERT INTO file_changes VALUES('../outside/new', '.forebay/staging/x')",
        """UPDATE inputs SET outputs = '[["../outside/precious", 1]]' WHERE ordinal = 1""",
    ],
)
def test_caches_and_predictions_touch_nothing_outside(tmp_path, outside, call, sql):
    """Their ledgers are looked at as those of preprocess are."""
    folder = tmp_path / "made"
    call(folder)
    (folder / ".forebay" / "cache.json").unlink(missing_ok=True)
    doctor(folder, sql)
    with pytest.raises(LedgerError, match="which"):
        call(folder, redo="*")


@pytest.mark.slow
@pytest.mark.parametrize("call", [make, predict])
@pytest.mark.parametrize(
    "value", ["{}", "[]", '{"samples": 1e999, "size": 1, "facts": ""}', "[" * 100_000, b"\xff"]
)
def test_how_the_samples_are_cut_may_be_anything(tmp_path, call, value):
    """It is damage, said in words."""
    call(tmp_path / "made")
    (tmp_path / "made" / ".forebay" / "cache.json").unlink(missing_ok=True)
    doctor(tmp_path / "made", "UPDATE meta SET value = ? WHERE key = 'ranges'", value)
    with pytest.raises(ForebayError, match="damaged"):
        call(tmp_path / "made")


@pytest.mark.parametrize(
    "record", ["{}", "[]", '[{"rows": "many"}]', '[{"rows": 1, "failures": [1], "columns": 7}]']
)
def test_the_record_of_a_part_may_be_anything(tmp_path, record):
    """It is damage, said in words."""
    predict(tmp_path / "made")
    doctor(tmp_path / "made", "UPDATE inputs SET metadata = ? WHERE ordinal = 1", record)
    with pytest.raises(LedgerError, match="damaged"):
        predict(tmp_path / "made")


@pytest.mark.parametrize(
    ("call", "name"), [(make, "shard-00001.arrow"), (predict, "part-00001.parquet")]
)
def test_a_file_that_is_in_the_way_stays(tmp_path, call, name):
    """Of a cache, of predictions: it is somebody's own, and the error says so."""
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / name).write_text("the user's own")
    with pytest.raises((OutputError, forebay.FailuresError), match="exists already"):
        call(tmp_path / "made")
    assert contents(tmp_path / "made")[name] == b"the user's own"
    (tmp_path / "made" / name).unlink()
    call(tmp_path / "made")


def test_a_ledger_of_one_verb_is_none_of_another(tmp_path, outside):
    """A link in the place of a shard is replaced, and what it leads to is not."""
    make(tmp_path / "made")
    (tmp_path / "made" / "shard-00001.arrow").unlink()
    (tmp_path / "made" / "shard-00001.arrow").symlink_to(outside / "precious")
    with pytest.raises(InputError, match="were written"):
        make(tmp_path / "made")
    db = sqlite3.connect(tmp_path / "made" / ".forebay" / "ledger.sqlite")
    assert db.execute("SELECT count(*) FROM inputs").fetchone() == (6,)
    db.close()
