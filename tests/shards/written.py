"""Shards as others write them, and what a loader returns of them."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile

import numpy as np
import pyarrow as pa
from tables import arrow_bytes, parquet_bytes

import forebay
from kit.mds_writer import mds_shard

SAMPLES = 400


def members(index):
    """Return the files of a sample, by extension; the second is missing in some."""
    rng = np.random.default_rng(index)
    found = {"jpg": rng.bytes(int(rng.integers(0, 3000))), "cls": str(index % 10).encode()}
    return found if index % 3 else {"jpg": found["jpg"]}


def sample(index):
    """Return a sample as a tar has it."""
    return {"__key__": f"part/{index:06}", **members(index)}


def add(tar, name, data, **fields):
    """Add a file to a tar."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    tar.addfile(info, io.BytesIO(data))


def write_tar(path, indices, mode="w", form=tarfile.PAX_FORMAT):
    """Write samples to a tar."""
    with tarfile.open(path, mode, format=form) as tar:
        for index in indices:
            for extension, data in members(index).items():
                add(tar, f"part/{index:06}.{extension}", data)


def write_tars(folder, samples, shards):
    """Write samples to shards of one size."""
    each = -(-samples // shards)
    for number in range(shards):
        first = number * each
        write_tar(folder / f"train-{number:03}.tar", range(first, min(first + each, samples)))


def record(index):
    """Return a sample as a table has it."""
    rng = np.random.default_rng(index)
    return {"number": index, "text": rng.bytes(int(rng.integers(0, 900))).hex()}


def write_records(folder, suffix, shards=5):
    """Write samples to shards of a format by the end of their names."""
    for number in range(shards):
        found = [record(at) for at in range(number * 80, number * 80 + 80)]
        path = folder / f"shard.{number:05}{suffix}"
        if suffix in (".parquet", ".arrow"):
            table = pa.Table.from_pylist(found)
            data = (
                parquet_bytes(table, row_group_size=20)
                if suffix == ".parquet"
                else arrow_bytes(table, 20, is_stream=number % 2 == 0)
            )
        elif suffix == ".mds":
            data = mds_shard({"number": "int", "text": "str"}, found)
        else:
            data = "".join(json.dumps(each) + "\n" for each in found).encode()
            data = gzip.compress(data, mtime=0) if suffix.endswith(".gz") else data
        path.write_bytes(data)


def texts(samples):
    """Return what a batch has, as bytes."""
    return [repr(sorted(each.items())).encode() for each in samples]


def hashed(batches, found=None):
    """Return a hash of batches."""
    found = hashlib.sha256() if found is None else found
    for batch in batches:
        for each in batch:
            found.update(each)
    return found


def loader_of(dataset, batch=24, **arguments):
    """Return a loader with a seed."""
    usual = {"shuffle": True, "seed": 3, "collate_fn": texts, "drop_last": True}
    return forebay.DataLoader(dataset, batch, **usual | arguments)


def close_connections():
    """Close those of this process's clients, which they would keep for twelve seconds."""
    import s3fs

    for each in [*s3fs.S3FileSystem._cache.values()]:
        if each._s3 is not None:
            s3fs.S3FileSystem.close_session(each.loop, each._s3)
    s3fs.S3FileSystem.clear_instance_cache()


def use(server, monkeypatch):
    """Have clients find a server; fsspec remembers the one before."""
    import s3fs

    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
