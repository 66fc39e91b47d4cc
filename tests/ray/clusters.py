"""Clusters of several nodes on this machine, and drivers of their own to be watched and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driving import MARK, PATIENCE_S, SOURCE

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
    # It would replace builtins.print for all tests that follow.
    "RAY_TQDM_PATCH_PRINT": "0",
    # Ray 2.50 warns of what this will be in later versions.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Other programs of this machine must not have Ray kill workers.
    "RAY_memory_monitor_refresh_ms": "0",
}


def start_cluster(nodes: int = 2, **arguments: object) -> Cluster:
    """Start a head without CPUs, and nodes of one CPU each; connect to it."""
    os.environ.update(QUICK_DEATHS, **{MARK: str(os.getpid())})
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "include_dashboard": False,
            "object_store_memory": STORE_BYTES,
        },
    )
    # To the head, which tests leave alone: Ray 2.50 connects to any node of this machine.
    ray.init(cluster.address, log_to_driver=False, configure_logging=False)
    for _ in range(nodes):
        cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, **arguments)
    cluster.wait_for_nodes()
    return cluster


def stop_cluster(cluster: Cluster) -> None:
    """Disconnect and end every node."""
    ray.shutdown()
    cluster.shutdown()


def until(is_so: Callable[[], Any]) -> Any:
    """Wait until something is so; return what it is."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := is_so()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return found


def start_driver(cluster: Cluster | None, source: str, folder: Path, **environment: str) -> Any:
    """Run a script in a process of its own, in `folder`; with a cluster to connect to."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(source))
    where = {} if cluster is None else {"RAY_ADDRESS": cluster.address}
    return subprocess.Popen(
        [sys.executable, str(path)],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={
            **os.environ,
            **QUICK_DEATHS,
            MARK: str(os.getpid()),
            "PYTHONPATH": SOURCE,
            **where,
            **environment,
        },
    )


def zygotes() -> list[int]:
    """Return the processes that fork workers, on any node that was started from here."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path("/proc", name, "cmdline").read_bytes()
            environment = Path("/proc", name, "environ").read_bytes()
        except OSError:
            continue
        mark = f"{MARK}={os.getpid()}".encode()
        if b"forebay.pools import zygote" in command and mark in environment.split(b"\0"):
            found.append(int(name))
    return found


def kill_host() -> None:
    """Kill the host of the first worker, and wait for the end of the process that forks workers."""
    forker = min(zygotes())  # the worker is forked later
    host = int(Path(f"/proc/{forker}/stat").read_text().rpartition(")")[2].split()[1])
    assert b"forebay" not in Path(f"/proc/{host}/cmdline").read_bytes()
    os.kill(host, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{forker}").exists())
