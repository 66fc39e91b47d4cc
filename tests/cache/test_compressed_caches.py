"""Compressed caches: the same samples, in a folder and in a bucket, and no bomb goes off."""

from __future__ import annotations

import json
import pickle
import struct
from itertools import chain

import numpy as np
import pyarrow as pa
import pytest
import torch
from cached import Made, Pictures
from driving import published
from reading import SAMPLES, ask, equal, sample
from same import assert_same

import forebay
from forebay.base.file_stores import Folder
from forebay.caching import arrow_shards
from forebay.caching.arrow_messages import decompressed, record_batches
from forebay.caching.index import Index

CODECS = ["zstd", "lz4"]


def make(dataset, location, compression="zstd", **options):
    """Make or open a cache in this process."""
    options = {"num_workers": 0, "progress": False, "compression": compression, **options}
    return forebay.cache(dataset, location, **options)


@pytest.fixture
def small_blocks(monkeypatch):
    """Make caches of few shards with several blocks."""
    monkeypatch.setattr(arrow_shards, "BATCH_BYTES", 8000)
    monkeypatch.setattr("forebay.runs.cache.LEAST_SHARDS", 8)


def firsts_of(batch):
    """Return the first token of each sample."""
    return [int(sample[0]) for row in batch for sample in row]


def blocks_of(folder):
    return Index.read(Folder(folder)).read_blocks(Folder(folder))


# ---- in a folder ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("compression", CODECS)
def test_samples_are_those_without_compression(tmp_path, small_blocks, compression):
    """Of every kind of leaf, in any order, one by one and in batches; they own their memory."""
    dataset = Made(sample, 200)
    plain = make(dataset, tmp_path / "plain", None)
    found = make(dataset, tmp_path / "made", compression)
    order = np.random.default_rng(0).permutation(200).tolist()
    assert all(equal(found[at], plain[at]) for at in order)
    assert all(
        equal(*each)
        for each in zip(found.__getitems__(order), plain.__getitems__(order), strict=True)
    )
    one = found[0]["image"]
    one += 1  # writable, and nobody else's
    assert equal(found[0], plain[0])
    assert one.untyped_storage().nbytes() == one.nbytes
    blocks = blocks_of(tmp_path / "made")
    assert len(blocks) > 16 and (blocks.nbytes != blocks.length).any()
    opened = forebay.open_cache(tmp_path / "made", transform=lambda each: each["name"])
    assert opened[5] == "sample 5"


@pytest.mark.slow
def test_a_table_of_a_compressed_cache_has_its_rows(tmp_path, small_blocks):
    """Decompressed, and the same as without compression, where shards differ, too."""
    dataset = Made(lambda at: {"wave": torch.arange(3 + (at > 250) * at % 5), "at": at}, 300)
    found, plain = (make(dataset, tmp_path / str(codec), codec).table() for codec in ("lz4", None))
    assert found.equals(plain)
    found.validate(full=True)


@pytest.mark.slow
@pytest.mark.parametrize("compression", CODECS)
def test_a_sample_that_does_not_fit_begins_another_file(tmp_path, small_blocks, compression):
    """What was compressed with the narrower layout is written again with the wider one."""
    dataset = Made(lambda at: {"x": "text" if at % 40 else 7, "y": [0.5] * (at % 9)}, 200)
    found = make(dataset, tmp_path, compression)
    assert [found[at] for at in range(200)] == [dataset[at] for at in range(200)]


def test_decompressed_blocks_are_kept_up_to_a_number_of_bytes(tmp_path, small_blocks, monkeypatch):
    """Rows of one block decompress it once, and the oldest block goes first."""
    found = make(Made(sample, 200), tmp_path)
    blocks, made = blocks_of(tmp_path), []

    def noted(*given):
        made.append(len(found := decompressed(*given)))
        return found

    monkeypatch.setattr(arrow_shards, "decompressed", noted)
    kept = found._source._decompressed
    kept._most = int(blocks.nbytes[:3].sum())
    for at in range(int(blocks.first[3])):
        found[at]
    assert made == blocks.nbytes[:3].tolist()
    found[0]  # is now the youngest
    found[int(blocks.first[3])]
    found[0]
    assert len(made) == 4
    assert sum(size for _, size in kept._blocks.values()) <= kept._most
    kept._most = 0
    for at in range(int(blocks.first[5]), int(blocks.first[6])):
        found[at]
    assert len(made) == 5 and len(kept._blocks) == 1  # the last one stays


def test_decompressed_blocks_are_those_of_a_window(tmp_path, small_blocks):
    """So memory is what `window=` says; at most 512 MB, also without windows."""
    make(Made(sample, 200), tmp_path)
    for window, most in (("60KB", 60_000), ("4GB", 512 << 20), (None, 512 << 20)):
        found = forebay.open_cache(tmp_path, window=window)
        assert pickle.loads(pickle.dumps(found))._source._decompressed._most == most


def test_lengths_are_a_column_of_a_compressed_cache(tmp_path, small_blocks, monkeypatch):
    """One shard at a time is decompressed for it, also where shards differ in shape."""
    lengths = [3 + (at > 250) * at % 5 for at in range(300)]
    dataset = Made(lambda at: {"wave": torch.arange(lengths[at]), "at": at + 1}, 300)
    found = make(dataset, tmp_path, "lz4")
    monkeypatch.setattr(forebay.CachedDataset, "table", None)
    assert forebay.pack_sequences(found, "wave", size=16).lengths.tolist() == lengths
    assert forebay.pack_sequences(found, "at", size=400).lengths.tolist() == [*range(1, 301)]


@pytest.mark.slow
def test_rows_of_a_compressed_cache_come_by_windows(tmp_path, small_blocks, monkeypatch):
    """So each block is decompressed a few times, and not for each sample of a row."""
    lengths = [1 + at * 7 % 40 for at in range(2000)]
    dataset = Made(lambda at: torch.full((lengths[at],), at), 2000)
    make(dataset, tmp_path)
    made: list[int] = []

    def noted(*given):
        made.append(len(found := decompressed(*given)))
        return found

    monkeypatch.setattr(arrow_shards, "decompressed", noted)
    found = forebay.open_cache(tmp_path, window="60KB")
    blocks = len(blocks_of(tmp_path))
    rows = forebay.pack_sequences(found, lengths, size=64, window=50)
    assert rows.filled > 0.9
    assert sorted(chain(*map(rows.members, range(len(rows))))) == list(range(2000))
    with forebay.DataLoader(rows, 8, shuffle=True, seed=1, collate_fn=firsts_of) as loader:
        batches = [*loader]
    assert sorted(chain(*batches)) == list(range(2000))
    assert blocks <= len(made) < 3 * blocks < 1000
    exact = forebay.pack_sequences(forebay.open_cache(tmp_path, window=None), lengths, size=64)
    assert exact.by_blocks is None and len(exact) <= len(rows)


@pytest.mark.slow
def test_a_cache_keeps_its_compression(tmp_path):
    """It is continued with it, and another one is an error, before anything is changed."""
    make(Pictures(), tmp_path)
    (tmp_path / "shard-00003.arrow").unlink()
    again = make(Pictures(), tmp_path, None)
    assert_same(again[3], Pictures()[3])
    assert record_batches(
        memoryview((tmp_path / "shard-00003.arrow").read_bytes()), is_compressed=True
    )
    before = published(tmp_path)
    for call in (
        lambda: make(Pictures(), tmp_path, "lz4"),
        lambda: make(Pictures(60), tmp_path, "lz4", accept_changes=True),
    ):
        with pytest.raises(forebay.OptionError, match=r"'lz4': the cache in .* begun with 'zstd'"):
            call()
        assert published(tmp_path) == before
    assert_same(make(Pictures(), tmp_path, "lz4", redo="*")[3], Pictures()[3])
    with pytest.raises(forebay.OptionError, match="compression='gzip' must be 'zstd'"):
        make(Pictures(), tmp_path, "gzip")
    make(Pictures(), tmp_path / "plain", None)
    with pytest.raises(forebay.OptionError, match="begun without compression"):
        make(Pictures(), tmp_path / "plain")


@pytest.mark.slow
def test_named_samples_are_taken_over_from_compressed_shards(tmp_path):
    """New ones are added, and none is read again."""
    asked = []

    def load(name):
        asked.append(name)
        return {"name": name, "value": torch.full((50,), float(name))}

    names = [str(at) for at in range(40)]
    make(forebay.from_ids(names, load), tmp_path)
    asked.clear()
    found = make(forebay.from_ids(["new-first-is-1"[-1] + "00", *names], load), tmp_path, None)
    assert set(asked) <= {"100", *names[:1], names[19], names[20], names[-1]}  # probes
    assert [each["name"] for each in found] == ["100", *names]


# ---- in a bucket ---------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=CODECS)
def there(request, root):
    """The cache of `root`, compressed, beside it; returns its URL and the folder."""
    folder = root / "bucket" / request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow_shards, "BATCH_BYTES", 8000)
        patch.setattr("forebay.runs.cache.LEAST_SHARDS", 8)
        make(Made(sample, SAMPLES), folder, request.param)
    return f"s3://bucket/{request.param}", folder


@pytest.mark.slow
def test_a_compressed_cache_in_a_bucket_is_read_there(endpoint, local, there, tmp_path):
    """Samples, and each byte of it once an epoch; kept on disk it is compressed."""
    url, folder = there
    found = forebay.open_cache(url)
    some = [0, 599, 300, 301, 17]
    assert all(equal(found[at], local[at]) for at in some)
    wanted = ask(forebay.open_cache(folder, window="60KB"), epochs=2)
    keeping = forebay.open_cache(url, directory=tmp_path / "kept", disk="4MB", window="60KB")
    endpoint.set()
    assert ask(keeping, epochs=2) == wanted
    size = sum(path.stat().st_size for path in folder.glob("shard-*"))
    assert endpoint.counters()["bytes"] < 1.2 * size  # the second epoch comes from the disk
    del keeping
    endpoint.set()
    again = forebay.open_cache(url, directory=tmp_path / "kept", disk="4MB", window="60KB")
    assert ask(again, num_workers=2) == wanted[:1]
    assert endpoint.counters()["bytes"] < size / 2


@pytest.mark.slow
def test_rows_of_samples_in_a_bucket_come_by_windows(endpoint, there):
    """The same as of a folder, and hardly more is fetched than each block once."""
    url, folder = there
    size = sum(path.stat().st_size for path in folder.glob("shard-*"))

    def names_of(location):
        cached = forebay.open_cache(location, window="100KB")
        rows = forebay.pack_sequences(cached, [3] * SAMPLES, size=12, window=20)  # of the image
        with forebay.DataLoader(rows, 6, shuffle=True, seed=2, collate_fn=list) as loader:
            return [[each["name"] for row in batch for each in row] for batch in loader]

    wanted = names_of(folder)
    assert sorted(chain(*wanted)) == sorted(f"sample {at}" for at in range(SAMPLES))
    endpoint.set()
    assert names_of(url) == wanted
    assert endpoint.counters()["bytes"] < 2 * size  # some is for the epoch that follows


def test_a_compressed_cache_is_made_in_a_bucket(memory, machine, tmp_path):
    """With the bytes of one in a folder."""
    make(Pictures(), tmp_path)
    found = make(Pictures(), "memory://bucket/cache")
    assert (
        memory.cat("/bucket/cache/shard-00003.arrow")
        == (tmp_path / "shard-00003.arrow").read_bytes()
    )
    assert len(found) == 40


# ---- bombs ---------------------------------------------------------------------------------------


def zeros(compression, nbytes=1 << 20):
    """Return a compressed record batch of zeros, as bytes, and its schema."""
    batch = pa.record_batch(
        {"x": pa.array(np.zeros(nbytes, np.uint8)), "y": pa.array([None] * nbytes)}
    )
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    data = memoryview(sink.getvalue())
    ((start, length),) = record_batches(data, is_compressed=True)
    return bytearray(data[start : start + length]), batch


@pytest.mark.parametrize("compression", CODECS)
def test_a_record_batch_is_decompressed_to_one_without_compression(compression):
    """Which Arrow reads without taking memory of its own."""
    data, batch = zeros(compression)
    into = decompressed(memoryview(data), batch.schema, compression)
    before = pa.total_allocated_bytes()
    found = pa.ipc.read_record_batch(pa.py_buffer(into), batch.schema)
    assert pa.total_allocated_bytes() == before
    assert found.equals(batch)


@pytest.mark.parametrize("compression", CODECS)
def test_a_bomb_is_refused_before_memory_is_taken(compression):
    """A buffer that claims more than its codec can make of its bytes."""
    data, batch = zeros(compression)
    at = 8 + int.from_bytes(data[4:8], "little")  # behind the metadata
    for claim in (1 << 40, (1 << 63) - 1):
        struct.pack_into("<q", data, at, claim)
        with pytest.raises(ValueError, match=r"a block of [0-9,]+ bytes cannot become"):
            decompressed(memoryview(data), batch.schema, compression)
    struct.pack_into("<q", data, at, (1 << 20) + 1)  # possible, but not true
    with pytest.raises(ValueError, match="cannot be decompressed"):
        decompressed(memoryview(data), batch.schema, compression)


def test_forged_record_batches_are_errors():
    """Any bytes of one may be anything: it is decompressed, or ValueError says why not."""
    data, batch = zeros("zstd", 1000)
    rng, refused = np.random.default_rng(0), 0
    for _ in range(300):
        forged = bytearray(data)
        for at in rng.integers(0, len(data), rng.integers(1, 4)):
            forged[at] = rng.integers(256)
        try:
            decompressed(memoryview(forged), batch.schema, "zstd")
        except ValueError:
            refused += 1
    assert 20 < refused < 300


@pytest.mark.slow
def test_a_shard_is_compressed_only_if_the_index_says_so(tmp_path):
    """Another index makes none of it readable."""
    make(Pictures(), tmp_path)
    path = tmp_path / ".forebay" / "cache.json"
    found = json.loads(path.read_text())
    found["plan"]["compression"] = None
    path.write_text(json.dumps(found))
    opened = forebay.open_cache(tmp_path)
    with pytest.raises(forebay.InputError, match=r"cannot be read as a shard.*are compressed"):
        opened[0]
    found["plan"]["compression"] = "snappy"
    path.write_text(json.dumps(found))
    with pytest.raises(forebay.InputError, match=r"damaged: .*compression 'snappy'"):
        forebay.open_cache(tmp_path)
