"""Lend slots of a slab to another process on the same machine, which did not inherit the slab.

    lender                                          borrower
    offer, with a batch that is copied ──────────>  map the slab and the board, if it can
    may_lend  <──────────── board ────────────────  accept
    lend: the number of a slot ──────────────────>  borrow: its bytes, without a copy
    returned: the slot is free  <──── board ──────  when nothing views them any more

The board is a page of memory that both share, with one byte for each slot that is lent: the lender
sets it, the borrower clears it. So no message is needed to return a slot. A borrower on another
machine, or in another container, cannot map the slab; it accepts nothing and still gets copies.
What was borrowed stays valid when the lender dies, even by SIGKILL: memory exists as long as it is
mapped.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from forebay.base.process import memory_file
from forebay.memory.layout import Slot
from forebay.memory.slab import FORKS, Slab

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
        offer: Sent to a borrower, so that it can map the slab; None if no memory could be had.
    """

    def __init__(self, slab: Slab) -> None:
        self.offer: Offer | None = None
        self._lent: dict[int, Slot] = {}
        self._numbers = [*reversed(range(_BOARD_BYTES - _FIRST))]
        with suppress(OSError):
            descriptor = memory_file(_NAME)
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
        FORKS.settle()
        found = np.frombuffer(self._slab.view(loan.slot), np.uint8, loan.nbytes)
        FORKS.hold((id(self._board), loan.number))
        back = weakref.finalize(found, _give_back, self._board, loan.number, os.getpid())
        back.atexit = False
        return found


def _give_back(board: mmap.mmap, number: int, borrower: int) -> None:
    if os.getpid() == borrower:  # a fork drops its copies of arrays that the borrower still reads
        FORKS.let_go((id(board), number), partial(board.__setitem__, _FIRST + number, 0))


def _open(pid: int, descriptor: int) -> int:
    """Return a descriptor of a file in memory that another process has open."""
    path = f"/proc/{pid}/fd/{descriptor}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):  # opening another file could block
        raise ValueError("not a slab")
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)
