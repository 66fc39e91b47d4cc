"""A cluster of this machine that run lives share: to start one takes seconds.

It is a process of its own, which ends once nobody has the other end of its standard input.
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys

_STORE_BYTES = 78_643_200  # the least that Ray accepts
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # Other programs of this machine must not have Ray kill workers.
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@functools.cache
def start_cluster() -> None:
    """Start the cluster, once; drivers find it by the environment."""
    import ray  # noqa: F401 once, for all drivers

    os.environ |= _SETTINGS
    cluster = subprocess.Popen(
        [sys.executable, "-m", "lives.run_ray"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert cluster.stdin and cluster.stdout
    os.environ["RAY_ADDRESS"] = cluster.stdout.readline().strip()
    atexit.register(_end, cluster)


def _end(cluster: subprocess.Popen[str]) -> None:
    cluster.communicate("")


def _main() -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 8,
            "include_dashboard": False,
            "object_store_memory": _STORE_BYTES,
        },
    )
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    _main()
