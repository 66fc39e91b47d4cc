"""Nodes, hosts, drivers and whole clusters that end while work goes on: nothing is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
from clusters import STORE_BYTES, ray, start_cluster, start_driver, stop_cluster, until, zygotes
from driving import calls, finish, make_inputs, published, staged
from ray._raylet import GcsClient
from ray.core.generated import autoscaler_pb2
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from same import assert_same
from streams import Noisy
from works import copy

import forebay
from forebay.pools import ray_pool as pools
from preempted import signal_all
from runs import attempts, run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_cluster")]


@contextmanager
def cluster_of(nodes):
    """A cluster that may be broken."""
    cluster = start_cluster(nodes)
    try:
        yield cluster
    finally:
        stop_cluster(cluster)


def add_node(cluster, **arguments):
    return cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, **arguments)


def raylet_of(node):
    return node.all_processes["raylet"][0].process.pid


def hosts():
    """Return the processes that look after workers: the parents of the zygotes."""
    found = []
    for zygote in zygotes():
        fields = dict(
            line.split(":", 1) for line in Path(f"/proc/{zygote}/status").read_text().splitlines()
        )
        found.append(int(fields["PPid"]))
    return found


def waiting(folder, held):
    """Return a work that counts its calls, and from number `held` on waits until it is let go."""
    path = str(folder)

    def work(source, out):
        import os
        import time
        from pathlib import Path

        file = os.open(Path(path, "calls"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{source.name}\n".encode())
        os.close(file)
        Path(path, f"at {os.environ['RAY_RAYLET_PID']}").touch()
        if int(source.stem) >= held:
            while not Path(path, "go").exists():
                time.sleep(0.01)
        out.file(source.name).write_bytes(source.read_bytes())
        return {"raylet": int(os.environ["RAY_RAYLET_PID"])}

    return work


class Threaded:
    """A run in a thread, so that the test can break things meanwhile."""

    def __init__(self, call):
        self.result = self.error = None

        def body():
            try:
                self.result = call()
            except BaseException as error:  # noqa: BLE001 - raised in `end`
                self.error = error

        self._thread = threading.Thread(target=body)
        self._thread.start()

    def end(self):
        self._thread.join(180)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.result


# ---- nodes and hosts that are lost --------------------------------------------------------------


def test_losing_a_node_costs_no_input_a_try(tmp_path):
    """What it had is done by the others; and a node that joins gets work."""
    inputs = make_inputs(tmp_path / "in", 30)
    with cluster_of(2) as cluster:
        work = waiting(tmp_path, 10)
        going = Threaded(lambda: run(work, inputs, tmp_path / "out", retries=0))
        until(lambda: len(calls(tmp_path)) >= 12)
        cluster.remove_node(last_of(cluster), allow_graceful=False)
        joined = raylet_of(add_node(cluster))
        until((tmp_path / f"at {joined}").exists)
        (tmp_path / "go").touch()
        report = going.end()
    assert (report.done, report.failed) == (30, 0)
    assert joined in report.metadata.column("raylet").to_pylist()
    tries = attempts(tmp_path / "out")
    twice = [name for name, count in Counter(calls(tmp_path)).items() if count > 1]
    assert twice, "what the lost node had in hand is done again"
    assert tries == dict.fromkeys(tries, 1) and set(twice) <= set(tries)
    assert published(tmp_path / "out") == {p.name: p.read_bytes() for p in inputs.iterdir()}
    assert not staged(tmp_path / "out")


def last_of(cluster):
    return sorted(cluster.worker_nodes, key=raylet_of)[-1]


def kill(cluster):
    cluster.remove_node(last_of(cluster), allow_graceful=False)


def terminate(cluster):
    """Send SIGTERM to all processes of a node, its workers included."""
    signal_all(signal.SIGTERM, raylet_of(last_of(cluster)))


def drain(cluster):
    """Do what a cluster's manager does that takes a node away: say so, then kill it."""
    reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
    known, deadline = GcsClient(address=cluster.address), int(time.time() * 1000) + 60_000
    assert known.drain_node(last_of(cluster).node_id, reason, "for a test", deadline)[0]
    kill(cluster)


@pytest.mark.parametrize(
    ("lose", "buffer"), [(kill, None), (kill, "1MB"), (terminate, "1MB"), (drain, None)]
)
def test_losing_a_node_changes_no_batch(lose, buffer):
    """They are made again elsewhere, and are the same; no sample is blamed."""
    expected = list(forebay.DataLoader(Noisy(400), 4, num_workers=0, seed=5))
    with cluster_of(2) as cluster:
        loader = forebay.DataLoader(
            Noisy(400), 4, num_workers=2, seed=5, backend="ray", buffer=buffer
        )
        with loader:
            iterator = iter(loader)
            batches = [next(iterator) for _ in range(20)]
            lose(cluster)
            batches += iterator
            assert_same(batches, expected)
            assert loader.statistics().failures == 0


def test_an_input_that_a_lost_node_had_still_has_all_its_tries(tmp_path):
    """It fails afterwards, as often as one that no node was lost with."""
    inputs = make_inputs(tmp_path / "in", 12)
    copies = waiting(tmp_path, 4)

    def work(source, out):
        copies(source, out)
        if int(source.stem) >= 4:
            raise ValueError(f"not {source.name}")

    with cluster_of(2) as cluster:
        going = Threaded(lambda: run(work, inputs, tmp_path / "out", retries=2))
        until(lambda: len(calls(tmp_path)) >= 6)
        before = len(zygotes())
        cluster.remove_node(last_of(cluster), allow_graceful=False)
        # What it had under way must not go on.
        until(lambda: len(zygotes()) == before // 2)
        (tmp_path / "go").touch()
        report = going.end()
    called = Counter(calls(tmp_path))
    assert [each.attempts for each in report.failures] == 8 * [3]
    # One was under way on the node that was lost.
    assert sorted(called[Path(each.source).name] for each in report.failures) == [*7 * [3], 4]


def test_losing_a_host_costs_no_input_a_try(tmp_path):
    """By a signal, as a supervisor would, or by Ray."""
    inputs = make_inputs(tmp_path / "in", 20)
    with cluster_of(2):
        going = Threaded(lambda: run(waiting(tmp_path, 5), inputs, tmp_path / "out", retries=0))
        until(lambda: len(calls(tmp_path)) >= 7)
        before = set(hosts())
        os.kill(min(before), signal.SIGKILL)
        until(lambda: len(set(hosts()) - before) == 1)
        (tmp_path / "go").touch()
        report = going.end()
    assert (report.done, report.failed) == (20, 0)


# ---- room ---------------------------------------------------------------------------------------


def test_it_says_what_it_waits_for_and_goes_on(tmp_path, capsys, monkeypatch):
    """First no node could ever do, then one that is in use, then it is free."""
    monkeypatch.setattr(pools, "SAY_S", 0.5)
    monkeypatch.setattr(pools, "SAY_AGAIN_S", 0.5)
    inputs = make_inputs(tmp_path / "in", 6)
    with cluster_of(1) as cluster:
        disk = forebay.Ray(resources={"disk": 1})
        going = Threaded(lambda: forebay.preprocess(copy, inputs, tmp_path / "out", backend=disk))
        said = ""

        def says(words):
            nonlocal said
            said += capsys.readouterr().err
            return words in said

        until(lambda: says("No node has that much: start a larger one, or ask for less."))
        assert "1 worker waits for room on the cluster; each needs 1 CPU, 1 disk" in said
        assert "1 of 1 CPU free, 0 of 0 disk free" in said
        taken = take_room(add_node(cluster, resources={"disk": 1}))
        said = ""
        until(lambda: says("All of it is in use: the run continues when resources are freed"))
        ray.kill(taken)
        assert going.end().done == 6


def test_without_progress_the_log_says_what_it_waits_for(tmp_path, caplog, monkeypatch):
    """Otherwise a run that no node has room for would hang in silence."""
    monkeypatch.setattr(pools, "SAY_S", 0.5)
    inputs = make_inputs(tmp_path / "in", 6)
    with cluster_of(1) as cluster:
        disk = forebay.Ray(resources={"disk": 1})
        options = {"backend": disk, "progress": False}
        going = Threaded(lambda: forebay.preprocess(copy, inputs, tmp_path / "out", **options))
        until(lambda: "1 worker waits for room on the cluster" in caplog.text)
        add_node(cluster, resources={"disk": 1})
        assert going.end().done == 6


def take_room(node):
    """Have another program's actor take all resources of a node."""

    @ray.remote(num_cpus=1)
    class Other:
        def here(self):
            return True

    where = NodeAffinitySchedulingStrategy(until(lambda: node.node_id), soft=False)
    other = Other.options(scheduling_strategy=where).remote()
    assert ray.get(other.here.remote())
    return other


# ---- the cluster itself is gone -----------------------------------------------------------------

# What both scripts do; and a local run after them.
WORK = """
def work(source, out):
    import time
    time.sleep(0.05)
    out.file(source.name).write_bytes(source.read_bytes())
"""

LEAVES = f"""
import sys, threading, time
from pathlib import Path
import ray, forebay

here = Path(__file__).parent
ray.init(log_to_driver=False)
{WORK}
def leave():
    while len(list((here / "out").glob("*.txt"))) < 5:
        time.sleep(0.01)
    ray.shutdown()

threading.Thread(target=leave).start()
try:
    forebay.preprocess(work, here / "in", here / "out", backend="ray", progress=False)
except forebay.WorkerDiedError as error:
    print(error, ray.is_initialized())
"""


def test_leaving_the_cluster_ends_the_run(tmp_path):
    """Within seconds, with what was done kept, and without joining it again."""
    inputs = make_inputs(tmp_path / "in", 300)
    with cluster_of(1) as cluster:
        code, out, err = finish(start_driver(cluster, LEAVES, tmp_path))
        assert code == 0, err
        first, *_, last = out.splitlines()
        assert first == "the Ray cluster is gone: Ray was shut down"
        assert last.endswith("on a cluster or on this machine. False")
        until(lambda: not zygotes())
    finished = len(published(tmp_path / "out"))
    assert 0 < finished < 300
    report = run(
        work_of_the_scripts(), inputs, tmp_path / "out", backend="process", accept_changes=True
    )
    assert (report.done, report.resumed) == (300, finished)


def work_of_the_scripts():
    """Return their function, without running the rest."""
    found = {}
    exec(WORK, found)
    return found["work"]


KILLED = f"""
from pathlib import Path
import ray, forebay
here = Path(__file__).parent
ray.init(log_to_driver=False)
{WORK}
forebay.preprocess(work, here / "in", here / "out", backend="ray")
"""


def test_a_cluster_that_dies_ends_the_run(tmp_path):
    """All its processes are killed; completed work is kept, and a local run does the rest."""
    inputs = make_inputs(tmp_path / "in", 300)
    with cluster_of(1) as cluster:
        # How long Ray looks for its head before it ends the process; a minute if it is not told.
        patience = {"RAY_gcs_rpc_server_reconnect_timeout_s": "5"}
        process = start_driver(cluster, KILLED, tmp_path, **patience)
        until(lambda: len(published(tmp_path / "out")) >= 5)
        ray.shutdown()
        for node in [*cluster.worker_nodes, cluster.head_node]:
            node.kill_all_processes(check_alive=False, allow_graceful=False)
        code, _, err = finish(process)
        assert code != 0
        assert "300 done" not in err
    finished = len(published(tmp_path / "out"))
    assert 0 < finished < 300
    report = run(
        work_of_the_scripts(), inputs, tmp_path / "out", backend="process", accept_changes=True
    )
    assert report.done == 300


def test_workers_end_with_their_driver(tmp_path):
    """It is killed and cannot clean up; hosts and workers end all the same."""
    make_inputs(tmp_path / "in", 300)
    with cluster_of(1) as cluster:
        process = start_driver(cluster, KILLED, tmp_path)
        until(lambda: published(tmp_path / "out"))
        assert zygotes()
        process.kill()
        process.communicate()
        until(lambda: not zygotes())
        until(cluster_is_free)


def cluster_is_free():
    return ray.available_resources().get("CPU") == 1
