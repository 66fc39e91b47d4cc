"""Whole objects over a stream socket: a length, then a pickle.

Both ends are this program's own processes; nothing that arrives here came from a disk. Nobody
shares a channel, so a process that dies in the middle of a write spoils only its own.
"""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!Q")
_CHUNK = 1 << 18


class Channel:
    """One end. `send` and `receive` block; `receive_nowait`, `queue` and `flush` never do."""

    def __init__(self, end: socket.socket) -> None:
        """Own `end`."""
        self._socket = end
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self.ended = False

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Send one object, waiting for room."""
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> Any:
        """Return the next object, waiting for it.

        Raises:
            EOFError: The other end is gone.
        """
        while (messages := self._parse(1)) == []:
            data = self._socket.recv(_CHUNK)
            if not data:
                raise EOFError
            self._incoming += data
        return messages[0]

    def receive_nowait(self) -> list[Any]:
        """Return every whole object that has arrived; sets `ended` when no more can come."""
        while not self.ended:
            try:
                data = self._socket.recv(_CHUNK, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            self._incoming += data
            self.ended = not data
            if len(data) < _CHUNK:
                break
        return self._parse()

    def queue(self, message: Any) -> None:
        """Keep an object to be sent by `flush`."""
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._outgoing += _LENGTH.pack(len(body)) + body

    def flush(self) -> bool:
        """Send what there is room for; return whether something is left over."""
        while self._outgoing:
            try:
                sent = self._socket.send(self._outgoing, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except OSError:  # the other end died; its death is reported by other means
                self._outgoing.clear()
                return False
            del self._outgoing[:sent]
        return False

    def close(self) -> None:
        """Close this end; the other reads its end of file."""
        self._socket.close()

    def _parse(self, most: int | None = None) -> list[Any]:
        messages: list[Any] = []
        start, size = 0, _LENGTH.size
        while len(messages) != most and len(self._incoming) >= start + size:
            (length,) = _LENGTH.unpack_from(self._incoming, start)
            end = start + size + length
            if len(self._incoming) < end:
                break
            with memoryview(self._incoming) as view:
                messages.append(pickle.loads(view[start + size : end]))  # noqa: S301
            start = end
        del self._incoming[:start]
        return messages
