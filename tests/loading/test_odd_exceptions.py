"""Exceptions that are legal and odd: each surfaces with words, and costs one batch."""

from __future__ import annotations

import sys
import warnings

import pytest
from datasets import Failing, Squares, error_of_next

import forebay
from forebay.errors import MAX_TEXT

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker")


class MuteError(Exception):
    """An exception that cannot be shown."""

    def __str__(self):
        raise LookupError("no message")


class HoldingError(Exception):
    """An exception with an attribute that cannot be pickled."""

    def __init__(self, words):
        super().__init__(words)
        self.stream = sys.stdout
        self.hook = lambda: words


class EndError(BaseException):
    """An exception that `except Exception` lets pass."""


def local_class():
    class LocalError(ValueError):
        """An exception whose class has no name that another process could find."""

    return LocalError("seven")


def from_main():
    kind = type("MainError", (ValueError,), {"__module__": "__main__"})
    return kind("seven")


def caused_in_a_circle():
    first, second = ValueError("seven"), KeyError("six")
    first.__cause__, second.__cause__ = second, first
    return first


def far_too_deep():
    try:
        return far_too_deep()
    except RecursionError as error:
        return error


def with_a_note():
    error = ValueError("seven")
    error.add_note("a note")
    return error


class Raising(Squares):
    """Samples of which the fifth raises what a function returns."""

    def __init__(self, make):
        super().__init__(8)
        self.make = make

    def __getitem__(self, index):
        if index == 5:
            raise self.make()
        return index


class Warns(Squares):
    """Samples of which the fifth warns, where warnings are errors."""

    def __getitem__(self, index):
        if index == 5:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.warn("seven", stacklevel=1)
        return index


# What a sample raises, and words of what the trainer gets.
ODD = {
    "unpicklable attributes": (lambda: HoldingError("seven"), "seven"),
    "a class in a function": (local_class, "seven"),
    "a class in __main__": (from_main, "seven"),
    "a mute one": (MuteError, "MuteError"),
    "GeneratorExit": (lambda: GeneratorExit("seven"), "seven"),
    "SystemExit": (lambda: SystemExit("seven"), "seven"),
    "a BaseException": (lambda: EndError("seven"), "seven"),
    "a group": (lambda: ExceptionGroup("seven", [ValueError("six")]), "seven"),
    "a group of the base": (lambda: BaseExceptionGroup("seven", [EndError("six")]), "seven"),
    "RecursionError": (far_too_deep, "recursion"),
    "a circle of causes": (caused_in_a_circle, "seven"),
    "a note": (with_a_note, "seven"),
}


def outcome(dataset, **options):
    """Return the error of the batch with sample 5, having checked the other batches."""
    loader = forebay.DataLoader(dataset, batch_size=2, **options)
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    kind, words = error_of_next(batches)
    assert [batch.tolist() for batch in batches] == [[6, 7]]
    return kind, words


WAYS = {
    "here": {},
    "processes": {"num_workers": 2},
    "threads": {"num_workers": 2, "backend": "thread"},
    "background": {"num_workers": 2, "seed": 1, "buffer": forebay.Buffer(max_batches=2)},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("make", "words"), ODD.values(), ids=ODD)
def test_an_odd_exception_costs_one_batch(make, words, way):
    """Wherever the batch is made, there is an error with words, and all other batches come."""
    if make is MuteError and way in ("here", "threads"):
        with pytest.raises(LookupError):  # the very exception, which cannot be shown
            outcome(Raising(make), **WAYS[way])
        return
    _, text = outcome(Raising(make), **WAYS[way])
    assert words in text


@pytest.mark.parametrize("way", WAYS)
def test_a_warning_that_is_an_error_costs_one_batch(way):
    """As the test suites of users have them."""
    kind, text = outcome(Warns(8), **WAYS[way])
    assert (kind, "seven" in text) == (UserWarning, True)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["processes", "background"])
def test_a_message_of_a_hundred_megabytes_does_not_travel(way):
    """Its ends do."""
    kind, text = outcome(
        Failing(8, ValueError("begin" + "x" * 100_000_000 + "end"), (5,)), **WAYS[way]
    )
    assert kind is ValueError
    assert "begin" in text and "end" in text
    assert len(text) < 2 * MAX_TEXT


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("make", "words"), ODD.values(), ids=ODD)
def test_with_on_error_skip_an_odd_exception_costs_one_sample(make, words, way):
    """The record names the sample; what would end a process costs its batch."""
    loader = forebay.DataLoader(
        Raising(make), batch_size=2, on_error="skip", **({"seed": 1} | WAYS[way])
    )
    ends = not issubclass(type(make()), Exception)
    if ends:
        kind, _ = outcome(Raising(make), on_error="skip", **({"seed": 1} | WAYS[way]))
        assert kind is not StopIteration
        return
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4], [6, 7]]
    (failure,) = loader.failures
    assert failure.index == 5
    assert words in f"{failure}{failure.traceback}"
