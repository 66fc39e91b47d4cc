"""Run what may end its process, such as a library that is given damaged bytes, in another one.

    with apart():        one process for all calls in the block; it ends with the block
        call_apart(work, data)

Without such a block, as in a worker, whose death names its input, the call is made here.
"""

from __future__ import annotations

import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module

from forebay.base.process import signals_held, standard_library_first

_HEAD = struct.Struct("<HQ")  # bytes of the name of a function, and of what it is given
_BOOT = "import sys; sys.path[:] = sys.argv[1:]; from forebay.shards.apart import answer; answer()"


class EndedError(Exception):
    """The process ended within a call; says how."""


class _Process:
    """Started by the first call; for one call at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None

    def call(self, name: str, data: bytes) -> bytes:
        """Return what a function returns for some bytes."""
        with self._lock:
            if self._running is None:
                with signals_held():
                    self._running = subprocess.Popen(
                        [sys.executable, "-P", "-c", _BOOT, *standard_library_first()],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        start_new_session=True,  # Ctrl-C is for the caller
                    )
            process = self._running
            assert process.stdin is not None and process.stdout is not None
            with suppress(BrokenPipeError):
                process.stdin.write(_HEAD.pack(len(name), len(data)) + name.encode() + data)
                process.stdin.flush()
            head = process.stdout.read(8)
            if len(head) == 8:
                return process.stdout.read(int.from_bytes(head, "little"))
            self.close()
            code = process.returncode
            how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            raise EndedError(how)

    def close(self) -> None:
        """End the process."""
        process, self._running = self._running, None
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            process.stdout.close()
            with suppress(BrokenPipeError):
                process.stdin.close()
            process.wait()


_processes: list[_Process] = []  # of the blocks under way: the last one counts


@contextmanager
def apart() -> Iterator[None]:
    """Have calls of `call_apart` made by another process while the block runs."""
    _processes.append(own := _Process())
    try:
        yield
    finally:
        _processes.remove(own)
        own.close()


def call_apart(work: Callable[[bytes], bytes], data: bytes) -> bytes:
    """Return what a function of a module returns; raise EndedError if it ends its process."""
    if not _processes:
        return work(data)
    return _processes[-1].call(f"{work.__module__}:{work.__qualname__}", data)


def answer() -> None:
    """Answer calls until nobody is left who makes them."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    while len(head := source.read(_HEAD.size)) == _HEAD.size:
        length, size = _HEAD.unpack(head)
        module, _, name = source.read(length).decode().partition(":")
        answer = getattr(import_module(module), name)(source.read(size))
        sink.write(len(answer).to_bytes(8, "little") + answer)
        sink.flush()
