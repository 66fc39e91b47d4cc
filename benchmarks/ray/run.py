"""One run of one peer over inputs, in a separate process; its last line is JSON.

As a program: `python -m benchmarks.ray.run PEER TASK COUNT SOURCES FOLDER ADDRESS`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time

import ray
from benchmarks.ray.cluster import connect


def main(peer: str, task: str, count: str, sources: str, folder: str, address: str) -> None:
    """Run the peer and print its time."""
    run = importlib.import_module(f"benchmarks.ray.peers.{peer}").run
    connect(address)
    inputs = [os.path.join(sources, f"{at:07}") for at in range(int(count))]
    began = time.perf_counter()
    results = run(task, inputs, folder)
    seconds = time.perf_counter() - began
    ray.shutdown()  # so that its other output, about dead nodes for example, comes before
    print()
    print(json.dumps({"seconds": seconds, "results": results}))


if __name__ == "__main__":
    main(*sys.argv[1:])
