"""Send objects through a pair of pipes: a length, then a pickle.

Both ends are this program's own processes; nothing is read from a disk. No two workers share a
channel, so a process that dies in the middle of a write only damages its own.

Pipes, not a socket: a socket charges each small message some 800 bytes of its buffer and is full
after 280 of them, long before the driver reads them; a pipe packs them.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import select
import struct
from contextlib import suppress
from typing import Any

_LENGTH = struct.Struct("!Q")
_CHUNK = 1 << 18
# Room for answers while the driver is busy; the maximum for an unprivileged process.
_PIPE_BYTES = 1 << 20


def roomy_pipe() -> tuple[int, int]:
    """Return the ends (to read, to write) of a pipe with a larger buffer, if the system allows."""
    ends = os.pipe()
    with suppress(OSError):  # the user's limit for pipes is reached; a smaller buffer works too
        fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return ends


class Channel:
    """One end: a pipe to read from and one to write to, both owned.

    `send` and `receive` block; `receive_nowait`, `queue` and `flush` never do.

    Args:
        incoming: Descriptor to read from.
        outgoing: Descriptor to write to.
    """

    def __init__(self, incoming: int, outgoing: int) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self._received = bytearray()
        self._queued = bytearray()
        self._arrivals = select.poll()
        self._arrivals.register(incoming, select.POLLIN)
        self.ended = False

    def fileno(self) -> int:
        """Return the descriptor that is read from, for a selector."""
        return self._incoming

    @property
    def outgoing(self) -> int:
        """The descriptor that is written to, for a selector."""
        return self._outgoing

    def send(self, message: Any) -> None:
        """Send one object, waiting for room."""
        data = _framed(message)
        sent = os.write(self._outgoing, data)
        while sent < len(data):
            sent += os.write(self._outgoing, memoryview(data)[sent:])

    def receive(self) -> Any:
        """Return the next object, waiting for it.

        Raises:
            EOFError: The other end is gone.
        """
        while not (messages := self._parse(1)):
            data = os.read(self._incoming, _CHUNK)
            if not data:
                raise EOFError
            self._received += data
        return messages[0]

    def receive_nowait(self) -> list[Any]:
        """Return every whole object that has arrived; sets `ended` when no more can come."""
        while not self.ended and self._arrivals.poll(0):
            data = os.read(self._incoming, _CHUNK)
            self._received += data
            self.ended = not data
        return self._parse()

    def queue(self, message: Any) -> None:
        """Queue an object to be sent by `flush`."""
        self._queued += _framed(message)

    def flush(self) -> bool:
        """Send as much as the pipe accepts; return whether anything is left.

        The descriptor must be non-blocking (`os.set_blocking`).
        """
        while self._queued:
            try:
                sent = os.write(self._outgoing, self._queued)
            except BlockingIOError:
                return True
            except BrokenPipeError:  # the other end died; its death is reported by other means
                self._queued.clear()
                return False
            del self._queued[:sent]
        return False

    def close(self) -> None:
        """Close both pipes; the other end then reads an end of file."""
        os.close(self._incoming)
        os.close(self._outgoing)

    def _parse(self, most: int | None = None) -> list[Any]:
        messages: list[Any] = []
        start, size = 0, _LENGTH.size
        while len(messages) != most and len(self._received) >= start + size:
            (length,) = _LENGTH.unpack_from(self._received, start)
            end = start + size + length
            if len(self._received) < end:
                break
            with memoryview(self._received) as view:
                messages.append(pickle.loads(view[start + size : end]))  # noqa: S301
            start = end
        del self._received[:start]
        return messages


def _framed(message: Any) -> bytes:
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body
