"""The cost of losing a node: kill -9 for all its Ray processes, a third of the way through.

Each input writes a line when it begins. Of three nodes two have a worker; the third is spare.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.call import Call
from benchmarks.crash import Line, lines_of
from benchmarks.measure import Ground, outputs
from benchmarks.preprocess import show
from benchmarks.ray.cluster import BURN_S, WORKERS, cluster, join, log

LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Loss:
    """The result of a run with a node that was killed.

    Attributes:
        first_s: From the kill to the first input that a new worker began.
        twice: Executions beyond one per input.
        missing: Inputs without an output.
        whole_s: The whole run.
    """

    first_s: float
    twice: int
    missing: int
    whole_s: float


def death(ground: Ground, quick: bool) -> None:
    """Print the table."""
    count = 200 if quick else 600
    losses = [_suffer(ground, count) for _ in range(1 if quick else 2)]
    print(
        f"kill -9 of a node with one of {WORKERS} workers, a third of the way through {count:,} "
        f"inputs of {BURN_S * 1e3:g} ms;\na spare node of one CPU; Ray's health checks as they come"
    )
    back = [loss.first_s for loss in losses]
    row = (
        "forebay.preprocess(backend='ray')",
        f"{statistics.median(back):.2f} s",
        f"{min(back):.2f}-{max(back):.2f} s",
        ", ".join(str(loss.twice) for loss in losses),
        ", ".join(str(loss.missing) for loss in losses),
        f"{statistics.median(loss.whole_s for loss in losses):.1f} s",
    )
    columns = ("", "full speed after", "fastest-slowest", "ran twice", "missing", "whole call")
    show(columns, [row])
    print(
        "full speed after: from the kill to the first input that the replacement begins on the\n"
        "spare node; the other worker never stops. ran twice: executions beyond one an input."
    )


def _suffer(ground: Ground, count: int) -> Loss:
    nodes = cluster(ground)
    join(nodes)  # the spare one, since the last run lost a node
    nodes.wait_for_nodes()
    folder, traced = ground.fresh(), log(ground)
    traced.write_text("")
    arguments = ["forebay", "traced", str(count), str(ground.sources), str(folder), nodes.address]
    with Call("benchmarks.ray.run", *arguments) as call:
        before: list[Line] = []
        while len(before) < count // 3:
            if call.process.poll() is not None:
                raise RuntimeError(call.process.communicate()[1])
            time.sleep(0.01)  # polled: nothing signals that a line was written
            before = lines_of(traced)
        victim = _node_of(nodes, before[-1].pid)
        killed = time.time()
        nodes.remove_node(victim, allow_graceful=False)
        answer = json.loads(call.answer(LIMIT_S))
    lines = lines_of(traced)
    old = {line.pid for line in lines if line.at <= killed}
    first = min(line.at for line in lines if line.pid not in old)
    return Loss(
        first - killed,
        len(lines) - len({line.name for line in lines}),
        count - outputs(folder),
        answer["seconds"],
    )


def _node_of(nodes: Any, pid: int) -> Any:
    """Return the node that a worker belongs to: its raylet is among the worker's ancestors."""
    raylets = {
        each.process.pid: node
        for node in nodes.worker_nodes
        for each in node.all_processes["raylet"]
    }
    while pid not in raylets:
        status = Path("/proc", str(pid), "stat").read_text()
        pid = int(status.rpartition(")")[2].split()[1])
        if pid <= 1:
            raise RuntimeError("the worker is no descendant of a node")
    return raylets[pid]
