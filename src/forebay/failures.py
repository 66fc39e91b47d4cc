"""The record of a failure, used everywhere, and a bounded log of such records.

The engine creates the record when a task raises, hangs or dies. Code that knows more about it
(which input, which sample, how many attempts) adds that with `_replace`.

Workers import this module before their first task, so the record is a named tuple: a dataclass
needs the modules `dataclasses` and `inspect`, which take as long to import as half an interpreter.
Annotations are evaluated at once: a named tuple would compile each of them from a string.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Self

from forebay.errors import message_of, printable, traceback_of, without_credentials

# Limits of a log: a long run may have millions of failures, and each traceback takes kilobytes.
MAX_KEPT = 1000
MAX_TRACED = 100
# The attributes that are stored: by the ledger, and in the records of ranges of samples.
_STORED = ("source", "kind", "error", "message", "traceback", "sample")
# Examples of a group of failures, and characters of the line by which messages are compared.
MAX_EXAMPLES = 3
MAX_LINE = 300
# What may differ between equal messages: the input's own name, other paths, and numbers.
_OWN = "\0"
_DIFFERS = rf"([^\s'\"]*/[^\s'\",:;)]+|{_OWN}|0x[0-9a-fA-F]+|-?\d[\d.,]*(?:e[+-]?\d+)?)"


class Failure(NamedTuple):
    """Why an input, a sample, a batch or a worker failed.

    Attributes:
        kind: "exception", "timeout", "crash" (the worker died), "input" (the input is missing or is
            a folder), "output" (an output's name is not acceptable), or "stream" (an iterable
            dataset cannot be read any further).
        error: Type of the error, such as "ValueError".
        message: The error's message, one or more lines; if it is too long, its middle is omitted.
        traceback: The user's frames, or the stack of a hang or a crash, shortened too; "" if none.
        source: What failed: an input's path, a manifest row as JSON, a sample's name, or the index
            of a sample without one.
        epoch: Epoch of the sample, from 0; None for anything but a loader's sample.
        batch: Number of the sample's batch in the epoch, from 0; None for anything else.
        attempts: Number of attempts.
        seconds: Duration of the last attempt.
        pid: Number of the worker process that died; None for anything else.
        sample: Index of a sample that has a name; None for anything else.
        exception: The exception itself, if it is known and could be sent between processes.
    """

    kind: str
    error: str
    message: str
    traceback: str = ""
    source: Any = None
    epoch: int | None = None
    batch: int | None = None
    attempts: int = 1
    seconds: float = 0.0
    pid: int | None = None
    sample: int | None = None
    exception: BaseException | None = None

    @classmethod
    def of(cls, error: BaseException, **known: Any) -> Self:
        """Return the record of an exception, of the kind "exception".

        Args:
            error: The exception. It is described, not kept: its frames hold the user's data.
            **known: Further attributes.
        """
        text = traceback_of(error, error.__traceback__)
        return cls("exception", type(error).__name__, message_of(error), text, **known)

    @property
    def index(self) -> Any:
        """The sample's index, if a sample failed: the same as `source` if it has no name."""
        return self.source if self.sample is None else self.sample

    def named(self, name: str | None) -> Self:
        """Return the failure of a sample with its name, if it has one."""
        return self if name is None else self._replace(source=name, sample=self.index)

    def __eq__(self, other: object) -> bool:
        """Compare all but the exception: one that was sent between processes is another object."""
        return isinstance(other, Failure) and self[:-1] == other[:-1]

    def __ne__(self, other: object) -> bool:
        """See `__eq__`; a tuple has its own."""
        return not self == other

    def __hash__(self) -> int:
        """Return the hash of what `__eq__` compares."""
        return hash(self[:-1])

    def __repr__(self) -> str:
        """Return all but the exception, whose message is there already."""
        known = zip(self._fields[:-1], self, strict=False)
        shown = ", ".join(f"{name}={value!r}" for name, value in known)
        return without_credentials(f"Failure({shown})")

    def __str__(self) -> str:
        """Return the failure in one line, safe to print on a terminal."""
        words = self.message.splitlines()[0] if self.message else ""
        what = self.source if isinstance(self.source, str) else f"sample {self.source!r}"
        named = "" if self.source is None else f"{what}: "
        return printable(f"{named}{self.error}" + (f": {words}" if words else ""))


def failure_to_json(failure: Failure) -> dict[str, Any]:
    """Return what is stored of a failure, JSON-serializable."""
    return {name: value for name in _STORED if (value := getattr(failure, name)) not in ("", None)}


def failure_from_json(found: Mapping[str, Any]) -> Failure:
    """Return the failure that `failure_to_json` stored."""
    known = {name: str(found[name]) for name in _STORED[1:-1] if name in found}
    sample = None if found.get("sample") is None else int(found["sample"])
    return Failure(**{"message": ""} | known, source=found.get("source"), sample=sample)  # type: ignore[arg-type]


class FailureLog:
    """The first failures of a run, and the number of all of them."""

    def __init__(self, failures: Iterable[Failure] = ()) -> None:
        """Start with the given failures."""
        self.total = 0
        self._kept: list[Failure] = []
        self.extend(failures)

    def extend(self, failures: Iterable[Failure]) -> None:
        """Add failures: the first `MAX_KEPT` are kept, the first `MAX_TRACED` with tracebacks."""
        for failure in failures:
            if self.total < MAX_KEPT:
                traced = self.total < MAX_TRACED
                self._kept.append(failure if traced else failure._replace(traceback=""))
            self.total += 1

    def __iter__(self) -> Iterator[Failure]:
        """Yield the failures that are kept, in the order in which they were added."""
        return iter(self._kept)

    def __len__(self) -> int:
        """Return how many are kept."""
        return len(self._kept)


# ---- groups --------------------------------------------------------------------------------------


class Group(NamedTuple):
    """Failures with the same error, safe to print on a terminal.

    Attributes:
        error: Type of the error, and first line of its message, with "…" for what differs.
        count: How many there are.
        examples: The first `MAX_EXAMPLES` inputs, with their messages where not only names differ.
    """

    error: str
    count: int  # type: ignore[assignment]  # as the method of a tuple
    examples: tuple[str, ...]


def grouped(failures: Iterable[Failure]) -> list[Group]:
    """Return failures by error, the most frequent first.

    Messages are equal up to the input's own name, other paths, and numbers.
    """
    counts = Counter[tuple[str, ...]]()
    # By group: what differs in its messages, "…" where it does; its first inputs and messages.
    differing: dict[tuple[str, ...], list[str]] = {}
    first: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for failure in failures:
        line = failure.message.strip().partition("\n")[0][:MAX_LINE]
        name = failure.source if isinstance(failure.source, str) else repr(failure.source)
        parts = re.split(_DIFFERS, _without_names(line, name))
        key, found = (failure.error, *parts[::2]), parts[1::2]
        known = differing.setdefault(key, found)
        pairs = zip(known, found, strict=True)
        differing[key] = [one if one == other else "…" for one, other in pairs]
        counts[key] += 1
        if counts[key] <= MAX_EXAMPLES:
            first.setdefault(key, []).append((name, line))
    groups = []
    for key, count in counts.most_common():
        error, *fixed = key
        message = first[key][0][1]
        if count > 1:
            pieces = zip(fixed, [*differing[key], ""], strict=True)
            message = "".join(text for pair in pieces for text in pair).replace(_OWN, "…")
        is_shown = "…" not in differing[key] or count == 1
        examples = (name if is_shown else f"{name}: {line}" for name, line in first[key])
        shown = printable(f"{error}: {message}".removesuffix(": "))
        groups.append(Group(shown, count, tuple(map(printable, examples))))
    return groups


def _without_names(line: str, source: str) -> str:
    """Return a message with the names of its input replaced: paths, files, and files to the dot."""
    paths = [each for each in _row(source).values() if isinstance(each, str)] or [source]
    files = [each.rstrip("/").rpartition("/")[2] for each in paths]
    for name in filter(None, [*paths, *files, *(each.partition(".")[0] for each in files)]):
        head, *others = line.split(name)
        for text in others:
            is_word = head[-1:].isalnum() or text[:1].isalnum()  # "a" of "a.txt" is in many words
            head += (name if is_word else _OWN) + text
        line = head
    return line


def _row(source: str) -> dict[str, Any]:
    """Return the row of a table that is an input, by column; empty for a path."""
    import json  # not in each worker

    try:
        row = json.loads(source) if source.startswith("{") else {}
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}
