"""A bucket with shards, for the tests of reading them there."""

from __future__ import annotations

import gc
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
from written import SAMPLES, close_connections, use, write_tars

from kit.range_server import RangeServer

# How the processes that fetch are found is that of the tests of caches.
sys.path[:0] = [str(Path(__file__).parents[1] / "cache")]


@pytest.fixture(autouse=True, scope="session")
def _what_torch_keeps():
    """Have torch start the thread that hands out descriptors, which it keeps from then on."""
    ForkingPickler.loads(ForkingPickler.dumps(torch.ones(1)))


@pytest.fixture(autouse=True)
def _own_caches(tmp_path, monkeypatch):
    """Keep indexes out of the user's folder for caches; blocks are small."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr("forebay.shards.format.BLOCK_BYTES", 20_000)


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    """Make a folder with a bucket, and in it tars."""
    folder = tmp_path_factory.mktemp("buckets")
    (folder / "bucket" / "tars").mkdir(parents=True)
    write_tars(folder / "bucket" / "tars", SAMPLES, 5)
    return folder


@pytest.fixture(scope="session")
def running(root):
    """Serve it."""
    with RangeServer(root) as endpoint:
        yield endpoint


@pytest.fixture
def endpoint(running, monkeypatch):
    """Have the endpoint without faults, and clients find it."""
    from reading import await_no_fetcher

    use(running, monkeypatch)
    running.set()
    yield running
    gc.collect()
    await_no_fetcher()
    close_connections()
