"""Shards as others write them, and what a loader returns of them."""

from __future__ import annotations

import hashlib
import io
import tarfile

import numpy as np

import forebay

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


def use(server, monkeypatch):
    """Have clients find a server; fsspec remembers the one before."""
    import s3fs

    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
