"""What holds for every test on a cluster, and the cluster that the tests of a module share."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# The works, datasets and comparisons of the local backends' tests: here they run on Ray.
sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("preprocess", "loading")]

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


# One test of each promise; each of the others takes a cluster for seconds, and there are a hundred.
CORE = {
    "test_files_and_table_are_those_of_a_local_run",
    "test_each_death_of_a_worker_is_laid_to_its_input",
    "test_options_of_a_cluster_need_the_backend",
    "test_no_workers_are_refused",
    "test_a_batch_whose_worker_is_killed_is_made_again",
    "test_losing_a_node_costs_no_input_a_try",
    "test_predictions_of_a_cluster_are_those_of_a_local_run",
}
QUICK = ("test_ray_nodes.py", "test_ray_pool.py", "test_ray_internals.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave what takes long to `make test-all`."""
    for item in items:
        is_ours = item.path.parent == Path(__file__).parent and item.path.name not in QUICK
        if is_ours and CORE.isdisjoint((item.name, getattr(item, "originalname", ""))):
            item.add_marker(pytest.mark.thorough)
