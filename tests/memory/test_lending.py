"""Slots lent to another process, which did not inherit the slab: real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from ast import literal_eval
from collections.abc import Iterator

import pytest

from forebay.memory.layout import LEAST_CAPACITY, Slot
from forebay.memory.lending import Borrower, Lender, Loan, Offer
from forebay.memory.slab import Slab

# Newer Pythons warn of a fork beside threads, of which torch has some; the children here only exit.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

# Borrows what it is told to, adds one to each byte, and waits before it returns the slot.
BORROWER = """
from ast import literal_eval
from forebay.memory.lending import Borrower, Loan, Offer
from forebay.memory.layout import Slot

borrower = Borrower(Offer(*literal_eval(input())))
print("accepted", flush=True)
number, slot, nbytes = literal_eval(input())
found = borrower.borrow(Loan(number, Slot(*slot), nbytes))
print(bytes(found), flush=True)
found += 1
input()
del found
print("dropped", flush=True)
input()
"""

# Lends one slot, and lives until it is killed.
LENDER = """
import time
from forebay.memory.lending import Lender
from forebay.memory.slab import Slab

slab = Slab()
lender = Lender(slab)
print(tuple(lender.offer), flush=True)
input()
slot = slab.take()
slab.view(slot)[:5] = b"hello"
number, slot, nbytes = lender.lend(slot, 5)
print((number, tuple(slot), nbytes, lender.may_lend), flush=True)
time.sleep(3600)
"""


class Process:
    """A script that is talked to by lines."""

    def __init__(self, script: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def say(self, line: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[Process]:
    process = Process(request.param)
    yield process
    process.end()


@pytest.mark.parametrize("process", [BORROWER], indirect=True)
def test_a_slot_is_lent_and_comes_back(slab: Slab, process: Process) -> None:
    """The borrower reads and writes the lender's memory; then the slot is used again."""
    lender = Lender(slab)
    assert not lender.may_lend
    process.say(tuple(lender.offer))
    assert process.hear() == "accepted"
    assert lender.may_lend
    slab.record_size(LEAST_CAPACITY // 2)
    slot = slab.take()
    slab.view(slot)[:3] = b"abc"
    loan = lender.lend(slot, 3)
    process.say((loan.number, tuple(loan.slot), loan.nbytes))
    assert process.hear() == "b'abc'"
    assert [*lender.returned()] == []
    process.say("drop it")
    assert process.hear() == "dropped"
    assert bytes(slab.view(slot)[:3]) == b"bcd"
    assert [*lender.returned()] == [slot]
    assert [*lender.returned()] == [], "only once"
    assert lender.lend(slot, 3) is not None


@pytest.mark.parametrize("process", [LENDER], indirect=True)
def test_what_is_borrowed_outlives_the_lender(process: Process) -> None:
    """A batch that was delivered stays as it is when its host is killed."""
    borrower = Borrower(Offer(*literal_eval(process.hear())))
    process.say("lend")
    number, slot, nbytes, may_lend = literal_eval(process.hear())
    assert may_lend
    found = borrower.borrow(Loan(number, Slot(*slot), nbytes))
    process.end()
    del borrower
    found[0] = ord("j")
    assert bytes(found) == b"jello"


def test_the_offer_of_another_process_is_refused(slab: Slab) -> None:
    """On another machine the same numbers may mean anything; nothing is accepted or opened."""
    lender = Lender(slab)
    offer = lender.offer
    with tempfile.TemporaryFile() as file:
        read, write = os.pipe()
        try:
            for wrong in (
                offer._replace(nonce=bytes(16)),
                offer._replace(board=offer.slab),
                offer._replace(board=file.fileno()),
                offer._replace(board=read),
                offer._replace(board=1 << 20),
                offer._replace(pid=1 << 30),
            ):
                with pytest.raises((OSError, ValueError)):
                    Borrower(wrong)
        finally:
            os.close(read)
            os.close(write)
    assert not lender.may_lend


def test_a_board_has_an_end(slab: Slab) -> None:
    """Where no more can be lent, a batch is copied."""
    lender, slot = Lender(slab), slab.take()
    count = 0
    while lender.lend(slot, 1) is not None:
        count += 1
    assert count > 4000
    assert lender.lend(slot, 1) is None


def test_a_fork_of_the_borrower_returns_nothing(slab: Slab) -> None:
    """It drops copies of arrays that the borrower still reads."""
    lender = Lender(slab)
    borrower = Borrower(lender.offer)
    slot = slab.take()
    found = borrower.borrow(lender.lend(slot, 4))
    child = os.fork()
    if not child:
        del found
        os._exit(0)
    os.waitpid(child, 0)
    assert [*lender.returned()] == []
    del found
    assert [*lender.returned()] == [slot]


def test_what_a_fork_of_the_borrower_has_is_not_returned_while_it_lives(slab: Slab) -> None:
    """The lender would write the next batch there."""
    lender = Lender(slab)
    borrower = Borrower(lender.offer)
    slot = slab.take()
    found = borrower.borrow(lender.lend(slot, 4))
    gate, ours = os.pipe()
    child = os.fork()
    if not child:
        os.close(ours)
        os.read(gate, 1)  # until the parent closes its end
        os._exit(0)
    os.close(gate)
    del found
    assert [*lender.returned()] == []
    os.close(ours)
    os.waitpid(child, 0)
    other = borrower.borrow(lender.lend(slab.take(), 4))
    assert [*lender.returned()] == [slot]
    del other
