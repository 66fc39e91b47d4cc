"""Clusters of several nodes on this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="needs forebay[ray]")
from ray.cluster_utils import Cluster  # noqa: E402

# The least that Ray accepts, so that several fit.
STORE_BYTES = 78_643_200
QUICK_DEATHS = {
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # Other programs of this machine must not have Ray kill workers.
    "RAY_memory_monitor_refresh_ms": "0",
}
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a worker; what Ray itself keeps is Ray's."""
    yield
    deadline = time.monotonic() + PATIENCE_S
    while left := _zygotes():
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


def _zygotes() -> list[str]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path("/proc", name, "cmdline").read_bytes()
        except OSError:
            continue
        if b"forebay.engine.pools.zygote" in command:
            found.append(name)
    return found


def start_cluster(nodes: int = 2, **arguments: object) -> Cluster:
    """Start a head without CPUs, and nodes of one CPU each; connect to it."""
    os.environ.update(QUICK_DEATHS)
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "include_dashboard": False,
            "object_store_memory": STORE_BYTES,
        },
    )
    for _ in range(nodes):
        cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, **arguments)
    ray.init(cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()
    return cluster


def stop_cluster(cluster: Cluster) -> None:
    """Disconnect and end every node."""
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head and two nodes, for all tests of a module; they must leave it as it is."""
    cluster = start_cluster()
    yield cluster
    stop_cluster(cluster)
