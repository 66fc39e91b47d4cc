"""Workers that share a host: several on one node, with one actor and one stream of messages."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import STORE_BYTES, ray, start_cluster, stop_cluster, until, zygotes
from driving import calls, make_inputs, published
from test_ray_deaths import Threaded
from test_ray_deaths import hosts as parents
from works import copy

from forebay.options import Ray
from forebay.pools import ray_pool as pools
from forebay.pools.base import Pool
from forebay.pools.events import Assignment, Job, WorkerDied, WorkerStarted
from forebay.pools.ray_host import Hosting
from forebay.pools.ray_nodes import NodeCheck
from forebay.pools.ray_pool import RayPool
from forebay.pools.ray_shipping import shipped
from kit.conformance import PoolTests
from kit.faults import FaultyJob, meet_fault
from runs import attempts, run, table

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_large_node")]
CPUS = 4


@pytest.fixture(scope="module")
def one_large_node(shared: Any) -> Iterator[Any]:
    """A head without CPUs and one node of four."""
    shared.stop()
    cluster = start_cluster(0)
    cluster.add_node(num_cpus=CPUS, object_store_memory=STORE_BYTES)
    cluster.wait_for_nodes()
    yield cluster
    stop_cluster(cluster)


def pool_of(job: Job) -> RayPool:
    payload = shipped(job)
    return RayPool(Hosting(payload), Ray(), NodeCheck(payload), None, say=print)


def hosts() -> list[int]:
    """Return the hosts alone: workers are forks of zygotes, and look like them."""
    return sorted(set(parents()) - set(zygotes()))


class TestOneHost(PoolTests):
    """The pool's contract where all workers have one host."""

    def make_pool(self, job: Job) -> Pool:
        return pool_of(job)

    @pytest.mark.skip(reason="Ray keeps processes for the next actor, and ends them when it likes")
    def test_stopped_workers_leave_nothing(self) -> None:
        """The last worker's end is that of its host, as in `test_ray_pool.py`."""


def test_a_worker_that_replaces_another_has_its_host() -> None:
    """One host from beginning to end, although each of its workers died; the others go on."""
    suite, pool = TestOneHost(), pool_of(FaultyJob())
    try:
        for incarnation in range(CPUS):
            pool.start(incarnation, worker_id=incarnation)
        suite.collect(pool, lambda heard: len(heard) == CPUS)
        (host,) = hosts()
        for victim in range(CPUS):
            pool.send(victim, [Assignment(victim, 1, "SIGKILL")])
            died = suite.collect(
                pool, lambda heard: any(isinstance(each, WorkerDied) for each in heard)
            )
            assert [each.incarnation for each in died] == [victim]
            pool.start(CPUS + victim, worker_id=victim)
            assert suite.collect(pool) == [WorkerStarted(CPUS + victim)]
        assert hosts() == [host]
    finally:
        pool.close()


def test_a_stopped_worker_leaves_its_neighbours_at_work() -> None:
    """And its place is free for another on the same host."""
    suite, pool = TestOneHost(), pool_of(FaultyJob())
    try:
        for incarnation in range(CPUS + 1):
            pool.start(incarnation, worker_id=incarnation)
        suite.collect(pool, lambda heard: len(heard) == CPUS)
        pool.stop(0)
        assert suite.collect(pool) == [WorkerStarted(CPUS)]
        assert len(hosts()) == 1
    finally:
        pool.close()


def test_workers_are_placed_again_if_others_take_the_resources_of_their_host(monkeypatch) -> None:
    """Another job takes a CPU just before the host starts; three of the four workers start."""
    monkeypatch.setattr(pools, "PENDING_S", 3.0)

    class Other:
        def is_there(self) -> bool:
            return True

    suite, pool = TestOneHost(), pool_of(FaultyJob())
    remote: Any = ray.remote(num_cpus=1)(Other)
    other = remote.remote()
    try:
        assert ray.get(other.is_there.remote())
        for incarnation in range(CPUS):
            pool.start(incarnation, worker_id=incarnation)
        heard = suite.collect(pool, lambda heard: len(heard) == CPUS - 1)
        assert all(isinstance(each, WorkerStarted) for each in heard)
        ray.kill(other)
        assert isinstance(suite.collect(pool)[0], WorkerStarted)
    finally:
        pool.close()


def test_losing_a_shared_host_costs_no_input_a_try(tmp_path):
    """All of its workers are lost at once, and none of their inputs is to blame."""
    inputs = make_inputs(tmp_path / "in", 40)
    folder = str(tmp_path)

    def work(source, out):
        import time
        from pathlib import Path

        Path(folder, f"began {source.name}").touch()
        while not Path(folder, "go").exists():
            time.sleep(0.01)
        out.file(source.name).write_bytes(source.read_bytes())

    running = Threaded(lambda: run(work, inputs, tmp_path / "out", retries=0))
    until(lambda: len(list(tmp_path.glob("began *"))) == CPUS)
    (host,) = hosts()
    os.kill(host, signal.SIGKILL)
    until(lambda: not Path("/proc", str(host)).exists())
    (tmp_path / "go").touch()
    report = running.end()
    assert (report.done, report.failed) == (40, 0)
    assert set(attempts(tmp_path / "out").values()) == {1}
    assert published(tmp_path / "out") == {p.name: p.read_bytes() for p in inputs.iterdir()}


def test_a_death_is_laid_to_its_input_beside_others(tmp_path):
    """Four workers share the messages in which their deaths come."""
    inputs = make_inputs(tmp_path / "in", 40)
    for number in (3, 11, 27):
        (inputs / f"{number:04d}.txt").write_text("SIGKILL")
    report = run(meet_fault, inputs, tmp_path / "out", retries=0)
    assert report.done == 37
    assert [each.source[-8:-4] for each in report.failures] == ["0003", "0011", "0027"]
    assert all(each.attempts == 1 for each in report.failures)


def test_the_table_is_that_of_a_local_run(tmp_path):
    """Whatever the order in which four workers answer."""
    inputs = make_inputs(tmp_path / "in", 200)
    run(copy, inputs, tmp_path / "here", backend="process", num_workers=2)
    run(copy, inputs, tmp_path / "ray")
    assert table(tmp_path / "ray") == table(tmp_path / "here")
    assert len(calls(tmp_path)) == 400
