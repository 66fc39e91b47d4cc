"""Exceptions from samples: they keep their type, say where they come from, and cost one batch."""

from __future__ import annotations

import re

import pytest
from datasets import Failing, Squares, error_of_next, numbers

# A machine of one core is warned of two workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker")


class OwnError(Exception):
    """An exception like any other."""


class OddError(Exception):
    """An exception that cannot be made of words alone."""

    def __init__(self, code, *, reason):
        super().__init__(code, reason)


class WithMessage(Exception):  # noqa: N818 - as some libraries call theirs
    """An exception with a `message`, which is given by name."""

    message = "none yet"

    def __init__(self, message):
        super().__init__(message)
        self.message = message


class UnsendableError(ValueError):
    """An exception that holds what cannot be sent."""

    def __init__(self, words):
        super().__init__(words)
        self.hook = lambda: words


# raised: what comes out, and words of it
KEPT = {
    "ValueError": (ValueError("seven"), ValueError, "seven"),
    "no words": (ValueError(), ValueError, "ValueError"),
    "KeyError": (KeyError("seven"), KeyError, "KeyError: 'seven'"),
    "IndexError": (IndexError("seven"), IndexError, "seven"),
    "OSError": (FileNotFoundError(2, "gone", "seven"), FileNotFoundError, "'seven'"),
    "MemoryError": (MemoryError("seven"), MemoryError, "seven"),
    "NotImplementedError": (NotImplementedError(), NotImplementedError, "NotImplementedError"),
    "AssertionError": (AssertionError("seven"), AssertionError, "seven"),
    "own": (OwnError("seven", 7), OwnError, r"\('seven', 7\)"),
    "with a message": (WithMessage("seven"), WithMessage, "seven"),
    "cannot be sent": (UnsendableError("seven"), UnsendableError, "seven"),
    "odd": (OddError(7, reason="seven"), RuntimeError, "Caught OddError in .*seven"),
    "UnicodeError": (
        UnicodeDecodeError("ascii", b"\xff", 0, 1, "seven"),
        RuntimeError,
        "Caught UnicodeDecodeError in .*seven",
    ),
}


def test_an_exception_from_a_worker_keeps_its_type_and_says_where(loader_class):
    """The same type with torch's words around it; a RuntimeError if it cannot be made again."""
    iterator = iter(loader_class(Raising([case[0] for case in KEPT.values()]), num_workers=2))
    for position, (name, (raised, expected, words)) in enumerate(KEPT.items()):
        kind, text = error_of_next(iterator)
        assert kind is expected, name
        assert text.startswith(
            f"Caught {type(raised).__name__} in DataLoader worker process {position % 2}.\n"
            "Original Traceback (most recent call last)"
        ), name
        assert "in __getitem__\n    raise self.errors[index]" in text, name
        assert re.search(words, text, re.DOTALL), name


class Raising(Squares):
    """Samples each of which raises an error of its own."""

    def __init__(self, errors):
        super().__init__(len(errors))
        self.errors = errors

    def __getitem__(self, index):
        raise self.errors[index]


@pytest.mark.parametrize("raised", [case[0] for case in KEPT.values()], ids=KEPT)
def test_an_exception_in_the_main_process_is_that_very_exception(loader_class, raised):
    """Nothing is wrapped where nothing has to be sent."""
    with pytest.raises(type(raised)) as caught:
        list(loader_class(Failing(2, raised, (0,))))
    assert caught.value is raised


@pytest.mark.slow
@pytest.mark.parametrize("failing", [(0,), (4, 5), (2, 9), tuple(range(10))], ids=str)
def test_after_an_exception_the_next_batch_comes(loader_class, num_workers, failing):
    """An error costs the batch that it is in; whoever catches it goes on with the following."""
    dataset = Failing(10, KeyError("x"), failing)
    iterator = iter(loader_class(dataset, batch_size=2, num_workers=num_workers))
    for keys in ([0, 1], [2, 3], [4, 5], [6, 7], [8, 9]):
        if set(keys) & set(failing):
            assert error_of_next(iterator)[0] is KeyError
        else:
            assert next(iterator).tolist() == keys
    with pytest.raises(StopIteration):
        next(iterator)


def test_stop_iteration_from_a_sample_ends_the_loop_and_not_the_epoch(loader_class, num_workers):
    """A for-loop takes it for the end; next() goes on behind it, as after any exception."""
    iterator = iter(
        loader_class(Failing(6, StopIteration("odd"), (2,)), batch_size=2, num_workers=num_workers)
    )
    assert numbers(iterator) == [[0, 1]]
    assert numbers(iterator) == [[4, 5]]


def test_stop_iteration_from_a_worker_says_where_it_comes_from(loader_class):
    """It is told from the end by its words."""
    iterator = iter(loader_class(Failing(2, StopIteration("odd"), (0,)), num_workers=2))
    kind, words = error_of_next(iterator)
    assert kind is StopIteration
    assert words.startswith("Caught StopIteration in DataLoader worker process 0.\nOriginal")


def test_an_exception_in_a_collate_fn_is_told_like_one_in_a_sample(loader_class, num_workers):
    """With the same words around it, and at the cost of that batch."""

    def collate(samples):
        if 1 in samples:
            raise OwnError("cannot collate one")
        return samples

    iterator = iter(loader_class(range(3), collate_fn=collate, num_workers=num_workers))
    assert next(iterator) == [0]
    kind, words = error_of_next(iterator)
    assert kind is OwnError
    assert "cannot collate one" in words
    assert ("Caught OwnError in DataLoader worker process 1." in words) is (num_workers > 0)
    assert next(iterator) == [2]


def test_an_exception_in_the_loop_passes_through(loader_class, num_workers):
    """What the user's own code raises is none of the loader's business."""
    loader = loader_class(range(40), num_workers=num_workers)
    with pytest.raises(OwnError, match=r"^mine$"):
        for batch in loader:
            if batch.item() == 3:
                raise OwnError("mine")
    assert len(list(loader)) == 40
