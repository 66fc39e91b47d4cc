"""The index of shards: an Arrow file, which may be anybody's, and is compared with its shards."""

from __future__ import annotations

import json
import resource

import numpy as np
import pyarrow as pa
import pytest
from written import write_tars

import forebay
from forebay.shards.format import BlockDecoder, FoundBlocks, ShardFormat

NAMES = ["block_ends", "extent_ends", "first", "offset", "length", "starts_at", "infos", "codecs"]


@pytest.fixture
def index(tmp_path):
    """Return the file of an index of two tars."""
    (tmp_path / "tars").mkdir()
    write_tars(tmp_path / "tars", 40, 2)
    given = {"num_workers": 0, "progress": False}
    forebay.index_shards(tmp_path / "tars", tmp_path / "index", **given)
    return tmp_path / "index" / "shards.index"


def opened(index):
    location = index.parents[1] / "tars"
    return forebay.open_shards(location, index=index.parent, progress=False)


def rewritten(index, change):
    """Write an index again with other lists, or another head."""
    batch = pa.ipc.open_file(index.read_bytes()).get_batch(0)
    lists = {name: batch.column(name).values for name in batch.schema.names}
    head = json.loads(batch.schema.metadata[b"forebay"])
    options = change(lists, head)
    columns = [
        pa.LargeListArray.from_arrays(pa.array([0, len(each)], pa.int64()), each)
        for each in lists.values()
    ]
    schema = pa.schema([pa.field(name, each.type) for name, each in zip(lists, columns)])  # noqa: B905
    schema = schema.with_metadata({"forebay": json.dumps(head)})
    with pa.ipc.new_file(index, schema, options=options) as writer:
        writer.write_batch(pa.record_batch(columns, schema=schema))


def test_an_index_is_an_arrow_file_that_others_read(index):
    """A row, with a list of each kind of number."""
    table = pa.ipc.open_file(index).read_all()
    assert table.num_rows == 1
    assert table["names"][0].as_py() == [b"train-000.tar", b"train-001.tar"]
    assert len(table["starts"][0]) == len(opened(index)) == 40


@pytest.mark.parametrize("number", [1 << 40, (1 << 63) - 1, -1, 0, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_forged_number_is_refused_before_memory_is_taken_for_it(index, name, number):
    """In words that name the file and what to do; or what it says can be true."""

    def change(lists, head):
        values = np.array(lists[name])
        values[-1] = np.clip(number, *(np.iinfo(values.dtype).min, np.iinfo(values.dtype).max))
        lists[name] = pa.array(values, lists[name].type)

    rewritten(index, change)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        samples = opened(index)
    except forebay.InputError as error:
        words = str(error)
        assert "shards.index' is damaged: " in words and "forebay.index_shards again" in words
        assert len(words.partition("damaged: ")[2].split()) > 10
    else:
        assert name in ("length", "starts_at", "codecs", "offset", "first", "infos")
        assert len(samples) == 40
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (100 << 10)


def test_forged_heads_and_lists_are_refused(index):
    """Too many samples for the bytes, lists of other lengths or types, compressed lists."""
    whole = index.read_bytes()

    def claims(lists, head):
        head["samples"] = 1 << 40

    def lacks(lists, head):
        lists["crc32"] = lists["crc32"][:-1]

    def other(lists, head):
        lists["crc32"] = lists["crc32"].cast(pa.float64())

    def nothing(lists, head):
        lists["tags"] = pa.array([None, b"x"], lists["tags"].type)

    def compressed(lists, head):
        return pa.ipc.IpcWriteOptions(compression="zstd")

    def version(lists, head):
        head["format"] = 2

    for change in (claims, lacks, other, nothing, compressed, version):
        rewritten(index, change)
        with pytest.raises(forebay.InputError, match=r"shards\.index' is damaged: "):
            opened(index)
        index.write_bytes(whole)
    for cut in (10, len(whole) // 2, len(whole) - 1):
        index.write_bytes(whole[:cut])
        with pytest.raises(forebay.InputError, match=r"shards\.index' is damaged: "):
            opened(index)
    index.write_bytes(whole)
    assert len(opened(index)) == 40


class Last(BlockDecoder):
    def sample(self, data):
        return len(data)


class Halves(ShardFormat):
    """A format whose shards are a block of two samples, the second beyond 4 GiB."""

    name, suffixes, reads_all = "halves", (".halves",), False

    def matches(self, head):
        return False

    def find(self, shard):
        starts = np.array([0, shard.size - 50])
        return FoundBlocks(np.array([2]), np.array([[0, 0, shard.size]]), starts=starts)

    def decoder(self, info, columns):
        return Last()


def test_samples_beyond_4_gib_of_a_block_are_where_their_format_says(tmp_path):
    """Of a format of one's own; the file has a hole."""
    forebay.register_format(Halves())
    path = tmp_path / "a.halves"
    with path.open("wb") as file:
        file.truncate((1 << 32) + 100)
    samples = forebay.open_shards(path, format="halves", progress=False)
    assert samples[1] == 50
    assert samples[0] == (1 << 32) + 50
