"""`check_resume`: what it says of loaders that resume exactly, and of others."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from array import array
from collections import deque
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import resume_check
from resume_check import OptionError, ResumeDifference, check_resume
from resume_check.digests import differing, digested, not_compared
from resume_check.processes import LoaderJob, run_apart

LENGTH = 4


class Exact:
    """Four batches an epoch, each another one; resumes exactly."""

    def __init__(self, num_workers=0):
        self.num_workers = num_workers
        self.epoch, self.at = 0, 0

    def __iter__(self):
        while self.at < LENGTH:
            self.at += 1
            yield self.batch()
        self.epoch, self.at = self.epoch + 1, 0

    def batch(self):
        number = LENGTH * self.epoch + self.at
        return {"x": torch.full((3,), float(number)), "name": str(number)}

    def state_dict(self):
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state):
        self.epoch, self.at = state["epoch"], state["at"]


class Skips(Exact):
    def load_state_dict(self, state):
        super().load_state_dict({**state, "at": state["at"] + 1})


class Repeats(Exact):
    def load_state_dict(self, state):
        super().load_state_dict({**state, "at": max(state["at"] - 1, 0)})


class Ignores(Exact):
    def load_state_dict(self, state):
        pass


class Raises(Exact):
    def load_state_dict(self, state):
        raise ValueError(f"unknown state {state}")


class RaisesLater(Exact):
    def load_state_dict(self, state):
        super().load_state_dict({**state, "at": None})


class Hangs(Exact):
    def load_state_dict(self, state):
        while True:
            time.sleep(1000)


class Interrupts(Exact):
    def load_state_dict(self, state):
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(1000)


class Dies(Exact):
    def load_state_dict(self, state):
        os.kill(os.getpid(), signal.SIGKILL)


class OtherBits(Exact):
    """After a resume the samples are in their order, with other random numbers."""

    noise = 0.0

    def batch(self):
        whole = super().batch()
        return {**whole, "x": whole["x"] + self.noise}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.noise = 0.5


class Unseeded(Exact):
    def batch(self):
        return torch.frombuffer(bytearray(os.urandom(16)), dtype=torch.uint8)


class Endless(Exact):
    def __iter__(self):
        while True:
            yield 0


class Once(Exact):
    """Has one epoch, as an iterator has."""

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == LENGTH:
            raise StopIteration
        self.at += 1
        return self.batch()


class WorkersMatter(Exact):
    def load_state_dict(self, state):
        if self.num_workers:
            raise ValueError("the state has another number of workers")
        super().load_state_dict(state)


def said(check):
    assert not check
    return [each.what for each in check.differences]


@pytest.mark.slow
@pytest.mark.parametrize("kill", [True, False])
def test_an_exact_loader_is_said_to_be_exact(kill):
    """The cuts are the first, the middle, the last but one, the last, and one in epoch 1."""
    check = check_resume(Exact, workers=[3], kill=kill)
    assert check, str(check)
    assert (check.batches, check.epochs, check.cuts) == (8, 2, (1, 2, 3, 4, 6))
    assert str(check) == (
        "8 batches in 2 epochs, cut after 1, 2, 3, 4, 6, resumed also with num_workers=3: each "
        "resumed run gave the batches that were left."
    )


def test_a_loader_that_skips_a_batch_is_found():
    """The batch that came is named, and one is lost."""
    check = check_resume(Skips, cuts=[1])
    assert check.differences[0].after == 1
    assert check.differences[0].workers is None
    assert said(check) == [
        "epoch 0, batch 1 is the one that came as epoch 0, batch 2; 1 batch lost; "
        "6 batches came instead of 7"
    ]
    assert str(check) == (
        f"8 batches in 2 epochs, cut after 1:\n  after 1 batch: {check.differences[0].what}"
    )


def test_a_loader_that_repeats_a_batch_is_found():
    """The batch that came is named, and one came twice."""
    assert said(check_resume(Repeats, cuts=[2])) == [
        "epoch 0, batch 2 is the one that came as epoch 0, batch 1; 1 batch repeated; "
        "7 batches came instead of 6"
    ]


def test_a_loader_that_ignores_the_state_is_found():
    """It begins with the first batch again."""
    (what,) = said(check_resume(Ignores, cuts=[3]))
    assert what.startswith("epoch 0, batch 3 is the one that came as epoch 0, batch 0; ")
    assert "3 batches repeated" in what


def test_other_values_are_named_by_their_field():
    """A batch that no run without interruption has: which fields differ."""
    assert said(check_resume(OtherBits, cuts=[7])) == [
        "epoch 1, batch 3, ['x'] differ; 1 batch lost; 1 batch not in the uninterrupted run"
    ]


def test_what_a_resumed_loader_raises_is_said_in_its_words():
    """In `load_state_dict`, and later."""
    assert said(check_resume(Raises, cuts=[1])) == [
        "load_state_dict() raised ValueError: unknown state {'epoch': 0, 'at': 1}"
    ]
    (what,) = said(check_resume(RaisesLater, cuts=[1]))
    assert what.startswith("epoch 0, batch 1 raised TypeError: '<' not supported")


def test_a_loader_that_needs_equal_workers_is_found():
    """The difference has the number of workers."""
    check = check_resume(WorkersMatter, cuts=[2], workers=[1])
    what = "load_state_dict() raised ValueError: the state has another number of workers"
    assert check.differences == (ResumeDifference(2, 1, what),)
    assert f"  after 2 batches, num_workers=1: {what}" in str(check)


def test_without_a_default_the_first_number_of_workers_is_the_usual_one():
    """A parameter `num_workers` that must be passed."""
    check = check_resume(
        lambda num_workers: WorkersMatter(num_workers - 2), cuts=[2], workers=[2, 3]
    )
    assert check.workers == (3,)
    assert [each.workers for each in check.differences] == [3]


def test_a_loader_that_hangs_is_ended():
    """A process that gives nothing counts as hanging, and is killed."""
    hung = run_apart(Hangs, LoaderJob(1, None, state=b"N."), timeout=0.2)
    assert hung.error == "it hangs: nothing came for 0.2 s after 0 batches"


def test_ctrl_c_leaves_no_process():
    """It ends the check, and the process that it waits for."""
    with pytest.raises(KeyboardInterrupt):
        check_resume(Interrupts, cuts=[1])


def test_a_loader_whose_process_dies_is_found():
    """The signal is named."""
    assert said(check_resume(Dies, cuts=[1])) == [
        "its process was killed by signal 9 after 0 batches"
    ]


def test_a_loader_that_is_not_deterministic_is_said_to_be_so_first():
    """No cut is made: nothing can be exact."""
    check = check_resume(Unseeded)
    assert check.cuts == ()
    assert str(check) == (
        "Nothing was cut:\n  uninterrupted: two runs with equal seeds differ, so no resume can be "
        "exact: epoch 0, batch 0 differ; 8 batches lost; 8 batches not in the uninterrupted run; "
        "set a seed"
    )


def test_a_loader_that_cannot_be_checked_is_refused():
    """Without `state_dict`, without batches; and impossible arguments."""
    with pytest.raises(OptionError, match=r"^the loader has no state_dict\(\): list\n"):
        check_resume(lambda: [1, 2])
    with pytest.raises(OptionError, match="cuts must be from 1 to 8"):
        check_resume(Exact, cuts=[9])
    with pytest.raises(OptionError, match="needs a function that returns a new loader"):
        check_resume(Exact())
    with pytest.raises(OptionError, match="more than 10,000 batches and did not end"):
        check_resume(Endless)
    with pytest.raises(OptionError, match="parameter num_workers"):
        check_resume(lambda: None, workers=[1])
    for wrong in ({"epochs": 0}, {"cuts": 3}, {"workers": 2}, {"timeout": 0}):
        with pytest.raises(OptionError, match="at least 1 epoch"):
            check_resume(lambda num_workers=0: Exact(num_workers), **wrong)


def test_an_iterator_is_checked_over_the_one_epoch_that_it_has():
    """Its second epoch is empty, and not counted."""
    check = check_resume(Once, cuts=[2, 4])
    assert check, str(check)
    assert (check.batches, check.epochs) == (4, 1)


def test_what_make_loader_raises_is_said():
    """A loader that cannot be made has no run to compare with."""
    assert said(check_resume(lambda: 1 // 0)) == [
        "make_loader() raised ZeroDivisionError: integer division or modulo by zero"
    ]


class Locks(Exact):
    """Has batches with an object whose state nobody can read."""

    def batch(self):
        return {**super().batch(), "lock": threading.Lock()}


def test_what_cannot_be_compared_is_said():
    """Batches that may be others are not said to be those that were left."""
    check = check_resume(Locks, cuts=[1])
    assert not check
    assert check.not_compared == ("['lock'] (_thread.lock)",)
    assert str(check) == (
        "8 batches in 2 epochs, cut after 1:\n  ['lock'] (_thread.lock): cannot be compared, since "
        "Python cannot read its state, or not to its end. Leave it out, or give its class a "
        "__getstate__()"
    )


@dataclass
class Boxes:
    corners: torch.Tensor


class Graph:
    def __init__(self, edges):
        self.edges = edges


class Named(dict):
    def __init__(self, name):
        super().__init__(a=1)
        self.name = name


class Slotted:
    __slots__ = ("other", "value")

    def __init__(self, value):
        self.value, self.other = value, self


class Undecided:
    """Has an `__eq__` that has no answer, as a table's."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        raise ValueError("the truth value is ambiguous")

    __hash__ = None


class Always(Graph):
    """Is equal to any other, and has what pickle saves."""

    def __eq__(self, other):
        return True

    __hash__ = None


def table(bit):
    return np.array([(bit, "text")], dtype=[("x", "f8"), ("y", "U4")])


@pytest.mark.parametrize(
    "make",
    [
        lambda bit: torch.tensor([1.0, bit]),
        lambda bit: torch.tensor([1.0, bit], dtype=torch.bfloat16),
        lambda bit: torch.tensor([1.0, bit]).to_sparse(),
        torch.tensor,
        lambda bit: torch.empty(int(bit), device="meta"),
        lambda bit: np.array([bit, float("nan")]),
        lambda bit: np.array([bit, "text"], dtype=object),
        lambda bit: bytes([int(bit)]),
        lambda bit: Boxes(torch.tensor(bit)),
        lambda bit: Graph([torch.tensor(bit)]),
        lambda bit: ("text", bit, None),
        lambda bit: {"a", bit, "b"},
        lambda bit: deque([torch.tensor(bit)]),
        Named,
        Slotted,
        Undecided,
        Always,
        table,
        lambda bit: array("d", [bit]),
        lambda bit: Path(str(bit)),
        lambda bit: [int, len, table, date(2026, 1, int(bit))],
        lambda bit: partial(table, bit),
        lambda bit: np.random.default_rng(int(bit)),
        lambda bit: torch.Generator().manual_seed(int(bit)),
    ],
)
def test_digests_differ_where_a_bit_differs(make):
    """Equal values have equal digests, also those of objects that cannot be compared."""
    assert digested(make(1.0)) == digested(make(1.0))
    assert digested(make(1.0)) != digested(make(2.0))
    assert not [*not_compared(digested(make(1.0)))]
    assert digested(make(1.0)) == pickle.loads(pickle.dumps(digested(make(1.0))))


def test_the_path_to_what_differs_is_named():
    """Keys, indices, fields and attributes; what a class keeps without a name is itself."""

    def make(bit):
        deep = {"graph": Graph([1, {"x": bit}]), "when": date(2026, 1, bit)}
        return {"boxes": [Boxes(torch.tensor(bit))], 3: deep}

    assert [*differing(digested(make(1)), digested(make(2)))] == [
        "['boxes'][0].corners",
        "[3]['graph'].edges[1]['x']",
        "[3]['when']",
    ]
    assert [*differing(digested([1, 2]), digested([1, 2, 3]))] == [""]
    assert [*differing(digested(1), digested(True))] == [""]


def test_what_has_no_state_to_read_is_named():
    """Also what contains itself, which no walk ends."""
    endless = []
    endless.append(endless)
    assert [*not_compared(digested({"a": [iter([]), (x for x in ())], "b": Graph(open)}))] == [
        ("['a'][1]", "generator")
    ]
    ((path, kind),) = not_compared(digested(endless))
    assert (path, kind) == ("", "list that contains itself, or is nested too deeply")


def test_it_stands_alone():
    """Neither it nor what it imports is of forebay, whose loader is one of those that it judges."""
    sources = Path(resume_check.__file__).parent.glob("*.py")
    assert not [each.name for each in sources if "import forebay" in each.read_text()]
