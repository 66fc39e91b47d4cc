"""Shards and indexes that somebody else made: nothing outside is read, written or removed."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from pathlib import Path

import pytest
from doctored import contents, doctor

import forebay
from forebay.errors import ForebayError, InputError, LedgerError

pytestmark = pytest.mark.usefixtures("readers_closed")


def pack(source, out):
    """Pack an input's text."""
    out.pack(source.name, source.read_bytes())


def run(inputs, output, **options):
    return forebay.preprocess(pack, inputs, output, num_workers=0, progress=False, **options)


@pytest.fixture
def packed(tmp_path, monkeypatch):
    """The inputs and the output folder of a run."""
    (tmp_path / "in").mkdir()
    for name in "ab":
        (tmp_path / "in" / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    run(Path("in"), tmp_path / "out")
    return Path("in"), tmp_path / "out"


def change(output, sql, *parameters):
    """Change the index."""
    db = sqlite3.connect(output / "packed" / "index.sqlite", isolation_level=None)
    try:
        db.execute(sql, parameters)
    finally:
        db.close()


PLACES = {
    "a path": ["../../outside/precious", 512, 1],
    "no number": [None, 512, 1],
    "a float": [0.5, 512, 1],
    "negative": [-1, 512, 1],
    "too large": [10**17, 512, 1],
    "a negative offset": [0, -5, 1],
    "an offset behind the end": [0, 2**60, 1],
    "an offset without room for a header": [0, 100, 1],
    "a negative CRC": [0, 512, -1],
    "too little": [0],
    "nested": [[0], 512, 1],
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_the_place_of_a_member_may_be_anything(tmp_path, packed, outside, place):
    """An error in words; the shard, and what is outside, stay as they are."""
    inputs, output = packed
    shards = contents(output / "packed")
    doctor(
        output,
        "UPDATE inputs SET outputs = ? WHERE ordinal = 1",
        json.dumps([["packed/a", 1, *place]]),
    )
    (tmp_path / "in" / "c").write_text("c")
    with pytest.raises(ForebayError, match=r"damaged|missing"):
        run(inputs, output)
    assert contents(output / "packed") == shards


@pytest.mark.parametrize("name", ["../../outside/precious", "/etc/passwd", "a", "packed/00000.tar"])
def test_the_name_of_a_member_stays_in_the_folder(packed, outside, name):
    """Any other is an error."""
    inputs, output = packed
    doctor(
        output,
        "UPDATE inputs SET outputs = ? WHERE ordinal = 1",
        json.dumps([[name, 1, 0, 512, 1]]),
    )
    (inputs / "c").write_text("c")
    with pytest.raises(LedgerError, match=r"which|damaged"):
        run(inputs, output)


@pytest.mark.parametrize(
    "record",
    [
        "{}",
        "[]",
        "[" * 99_999,
        '{"live": ["../../outside/precious"], "dead": []}',
        '{"live": [], "dead": [-1]}',
        '{"live": 1, "dead": 2}',
    ],
)
def test_the_record_of_the_shards_may_be_anything(packed, outside, record):
    """It is damage, in words; nothing is removed by it."""
    inputs, output = packed
    doctor(output, "UPDATE meta SET value = ? WHERE key = 'packed'", record)
    (inputs / "c").write_text("c")
    for options in ({}, {"resume": False}):
        with pytest.raises(LedgerError, match="damaged"):
            run(inputs, output, **options)
    assert "00000.tar" in contents(output / "packed")


@pytest.mark.parametrize("resume", [True, False])
def test_no_link_is_followed_when_shards_are_completed(tmp_path, packed, outside, resume):
    """Neither one in the place of a shard, nor one in the place of their folder."""
    inputs, output = packed
    (inputs / "a").write_text("changed")  # the shard has to be copied
    (output / "packed" / "00000.tar").unlink()
    (output / "packed" / "00000.tar").symlink_to(outside / "precious")
    if resume:
        with pytest.raises(ForebayError, match="cannot be completed"):
            run(inputs, output)
    shutil.rmtree(output / "packed")
    (output / "packed").symlink_to(outside)
    with pytest.raises(ForebayError, match="is a link"):
        run(inputs, output, resume=resume)


def test_a_link_in_the_place_of_an_open_shard_is_not_written_through(tmp_path, packed, outside):
    """Nor is one in the place of their folder."""
    inputs, output = packed
    (output / ".forebay" / "packed").mkdir()
    (output / ".forebay" / "packed" / "00000.tar").symlink_to(outside / "precious")
    (inputs / "c").write_text("c")
    with pytest.raises(ForebayError, match="cannot be completed"):
        run(inputs, output)
    shutil.rmtree(output / ".forebay" / "packed")
    (output / ".forebay" / "packed").symlink_to(outside)
    with pytest.raises(ForebayError, match="is a link"):
        run(inputs, output)


INDEXES = {
    "a shard that is a path": (
        "UPDATE members SET shard = '../../outside/precious'",
        "cannot be read",
    ),
    "a negative offset": ("UPDATE members SET offset = -1", "cannot be read"),
    "a huge size": ("UPDATE members SET size = 1 << 60", "too short"),
    "an offset behind the end": ("UPDATE members SET offset = 1 << 60", "too short"),
    "a size that is text": ("UPDATE members SET size = 'many'", "cannot be read"),
    "no table": ("ALTER TABLE members RENAME TO others", "not an index"),
    "a view": ("CREATE VIEW more AS SELECT * FROM members", "not an index"),
    "no shard": ("UPDATE members SET shard = 7", "No such file"),
}


@pytest.mark.parametrize(("sql", "words"), INDEXES.values(), ids=INDEXES)
def test_an_index_may_say_anything(packed, sql, words):
    """What is read is a member of a shard in the folder, or an error."""
    _, output = packed
    change(output, sql)
    with pytest.raises(InputError, match=words):
        forebay.open_output(output / "packed" / "a")


@pytest.mark.parametrize("body", [b"", b"no database", b"SQLite format 3\0" + bytes(200)])
def test_an_index_may_be_any_file(packed, body):
    """It is damage, in words."""
    _, output = packed
    (output / "packed" / "index.sqlite").write_bytes(body)
    with pytest.raises(InputError, match="cannot be read"):
        forebay.open_output(output / "packed" / "a")


def test_no_link_in_the_place_of_a_shard_is_read(packed, outside):
    """It would be read as if it were a shard."""
    _, output = packed
    (output / "packed" / "00000.tar").unlink()
    (output / "packed" / "00000.tar").symlink_to(outside / "precious")
    with pytest.raises(InputError, match="cannot be read"):
        forebay.open_output(output / "packed" / "a")
    os.unlink(output / "packed" / "00000.tar")
    os.mkfifo(output / "packed" / "00000.tar")
    with pytest.raises(InputError, match="not a regular file"):
        forebay.open_output(output / "packed" / "a")
