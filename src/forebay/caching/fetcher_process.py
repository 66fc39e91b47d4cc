"""The process that fetches blocks, as the processes that read reach it, start it and end it.

    reader ── one end of a pair of sockets ──> fetcher, which answers on it; see `link.py`

The fetcher is a child of a process that reads. Nothing has a name, and nothing is searched: the
process that opens a cache makes a pair of sockets and a lock, without names, which its workers
inherit, or receive where they are new interpreters. Through the pair, each reader hands over a
connection of its own. The fetcher keeps the lock as long as it lives, so each of these processes
sees whether there is one, and starts another if there is none. It ends with the process that opened
the cache.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import resource
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from forebay.base.process import (
    descriptors_for_workers,
    memory_file,
    memory_file_of,
    signals_held,
    standard_library_first,
)
from forebay.errors import InputError, shown_location

# How long a new fetcher may take until it has its lock, and how often a look is taken.
START_S, LOOK_S = 60.0, 0.005
# The bytes of the lock: one that the fetcher has, one for who starts it.
_ALIVE, _STARTING = 0, 1
_TOKEN_BYTES = 16
# As in <fcntl.h>, on machines of 64 bits: type, from where, start, length, process.
_FLOCK = struct.Struct("hhqqi4x")
# Variables of the environment that say how to reach a bucket.
_SETTINGS = ("AWS_", "AZURE_", "FSSPEC_", "GOOGLE_", "GCS_")

_BOOT = (
    "import sys; sys.path[:] = sys.argv[4:]; "
    "from forebay.caching.fetcher_main import run_fetcher; run_fetcher(*map(int, sys.argv[1:4]))"
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a cache is, and what of it may be kept here.

    Attributes:
        url: Of its folder, with credentials if the user put some there.
        directory: Where blocks are kept; None for memory only.
        disk: Bytes to keep there.
    """

    url: str
    directory: str | None = None
    disk: int = 0

    @property
    def name(self) -> str:
        """The name of the folder of this cache in its directory."""
        return sha256(self.url.encode()).hexdigest()[:16]

    def source(self, read_all: Any) -> Any:
        """Return the `BlockSource` of the cache, in the process that fetches."""
        from forebay.caching.block_source import CacheSource

        return CacheSource(self.url, read_all)


class FetcherProcess:
    """The descriptors by which processes reach the fetcher of a cache; see the module.

    Attributes:
        place: Of the cache.
        token: What the file of the lock contains, by which its descriptor is recognised.
        descriptors: Where connections are handed over; where the fetcher takes them; the lock.
    """

    def __init__(self, place: Place, token: bytes, descriptors: Sequence[int]) -> None:
        self.place, self.token, self.descriptors = place, token, tuple(descriptors)
        self._requests, _, self._lock = self.descriptors
        self._starting = threading.Lock()
        self._started: list[subprocess.Popen[bytes]] = []
        descriptors_for_workers.update(self.descriptors)
        owned = os.getpid(), self.descriptors, self._started
        self.close = weakref.finalize(self, _close, *owned)

    @classmethod
    def of(cls, place: Place) -> FetcherProcess:
        """Return the one of this process for a cache; nothing is started yet."""
        key = _key(place)
        if (known := _known.get(key)) is None:
            token = secrets.token_bytes(_TOKEN_BYTES)
            with _in_words(place), ExitStack() as undo:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                undo.callback(ours.close)
                undo.callback(theirs.close)
                lock = memory_file("forebay-lock")
                undo.pop_all()
            os.write(lock, token)
            ours.setblocking(False)
            known = _known[key] = cls(place, token, (ours.detach(), theirs.detach(), lock))
        return known

    @classmethod
    def received(cls, place: Place, token: bytes, descriptors: Sequence[int]) -> FetcherProcess:
        """Return the one that another process named, if this one has its descriptors."""
        known = _known.get(_key(place))
        if known is not None and known.token == token:
            return known
        with suppress(OSError):
            if os.pread(descriptors[2], 2 * _TOKEN_BYTES, 0) == token:
                for each in descriptors:
                    os.set_inheritable(each, False)
                known = _known[_key(place)] = cls(place, token, descriptors)
                return known
        return cls.of(place)

    def __reduce__(self) -> Any:
        """Pickle the numbers of the descriptors, which this process's workers inherit.

        A process that `multiprocessing` starts receives them. Any other one makes its own.
        """
        popen = sys.modules.get("multiprocessing.context")
        if popen is not None and popen.get_spawning_popen() is not None:
            from multiprocessing.reduction import DupFd

            return _detached, (self.place, self.token, [*map(DupFd, self.descriptors)])
        return FetcherProcess.received, (self.place, self.token, self.descriptors)

    # ---- the process ---------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """The process ID of the fetcher; None if there is none."""
        return self._holder(_ALIVE)

    def connect(self) -> socket.socket:
        """Return a connection, which the fetcher accepts as soon as it can.

        Raises:
            InputError: The system refuses what it takes.
        """
        until = time.monotonic() + START_S
        requests = socket.socket(fileno=self._requests)
        try:
            with _in_words(self.place), ExitStack() as undo:
                ours, theirs = map(undo.enter_context, socket.socketpair())
                while True:
                    self.keep_alive()
                    try:
                        socket.send_fds(requests, [b"c"], [theirs.fileno()])
                        break
                    except BlockingIOError:  # as many wait as the system allows
                        if time.monotonic() > until:
                            raise self.silent_error(START_S) from None
                    time.sleep(LOOK_S)
                undo.pop_all()
                theirs.close()
                return ours
        finally:
            requests.detach()

    def begin(self) -> None:
        """Start a fetcher if there is none, and do not wait for it: it takes a while."""
        with suppress(OSError):  # then reading says what the system refuses
            if self.pid is None and not self._is_starting():
                self._launch()

    def keep_alive(self) -> None:
        """Start a fetcher if there is none; another process may be about to."""
        if self.pid is not None or not self._starting.acquire(blocking=False):
            return
        try:
            with suppress(BlockingIOError, PermissionError):
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _STARTING)
                try:
                    if self.pid is None:
                        self._start()
                finally:
                    fcntl.lockf(self._lock, fcntl.LOCK_UN, 1, _STARTING)
        finally:
            self._starting.release()

    def kill(self) -> None:
        """End a fetcher that does not answer; the next call starts another one."""
        if (pid := self.pid) is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def resume(self) -> None:
        """Continue a fetcher that was stopped."""
        if (pid := self.pid) is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGCONT)

    def silent_error(self, seconds: float) -> InputError:
        """Return the error for a fetcher that does nothing."""
        return InputError(
            f"{shown_location(self.place.url)}: the process that fetches its blocks (process ID "
            f"{self.pid}) has been silent for {seconds:g} s\n"
            "  It is stopped, or the machine cannot run it. It was killed; blocks on disk stay. "
            "Make the same call again, which starts another one."
        )

    def _holder(self, byte: int) -> int | None:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        kind, *_, pid = _FLOCK.unpack(fcntl.fcntl(self._lock, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else int(pid)

    def _is_starting(self) -> bool:
        self._started[:] = [each for each in self._started if each.poll() is None]
        return bool(self._started)

    def _start(self) -> None:
        """Start a fetcher, and wait until it has its lock or has ended."""
        if not self._is_starting():
            self._launch()
        process, until = self._started[-1], time.monotonic() + START_S
        while process.poll() is None and self.pid is None:
            if time.monotonic() > until:
                process.kill()
            time.sleep(LOOK_S)

    def _launch(self) -> None:
        # In a file without a name, since a command line can be read by everybody.
        config = memory_file_of("place", pickle.dumps(self.place))
        passed = self._lock, self.descriptors[1], config
        try:
            with signals_held():  # until it ignores them
                process = subprocess.Popen(
                    [
                        *(sys.executable, "-P", "-c", _BOOT),
                        *map(str, passed),
                        *standard_library_first(),
                    ],
                    pass_fds=passed,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
        finally:
            os.close(config)
        self._started.append(process)


@contextmanager
def _in_words(place: Place) -> Iterator[None]:
    """Raise InputError if the system refuses a process or open files."""
    try:
        yield
    except OSError as error:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise InputError(
            f"{shown_location(place.url)}: the process that fetches its blocks cannot be started "
            f"or reached: {error.strerror or error}\n"
            f"  Nothing was fetched. This process may have {soft:,} open files (ulimit -n): raise "
            "that limit, or that of processes (ulimit -u)."
        ) from error


# Those of this process that are in use.
_known: weakref.WeakValueDictionary[Any, FetcherProcess] = weakref.WeakValueDictionary()


def _key(place: Place) -> Any:
    """Return what fetchers of one process differ by: also by credentials and endpoints."""
    return place, *sorted(item for item in os.environ.items() if item[0].startswith(_SETTINGS))


def _detached(place: Place, token: bytes, descriptors: Sequence[Any]) -> FetcherProcess:
    return FetcherProcess.received(place, token, [each.detach() for each in descriptors])


def _close(
    owner: int, descriptors: Sequence[int], started: Sequence[subprocess.Popen[bytes]]
) -> None:
    """Close the descriptors, and end the fetcher that this process has started."""
    descriptors_for_workers.difference_update(descriptors)
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)
    if os.getpid() == owner:
        for process in started:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(START_S)
