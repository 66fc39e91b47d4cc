"""The Ray pool against the conformance suite, and what is particular to it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private import auto_init_hook

import ray
from forebay.options import Ray
from forebay.pools.base import Pool
from forebay.pools.events import Job, WorkersResized, WorkerStarted
from forebay.pools.ray_host import Hosting
from forebay.pools.ray_nodes import ClusterState, NodeCheck
from forebay.pools.ray_placement import HostEnded, listen
from forebay.pools.ray_pool import RayPool
from forebay.pools.ray_shipping import shipped
from kit.conformance import PoolTests
from kit.faults import FaultyJob


def pool_of(job: Job, **arguments: Any) -> RayPool:
    payload = shipped(job)
    return RayPool(Hosting(payload), Ray(), NodeCheck(payload), None, say=print, **arguments)


@pytest.mark.usefixtures("cluster")
class TestRay(PoolTests):
    """Workers under hosts on a cluster of two nodes."""

    def make_pool(self, job: Job) -> Pool:
        # If it grew, it would report a node that is found late, at any time.
        return pool_of(job, grows=False)

    @pytest.mark.skip(reason="Ray keeps processes for the next actor, and ends them when it likes")
    def test_stopped_workers_leave_nothing(self) -> None:
        """Covered by `test_a_stopped_worker_frees_its_place`."""


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_stopped_worker_frees_its_place() -> None:
    """A worker that waits for room gets it; one that was stopped while it waited does not."""
    suite, pool = TestRay(), pool_of(FaultyJob())
    try:
        full = pool.num_workers
        for incarnation in range(full + 2):
            pool.start(incarnation, worker_id=incarnation)
        suite.collect(pool, lambda heard: len(heard) == full)
        pool.stop(full)
        pool.stop(0)
        assert suite.collect(pool) == [WorkerStarted(full + 1)]
    finally:
        pool.close()


@pytest.mark.usefixtures("cluster")
def test_a_worker_without_a_node_says_what_it_waits_for() -> None:
    """When it is asked where it is: its program may show no progress."""
    payload = shipped(FaultyJob())
    where = Ray(num_cpus=64)
    pool = RayPool(Hosting(payload), where, NodeCheck(payload), None, say=lambda _: None)
    try:
        pool.start(0, worker_id=0)
        assert pool.wait(0.0) == []
        pool.take_stacks(0)
        (taken,) = TestRay().collect(pool)
    finally:
        pool.close()
    assert taken.incarnation == 0
    first, *nodes, hint = taken.stacks.splitlines()
    assert first == "1 worker waits for room on the cluster; each needs 64 CPU"
    assert all(" CPU free" in each for each in nodes)
    assert hint == "  No node has that much: start a larger one, or ask for less."


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("grows", [True, False])
def test_room_for_more_workers_is_reported_only_where_it_decides(grows: bool) -> None:
    """A loader asks for a number of workers, and those without room wait for it."""
    pool = pool_of(FaultyJob(), grows=grows)
    try:
        room, pool.num_workers = pool.num_workers, 1
        assert room > 1
        events = pool._update_nodes(ClusterState(pool._nodes, {}))
        assert events == ([WorkersResized(room, pool.group_s)] if grows else [])
    finally:
        pool.close()


@pytest.mark.usefixtures("cluster")
def test_a_close_that_is_interrupted_still_leaves_the_cluster(monkeypatch: Any) -> None:
    """Ctrl-C while workers clean up; the program may be a notebook, which goes on."""

    def interrupted(*_: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    pool = pool_of(FaultyJob())
    pool.start(0, worker_id=0)
    TestRay().collect(pool, lambda heard: len(heard) == 1)
    monkeypatch.setattr(pool, "_join_listeners", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.close()
    names = {each.name.rstrip("0123456789") for each in threading.enumerate()}
    assert names.isdisjoint({"forebay-monitor", "forebay-listener-"})
    assert auto_init_hook.enable_auto_connect, "calls to Ray connect by themselves again"


def host_lost_by(error: Exception) -> Any:
    """A host whose events end with an error of Ray's before there was one."""

    def remote(room: int, workers: Any) -> Any:
        raise error

    options = SimpleNamespace(remote=remote)
    return SimpleNamespace(events=SimpleNamespace(options=lambda **_: options))


LOSSES = {
    "memory": (
        ray.exceptions.OutOfMemoryError("Task was killed due to the node running low on memory."),
        "Ray killed it because memory ran out: Task was killed",
        False,
    ),
    "node": (
        ray.exceptions.NodeDiedError("the node was lost"),
        "its host was lost: the node was lost",
        True,
    ),
}


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("error", "words", "external"), LOSSES.values(), ids=LOSSES)
def test_only_want_of_memory_is_laid_to_what_a_lost_host_ran(error, words, external):
    """What its worker did is the likely reason then; a node is lost for reasons of its own."""
    told = []
    listen(0, host_lost_by(error), 1, [(0, 0)], -1, told.append, threading.Event())
    (end,) = told
    assert isinstance(end, HostEnded)
    assert end.failure.message.startswith(words)
    assert end.external == external


def test_hosts_that_never_start_end_the_run_with_words(monkeypatch):
    """As where the agent of a node is lost: Ray then has room there, and starts nothing."""
    monkeypatch.setattr("forebay.pools.ray_pool.HOSTS_S", 30.0)
    node = SimpleNamespace(id="n1", name="node one")
    host = SimpleNamespace(kill_at=None, node="n1")
    pool = SimpleNamespace(
        _hosts={0: host}, _nodes=[node], _waiting_since=None, _idle_since=0.0, _gone=""
    )
    monkeypatch.setattr("forebay.pools.ray_pool.time.monotonic", lambda: 29.0)
    RayPool._meet_deadlines(pool)
    assert pool._gone == ""
    monkeypatch.setattr("forebay.pools.ray_pool.time.monotonic", lambda: 31.0)
    RayPool._meet_deadlines(pool)
    assert "started no worker for 30 s" in pool._gone and "on node one" in pool._gone
