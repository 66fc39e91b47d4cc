"""Slots sent over TCP: real sockets, and senders that are real processes."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

import pytest

from forebay.memory import transport
from forebay.memory.layout import Slot
from forebay.memory.slab import Slab
from forebay.memory.transport import Address, Receiver, Sender, Sent

HERE = "127.0.0.1"
# Bytes that a connection begins with.
_KEY_AND_ID = 48

# Sends the first of two megabytes that it announces.
SENDER = """
import sys, time
from ast import literal_eval
from forebay.memory.transport import Address, Sender
from forebay.memory.slab import Slab

slab = Slab()
sender = Sender(Address(*literal_eval(sys.argv[1])), slab)
slot = slab.take()
slab.view(slot)[:5] = b"hello"
print(sender.send(slot, 1 << 20).sender.hex(), flush=True)
time.sleep(3600)
"""


@pytest.fixture
def senders() -> Iterator[ExitStack]:
    """Closes the senders that a test has made."""
    with ExitStack() as stack:
        yield stack


def connect(senders: ExitStack, address: Address, slab: Slab) -> Sender:
    """Return a sender that its test closes."""
    return senders.enter_context(closing(Sender(address, slab)))


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver(HERE)
    yield receiver
    receiver.close()


def filled(slab: Slab, text: bytes) -> Slot:
    """Return a slot of a slab that begins with a text."""
    slot = slab.take()
    assert slot is not None
    slab.view(slot)[: len(text)] = text
    return slot


def is_open(address: Address) -> bool:
    """Return whether anything listens there."""
    try:
        socket.create_connection((address.host, address.port), 10.0).close()
    except ConnectionRefusedError:
        return False
    return True


def test_bytes_arrive_in_order_and_slots_are_free_again(
    receiver: Receiver, senders: ExitStack
) -> None:
    """Of two senders, each with its own order; what is longer than a socket's buffer, too."""
    slabs = Slab(), Slab()
    first, second = (connect(senders, receiver.address, slab) for slab in slabs)
    large = os.urandom(1 << 24)
    for slab in slabs:
        slab.record_size(len(large))
    one = [first.send(filled(slabs[0], text), len(text)) for text in (b"one", b"", large, b"two")]
    other = [second.send(filled(slabs[1], b"three"), 5)]
    assert [each.tobytes() for each in receiver.receive(other)] == [b"three"]
    assert [each.tobytes() for each in receiver.receive(one[:3])] == [b"one", b"", large]
    assert [each.tobytes() for each in receiver.receive(one[3:])] == [b"two"]
    last = first.send(filled(slabs[0], b"four"), 4)
    assert receiver.receive([last])[0].tobytes() == b"four"
    # The thread gives a slot back after it has sent it, and before it sends the next one.
    assert slabs[0].out <= 1


def test_it_listens_on_its_address_alone(receiver: Receiver) -> None:
    """Not on the other addresses of the machine."""
    assert is_open(receiver.address)
    assert not is_open(receiver.address._replace(host="127.0.0.2"))


@pytest.mark.parametrize("said", [b"", b"x", bytes(48), bytes(1 << 16)])
def test_a_stranger_is_turned_away(receiver: Receiver, senders: ExitStack, said: bytes) -> None:
    """Its connection is closed without an answer; those who know the key are not disturbed."""
    with socket.create_connection((HERE, receiver.address.port), 10.0) as stranger:
        with suppress(OSError):  # it was turned away before it had said everything
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b""
    slab = Slab()
    sent = connect(senders, receiver.address, slab).send(filled(slab, b"fine"), 4)
    assert receiver.receive([sent])[0].tobytes() == b"fine"


def introduced(receiver: Receiver) -> None:
    """Return when a connection has introduced itself, and those before it were read as well."""
    with socket.create_connection((HERE, receiver.address.port), 10.0) as connection:
        connection.sendall(receiver.address.key + os.urandom(16))
        assert connection.recv(1) == b"\1"


@pytest.mark.parametrize("at", range(1, 48))
def test_an_introduction_may_come_in_two_parts(receiver: Receiver, at: int) -> None:
    """TCP has no messages: wherever it is cut, the sender is known by its whole ID."""
    sender = os.urandom(16)
    said = receiver.address.key + sender
    with socket.create_connection((HERE, receiver.address.port), 10.0) as connection:
        connection.sendall(said[:at])
        introduced(receiver)  # has accepted this connection, too
        introduced(receiver)  # has read its first part
        connection.sendall(said[at:])
        assert connection.recv(1) == b"\1"
        connection.sendall(b"hello")
        assert receiver.receive([Sent(sender, 5)])[0].tobytes() == b"hello"


def test_two_hundred_idle_strangers_keep_nobody_out(receiver: Receiver, senders: ExitStack) -> None:
    """The newest 64 may stay for a while; the others are turned away at once."""
    strangers = [socket.create_connection((HERE, receiver.address.port), 10.0) for _ in range(200)]
    try:
        slab = Slab()
        sent = connect(senders, receiver.address, slab).send(filled(slab, b"fine"), 4)
        assert receiver.receive([sent])[0].tobytes() == b"fine"
        for stranger in strangers[: 200 - transport._MOST_STRANGERS]:
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
    finally:
        for stranger in strangers:
            stranger.close()


@pytest.mark.parametrize("says", [b"", b"x"], ids=["nothing", "a byte now and then"])
def test_a_stranger_has_a_limited_time(monkeypatch: pytest.MonkeyPatch, says: bytes) -> None:
    """Counted from its connection, not from its last byte."""
    monkeypatch.setattr(transport, "_CONNECT_S", 0.1)
    monkeypatch.setattr(transport, "_LOOK_S", 0.02)
    with closing(Receiver(HERE)) as receiver:
        stranger = socket.create_connection((HERE, receiver.address.port), 60.0)
        with stranger, suppress(ConnectionResetError, BrokenPipeError):
            stranger.settimeout(0.02)
            for _ in range(_KEY_AND_ID - 1 if says else 0):
                stranger.sendall(says)
                with suppress(TimeoutError):
                    assert stranger.recv(1) == b""
                    return
            stranger.settimeout(60.0)
            assert stranger.recv(1) == b""


def test_a_system_without_threads_keeps_nobody_out(
    receiver: Receiver, senders: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who come meanwhile are let in, and a sender that has no thread succeeds later."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    slab = Slab()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        introduced(receiver)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            Sender(receiver.address, slab)
        with pytest.raises(OSError, match="can't start new thread"):
            Receiver(HERE)
    sent = connect(senders, receiver.address, slab).send(filled(slab, b"fine"), 4)
    assert receiver.receive([sent])[0].tobytes() == b"fine"


def test_a_system_without_descriptors_listens_again(
    receiver: Receiver, senders: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger gives up its descriptor for the next connection."""
    slab, refused = Slab(), threading.Event()
    accept = socket.socket.accept

    def refusing(listening: socket.socket) -> tuple[socket.socket, object]:
        if threading.current_thread().name == "forebay-receiver" and not refused.is_set():
            refused.set()
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listening)

    with socket.create_connection((HERE, receiver.address.port), 10.0) as stranger:
        introduced(receiver)
        introduced(receiver)
        monkeypatch.setattr(socket.socket, "accept", refusing)
        sent = connect(senders, receiver.address, slab).send(filled(slab, b"fine"), 4)
        assert refused.is_set()
        assert receiver.receive([sent])[0].tobytes() == b"fine"
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


def test_a_sender_that_sends_nothing_more_is_lost(
    receiver: Receiver, senders: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine may be alive, so that its connection is, too."""
    monkeypatch.setattr(transport, "_SILENT_S", 0.05)
    slab = Slab()
    sent = connect(senders, receiver.address, slab).send(filled(slab, b"a"), 1)
    with pytest.raises(ConnectionError, match=r"broke: no byte came for 0\.1 s"):
        receiver.receive([sent._replace(nbytes=2)])


def test_a_stranger_that_says_nothing_delays_nobody(receiver: Receiver, senders: ExitStack) -> None:
    """Nothing waits for it."""
    with socket.create_connection((HERE, receiver.address.port), 10.0):
        slab = Slab()
        sent = connect(senders, receiver.address, slab).send(filled(slab, b"fine"), 4)
        assert receiver.receive([sent])[0].tobytes() == b"fine"


def test_another_key_is_refused(receiver: Receiver) -> None:
    """As is a port where somebody else listens, who does not answer as a receiver does."""
    with pytest.raises(OSError, match=r"another's|reset"):
        Sender(receiver.address._replace(key=bytes(32)), Slab())


def test_a_sender_that_is_killed_ends_the_wait(receiver: Receiver) -> None:
    """SIGKILL, while more bytes are expected; nothing of them is returned."""
    process = subprocess.Popen(
        [sys.executable, "-c", SENDER, str(tuple(receiver.address))],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    sender = bytes.fromhex(process.stdout.readline())
    assert receiver.receive([Sent(sender, 5)])[0].tobytes() == b"hello"
    killer = threading.Timer(0.1, process.send_signal, [signal.SIGKILL])
    killer.start()
    with pytest.raises(ConnectionError, match="its connection to the trainer broke"):
        receiver.receive([Sent(sender, 1 << 24)])
    killer.join()
    process.communicate()
    with pytest.raises(ConnectionError, match="closed here"):
        receiver.receive([Sent(sender, 1)])


def test_closing_ends_the_wait_and_the_listening(senders: ExitStack) -> None:
    """In whichever order they come."""
    receiver, slab = Receiver(HERE), Slab()
    sent = connect(senders, receiver.address, slab).send(filled(slab, b"a"), 1)
    assert receiver.receive([sent])[0].tobytes() == b"a"
    closer = threading.Timer(0.1, receiver.close)
    closer.start()
    with pytest.raises(ConnectionError):
        receiver.receive([sent])
    closer.join()
    assert not is_open(receiver.address)
    with pytest.raises(OSError, match="refused"):
        Sender(receiver.address, slab)


def test_sending_to_a_receiver_that_is_gone_is_an_error(senders: ExitStack) -> None:
    """Slots that could not be sent are free again."""
    receiver, slab = Receiver(HERE), Slab()
    sender = connect(senders, receiver.address, slab)
    receiver.close()
    with pytest.raises(ConnectionError, match="the connection to the trainer broke"):
        for _ in range(3):  # the system refuses the second one, after it was told
            sender.send(filled(slab, b"a"), 1)
            until = time.monotonic() + 60.0
            while slab.out:
                assert time.monotonic() < until, "a slot was lost"
                time.sleep(0.001)
