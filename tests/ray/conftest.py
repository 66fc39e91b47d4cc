"""What holds for every test on a cluster, and the cluster that most tests share."""

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


def pytest_configure(config: pytest.Config) -> None:
    """Let be what Ray 2.50 does not close when it starts the processes of a cluster."""
    unclosed = r"unclosed file <_io\.\w+ name='/dev/null'"
    config.addinivalue_line("filterwarnings", f"ignore:{unclosed}:ResourceWarning")


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a worker; what Ray itself keeps is Ray's."""
    yield
    deadline = time.monotonic() + PATIENCE_S
    while left := zygotes():
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


class Shared:
    """A head and two nodes: started for the first test that asks, kept for those that follow."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None

    def get(self) -> Cluster:
        """Return the cluster; start it if there is none."""
        if self._cluster is None:
            self._cluster = start_cluster()
        return self._cluster

    def stop(self) -> None:
        """End the cluster, if there is one."""
        if self._cluster is not None:
            stop_cluster(self._cluster)
        self._cluster = None


@pytest.fixture(scope="session")
def shared() -> Iterator[Shared]:
    """The cluster of most tests: to start one takes seconds."""
    shared = Shared()
    yield shared
    shared.stop()


@pytest.fixture(scope="module")
def cluster(shared: Shared) -> Cluster:
    """A head and two nodes; tests must leave them as they are."""
    return shared.get()


@pytest.fixture
def no_cluster(shared: Shared) -> None:
    """No cluster that others have started: this test needs none, or one of its own."""
    shared.stop()


# One test of each promise; each of the others takes a cluster for seconds, and there are a hundred.
CORE = {
    "test_files_and_table_are_those_of_a_local_run",
    "test_each_death_of_a_worker_is_laid_to_its_input",
    "test_options_of_a_cluster_need_the_backend",
    "test_no_workers_are_refused",
    "test_the_users_handler_stays_when_a_cluster_is_joined",
    "test_a_batch_whose_worker_is_killed_is_made_again",
    "test_losing_a_node_costs_no_input_a_try",
    "test_the_object_store_does_not_hold_them",
    "test_predictions_of_a_cluster_are_those_of_a_local_run",
    # Of the pool's conformance suite: order, exceptions, deaths, hangs, size, and room.
    "test_tasks_are_answered_in_order_one_by_one",
    "test_an_exception_fails_its_task_and_the_worker_lives_on[raise]",
    "test_a_death_comes_after_all_that_the_worker_said[SIGKILL]",
    "test_a_death_leaves_the_other_workers_alone",
    "test_the_stack_of_a_hang_is_told",
    "test_large_payloads_and_results_come_through",
    "test_a_stopped_worker_frees_its_place",
    "test_only_want_of_memory_is_laid_to_what_a_lost_host_ran",
}
QUICK = ("test_ray_nodes.py", "test_ray_internals.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave what takes long to `make test-all`; run what ends the shared cluster at the end."""
    items.sort(key=lambda item: "shared" in (has := item.fixturenames) and "cluster" not in has)
    for item in items:
        if item.path.parent != Path(__file__).parent or item.path.name in QUICK:
            continue
        item.add_marker(pytest.mark.slow)
        if CORE.isdisjoint((item.name, getattr(item, "originalname", ""))):
            item.add_marker(pytest.mark.thorough)
