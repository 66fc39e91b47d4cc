"""What is read from a bucket in tests: a cache of samples of every kind, and who reads it."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path

import numpy as np
import torch
from cached import Point

import forebay
from buckets import PATIENCE_S

SAMPLES = 600
URL = "s3://bucket/cache"


def sample(index):
    """Return a sample with leaves of every kind, some of which vary or are missing."""
    rng = np.random.default_rng(index)
    return {
        "image": torch.from_numpy(rng.integers(0, 256, (3, 5, 5), np.uint8)),
        "jpeg": rng.bytes(int(rng.integers(0, 3000))),
        "words": torch.arange(index % 7),
        "name": f"sample {index}",
        "at": Point(index, index / 2),
        "is_odd": bool(index % 2),
        "rare": None if index % 3 else index,
        "vector": rng.standard_normal(3),
        "logical": torch.tensor([bool(index % 2)]),
        "objects": [
            {"box": [at, 0.5], "parts": [{"name": f"part {at}"}] * at}
            | ({"rare": b"x"} if at else {})
            for at in range(index % 4)
        ],
        "either": index if index % 5 else f"word {index}",
        **({"extra": (index, ("x",) * (index % 3))} if index % 7 == 0 else {}),
    }


def equal(one, other):
    """Return whether two samples are the same, types included."""
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert type(value) is type(other[key]), key
        if isinstance(value, torch.Tensor):
            assert value.dtype == other[key].dtype
            assert torch.equal(value, other[key]), key
        elif isinstance(value, np.ndarray):
            assert np.array_equal(value, other[key]), key
        else:
            assert value == other[key], key
    return True


def texts(samples):
    """Return what a batch has, as bytes."""
    plain = [
        [getattr(leaf, "tolist", lambda own=leaf: own)() for leaf in each.values()]
        for each in samples
    ]
    return [repr(each).encode() for each in plain]


def hashed(loader):
    """Return a hash of the batches of an epoch."""
    found = hashlib.sha256()
    for batch in loader:
        for each in batch:
            found.update(each)
    return found.hexdigest()


def fetchers(among=None):
    """Return the processes that fetch, of this test's server: they have its address."""
    endpoint = f"={os.environ['AWS_ENDPOINT_URL']}".encode()
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")) if among is None else map(str, among):
        try:
            words = Path("/proc", name, "cmdline").read_bytes().split(b"\0")
            fetches = any(b"forebay.caching.fetcher" in word for word in words)
            if fetches and endpoint in Path("/proc", name, "environ").read_bytes():
                found.append(int(name))
        except OSError:
            pass
    return found


def await_fetcher():
    """Wait until a process that was just started can be seen to fetch; return it."""
    until = time.monotonic() + PATIENCE_S
    while not (found := fetchers()):
        assert time.monotonic() < until
        time.sleep(0.01)
    (pid,) = found
    return pid


def await_no_fetcher():
    """Wait until the last one has ended: it notices at once that nobody reads any more."""
    until = time.monotonic() + PATIENCE_S
    left = fetchers()
    while left:
        if time.monotonic() > until:
            for pid in left:
                os.kill(pid, signal.SIGKILL)  # or other checks would wait for them, too
            raise AssertionError(f"fetchers left: {left}")
        time.sleep(0.01)
        left = fetchers(left) or fetchers()  # a look at all processes takes long


def ask(dataset, batch=24, epochs=1, **arguments):
    """Return the hash of each epoch of a loader."""
    usual = {"batch_size": batch, "shuffle": True, "seed": 3, "collate_fn": texts}
    with forebay.DataLoader(dataset, **usual | arguments) as loader:
        return [hashed(loader) for _ in range(epochs)]
