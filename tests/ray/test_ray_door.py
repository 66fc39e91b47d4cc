"""The door that keeps Ray from being shut down under a call: no cluster needed."""

from __future__ import annotations

import threading

import pytest
from clusters import until
from driving import PATIENCE_S

from forebay.engine.pools.ray import cluster
from forebay.engine.pools.ray.door import Door, door


class Visit:
    """Somebody in a thread, who comes in and stays until told to go."""

    def __init__(self, enter):
        self.came, self._go = threading.Event(), threading.Event()

        def body():
            with enter():
                self.came.set()
                assert self._go.wait(PATIENCE_S)

        self._thread = threading.Thread(target=body)
        self._thread.start()

    def end(self):
        self._go.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


def test_many_are_inside_at_the_same_time():
    """One worker's ear does not wait for another's."""
    own = Door(threading.RLock())
    visits = [Visit(own.held) for _ in range(3)]
    assert all(visit.came.wait(PATIENCE_S) for visit in visits)
    for visit in visits:
        visit.end()


def test_a_shutdown_waits_until_all_are_out():
    """Ray frees what they stand on."""
    own = Door(threading.RLock())
    inside = [Visit(own.held), Visit(own.held)]
    assert all(visit.came.wait(PATIENCE_S) for visit in inside)
    shutdown = Visit(lambda: own)
    until(lambda: own._shutter)
    inside[0].end()
    assert not shutdown.came.is_set()
    inside[1].end()
    assert shutdown.came.wait(PATIENCE_S)
    shutdown.end()


def test_a_shutdown_does_not_wait_for_ever(monkeypatch):
    """A call into a cluster that is lost may never come back."""
    monkeypatch.setattr("forebay.engine.pools.ray.door.PATIENCE_S", 0.01)
    own = Door(threading.RLock())
    inside = Visit(own.held)
    assert inside.came.wait(PATIENCE_S)
    with own:
        pass
    inside.end()


def test_nobody_comes_in_during_a_shutdown():
    """They wait for its end; what it runs itself, a finalizer say, does not."""
    own = Door(threading.RLock())
    with own, own:
        with own.held():
            late = Visit(own.held)
        assert not late.came.is_set()
    assert late.came.wait(PATIENCE_S)
    late.end()


def test_it_stands_where_rays_own_lock_was():
    """Once, for the whole process; without a cluster nobody is sure of one."""
    from ray._private import worker

    assert door() is worker._connect_or_shutdown_lock is door()
    with pytest.raises(ConnectionError, match="Ray was shut down"):
        with cluster.up():
            pass
