"""Shards of every format through `open_shards`: samples, columns, batches, compressed shards."""

from __future__ import annotations

import bz2
import gzip
import json
import pickle

import pyarrow as pa
import pytest
from tables import arrow_bytes, parquet_bytes

import forebay
from forebay import InputError, OptionError
from kit.mds_writer import mds_shard, write_mds

SAMPLES = [{"id": at, "text": "ü" * (at % 9), "score": at / 8} for at in range(90)]
ENCODINGS = {"id": "int", "text": "str", "score": "str_float"}


def table(samples):
    return pa.Table.from_pylist(samples)


def lines(samples):
    return "".join(json.dumps(each) + "\n" for each in samples).encode()


# The suffix of each format, and what writes a shard.
WRITERS = {
    ".parquet": lambda samples: parquet_bytes(table(samples), row_group_size=7),
    ".arrow": lambda samples: arrow_bytes(table(samples), 7, is_stream=True),
    ".feather": lambda samples: arrow_bytes(table(samples), 7, is_stream=False, compression="lz4"),
    ".jsonl": lines,
    ".mds": lambda samples: mds_shard(ENCODINGS, samples),
}
COMPRESSED = {
    ".gz": gzip.compress,
    ".zst": lambda data: pa.Codec("zstd").compress(data, asbytes=True),
    ".zstd": lambda data: pa.Codec("zstd").compress(data, asbytes=True),
    ".bz2": bz2.compress,
}


@pytest.fixture
def folder(request, tmp_path):
    """Make a folder with three shards of a format."""
    for number in range(3):
        path = tmp_path / f"part-{number}{request.param}"
        path.write_bytes(WRITERS[request.param](SAMPLES[30 * number : 30 * number + 30]))
    return tmp_path


def opened(location, **options):
    return forebay.open_shards(location, progress=False, **options)


@pytest.mark.parametrize("folder", WRITERS, indirect=True)
def test_samples_are_those_that_were_written(folder):
    """In order, at random, some columns in the order given, and after pickling."""
    samples = opened(folder)
    assert [*samples] == SAMPLES
    assert samples[-1] == SAMPLES[-1]
    assert pickle.loads(pickle.dumps(samples))[31] == SAMPLES[31]
    chosen = opened(folder, columns=["score", "id"])
    found = chosen.__getitems__([89, 0, 45, 46, 44, 45])
    assert found == [{"score": at / 8, "id": at} for at in (89, 0, 45, 46, 44, 45)]
    assert [*found[0]] == ["score", "id"]
    with pytest.raises(OptionError, match="names a column twice"):
        opened(folder, columns=["id", "id"])[0]


@pytest.mark.parametrize("folder", WRITERS, indirect=True)
def test_an_unknown_column_is_named(folder):
    """At the latest when the first sample is read, with what there is."""
    with pytest.raises(InputError, match=r"(column is called|key) 'label'[\s\S]*'text'"):
        opened(folder, columns=["label"])[0]


@pytest.mark.parametrize("codec", COMPRESSED)
@pytest.mark.parametrize("suffix", [".jsonl", ".mds"])
def test_a_shard_may_be_compressed_as_a_whole(suffix, codec, tmp_path):
    """By every compression that Streaming writes, and JSON lines by those as well."""
    data = COMPRESSED[codec](WRITERS[suffix](SAMPLES))
    (tmp_path / f"a{suffix}{codec}").write_bytes(data)
    assert [*opened(tmp_path)] == SAMPLES
    assert opened(tmp_path, columns=["id"])[7] == {"id": 7}
    (tmp_path / f"a{suffix}{codec}").write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match=rf"a{suffix}{codec}"):
        opened(tmp_path)[60]


def test_a_shard_that_is_there_compressed_and_not_is_refused(tmp_path):
    """Its samples would come twice."""
    (tmp_path / "a.mds").write_bytes(WRITERS[".mds"](SAMPLES))
    (tmp_path / "a.mds.gz").write_bytes(gzip.compress(WRITERS[".mds"](SAMPLES)))
    with pytest.raises(InputError, match=r"'a\.mds' and 'a\.mds\.gz' are the same samples"):
        opened(tmp_path)
    assert len(opened(tmp_path / "*.mds")) == 90


def test_files_beside_shards_are_no_shards(tmp_path):
    """The index of Streaming, and what Hugging Face leaves beside a saved dataset."""
    write_mds(tmp_path / "mds", ENCODINGS, [SAMPLES[:50], SAMPLES[50:]])
    assert [*opened(tmp_path / "mds")] == SAMPLES
    saved = tmp_path / "saved"
    saved.mkdir()
    for name in ("dataset_info.json", "state.json"):
        (saved / name).write_text('{"features": {}}')
    for number in range(2):
        data = WRITERS[".arrow"](SAMPLES[45 * number : 45 * number + 45])
        (saved / f"data-{number:05}-of-00002.arrow").write_bytes(data)
    assert [*opened(saved)] == SAMPLES
