"""What the tests of `forebay.cache` share with those of the other verbs."""

from __future__ import annotations

import gc
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
from cached import Made
from reading import SAMPLES, await_no_fetcher, sample

import forebay
from forebay.caching import arrow_shards
from kit.range_server import RangeServer

# Runs to be killed are those of preprocess; batches are compared as the loader's are.
sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("preprocess", "loading")]


@pytest.fixture(autouse=True, scope="session")
def _what_torch_keeps():
    """Have torch start the thread that hands out descriptors, which it keeps from then on."""
    ForkingPickler.loads(ForkingPickler.dumps(torch.ones(1)))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Make a folder with a bucket, and in it a cache whose shards have several blocks."""
    folder = tmp_path_factory.mktemp("buckets")
    dataset = Made(sample, SAMPLES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow_shards, "BATCH_BYTES", 8000)
        patch.setattr("forebay.runs.cache.LEAST_SHARDS", 8)
        forebay.cache(dataset, folder / "bucket" / "cache", num_workers=0, progress=False)
    return folder


@pytest.fixture(scope="module")
def running(root):
    """Serve it."""
    with RangeServer(root) as endpoint:
        yield endpoint


@pytest.fixture
def endpoint(running, monkeypatch):
    """Have the endpoint without faults, and clients find it."""
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    running.set()
    yield running
    gc.collect()
    await_no_fetcher()


@pytest.fixture
def local(root):
    """Open the cache as files."""
    return forebay.open_cache(root / "bucket" / "cache")
