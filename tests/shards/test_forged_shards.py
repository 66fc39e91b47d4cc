"""Forged shards of every format: the samples they have, or an error that names them."""

from __future__ import annotations

import gzip
import json
import tarfile

import pyarrow as pa
import pytest
from tables import arrow_bytes, many_types, parquet_bytes
from written import write_tar

import forebay
from forebay import InputError
from forebay.shards.apart import apart
from forebay.shards.arrow import ArrowShards
from forebay.shards.blocks import damages
from forebay.shards.parquet import ParquetShards
from kit.forged_shards import forged
from kit.mds_writer import mds_shard
from kit.shard_reading import BytesShard, ReadShard

# Each is read in full: about 20 ms.
COUNT = 15
TABLE = many_types(20)
LINES = "".join(json.dumps({"text": "ü" * at, "n": [at, None]}) + "\n" for at in range(30)).encode()
MDS = mds_shard(
    {"id": "int", "text": "str", "array": "ndarray", "json": "json", "number": "uint16"},
    [
        {"id": at, "text": "ü" * at, "array": TABLE["int64"][: at + 1].to_numpy(), "json": [at],
         "number": at}
        for at in range(12)
    ],
)  # fmt: skip


def tar_bytes(folder):
    """Return a tar with long names, in two formats."""
    path = folder / "whole.tar"
    write_tar(path, range(20), form=tarfile.GNU_FORMAT)
    return path.read_bytes()


SHARDS = {
    "a.parquet": lambda _: parquet_bytes(TABLE, row_group_size=7, compression="zstd"),
    "b.parquet": lambda _: parquet_bytes(TABLE, compression="none", data_page_version="2.0"),
    "a.arrow": lambda _: arrow_bytes(TABLE, 7, is_stream=True, compression="lz4"),
    "b.arrow": lambda _: arrow_bytes(TABLE.drop_columns(["category"]), 7, is_stream=False),
    "a.jsonl": lambda _: LINES,
    "a.jsonl.gz": lambda _: gzip.compress(LINES),
    "a.mds": lambda _: MDS,
    "a.mds.zstd": lambda _: pa.Codec("zstd").compress(MDS, asbytes=True),
    "a.tar": tar_bytes,
}


def read(path):
    """Return how many samples were read, and how many failed with the name of the shard."""
    try:
        samples = forebay.open_shards([path], progress=False)
    except InputError as error:
        assert path.name in str(error) or "there are no samples" in str(error)  # noqa: PT017
        return 0, 1
    done = failed = 0
    # A count that is forged may be any: the first, the last, and some between them.
    for at in range(0, len(samples), max(len(samples) // 10, 1)):
        try:
            samples[at]
            done += 1
        except InputError as error:
            assert path.name in str(error)  # noqa: PT017
            failed += 1
    return done, failed


@pytest.mark.parametrize("name", SHARDS)
def test_a_forged_shard_gives_its_samples_or_is_refused(name, tmp_path):
    """Whatever was done to it: no other exception, no crash, no end of memory."""
    data = SHARDS[name](tmp_path)
    path = tmp_path / name
    path.write_bytes(data)
    assert read(path)[1] == 0
    failed = 0
    for each in forged(data, COUNT):
        path.write_bytes(each)
        failed += read(path)[1] > 0
    assert failed > COUNT // 4


@pytest.mark.parametrize(
    ("form", "data"),
    [
        (ParquetShards(), parquet_bytes(TABLE, row_group_size=7)),
        (ArrowShards(), arrow_bytes(TABLE, 7, is_stream=True)),
        (ArrowShards(), arrow_bytes(TABLE, 7, is_stream=False, compression="zstd")),
    ],
    ids=["parquet", "arrow", "compressed"],
)
def test_columns_of_a_forged_shard_are_put_together_or_refused(form, data):
    """As they are fetched from a bucket: only some stretches of each block."""
    failed = 0
    with apart():  # a footer may end pyarrow's process
        for each in (data, *forged(data, 3 * COUNT, seed=1)):
            try:
                shard = ReadShard(form, BytesShard(each), ["lists", "text", "category"])
                shard.read(range(0, len(shard), max(len(shard) // 10, 1)))
            except damages():
                failed += 1
                assert each != data
    assert failed > COUNT // 4
