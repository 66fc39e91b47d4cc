"""What is recorded of a failure, and how many records a log keeps."""

from __future__ import annotations

import gc
import pickle
import weakref

import pytest

from forebay.errors import message_of
from forebay.failures import MAX_KEPT, MAX_TRACED, Failure, FailureLog, Group, grouped


class MuteError(Exception):
    def __str__(self):
        raise LookupError("no message")


def raised(error):
    """Return an exception that has a traceback."""
    try:
        raise error
    except type(error) as caught:
        return caught


def failure(number, **known):
    return Failure("exception", "ValueError", f"number {number}", "a traceback", number, **known)


def test_an_exception_is_described():
    """By type, message and traceback; what else is known is added."""
    error = raised(ValueError("first line\nsecond line"))
    record = Failure.of(error, source=7, epoch=1, batch=2)
    assert (record.kind, record.error) == ("exception", "ValueError")
    assert record.message == "first line\nsecond line"
    assert record.traceback.startswith("Traceback (most recent call last)")
    assert "raise error" in record.traceback
    assert (record.source, record.index, record.epoch, record.batch) == (7, 7, 1, 2)
    assert (record.attempts, record.seconds, record.pid) == (1, 0.0, None)
    assert Failure.of(error, attempts=3).attempts == 3


@pytest.mark.slow
def test_an_exception_is_not_kept():
    """Its frames hold the user's data, which is gone when the exception is."""

    class Sample:
        pass

    def failing():
        sample = Sample()
        alive = weakref.ref(sample)
        try:
            raise ValueError("no")
        except ValueError as error:
            return Failure.of(error), alive

    record, alive = failing()
    gc.collect()
    assert record.exception is None
    assert alive() is None


def test_the_cause_of_an_exception_is_part_of_the_traceback():
    """What the user's code raised first is what the user looks for."""
    error = ValueError("second")
    error.__cause__ = raised(KeyError("first"))
    assert "KeyError: 'first'" in Failure.of(raised(error)).traceback


def test_an_exception_without_a_message_has_none():
    """One whose own code fails is described by how it fails."""
    assert message_of(ValueError("words")) == "words"
    assert message_of(ValueError()) == ""
    assert message_of(MuteError()) == "<its __str__ raised LookupError>"
    assert Failure.of(raised(MuteError())).message == "<its __str__ raised LookupError>"


@pytest.mark.parametrize(
    ("known", "line"),
    [
        ({"source": "a/b.wav"}, "a/b.wav: ValueError: first"),
        ({"source": 7}, "sample 7: ValueError: first"),
        ({"source": (1, "x")}, "sample (1, 'x'): ValueError: first"),
        ({"source": 0}, "sample 0: ValueError: first"),
        ({}, "ValueError: first"),
        ({"message": "", "source": 7}, "sample 7: ValueError"),
        ({"message": "", "source": None}, "ValueError"),
        ({"source": "a\n\x1b[31m.wav"}, "a\\n\\x1b[31m.wav: ValueError: first"),
        ({"source": "a", "message": "\x1b[2J\udcff"}, "a: ValueError: \\x1b[2J\\udcff"),
    ],
    ids=str,
)
def test_a_failure_is_one_line_as_a_string(known, line):
    """What failed, and the first line of the message, where there is one."""
    record = Failure("exception", "ValueError", "first\nsecond")
    assert str(record._replace(**known)) == line


def test_a_failure_cannot_be_changed():
    """Whoever knows more about it makes another record."""
    record = failure(1)
    with pytest.raises(AttributeError):
        record.attempts = 2
    assert record._replace(attempts=2).message == "number 1"


def test_failures_are_equal_by_what_they_say():
    """The exception is not compared: one that was sent to another process is another object."""
    assert failure(1, exception=ValueError("a")) == failure(1, exception=ValueError("a"))
    assert failure(1) != failure(2)
    assert "exception=" not in repr(failure(1, exception=ValueError("a")))


def test_a_failure_can_be_sent_to_another_process():
    """With all that it says."""
    record = failure(1, epoch=2, batch=3, attempts=4, seconds=0.5, pid=6, exception=OSError(5))
    copy = pickle.loads(pickle.dumps(record))
    assert copy == record
    assert copy.exception.args == (5,)


def test_a_log_keeps_the_first_failures_and_counts_all():
    """They are in the order in which they were added, over several additions."""
    log = FailureLog(failure(number) for number in range(10))
    assert (log.total, len(log)) == (10, 10)
    log.extend(failure(number) for number in range(10, MAX_KEPT + 5))
    log.extend([failure(-1)])
    assert log.total == MAX_KEPT + 6
    assert len(log) == MAX_KEPT
    assert [each.index for each in log] == list(range(MAX_KEPT))


def test_only_the_first_failures_of_a_log_have_tracebacks():
    """Of the others the rest is kept; the record that was added is as it was."""
    added = [failure(number, epoch=1) for number in range(MAX_TRACED + 2)]
    log = FailureLog()
    for each in added:
        log.extend([each])
    *traced, before_last, last = log
    assert traced == added[:MAX_TRACED]
    assert all(each is own for each, own in zip(traced, added, strict=False))
    assert before_last == added[-2]._replace(traceback="")
    assert last == added[-1]._replace(traceback="")
    assert added[-1].traceback


def test_an_empty_log_has_nothing():
    """It is false, as an empty list is."""
    log = FailureLog()
    assert list(log) == []
    assert log.total == 0
    assert not log


def test_a_log_can_be_sent_to_another_process():
    """With the count of all failures, and it can be added to there."""
    log = pickle.loads(pickle.dumps(FailureLog(map(failure, range(MAX_KEPT + 1)))))
    log.extend([failure(-1)])
    assert log.total == MAX_KEPT + 2
    assert [each.index for each in log] == list(range(MAX_KEPT))


def told(source, message, error="ValueError"):
    return Failure("exception", error, message, source=source)


def test_equal_failures_are_one_group():
    """Up to the input's own name, other paths and numbers; the most frequent first."""
    failures = [
        told("in/b.txt", "no header"),
        *(
            told(f"in/{n:03}.wav", f"cannot read 'in/{n:03}.wav' at {n * 1.5}\nmore")
            for n in range(5)
        ),
        told("in/a.txt", "no header"),
        told("in/c.txt", "a header"),
    ]
    assert grouped(failures) == [
        Group(
            "ValueError: cannot read '…' at …",
            5,
            tuple(f"in/{n:03}.wav: cannot read 'in/{n:03}.wav' at {n * 1.5}" for n in range(3)),
        ),
        Group("ValueError: no header", 2, ("in/b.txt", "in/a.txt")),
        Group("ValueError: a header", 1, ("in/c.txt",)),
    ]
    assert grouped([]) == []


def test_clashes_of_names_are_one_group():
    """Each names its own file and another folder's; that the name is claimed is what is equal."""
    clash = "output '{0:03}.json' is claimed by two inputs, this one and {1}/{0:03}.jpg\n  Neither."
    failures = [
        told(f"{here}/{n:03}.jpg", clash.format(n, there), "OutputError")
        for n in range(100)
        for here, there in (("a", "b"), ("b", "a"))
    ]
    (group,) = grouped(failures)
    assert group == Group(
        "OutputError: output '….json' is claimed by two inputs, this one and …",
        200,
        tuple(f"{one.source}: {one.message.splitlines()[0]}" for one in failures[:3]),
    )


@pytest.mark.parametrize(
    ("failures", "errors"),
    [
        # What is the same in all is shown; a single message is shown whole.
        ([told(n, f"3 channels instead of {n}") for n in (1, 4)], ["3 channels instead of …"]),
        ([told(n, f"3 channels instead of {n}") for n in (4,)], ["3 channels instead of 4"]),
        # A name in words is not the input's, and another word is another error.
        ([told("a.txt", "bad data"), told("b.txt", "bad data")], ["bad data"]),
        ([told("a.txt", "'left'"), told("b.txt", "'right'")], ["'left'", "'right'"]),
        # The strings of a table's row are names of the input.
        (
            [told(f'{{"path": "{n}.png", "id": 3}}', f"{n}.png is no image") for n in "xy"],
            ["… is no image"],
        ),
        ([told("{", "no"), told("{}", "no"), told("", "no"), told(None, "no")], ["no"]),
        ([told("x", ""), told("y", "")], [""]),
        # Printed on a terminal, it cannot move the cursor.
        ([told("x\x1b[2J", "no \x1b[2J")], ["no \\x1b[2J"]),
    ],
)
def test_what_a_group_says(failures, errors):
    """The words in which its messages agree."""
    expected = [f"ValueError: {error}".removesuffix(": ") for error in errors]
    groups = grouped(failures)
    assert [group.error for group in groups] == expected
    assert sum(group.count for group in groups) == len(failures)
    assert all(text.isprintable() for group in groups for text in group.examples)
