"""The driver's end of a zygote: starts it, sends orders, receives answers, monitors and ends it.

The zygote must answer each order and report each death. If an answer is due and the zygote sends
nothing, it is sent SIGCONT after CHECK_S, in case it was stopped, and given up after ZYGOTE_S.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.context import BaseContext
from typing import Any, Literal

from forebay.engine.job import Job
from forebay.engine.pools import launch, zygote
from forebay.engine.pools.channel import Channel
from forebay.engine.pools.linux import kill_descendants
from forebay.errors import WorkerDiedError

# How long a zygote that has loaded the job may owe an answer without sending anything.
ZYGOTE_S = 10.0
# How often it is checked while it owes one.
CHECK_S = 1.0

# The driver's ends of all descriptors of all pools. If one zygote kept some of them open, another
# would not notice the driver's death.
driver_ends: set[int] = set()


class ZygoteHandle:
    """One zygote, which is starting or running.

    Args:
        job: See `ProcessPool`; pickled where `start` is "auto".
        start: See `ProcessPool`.
        keep: See `ProcessPool`.

    Attributes:
        pid: Its process ID.

    Raises:
        OSError: The system starts no further process, or gives no further descriptor.
    """

    def __init__(
        self,
        job: Job | bytes,
        start: Literal["auto", "fork"] | BaseContext,
        keep: Sequence[int],
    ) -> None:
        self._spawned: Any = None  # the multiprocessing.Process, if it was spawned
        self._is_loaded = False  # whether it has loaded the job
        self._silent_s = 0.0
        self._checked_at = time.monotonic()
        get, answers = os.pipe()
        try:
            ours, theirs = socket.socketpair()
        except BaseException:  # descriptors have run out
            os.close(get)
            os.close(answers)
            raise
        driver_ends.update((get, ours.fileno()))
        try:
            with theirs:
                self.pid = self._launch(job, start, keep, theirs, answers)
        except BaseException:
            driver_ends.difference_update((get, ours.fileno()))
            ours.close()
            os.close(get)
            raise
        finally:
            os.close(answers)
        self._channel = Channel(get, ours.detach())

    def _launch(
        self,
        job: Job | bytes,
        start: Literal["auto", "fork"] | BaseContext,
        keep: Sequence[int],
        control: socket.socket,
        answers: int,
    ) -> int:
        if isinstance(start, BaseContext):
            assert not isinstance(job, bytes)
            self._spawned = launch.spawn(start, control, answers, job)
            return int(self._spawned.pid)
        if start == "fork":
            return launch.fork(control, answers, job, closing=driver_ends)
        assert isinstance(job, bytes)
        if launch.is_single_threaded() and not keep:
            return launch.fork(control, answers, job, closing=None)
        return launch.execute(control, answers, job, keep)

    def fileno(self) -> int:
        """Return the descriptor that its answers come from, for a selector."""
        return self._channel.fileno()

    @property
    def ended(self) -> bool:
        """Whether it is known to have ended."""
        return self._channel.ended

    def order(
        self,
        what: int,
        incarnation: int = 0,
        worker_id: int = 0,
        *,
        descriptors: Sequence[int] = (),
        seconds: float = 0.0,
    ) -> None:
        """Send an order; see `zygote.ORDER`."""
        order = zygote.ORDER.pack(what, incarnation, worker_id, seconds)
        control = socket.socket(fileno=self._channel.outgoing)
        # If it is dead, the end of the answers shows that.
        with suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(control, [order], list(descriptors))
        control.detach()  # the channel owns the descriptor

    def receive_nowait(self) -> list[tuple[Any, ...]]:
        """Return its messages: "forked", "exited" or "refused", a worker, and details."""
        messages = self._channel.receive_nowait()
        self._silent_s = 0.0
        self._is_loaded |= ("ready",) in messages
        return [message for message in messages if message != ("ready",)]

    def check_response(self, owes: bool) -> str | None:
        """Check how long it has been silent; continue it if it was stopped.

        Args:
            owes: Whether an answer is due.

        Returns:
            The reason to give it up; None if there is none.
        """
        now = time.monotonic()
        # A pause of this process, such as by Ctrl-Z, does not count against the zygote.
        passed, self._checked_at = min(now - self._checked_at, CHECK_S), now
        self._silent_s = self._silent_s + passed if owes else 0.0
        if self._silent_s >= CHECK_S:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGCONT)
        # Until it has loaded the job there is no limit: imports may take long.
        if not self._is_loaded or self._silent_s < ZYGOTE_S:
            return None
        return f"the process that forks the workers did not answer for {ZYGOTE_S:g} s"

    def end(self, patience_s: float) -> list[tuple[Any, ...]]:
        """Wait for it to end; kill it and all its descendants if it does not.

        Returns:
            Its last messages.
        """
        messages = []
        until = time.monotonic() + patience_s
        with selectors.PollSelector() as selector:  # poll needs no descriptor, and none may be left
            selector.register(self._channel, selectors.EVENT_READ)
            while not self.ended and (left := until - time.monotonic()) > 0:
                if selector.select(left):
                    messages += self.receive_nowait()
        driver_ends.difference_update((self._channel.fileno(), self._channel.outgoing))
        self._channel.close()
        if not self.ended:
            kill_descendants(self.pid)
        if self._spawned is not None:
            if self._spawned.is_alive():
                self._spawned.kill()
            self._spawned.join()
            self._spawned.close()
        else:
            with suppress(ProcessLookupError, ChildProcessError):  # it was reaped by another `wait`
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        return messages


@contextmanager
def limits_in_words() -> Iterator[None]:
    """Raise WorkerDiedError, which says what to do, if the system refuses something in the block.

    Only for blocks that start processes.
    """
    try:
        yield
    except OSError as error:
        raise WorkerDiedError(
            f"worker processes cannot be started: {error}\n"
            "  No input counts as failed, and completed work is kept.\n"
            "  A limit may be reached: of processes (ulimit -u), of open files (ulimit -n), of "
            "memory, or of space for temporary files (TMPDIR). Raise it, or lower num_workers."
        ) from error
