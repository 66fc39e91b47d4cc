"""Send slots of a slab to a process on another machine, over TCP.

    sender                                             receiver, which listens
    connect: the key, and the sender's ID ──────────>  accept, if the key is right
    send: the bytes of a slot, by a thread ─────────>  receive: memory that is used again
       └── `Sent`, in a message of the caller's ────>  says whose bytes come next, and how many

What is sent is the bytes of arrays, so nothing of it is unpickled. It is not encrypted.
"""

from __future__ import annotations

import hmac
import os
import queue
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from forebay.engine.memory.slab import Slab
    from forebay.engine.memory.slab_layout import Slot

_KEY_BYTES, _ID_BYTES = 32, 16
_ACCEPTED = b"\1"
# How long either side waits for the other to introduce itself, and how many may do so at a time.
_CONNECT_S = 10.0
_MOST_STRANGERS = 64
# A machine that stops answering without closing its connections counts as lost after 20 s.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class Address(NamedTuple):
    """Where a receiver listens, and what a connection must begin with.

    Attributes:
        host: An IP address of the receiver's machine.
        port: The port.
        key: Random bytes.
    """

    host: str
    port: int
    key: bytes


class Sent(NamedTuple):
    """Bytes that were sent, or will be; those of one sender arrive in the order of its calls.

    Attributes:
        sender: The ID of the sender.
        nbytes: How many bytes.
    """

    sender: bytes
    nbytes: int


class Sender:
    """Sends bytes to a receiver. For one thread, besides its own.

    Args:
        address: The receiver's.
        slab: The slab that the slots were taken from.

    Raises:
        OSError: There is no such receiver.
    """

    def __init__(self, address: Address, slab: Slab) -> None:
        self._slab = slab
        self._id = os.urandom(_ID_BYTES)
        self._broken: OSError | None = None
        self._queue: queue.SimpleQueue[tuple[Slot, memoryview] | None] = queue.SimpleQueue()
        self._socket = socket.create_connection((address.host, address.port), _CONNECT_S)
        try:
            self._socket.sendall(address.key + self._id)
            if self._socket.recv(1) != _ACCEPTED:
                raise ConnectionRefusedError(f"port {address.port} of {address.host} is another's")
            _keep_alive(self._socket)
        except BaseException:
            self._socket.close()
            raise
        threading.Thread(target=self._run, name="forebay-sender", daemon=True).start()

    def send(self, slot: Slot, nbytes: int) -> Sent:
        """Have the first bytes of a slot sent, after those of earlier calls; then it is free.

        Raises:
            ConnectionError: What an earlier call sent did not arrive.
        """
        if self._broken is not None:
            raise ConnectionError(f"the connection to the trainer broke: {self._broken}")
        self._queue.put((slot, self._slab.view(slot)[:nbytes]))
        return Sent(self._id, nbytes)

    def close(self) -> None:
        """Close the connection as soon as everything is sent."""
        self._queue.put(None)

    def _run(self) -> None:
        while (each := self._queue.get()) is not None:
            slot, view = each
            try:
                self._socket.sendall(view)
            except OSError as error:
                self._broken = error
            view.release()
            self._slab.give_back(slot)
        self._socket.close()


class Receiver:
    """Listens on one address of this machine, and receives what senders with its key send.

    Args:
        host: The IP address to listen on.

    Attributes:
        address: For senders; secret, because of its key.

    Raises:
        OSError: The address is not this machine's.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family)
        port = self._listening.getsockname()[1]
        self.address = Address(host, port, os.urandom(_KEY_BYTES))
        self._connections: dict[bytes, _Connection] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._strangers = threading.BoundedSemaphore(_MOST_STRANGERS)
        threading.Thread(target=self._listen, name="forebay-receiver", daemon=True).start()

    def receive(self, sent: Sequence[Sent]) -> list[np.ndarray[Any, Any]]:
        """Wait for bytes of one sender.

        Args:
            sent: What it sent, in order and without a gap since the last call.

        Returns:
            The bytes of each: uint8, in memory that is used again by the next call for this sender.

        Raises:
            ConnectionError: They will not arrive.
        """
        sender = sent[0].sender
        connection = self._connections.get(sender)
        try:
            if connection is None:
                raise ConnectionAbortedError("it was closed here")
            return connection.receive([each.nbytes for each in sent])
        except OSError as error:
            self.forget(sender)
            raise ConnectionError(f"its connection to the trainer broke: {error}") from error

    def forget(self, sender: bytes) -> None:
        """Close the connection of a sender, and free its memory."""
        with self._lock:
            connection = self._connections.pop(sender, None)
        if connection is not None:
            _end(connection.socket)

    def close(self) -> None:
        """Stop listening, and close all connections: whoever waits for bytes gets an error."""
        with self._lock:  # no connection is accepted after this
            self._closed.set()
        _end(self._listening)
        for sender in list(self._connections):
            self.forget(sender)

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listening.accept()
            except OSError:  # no descriptor is left, or this is closed
                self._closed.wait(1.0)
                continue
            self._strangers.acquire()
            threading.Thread(target=self._admit, args=(connection,), daemon=True).start()

    def _admit(self, connection: socket.socket) -> None:
        """Accept a connection that begins with the key; close any other."""
        try:
            connection.settimeout(_CONNECT_S)
            said = connection.recv(_KEY_BYTES + _ID_BYTES)
            if not hmac.compare_digest(said[:_KEY_BYTES], self.address.key):
                raise ConnectionRefusedError("a stranger")
            _keep_alive(connection)
            with self._lock:
                if self._closed.is_set():
                    raise ConnectionAbortedError("closed")
                self._connections[said[_KEY_BYTES:]] = _Connection(connection)
            connection.sendall(_ACCEPTED)
        except OSError:
            _end(connection)
        finally:
            self._strangers.release()


class _Connection:
    """The connection of a sender, and the memory for what it sends."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._memory = np.empty(0, np.uint8)

    def receive(self, sizes: Sequence[int]) -> list[np.ndarray[Any, Any]]:
        """Return as many bytes as each of the sizes says."""
        total = sum(sizes)
        if total > len(self._memory):
            self._memory = np.empty(total, np.uint8)
        view, at = self._memory.data[:total], 0
        while at < total:
            found = self.socket.recv_into(view[at:])
            if not found:
                raise ConnectionResetError("it was closed by the other side")
            at += found
        return np.split(self._memory[:total], np.cumsum(sizes)[:-1])


def _keep_alive(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _end(connection: socket.socket) -> None:
    """Close a socket, also if a fork of this process has it open; wake whoever waits for it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
