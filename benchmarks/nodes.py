"""How far one driver reaches: 1 to 64 simulated nodes, with the real driver.

The driver is real: `forebay.preprocess` with its engine, flow, ledger, commits and table. Only its
pool is replaced, by one whose nodes are a model (`simulated_nodes.py`), with the hosts and messages
of `engine/pools/ray`. Time is virtual: the driver's clock advances by the processor time that it
uses, by what Ray would use in its process for each message, and, where the driver waits, to the
next message. The model's own processor time does not count, and waiting for the disk does not
either. So the rate is what a driver would reach that has one core of this machine to itself.

As a program it is one driver: `python -m benchmarks.nodes SETTINGS MANIFEST FOLDER`.
"""

from __future__ import annotations

import concurrent.futures  # noqa: F401 - imported while the clock is still real
import json
import queue  # noqa: F401 - likewise
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from benchmarks.call import Call
from benchmarks.many import write_manifest
from benchmarks.measure import Ground
from benchmarks.preprocess import Rows, show
from benchmarks.simulated_nodes import Cluster, SimulatedNodes
from forebay.pools.base import Pool
from forebay.pools.events import Assignment, Event, TaskFinished

# Processor time that Ray takes in the driver's process: per message received and per answer in it,
# per order sent and per task in it. Measured with Ray 2.60 on the 2-core reference machine while it
# was busy. All of it counts as the driver's, although a part is in threads of Ray's own.
MESSAGE_S, ANSWER_S = 0.8e-3, 0.7e-6
ORDER_S, TASK_S = 1.0e-3, 1.6e-6
NODES = (1, 4, 16, 64)
WORKERS = (2, 16)
# Efficiency that 64 nodes are to have, and the durations of inputs that are tried for it.
TARGET = 0.8
STEPS_MS = (5, 7, 10, 14, 20, 28, 40, 56, 80, 110)
# How long a run takes, in virtual seconds, and its most inputs.
RUN_S, MOST_INPUTS, FEWEST_INPUTS = 12.0, 300_000, 2_000
LIMIT_S = 900.0
# Rates are those without the first and the last fifth of the answers: at the beginning, tasks are
# sent that last for a while.
EDGE = 0.2


class Clock:
    """Virtual time of the driver: its processor time, and what it waits for messages.

    Args:
        cpu: Returns the processor time of this process, in seconds.

    Attributes:
        driver_cpu: Processor time of the driver until `now` was called last, with Ray's.
    """

    def __init__(self, cpu: Callable[[], float] = time.process_time) -> None:
        self.driver_cpu = 0.0
        self._cpu = cpu
        self._now, self._read = 0.0, cpu()
        self._is_stopped = False
        self._idle = 0.0  # of the last sleep, in which Ray's threads may work

    def now(self) -> float:
        """Return the seconds since the beginning."""
        cpu = self._cpu()
        if not self._is_stopped:
            self._now += cpu - self._read
            self.driver_cpu += cpu - self._read
        self._read = cpu
        return self._now

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Do not count the processor time that is used in the block."""
        self.now()
        self._is_stopped = True
        yield
        self.now()
        self._is_stopped = False

    def sleep(self, seconds: float) -> None:
        """Let time pass while the driver's thread does nothing."""
        self._now = self.now() + seconds
        self._idle += seconds

    def rest_until(self, at: float) -> None:
        """Let time pass until `at`, if that is later."""
        self._now = max(self.now(), at)

    def spend(self, seconds: float) -> None:
        """Add processor time of Ray's threads; they may have worked during the last sleep."""
        self.driver_cpu += seconds
        self._now = self.now() + max(seconds - self._idle, 0.0)
        self._idle = 0.0


class SimulatedPool(Pool):
    """Workers on simulated nodes.

    Attributes:
        nodes: The model.
        progress: After each `wait` that returned answers: time, how many there were until then,
            and the driver's processor time.
        sent: Tasks that were sent, those that were sent again included.
    """

    def __init__(self, cluster: Cluster, clock: Clock) -> None:
        self.nodes = SimulatedNodes(cluster)
        self.progress: list[tuple[float, int, float]] = []
        self.sent = 0
        self.group_s = Pool.group_s + 5 * cluster.collect_s
        self._clock = clock

    def start(self, incarnation: int, worker_id: int) -> None:
        """Start a worker."""
        with self._clock.stopped():
            self.nodes.start(self._clock.now(), incarnation)

    def send_to_all(self, groups: Sequence[tuple[int, Sequence[Assignment]]]) -> None:
        """Send one order to the host of each node."""
        clock, nodes = self._clock, self.nodes
        orders: dict[int, list[tuple[int, Sequence[tuple[int, int]]]]] = {}
        with clock.stopped():
            for incarnation, assignments in groups:
                self.sent += len(assignments)
                node = nodes.node_of(incarnation)
                if node is not None:
                    tasks = [(task, attempt) for task, attempt, _ in assignments]
                    orders.setdefault(node, []).append((incarnation, tasks))
            for order in orders.values():
                clock.spend(ORDER_S + TASK_S * sum(len(tasks) for _, tasks in order))
                nodes.send(clock.now(), order)

    def take_stacks(self, incarnation: int) -> None:
        """Do nothing: a simulated worker has no stack."""

    def wait(self, timeout: float | None) -> list[Event]:
        """Return the events of the messages that arrive first."""
        clock, nodes = self._clock, self.nodes
        with clock.stopped():
            until = None if timeout is None else clock.now() + timeout
            while not (messages := nodes.due(clock.now())):
                at = nodes.next_at()
                if until is not None and (at is None or at > until):
                    clock.rest_until(until)
                    return []
                assert at is not None, "all nodes are lost, and none will join"
                clock.rest_until(at)
            events = [event for message in messages for event in message]
            clock.spend(MESSAGE_S * len(messages) + ANSWER_S * len(events))
            answers = sum(isinstance(event, TaskFinished) for event in events)
            before = self.progress[-1][1] if self.progress else 0
            self.progress.append((clock.now(), before + answers, clock.driver_cpu))
        return events

    def kill(self, incarnation: int) -> None:
        """Do nothing: no task hangs."""

    def stop(self, incarnation: int) -> None:
        """Do nothing: the number of workers is fixed."""

    def wake(self) -> None:
        """Do nothing: no other thread waits for `wait`."""

    def close(self) -> None:
        """Do nothing."""


def nodes(ground: Ground, quick: bool) -> None:
    """Print the tables."""
    print(
        "rows without files, of 0.5 to 1.5 times the mean duration; simulated nodes, the real "
        "driver,\nvirtual time"
    )
    rows = Rows()
    for workers in WORKERS:
        mean_ms = 20 if workers == 2 else 100
        alone = 0.0
        for count in NODES[:2] if quick else NODES:
            cluster = Cluster(nodes=count, workers=workers, input_s=mean_ms / 1e3)
            facts = _drive(ground, cluster, quick)
            alone = alone or facts["rate"]
            rows.append(_row(cluster, facts, facts["rate"] / alone / count))
    columns = ("nodes", "workers each", "ms an input", "inputs/s", "efficiency", "driver's µs")
    show((*columns, "core in use", "messages/s"), rows)
    print(
        "efficiency: of so many times the rate of one node. driver's µs: processor time per input, "
        "with\nRay's in its process. core in use: share of the time that the driver's core is busy."
    )
    if not quick:
        _find_shortest(ground)
    _lose_nodes(ground, quick)


def _row(cluster: Cluster, facts: dict[str, Any], efficiency: float) -> tuple[str, ...]:
    return (
        str(cluster.nodes),
        str(cluster.workers),
        f"{cluster.input_s * 1e3:g}",
        f"{facts['rate']:,.0f}",
        f"{efficiency:.2f}",
        f"{facts['cpu_us']:.0f}",
        f"{facts['busy']:.2f}",
        f"{(facts['messages'] + facts['orders']) / facts['whole_s']:,.0f}",
    )


def _find_shortest(ground: Ground) -> None:
    """Print the shortest duration of inputs for which 64 nodes are efficient enough."""
    print()
    for workers in WORKERS:
        low, high = 0, len(STEPS_MS)  # the answer is one of STEPS_MS[low:high], or none
        while low < high:
            middle = (low + high) // 2
            rates = []
            for count in (1, 64):
                input_s = STEPS_MS[middle] / 1e3
                cluster = Cluster(nodes=count, workers=workers, input_s=input_s)
                rates.append(_drive(ground, cluster, False)["rate"])
            if rates[1] >= TARGET * 64 * rates[0]:
                high = middle
            else:
                low = middle + 1
        found = f"{STEPS_MS[high]} ms" if high < len(STEPS_MS) else "none that was tried"
        print(
            f"64 nodes of {workers} workers reach {TARGET} of 64 times one node's rate from "
            f"this duration of an input on: {found}",
            flush=True,
        )


def _lose_nodes(ground: Ground, quick: bool) -> None:
    """Print what losses of nodes cost."""
    count = 4 if quick else 64
    whole = Cluster(nodes=count, workers=2, input_s=0.04)
    struck = replace(whole, losses=(4.0, 6.0, 8.0), joins=(12.0, 14.0))
    rows = Rows()
    for what, cluster in (("no loss", whole), ("3 nodes lost, 2 join", struck)):
        facts = _drive(ground, cluster, False)
        if not (facts["is_whole"] and facts["in_order"]):
            raise RuntimeError(f"inputs are missing or doubled: {facts}")
        again = facts["sent"] - facts["done"]
        row = (what, f"{facts['done']:,}", f"{facts['whole_s']:.1f} s", f"{again:,}")
        rows.append((*row, f"{facts['finished_twice']:,}"))
    print(f"\n{count} nodes of 2 workers, inputs of 40 ms; nodes are lost after 4, 6 and 8 s")
    show(("", "done, each once", "virtual time", "sent again", "of them finished before"), rows)


def _drive(ground: Ground, cluster: Cluster, quick: bool) -> dict[str, Any]:
    """Run one driver over as many inputs as take the nodes RUN_S."""
    ideal = RUN_S * cluster.nodes * cluster.workers / cluster.input_s
    inputs = round(max(min(ideal, MOST_INPUTS), FEWEST_INPUTS)) // (10 if quick else 1)
    manifest = ground.root / f"{inputs}.parquet"
    if not manifest.exists():
        write_manifest(manifest, inputs)
    folder = ground.root / f"nodes-{len(list(ground.root.iterdir()))}"
    settings = json.dumps(asdict(cluster))
    with Call("benchmarks.nodes", settings, str(manifest), str(folder)) as call:
        facts: dict[str, Any] = json.loads(call.answer(LIMIT_S))
    if facts["done"] != inputs:
        raise RuntimeError(f"{facts['done']} of {inputs} inputs are done")
    return facts


def main(settings: str, manifest: str, folder: str) -> None:
    """Run forebay over a manifest on simulated nodes and print what happened, as JSON."""
    values = json.loads(settings)
    times = {name: tuple(values[name]) for name in ("losses", "joins")}
    cluster = Cluster(**(values | times))
    clock, main_thread = Clock(), threading.get_ident()
    real_now, real_sleep = time.monotonic, time.sleep

    def now() -> float:
        return clock.now() if threading.get_ident() == main_thread else real_now()

    def sleep(seconds: float) -> None:
        (clock.sleep if threading.get_ident() == main_thread else real_sleep)(seconds)

    time.monotonic, time.sleep = now, sleep  # type: ignore[assignment]
    import pyarrow.parquet  # noqa: F401 - imported beforehand, as in every benchmark

    from benchmarks.instant import count
    from forebay import preprocess
    from forebay.runs import run as runs_run

    pool = SimulatedPool(cluster, clock)
    workers = cluster.nodes * cluster.workers
    runs_run.workers_for = lambda *_: (pool, workers)  # type: ignore[attr-defined]
    report = preprocess(count, manifest, folder, backend="ray", progress=False)
    rows = report.metadata.column("n").to_pylist()
    facts = {
        "done": report.done,
        "is_whole": sorted(rows) == list(range(min(rows), min(rows) + len(rows))),
        "in_order": rows == sorted(rows),
        "sent": pool.sent,
        "messages": pool.nodes.messages,
        "orders": pool.nodes.orders,
        "finished_twice": pool.nodes.finished_in_vain,
        "whole_s": pool.progress[-1][0] - cluster.start_s,
        **rate(pool.progress),
    }
    print()
    print(json.dumps(facts))


def rate(progress: Sequence[tuple[float, int, float]]) -> dict[str, float]:
    """Return inputs per second, and the driver's processor time per input, without the edges."""
    counts = [count for _, count, _ in progress]
    first = bisect_left(counts, EDGE * counts[-1])
    last = bisect_left(counts, (1 - EDGE) * counts[-1])
    (from_s, before, cpu_before), (to_s, after, cpu_after) = progress[first], progress[last]
    inputs = after - before
    seconds, cpu = to_s - from_s, cpu_after - cpu_before
    return {"rate": inputs / seconds, "cpu_us": cpu / inputs * 1e6, "busy": cpu / seconds}


if __name__ == "__main__":
    main(*sys.argv[1:])
