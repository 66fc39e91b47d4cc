"""What keeps Ray from shutting down during a call: no cluster needed."""

from __future__ import annotations

import threading

import pytest
from clusters import until
from driving import PATIENCE_S

from forebay.pools import ray_cluster
from forebay.pools.ray_internals import ShutdownGuard, shutdown_guard

pytestmark = pytest.mark.usefixtures("no_cluster")


class Call:
    """A thread within a block, until it is told to end."""

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


def test_many_calls_run_at_the_same_time():
    """One worker's listener does not wait for another's."""
    own = ShutdownGuard(threading.RLock())
    calls = [Call(own.held) for _ in range(3)]
    assert all(call.came.wait(PATIENCE_S) for call in calls)
    for call in calls:
        call.end()


def test_a_shutdown_waits_for_all_calls():
    """Ray frees what they depend on."""
    own = ShutdownGuard(threading.RLock())
    inside = [Call(own.held), Call(own.held)]
    assert all(call.came.wait(PATIENCE_S) for call in inside)
    shutdown = Call(lambda: own)
    until(lambda: own._shutting)
    inside[0].end()
    assert not shutdown.came.is_set()
    inside[1].end()
    assert shutdown.came.wait(PATIENCE_S)
    shutdown.end()


def test_a_shutdown_does_not_wait_for_ever(monkeypatch):
    """A call into a cluster that is lost may never come back."""
    monkeypatch.setattr("forebay.pools.ray_internals.PATIENCE_S", 0.01)
    own = ShutdownGuard(threading.RLock())
    inside = Call(own.held)
    assert inside.came.wait(PATIENCE_S)
    with own:
        pass
    inside.end()


def test_a_call_does_not_wait_for_ever_for_a_connection(monkeypatch):
    """If nodes do not answer, that may take minutes; the cluster from before is gone anyway."""
    monkeypatch.setattr("forebay.pools.ray_internals.PATIENCE_S", 0.01)
    own = ShutdownGuard(threading.RLock())
    connecting = Call(lambda: own)
    assert connecting.came.wait(PATIENCE_S)
    for _ in range(2):
        with pytest.raises(ConnectionError, match=r"another thread has .* for 0\.01 s"):
            with own.held():
                pass
    patient = Call(lambda: own.held(however_long=True))
    assert not patient.came.is_set()
    connecting.end()
    assert patient.came.wait(PATIENCE_S)
    patient.end()


def test_no_call_begins_during_a_shutdown():
    """They wait for its end; what it runs itself, a finalizer say, does not."""
    own = ShutdownGuard(threading.RLock())
    with own, own:
        with own.held():
            late = Call(own.held)
        assert not late.came.is_set()
    assert late.came.wait(PATIENCE_S)
    late.end()


def test_it_takes_the_place_of_rays_own_lock():
    """Once, for the whole process; without a cluster a call is refused."""
    from ray._private import worker

    assert shutdown_guard() is worker._connect_or_shutdown_lock is shutdown_guard()
    with pytest.raises(ConnectionError, match="Ray was shut down"):
        with ray_cluster.up():
            pass
