"""The blocks of a cache: each can be read and checked alone, and their list may be anybody's."""

from __future__ import annotations

import json
import zlib

import numpy as np
import pyarrow as pa
import pytest
import torch
from cached import Asked, Made, Pictures

import forebay
from forebay.base.file_stores import Folder
from forebay.base.value_types import schema_of
from forebay.caching import arrow_shards, shard_writer
from forebay.caching.index import Index
from forebay.caching.layout import BLOCK, BLOCKS, Blocks


def make(dataset, folder, **options):
    """Make or open a cache in this process."""
    return forebay.cache(dataset, folder, num_workers=0, progress=False, **options)


def varied(index):
    """Samples that are of one shape in most shards."""
    few = 300 < index < 310
    return {"wave": torch.arange(50 + few * index % 7), "name": "\udc80" if few else "plain"}


def test_a_block_is_read_and_checked_without_the_rest_of_its_shard(tmp_path, monkeypatch):
    """By its offset and length; its columns are those that the index has for the shard."""
    monkeypatch.setattr(arrow_shards, "BATCH_BYTES", 1000)
    make(Made(varied, 1000), tmp_path, shard_bytes=4096)
    index = Index.read(Folder(tmp_path))
    blocks = index.read_blocks(Folder(tmp_path))
    assert len(blocks) == index.blocks[0] >= 3 * len(index.sizes) > 300
    assert len({str(layout.specs) for layout in index.layouts}) == 2
    for number, name in enumerate(index.plan.names()):
        data, found = (tmp_path / name).read_bytes(), pa.ipc.open_file(tmp_path / name)
        bounds = [number * index.plan.per_shard, (number + 1) * index.plan.per_shard]
        at = range(*np.searchsorted(blocks.first, bounds).tolist())
        assert len(at) == found.num_record_batches
        for block in at:
            body = data[blocks.offset[block] :][: blocks.length[block]]
            assert zlib.crc32(body) == blocks.crc32[block]
            layout = index.layouts[number]
            schema = schema_of(layout.names, layout.specs)
            alone = pa.ipc.read_record_batch(pa.py_buffer(body), schema)
            whole = found.get_batch(block - at.start)
            assert alone.columns == whole.columns and len(alone) == blocks.rows(block)
            first = int(blocks.first[block])
            wanted = varied(first)["wave"].tolist()
            got = alone["wave"][0].as_py()
            assert (got["data"] if isinstance(got, dict) else got) == wanted


@pytest.mark.slow
def test_the_list_of_blocks_is_made_again_without_asking_for_a_sample(tmp_path):
    """A cache without it lacks a file; the shards stay as they are."""
    make(Asked(), tmp_path)
    path = tmp_path / BLOCKS
    before, kept = path.read_bytes(), (tmp_path / "shard-00003.arrow").stat().st_ino
    path.unlink()
    with pytest.raises(forebay.InputError, match=r"lacks \.forebay/blocks\.bin: 1 of its 41 files"):
        forebay.open_cache(tmp_path)
    Asked.asked.clear()
    make(Asked(), tmp_path)
    assert Asked.asked == [] and path.read_bytes() == before
    assert (tmp_path / "shard-00003.arrow").stat().st_ino == kept


@pytest.mark.slow
def test_missing_values_count_as_what_they_take(tmp_path, monkeypatch):
    """In a column of one shape each of them does; so blocks stay small."""
    monkeypatch.setattr(arrow_shards, "BATCH_BYTES", 10_000)
    make(Made(lambda i: (i, None if i % 50 else torch.zeros(1000)), 128 * 100), tmp_path)
    blocks = Index.read(Folder(tmp_path)).read_blocks(Folder(tmp_path))
    assert blocks.length.max() < 20_000


def test_a_sample_that_no_block_can_hold_is_named(tmp_path, monkeypatch):
    """The bytes of a block are counted in 32 bits."""
    monkeypatch.setattr(arrow_shards, "BATCH_BYTES", 1000)
    monkeypatch.setattr(shard_writer, "MOST_BLOCK_BYTES", 3000)
    with pytest.raises(forebay.FailuresError, match=r"\b7\n.*sample 7: the sample has about 4,0"):
        make(Made(lambda i: torch.zeros(1000 if i == 7 else 10), 20), tmp_path)


# Samples of all, and of each shard but the last; bytes of each.
PLAN = 10, 4, (1000, 1000, 500)
# first, offset, nbytes, length, crc32: two shards of two blocks, and one of one.
ROWS = [
    *((0, 8, 400, 400, 1), (3, 408, 500, 500, 2)),
    *((4, 8, 300, 300, 3), (7, 308, 692, 692, 4)),
    (8, 8, 400, 400, 5),
]


def table(*changes):
    """Return a list of blocks in which some numbers are others."""
    found = np.array(ROWS, BLOCK)
    for row, name, value in changes:
        found[name][row] = value
    return found.tobytes()


def test_a_list_of_blocks_says_how_many_samples_are_in_each():
    """A block ends where the next one begins."""
    blocks = Blocks(table(), *PLAN)
    assert blocks.first.tolist() == [0, 3, 4, 7, 8]
    assert [blocks.rows(block) for block in range(5)] == [3, 1, 3, 1, 2]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (table((0, "first", 1)), "not every shard begins with a block"),
        (table((2, "first", 5)), "not every shard begins with a block"),
        (table((1, "first", 4)), "block 1 is not in order"),
        (table((4, "first", 1 << 63)), "not every shard begins with a block"),
        (table()[: 4 * BLOCK.itemsize], "not every shard begins with a block"),
        (b"", "not every shard begins with a block"),
        (table((1, "first", 0)), "block 0 is not in order"),
        (table((3, "first", (1 << 64) - 1)), "not every shard begins with a block"),
        (table() + np.array([(10, 408, 50, 50, 6)], BLOCK).tobytes(), "block 5 is not in order"),
        (table() + np.array([(9, 408, 93, 93, 6)], BLOCK).tobytes(), "block 5 lies outside"),
        (table((4, "offset", 101)), "block 4 lies outside its shard"),
        (table((3, "offset", (1 << 64) - 692)), "block 3 lies outside its shard"),
        (table((3, "offset", (1 << 63) - 1)), "block 3 lies outside its shard"),
        (table((0, "length", (1 << 32) - 1)), "block 0 lies outside its shard"),
        (table((2, "length", 0)), "block 2 lies outside its shard"),
        (table((1, "offset", 407)), "block 1 overlaps the block before it"),
        (table()[:-1], "buffer size"),
        (table((3, "nbytes", 691)), "block 3 has another size in memory"),
        (table((3, "nbytes", 693)), "block 3 has another size in memory"),
    ],
)
def test_a_list_of_blocks_that_cannot_be_is_refused(data, words):
    """Nothing of it is used to compute where to read."""
    with pytest.raises(ValueError, match=words):
        Blocks(data, *PLAN)


@pytest.mark.parametrize(
    ("compression", "length", "most"),
    [("lz4", 400, 400 << 8), ("zstd", 400, 400 << 15), ("zstd", 900, 900 << 15)],
)
def test_a_block_has_no_more_bytes_than_its_codec_can_make(compression, length, most):
    """Of some hundred bytes; nor more than 4 GiB of any number."""
    plan = 4, 4, (1000,)
    for nbytes, is_right in ((0, True), (most, True), (most + 1, False), (1 << 63, False)):
        row = np.array([(0, 8, nbytes, length, 1)], BLOCK).tobytes()
        if is_right:
            assert Blocks(row, *plan, compression=compression).nbytes.tolist() == [nbytes]
            continue
        with pytest.raises(ValueError, match="block 0 has another size in memory"):
            Blocks(row, *plan, compression=compression)
    large = np.array([(0, 8, (1 << 32) + 1, 1 << 20, 1)], BLOCK).tobytes()
    with pytest.raises(ValueError, match="block 0 has another size in memory"):
        Blocks(large, 4, 4, (1 << 21,), compression="zstd")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-24],
        lambda data: data + data[-24:],
        lambda data: data[:100] + bytes([data[100] ^ 4]) + data[101:],
        lambda data: b"",
    ],
)
def test_a_damaged_list_of_blocks_is_an_error(tmp_path, damage):
    """Which says what to do; the list has the checksum that the index has."""
    make(Pictures(), tmp_path)
    index, path = Index.read(Folder(tmp_path)), tmp_path / BLOCKS
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(forebay.InputError, match=r"(?s)blocks\.bin' is damaged.*forebay\.cache"):
        index.read_blocks(Folder(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda told: told["blocks"].update(count=10**15),
        lambda told: told["blocks"].update(count=39),
        lambda told: told["blocks"].update(count=-1),
        lambda told: told["blocks"].update(crc32="x"),
        lambda told: told.pop("blocks"),
        lambda told: told["layout_of"].__setitem__(0, 7),
        lambda told: told["layout_of"].__setitem__(0, None),
        lambda told: told["layouts"][0]["columns"].pop(),
        lambda told: told["sizes"].__setitem__(0, 1 << 70),
        lambda told: told["sizes"].__setitem__(0, -1),
    ],
)
def test_an_index_with_impossible_numbers_is_damaged(tmp_path, change):
    """Also those that an ordinary local cache does not need."""
    make(Pictures(), tmp_path)
    path = tmp_path / ".forebay" / "cache.json"
    told = json.loads(path.read_text())
    change(told)
    path.write_text(json.dumps(told))
    with pytest.raises(forebay.InputError, match=r"cache\.json' is damaged"):
        forebay.open_cache(tmp_path)
