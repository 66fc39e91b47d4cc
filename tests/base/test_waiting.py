"""Waits without a limit: they end with what they wait for, and Ctrl-C ends them in any case."""

from __future__ import annotations

import signal
import threading

import pytest

from forebay.base.process import join_thread, wait_until

# Another thread is sent the signal, which does not interrupt the wait of the main thread: that is
# how a signal looks that arrives just before the wait.
SCRIPT = """
    from forebay.base.randomness import generators_locked
    from forebay.base.process import join_thread, wait_until

    def hang_within(begun):
        with generators_locked():
            begun.set()
            hang()

    begun = threading.Event()
    hanging = threading.Thread(target=hang_within, args=[begun], daemon=True)
    hanging.start()
    begun.wait()
    lock = threading.Lock()
    lock.acquire()
    waits = threading.Event()

    def interrupt():
        waits.wait()
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    waits.set()
    {wait}
"""
WAITS = {
    "a thread": "join_thread(hanging)",
    "a lock": "wait_until(lambda seconds: lock.acquire(timeout=seconds))",
    "the generators": "generators_locked().__enter__()",
}


@pytest.mark.slow
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_ctrl_c_ends_a_wait_that_it_does_not_interrupt(script, wait):
    """Within a second."""
    code, out, err = script(SCRIPT.format(wait=wait)).end()
    assert (code, out) == (-signal.SIGINT, "")
    assert err.endswith("KeyboardInterrupt\n")


def test_a_wait_ends_with_what_it_waits_for():
    """However many looks that takes."""
    looks = iter([False, None, 0, True])
    wait_until(lambda seconds: next(looks))
    assert next(looks, "none left") == "none left"
    thread = threading.Thread(target=sum, args=[range(1000)])
    thread.start()
    join_thread(thread)
    assert not thread.is_alive()
