"""What holds for every test on a cluster, and the cluster that the tests of a module share."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# The works, datasets and comparisons of the local backends' tests: here they run on Ray.
sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("preprocess", "loader")]

pytest.importorskip("ray", reason="needs forebay[ray]")
from clusters import Cluster, start_cluster, stop_cluster, zygotes  # noqa: E402
from driving import PATIENCE_S  # noqa: E402


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a worker; what Ray itself keeps is Ray's."""
    yield
    deadline = time.monotonic() + PATIENCE_S
    while left := zygotes():
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head and two nodes, for all tests of a module; they must leave it as it is."""
    cluster = start_cluster()
    yield cluster
    stop_cluster(cluster)
