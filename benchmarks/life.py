"""One input's life: where the processor time of `preprocess` goes, stage by stage.

    driver ── list, enrol ── send ──> worker: receive, seed, stage, call, check, answer
    driver <── receive ── flow ── record ── rename ── table

Times are processor time in microseconds for one input: a stage's total over all processes, divided
by the number of inputs. Looking at the clock takes a part of it: the last line of the table is the
same call without stages. On a machine with other work all of them grow, since caches are shared,
but not as much as wall time. Two workers and the driver share two cores, so a call takes at least
half of the sum for each input.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import stage_times
from benchmarks.measure import LIMIT_S, Ground
from benchmarks.peers import NAMES, WORKERS
from benchmarks.preprocess import BURN_S, Rows, show
from benchmarks.stage_times import FOLDER, REST
from benchmarks.work import SPINS, Staged, spins_for

_FOREBAY = "forebay"
PEERS = ("pool", "executor", "halves")

# The functions of each stage, in the order of an input's life. A stage's time leaves out what other
# stages do within it.
DRIVER: dict[str, tuple[str, ...]] = {
    "open the folder": ("forebay.runs.run:Session.__init__", "forebay.runs.run:Session.__enter__"),
    "start workers": ("forebay.runs.run:Session.start_workers",),
    "list, enrol": ("forebay.runs.run:Session.enrol",),
    "begin": ("forebay.runs.run:Session.remember_work",),
    "read what is to do": ("forebay.ledger.ledger:Ledger.rows",),
    "send": ("forebay.pools.processes:ProcessPool.send",),
    "receive": ("forebay.pools.processes:ProcessPool.wait",),
    "flow": ("forebay.engine.flow:Flow.handle",),
    "perform": ("forebay.engine.engine:Engine._perform",),
    "loop": ("forebay.runs.processing:Processing.run",),
    "record": ("forebay.ledger.ledger:Ledger.record",),
    "rename": ("forebay.runs.commits:Commits.advance",),
    "perform pending": ("forebay.runs.run:Session.perform_pending",),
    "table": ("forebay.runs.metadata_table:LedgerTable.update",),
    "close": (
        "forebay.pools.processes:ProcessPool.close",
        "forebay.runs.run:Session.__exit__",
    ),
}
WORKER: dict[str, tuple[str, ...]] = {
    "receive": (
        "forebay.pools.worker:Channel.receive",
        "forebay.pools.worker:Channel.receive_nowait",
    ),
    "seed": (
        "forebay.runs.job:seed_of_text",
        "forebay.runs.job:seed_generators",
    ),
    "stage": (
        "forebay.outputs.staging:Staging.begin",
        "forebay.outputs.output:Output.file",
    ),
    "metadata": (
        "forebay.runs.job:encode",
        "forebay.runs.job:rows_returned",
    ),
    "check files": (
        "forebay.outputs.output:Output.collect",
        "forebay.outputs.staging:Staging.commit",
    ),
    "answer": ("forebay.pools.worker:Channel.send",),
}
CALL = "call the function"
UNMEASURED = "processes starting and ending, flushes"


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of work.

    Attributes:
        task: Its name in `work.TASKS`.
        words: What it is, for the table.
        count: Inputs.
    """

    task: str
    words: str
    count: int


def kinds(quick: bool) -> tuple[Kind, ...]:
    """Return the kinds of work that are compared."""
    n = 1000 if quick else 4000
    return (
        Kind("copy", "one file", n),
        Kind("read", "a row", n),
        Kind("burn", "5 ms CPU", n // 10),
    )


def life(ground: Ground, quick: bool) -> None:
    """Print the table."""
    os.environ[SPINS] = str(spins_for(BURN_S))
    rounds = 1 if quick else 5
    columns: list[dict[str, float]] = []
    plain: list[float] = []
    walls: list[tuple[str, ...]] = []
    for kind in kinds(quick):
        runs = [_stages_of(ground, kind) for _ in range(rounds)]
        least = {
            name: min(run.get(name, 0.0) for run in runs)
            for name in dict.fromkeys(name for run in runs for name in run)
        }
        columns.append(least)
        least_us, beside = _beside(ground, kind, rounds)
        plain.append(least_us)
        walls += beside
    print("processor time of one input, in µs, by stage; 2 workers, the least of the runs")
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, *(f"{column.get(name, 0.0):,.1f}" for column in columns)) for name in names]
    sums = [sum(column.values()) for column in columns]
    own = [column.get(f"worker: {CALL}", 0.0) for column in columns]
    rows.append(("all", *(f"{each:,.1f}" for each in sums)))
    rows.append(
        ("all but the function", *(f"{a - b:,.1f}" for a, b in zip(sums, own, strict=True)))
    )
    rows.append(("all, measured without stages", *(f"{each:,.1f}" for each in plain)))
    show(("", *(kind.words for kind in kinds(quick))), rows)
    print("\nthe whole call beside others, in the same run")
    show(("", "", "CPU µs an input", "wall µs an input", "inputs/s", "x Pool"), walls)


def _stages_of(ground: Ground, kind: Kind) -> dict[str, float]:
    """Return the microseconds of one input by stage."""
    folder = ground.fresh()
    with tempfile.TemporaryDirectory(prefix="stages-") as found:
        settings = {FOLDER: found}
        with _call(ground, "forebay-stages", kind, folder, **settings) as call:
            cpu = json.loads(call.answer(LIMIT_S))["cpu"] / kind.count * 1e6
        stages = _summed(Path(found), kind.count)
    return {**stages, UNMEASURED: cpu - sum(stages.values())}


def _beside(ground: Ground, kind: Kind, rounds: int) -> tuple[float, list[tuple[str, ...]]]:
    """Return the least microseconds of one input with forebay, and the rows of all peers."""
    peers = (_FOREBAY, *PEERS)
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for _ in range(rounds):
        for peer in peers:
            with _call(ground, peer, kind, ground.fresh()) as call:
                answer = json.loads(call.answer(LIMIT_S))
            found[peer].append((answer["cpu"], answer["seconds"]))
    rows = Rows()
    pool = statistics.median(wall for _, wall in found["pool"])
    for peer in peers:
        cpu, wall = (statistics.median(values) for values in zip(*found[peer], strict=True))
        rows.append(
            (
                f"{NAMES[peer]}",
                kind.words,
                f"{cpu / kind.count * 1e6:,.0f}",
                f"{wall / kind.count * 1e6:,.0f}",
                f"{kind.count / wall:,.0f}",
                f"{pool / wall:.2f}",
            )
        )
    return min(cpu for cpu, _ in found[_FOREBAY]) / kind.count * 1e6, rows


def _call(ground: Ground, peer: str, kind: Kind, folder: Path, **settings: str) -> Any:
    from benchmarks.call import Call

    arguments = [peer, kind.task, str(kind.count), str(ground.sources), str(folder)]
    return Call("benchmarks.life", *arguments, **settings)


def _summed(folder: Path, count: int) -> dict[str, float]:
    """Return the microseconds of one input by stage, from what each process wrote."""
    totals: dict[str, dict[str, float]] = {"driver": {}, "worker": {}}
    for path in sorted(folder.iterdir()):
        record = json.loads(path.read_text())
        into = totals[record["role"]]
        for name, nanoseconds in record["spent"].items():
            into[name] = into.get(name, 0.0) + nanoseconds / 1000 / count
    ordered = {
        "driver": [*DRIVER, REST],
        "worker": ["receive", "seed", "stage", CALL, "metadata", "check files", "answer", REST],
    }
    return {
        f"{role}: {name}": totals[role][name]
        for role, names in ordered.items()
        for name in names
        if name in totals[role]
    }


class Timed(Staged):
    """The work as a stage; what it calls of forebay does not count there."""

    def __call__(self, source: Path, out: Any) -> dict[str, int]:
        stages = stage_times.current()
        before = stages.enter(CALL)
        try:
            return super().__call__(source, out)
        finally:
            stages.leave(before)


def _install() -> None:
    """Wrap forebay's functions, in this process and in those forked from it."""
    from forebay.pools import zygote

    both = {**DRIVER, **{name: places for name, places in WORKER.items() if name != "receive"}}
    stage_times.install(both)
    stage_times.install({"receive": WORKER["receive"]})
    serve = zygote.serve

    def serve_and_save(*arguments: Any) -> None:
        stage_times.begin()
        try:
            serve(*arguments)
        finally:
            stage_times.save("worker")

    zygote.serve = serve_and_save


def main(peer: str, task: str, count: str, sources: str, folder: str) -> None:
    """Run one peer, and print its processor and wall time as JSON."""
    inputs = [os.path.join(sources, f"{at:07}") for at in range(int(count))]
    if peer == "forebay-stages":
        import benchmarks.peers.forebay  # noqa: F401 - as the peer does
        from benchmarks.life import Timed as Work
        from forebay import preprocess

        before = _processor_s()
        stage_times.begin()
        preprocess(Work(task), inputs, output=folder, num_workers=WORKERS, progress=False)
        cpu = _processor_s() - before
        stage_times.save("driver")
        print(json.dumps({"cpu": cpu}))
        return
    import importlib

    run = importlib.import_module(f"benchmarks.peers.{peer}").run
    before, began = _processor_s(), time.perf_counter()
    results = run(task, inputs, folder)
    seconds, cpu = time.perf_counter() - began, _processor_s() - before
    assert results == int(count), results
    print(json.dumps({"seconds": seconds, "cpu": cpu}))


def _processor_s() -> float:
    """Return the processor time of this process and of those that it has waited for."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


if FOLDER in os.environ and __name__ != "__main__":  # imported with the work, in each process
    _install()

if __name__ == "__main__":
    main(*sys.argv[1:])
