"""The process that fetches blocks of one cache for the processes of one training.

    clients ── socket ──> loop: questions, answers ──> `fetched_blocks.py`

A reader finds a block in the table, which all processes map, and sends a message only if the block
is not there. The process ends with the one that opened the cache (see `fetcher_process.py`).
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from forebay.base.process import watch_maker_of
from forebay.caching.fetch_policy import NEEDED, GivenUp, Key, Unit, percentile
from forebay.caching.fetched_blocks import FetchedBlocks
from forebay.caching.fetcher_process import Place
from forebay.caching.link import ALIVE, accepted, error_as_sent, messages, packed_message

# How often clients hear what was fetched, and that this process lives.
_FACTS_S = 1.0
# A longer pause of the loop means that the process was frozen.
_FROZEN_S = 10.0
_RECV_BYTES = 1 << 16


@dataclass(eq=False, slots=True)
class _Client:
    number: int
    socket: socket.socket
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: deque[memoryview] = field(default_factory=deque)
    since: dict[str, float] | None = None  # totals at its beginning; None if it is sent no facts


@dataclass(eq=False, slots=True)
class _Question:
    """A message that is answered when some units are there."""

    client: _Client
    missing: set[Key]
    order: Sequence[Key]
    parts: dict[Key, memoryview] = field(default_factory=dict)


class Fetcher(FetchedBlocks):
    """The state of the process; see the module."""

    def __init__(self, place: Place, incoming: socket.socket) -> None:
        """Open the cache.

        Args:
            incoming: Where clients hand over their connections.

        Raises:
            ForebayError: It cannot be opened; clients get the words.
        """
        super().__init__(place)
        self._incoming = incoming
        self._id = secrets.token_hex(8)
        self._number = 0
        self._is_over = False
        self._clients: dict[socket.socket, _Client] = {}
        self._questions: dict[Key, list[_Question]] = {}
        self._selector = selectors.DefaultSelector()
        self._hits, self._epoch = 0, 0

    # ---- the loop ------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve clients until the process that opened the cache has ended."""
        next_facts, before = 0.0, time.monotonic()
        self._selector.register(self._incoming, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        for ended in watch_maker_of(self._incoming):
            self._selector.register(ended, selectors.EVENT_READ)
        while not self._is_over:
            now = time.monotonic()
            if now > before + _FROZEN_S:
                self._requests.excuse()
            before = now
            for get in self._requests.due(now):
                keys = [unit.key for unit in get.units if isinstance(unit.key, int)]
                self._threads.submit(self._perform, get, {key: self._slot() for key in keys})
            wait = min(next_facts, now + _FACTS_S) - now
            for key, mask in self._selector.select(max(wait, 0.0)):
                self._handle(key.fileobj, mask)
            while not self._done.empty():
                self._done.get()()
            if (now := time.monotonic()) >= next_facts:
                next_facts = now + _FACTS_S
                self._tell_facts()

    def _handle(self, source: Any, mask: int) -> None:
        if source is self._incoming:
            connection, self._is_over = accepted(self._incoming)
            if connection is not None:
                self._welcome(connection)
        elif source == self._wake:
            os.eventfd_read(self._wake)
        elif isinstance(source, int):  # the process that opened the cache has ended
            self._is_over = True
        elif (client := self._clients.get(source)) is not None:
            try:
                if mask & selectors.EVENT_WRITE:
                    self._flush(client)
                if mask & selectors.EVENT_READ:
                    data = client.socket.recv(_RECV_BYTES)
                    if not data:
                        raise ConnectionResetError
                    client.incoming += data
                    for message in messages(client.incoming):
                        self._obey(client, message)
            except BlockingIOError:
                pass
            except (OSError, ValueError, KeyError, TypeError):  # it has gone, or is none of ours
                self._part(client)

    def _welcome(self, connection: socket.socket) -> None:
        """Send a new client what it needs to read blocks."""
        self._number += 1
        client = self._clients[connection] = _Client(self._number, connection)
        facts = {"id": self._id, "extent": self._slab.extent}
        shared = [*self._source.descriptors, self._table_file, self._slab.fileno()]
        try:
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ)
            socket.send_fds(connection, [packed_message(facts)], shared)
        except OSError:
            self._part(client)

    def _part(self, client: _Client) -> None:
        """Forget a client that has gone."""
        del self._clients[client.socket]
        with suppress(KeyError, ValueError):
            self._selector.unregister(client.socket)
        client.socket.close()
        for key, questions in list(self._questions.items()):
            questions[:] = [each for each in questions if each.client is not client]
            if not questions:
                del self._questions[key]
                if not isinstance(key, int):
                    self._requests.cancel(key)
        self._drop(self._residency.leave(client.number))

    # ---- messages ------------------------------------------------------------------------------

    def _obey(self, client: _Client, message: dict[str, Any]) -> None:
        match message["op"]:
            case "facts":
                client.since = self._totals()
            case "hold":
                blocks = self._known(message["blocks"])
                epoch, due = int(message["epoch"]), int(message["due"])
                if epoch > self._epoch:
                    self._epoch = epoch
                    self._kept.begin_epoch()
                on_disk = self._kept.on_disk
                self._hits += sum(
                    each in on_disk or self._residency.is_here(each) for each in blocks
                )
                self._fetch(self._residency.hold(client.number, blocks), (1, epoch, due))
            case "need":
                blocks = self._known(message["blocks"])
                whole = {*self._known(message["whole"])}  # the others only if they come anyway
                blocks = [each for each in blocks if each in whole or self._comes(each)]
                self._fetch(self._residency.hold(client.number, blocks), NEEDED)
                self._ask(
                    _Question(client, {each for each in blocks if not self._table[each]}, blocks)
                )
            case "release":
                self._drop(self._residency.release(client.number, self._known(message["blocks"])))
            case "parts":
                self._number += 1
                keys = [(self._number, at) for at in range(len(message["parts"]))]
                self._ask(_Question(client, {*keys}, keys))
                for key, part in zip(keys, message["parts"], strict=True):
                    self._requests.want(Unit(key, *map(int, part)), NEEDED)

    def _ask(self, question: _Question) -> None:
        if not question.missing:
            self._answer(question)
        for key in question.missing:
            self._questions.setdefault(key, []).append(question)

    def _answer(self, question: _Question) -> None:
        parts = [question.parts[key] for key in question.order if key in question.parts]
        blocks = [key for key in question.order if isinstance(key, int)]
        self._tell(question.client, {"blocks": blocks}, parts)

    def _tell(
        self, client: _Client, message: dict[str, Any], payload: Sequence[memoryview] = ()
    ) -> None:
        client.outgoing.append(memoryview(packed_message(message, sum(map(len, payload)))))
        client.outgoing.extend(payload)
        self._flush(client)

    def _flush(self, client: _Client) -> None:
        """Send what can be sent now."""
        try:
            while client.outgoing:
                sent = client.socket.send(client.outgoing[0])
                if sent < len(client.outgoing[0]):
                    client.outgoing[0] = client.outgoing[0][sent:]
                else:
                    client.outgoing.popleft()
        except BlockingIOError:
            pass
        except OSError:
            client.outgoing.clear()  # reading from it says that it has gone
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.outgoing else 0)
        self._selector.modify(client.socket, events)

    def _totals(self) -> dict[str, float]:
        counts = self._requests.counts
        return {
            "requests": counts.requests,
            "nbytes": counts.nbytes,
            "hits": self._hits,
            "busy_s": counts.busy_s,
            "elapsed_s": time.monotonic(),
        }

    def _tell_facts(self) -> None:
        """Tell loaders what was fetched since they began, for all that read here."""
        totals, latencies = self._totals(), self._requests.counts.latencies or (0.0,)
        now = {f"p{part}_s": percentile(latencies, part / 100) for part in (50, 95)}
        now["on_disk"] = self._kept.nbytes
        words = {"off_disk": self._kept.why} if self._kept.why else {}
        now["readers"] = sum(client.since is not None for client in self._clients.values())
        for client in list(self._clients.values()):
            if client.since is not None and not client.outgoing:
                since = {name: total - client.since[name] for name, total in totals.items()}
                self._tell(client, {"op": "facts", **since, **now, **words})
        for number in {each.client.number for asked in self._questions.values() for each in asked}:
            client = next(each for each in self._clients.values() if each.number == number)
            if not client.outgoing:
                self._tell(client, ALIVE)

    # ---- blocks --------------------------------------------------------------------------------

    def _settle(self, key: Key, part: memoryview | None) -> None:
        """Answer those who waited for a unit."""
        for question in self._questions.pop(key, ()):
            question.missing.discard(key)
            if part is not None:
                question.parts[key] = part
            if not question.missing:
                self._answer(question)

    def _give_up(self, lost: GivenUp) -> None:
        """Tell those who waited for a unit why it does not come."""
        error = error_as_sent(self._error_of(lost))
        for question in self._questions.pop(lost.unit.key, ()):
            for key in question.missing:
                others = self._questions.get(key, [])
                if question in others:
                    others.remove(question)
            self._tell(question.client, error)
