"""Split the recordings on a Ray cluster of two nodes, and check that the results are identical.

python examples/demo_ray.py build/demo-ray/

The cluster is this machine's alone: a head without CPUs, as a head should be, and two nodes with
one CPU each. On a real cluster, leave out `start` and `shutdown`: see docs/how-to/cluster.md.
"""

import logging
import os
import sys
from pathlib import Path

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # do not send usage statistics

from ray.cluster_utils import Cluster
from show_table import show
from split_audio import split_audio

import forebay
import ray

RECORDINGS = "examples/recordings.csv"
STORE = 100_000_000  # bytes of each node's object store; the demo needs little


def run(folder):
    """Do the work once on this machine and once on a cluster; compare."""
    here, there = Path(folder, "local"), Path(folder, "ray")
    print(f"1. on this machine's cores, into {here}")
    print(forebay.preprocess(split_audio, RECORDINGS, here, num_workers=2, progress=False))

    print("\n2. on a Ray cluster of two nodes, into", there)
    cluster = start()
    try:
        for node in ray.nodes():
            cpus = node["Resources"].get("CPU", 0)
            print(f"   node {node['NodeID'][:8]}: {cpus:g} CPUs{'' if cpus else ', the head'}")
        print(forebay.preprocess(split_audio, RECORDINGS, there, backend="ray", progress=False))
    finally:
        ray.shutdown()
        cluster.shutdown()

    print("\n3. the two outputs")
    names = {path.name for path in [*here.glob("*.flac"), *there.glob("*.flac")]}
    names.add("metadata.parquet")
    differing = [name for name in sorted(names) if not same(here / name, there / name)]
    if differing:
        print(f"   DIFFERENT: {', '.join(differing)}")
        return 1
    print(f"   cmp {here}/metadata.parquet {there}/metadata.parquet: identical, byte for byte")
    print(f"   and so are the {len(names) - 1} pieces\n")
    show(str(there), rows=4)
    return 0


def start():
    """Start a head and two nodes, and connect to them."""
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(num_cpus=1, object_store_memory=STORE)
    # With an explicit address the demo never uses another cluster of this machine.
    ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    cluster.wait_for_nodes()
    return cluster


def same(one, other):
    """Return whether both files exist and have the same content."""
    return one.exists() and other.exists() and one.read_bytes() == other.read_bytes()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1]))
