"""The cluster of a run: a head without CPUs, with the driver, and nodes of one CPU each.

`ray.init(num_cpus=2)` would be simpler, but it starts a single node, where workers and driver share
an object store. On a cluster, data is copied from one node's store to another's, as it is here
(through the loopback interface); and only there can a node be killed while the driver runs.
"""

from __future__ import annotations

import atexit
import logging
import os
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.measure import Ground
from benchmarks.work import LOG, SPINS, spins_for

WORKERS = 2
STORE_BYTES = 2_000_000_000
BURN_S = 0.02
# An address that means a new cluster of one node for this process.
ONE_NODE = "one node"


@cache
def cluster(ground: Ground) -> Any:
    """Start the cluster, once; it ends with this process."""
    # Workers inherit the environment of their node, so their variables are set before.
    os.environ[SPINS] = str(spins_for(BURN_S))
    os.environ[LOG] = str(log(ground))
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    logging.getLogger("ray").setLevel(logging.ERROR)
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    found = Cluster(initialize_head=True, head_node_args=head)
    atexit.register(found.shutdown)
    for _ in range(WORKERS):
        join(found)
    found.wait_for_nodes()
    return found


def join(found: Any) -> None:
    """Add a node to the cluster."""
    found.add_node(num_cpus=1, object_store_memory=STORE_BYTES)


def log(ground: Ground) -> Path:
    """Return the file in which traced inputs are recorded."""
    return ground.root / "traced.log"


def connect(address: str) -> None:
    """Connect this process to the cluster, without log output."""
    import ray

    own: dict[str, Any] = {"num_cpus": WORKERS, "object_store_memory": STORE_BYTES}
    own["include_dashboard"] = False
    where = {"address": "local", **own} if address == ONE_NODE else {"address": address}
    ray.init(**where, log_to_driver=False, logging_level=logging.ERROR)
