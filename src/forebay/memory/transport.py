"""Batches between processes that share no slab: borrowed over a link of files, or sent."""

from __future__ import annotations

import hmac
import mmap
import os
import queue
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from forebay.memory.layout import Slot
from forebay.memory.slab import Slab

# ---- lending -------------------------------------------------------------------------------------
# Lend slots of a slab to another process on the same machine, which did not inherit the slab.
#
#     lender                                          borrower
#     offer, with a batch that is copied ──────────>  map the slab and the board, if it can
#     may_lend  <──────────── board ────────────────  accept
#     lend: the number of a slot ──────────────────>  borrow: its bytes, without a copy
#     returned: the slot is free  <──── board ──────  when nothing views them any more
#
# The board is a page of memory that both share, with one byte for each slot that is lent: the
# lender sets it, the borrower clears it. So no message is needed to return a slot. A borrower on
# another machine, or in another container, cannot map the slab; it accepts nothing and still gets
# copies. What was borrowed stays valid when the lender dies, even by SIGKILL: memory exists as
# long as it is mapped.

# The board: a random number, whether the offer was accepted, and the slots.
_BOARD_BYTES = 4096
_NONCE_BYTES = 16
_ACCEPTED = _NONCE_BYTES
_FIRST = _ACCEPTED + 1
_NAME = "forebay"


class Offer(NamedTuple):
    """Where a process on the same machine finds the slab of a lender."""

    pid: int
    slab: int
    board: int
    extent: int
    nonce: bytes


class Loan(NamedTuple):
    """A slot that is lent, and how many of its bytes are used."""

    number: int  # the slot's byte on the board
    slot: Slot
    nbytes: int


class Lender:
    """Lends slots of a slab that this process owns. For one thread.

    Attributes:
        offer: Sent to a borrower, so that it can map the slab; None if the system has no memfds.
    """

    def __init__(self, slab: Slab) -> None:
        self.offer: Offer | None = None
        self._lent: dict[int, Slot] = {}
        self._numbers = [*reversed(range(_BOARD_BYTES - _FIRST))]
        with suppress(AttributeError, OSError):
            descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
            weakref.finalize(self, os.close, descriptor)
            os.ftruncate(descriptor, _BOARD_BYTES)
            self._board = mmap.mmap(descriptor, _BOARD_BYTES)
            nonce = os.urandom(_NONCE_BYTES)
            self._board[:_NONCE_BYTES] = nonce
            self.offer = Offer(os.getpid(), slab.fileno(), descriptor, slab.extent, nonce)

    @property
    def may_lend(self) -> bool:
        """Return whether a borrower has accepted the offer."""
        return self.offer is not None and bool(self._board[_ACCEPTED])

    def lend(self, slot: Slot, nbytes: int) -> Loan | None:
        """Lend a slot until `returned` yields it; None if too many are lent."""
        if self.offer is None or not self._numbers:
            return None
        number = self._numbers.pop()
        self._board[_FIRST + number] = 1
        self._lent[number] = slot
        return Loan(number, slot, nbytes)

    def returned(self) -> Iterator[Slot]:
        """Yield the slots that were returned since the last call."""
        for number in [each for each in self._lent if not self._board[_FIRST + each]]:
            self._numbers.append(number)
            yield self._lent.pop(number)


class Borrower:
    """Maps the slab of a lender on this machine; a borrowed slot may be returned by any thread."""

    def __init__(self, offer: Offer) -> None:
        board = _open(offer.pid, offer.board)
        try:
            if os.fstat(board).st_size != _BOARD_BYTES:
                raise ValueError("not a board")
            self._board = mmap.mmap(board, _BOARD_BYTES)
        finally:
            os.close(board)
        if self._board[:_NONCE_BYTES] != offer.nonce:
            raise ValueError("the board of another lender")
        self._slab = Slab.attach(_open(offer.pid, offer.slab), offer.extent)
        self._board[_ACCEPTED] = 1

    def borrow(self, loan: Loan) -> np.ndarray[Any, Any]:
        """Return the bytes of a slot, writable; it is returned when nothing views them any more."""
        found = np.frombuffer(self._slab.view(loan.slot), np.uint8, loan.nbytes)
        back = weakref.finalize(found, _give_back, self._board, loan.number, os.getpid())
        back.atexit = False
        return found


def _give_back(board: mmap.mmap, number: int, borrower: int) -> None:
    if os.getpid() == borrower:  # a fork drops its copies of arrays that the borrower still reads
        board[_FIRST + number] = 0


def _open(pid: int, descriptor: int) -> int:
    """Return a descriptor of a file in memory that another process has open."""
    path = f"/proc/{pid}/fd/{descriptor}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):  # opening another file could block
        raise ValueError("not a slab")
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


# ---- sending -------------------------------------------------------------------------------------
# Send slots of a slab to a process on another machine, over TCP.
#
#     sender                                             receiver, which listens
#     connect: the key, and the sender's ID ──────────>  accept, if the key is right
#     send: the bytes of a slot, by a thread ─────────>  receive: memory that is used again
#        └── `Sent`, in a message of the caller's ────>  says whose bytes come next, and how many
#
# What is sent is the bytes of arrays, so nothing of it is unpickled. It is not encrypted.

_KEY_BYTES, _ID_BYTES = 32, 16
_ACCEPTED_ANSWER = b"\1"
# How long either side waits for the other to introduce itself, and how many may do so at a time.
_CONNECT_S = 10.0
_MOST_STRANGERS = 64
# How often the receiver looks for those whose time is over.
_LOOK_S = 1.0
# Half the time that a receiver waits for the next byte of what was sent.
_SILENT_S = 30.0
# A machine that stops answering without closing its connections counts as lost after 20 s.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class Address(NamedTuple):
    """Where a receiver listens, and the random bytes that a connection must begin with."""

    host: str
    port: int
    key: bytes


class Sent(NamedTuple):
    """Bytes that were sent, or will be; those of one sender arrive in the order of its calls."""

    sender: bytes
    nbytes: int


class Sender:
    """Sends bytes to a receiver. For one thread, besides its own."""

    def __init__(self, address: Address, slab: Slab) -> None:
        self._slab = slab
        self._id = os.urandom(_ID_BYTES)
        self._broken: OSError | None = None
        self._queue: queue.SimpleQueue[tuple[Slot, memoryview] | None] = queue.SimpleQueue()
        self._socket = socket.create_connection((address.host, address.port), _CONNECT_S)
        try:
            self._socket.sendall(address.key + self._id)
            if self._socket.recv(1) != _ACCEPTED_ANSWER:
                raise ConnectionRefusedError(f"port {address.port} of {address.host} is another's")
            # The trainer reads when it needs a batch, which may be much later.
            _keep_alive(self._socket, None)
            threading.Thread(target=self._run, name="forebay-sender", daemon=True).start()
        except BaseException:
            self._socket.close()
            raise

    def send(self, slot: Slot, nbytes: int) -> Sent:
        """Have the first bytes of a slot sent, after those of earlier calls; then it is free."""
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

    One thread accepts connections, and waits for no single one: whoever has not introduced itself
    after _CONNECT_S is turned away, and the oldest of _MOST_STRANGERS as soon as another comes.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family)
        self._listening.setblocking(False)
        port = self._listening.getsockname()[1]
        self.address = Address(host, port, os.urandom(_KEY_BYTES))
        self._connections: dict[bytes, _Connection] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="forebay-receiver", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the system has no more threads
            self._listening.close()
            raise OSError(str(error)) from error

    def receive(self, sent: Sequence[Sent]) -> list[np.ndarray[Any, Any]]:
        """Wait for bytes of one sender."""
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
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # the thread wakes, and closes it
        self._thread.join(_CONNECT_S)
        for sender in list(self._connections):
            self.forget(sender)

    def _listen(self) -> None:
        strangers: dict[socket.socket, tuple[bytearray, float]] = {}  # the oldest first
        with self._listening, selectors.DefaultSelector() as selector:
            selector.register(self._listening, selectors.EVENT_READ)
            while not self._closed.is_set():
                ready = {key.fileobj for key, _ in selector.select(_LOOK_S)}
                over: dict[socket.socket, bool] = {}
                for stranger, (said, until) in strangers.items():
                    is_known = self._hear(stranger, said) if stranger in ready else None
                    if is_known is not None or until <= time.monotonic():
                        over[stranger] = bool(is_known)
                if self._listening in ready and not self._accept(selector, strangers):
                    over.setdefault(next(iter(strangers)), False)
                for stranger, is_known in over.items():
                    del strangers[stranger]
                    selector.unregister(stranger)
                    if not is_known:
                        _end(stranger)
            for stranger in strangers:
                _end(stranger)

    def _accept(
        self,
        selector: selectors.BaseSelector,
        strangers: dict[socket.socket, tuple[bytearray, float]],
    ) -> bool:
        """Accept a connection; return whether the oldest of the strangers may stay."""
        try:
            stranger, _ = self._listening.accept()
            stranger.setblocking(False)
            selector.register(stranger, selectors.EVENT_READ)
        except OSError:  # no descriptor is left, or this is closed
            if not strangers:
                self._closed.wait(_LOOK_S)
            return not strangers
        strangers[stranger] = bytearray(), time.monotonic() + _CONNECT_S
        return len(strangers) <= _MOST_STRANGERS

    def _hear(self, stranger: socket.socket, said: bytearray) -> bool | None:
        """Read more of what a connection begins with, and accept it if the key is right.

        Returns None until all of it is there: judged sooner, it would give the key away by bytes.
        """
        try:
            found = stranger.recv(_KEY_BYTES + _ID_BYTES - len(said))
            said += found
            if found and len(said) < _KEY_BYTES + _ID_BYTES:
                return None
            if not hmac.compare_digest(said[:_KEY_BYTES], self.address.key):
                return False
            _keep_alive(stranger, _SILENT_S)
            with self._lock:
                if self._closed.is_set():
                    return False
                self._connections[bytes(said[_KEY_BYTES:])] = _Connection(stranger)
            stranger.sendall(_ACCEPTED_ANSWER)
        except BlockingIOError:
            return None
        except OSError:
            return False
        return True


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
        view, at, is_silent = self._memory.data[:total], 0, False
        while at < total:
            try:
                found = self.socket.recv_into(view[at:])
            except TimeoutError as error:
                if is_silent:  # twice, since the first may be a pause of this process
                    raise TimeoutError(f"no byte came for {2 * _SILENT_S:g} s") from error
                is_silent = True
                continue
            if not found:
                raise ConnectionResetError("it was closed by the other side")
            at, is_silent = at + found, False
        return np.split(self._memory[:total], np.cumsum(sizes)[:-1])


def _keep_alive(connection: socket.socket, timeout: float | None) -> None:
    connection.settimeout(timeout)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _end(connection: socket.socket) -> None:
    """Close a socket, also if a fork of this process has it open; wake whoever waits for it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


# ---- packed batch --------------------------------------------------------------------------------
# The message for a batch whose bytes are in a slot; see `packing.py`.
#
# It is a plain record, which a process without torch can forward.


class PackedBatch(NamedTuple):
    """A packed batch.

    Attributes:
        refused: Why the slab's disk had no room, if the bytes are therefore in `in_band`.
        offer: Where a reader on the same machine finds the slab that the bytes came from.
        loan: The slot that has the bytes, if that reader has accepted the offer.
        sent: What to receive, if the bytes are sent apart from this message.
    """

    in_band: bytes | tuple[int, int]
    buffers: tuple[tuple[int, int], ...]
    body: bytearray | np.ndarray[Any, Any] | None
    nbytes: int
    kept: bool = False
    refused: str | None = None
    offer: Offer | None = None
    loan: Loan | None = None
    sent: Sent | None = None

    @property
    def end(self) -> int:
        """The end of the last buffer; 0 without buffers."""
        return max((at + nbytes for at, nbytes in self.buffers), default=0)

    @property
    def used(self) -> int:
        """How many bytes of the slot, or of `body`, are used."""
        return self.end if isinstance(self.in_band, bytes) else max(self.end, sum(self.in_band))

    def settle(self, slab: Slab, slot: Slot | None) -> Slot | None:
        """Record the batch's arrival in the slab; called once, by the slab's owner."""
        slab.record_size(self.nbytes)
        if self.body is None:
            return slot
        if slot is not None and not self.kept:
            slab.give_back(slot)
        return None
