"""What came in two runs, compared: which batches were lost, repeated, or are others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from resume_check.digests import Digested, differing

_MOST_FIELDS = 5


class ReceivedBatch(NamedTuple):
    """The digests of a batch, and where it came.

    Attributes:
        epoch: None where only the steps of a training are counted.
        number: Which batch of the epoch it is, or which step, from 0.
    """

    epoch: int | None
    number: int
    content: Digested

    @property
    def where(self) -> str:
        """Return where it came, in words."""
        if self.epoch is None:
            return f"step {self.number}"
        return f"epoch {self.epoch}, batch {self.number}"


@dataclass(slots=True)
class LoaderRun:
    """What a process sent.

    Attributes:
        batches: Of a loader, or the steps of a training.
        error: How it ended, if not well.
    """

    batches: list[Any] = field(default_factory=list)
    state: bytes | None = None
    error: str = ""


def difference_after(reference: Sequence[ReceivedBatch], cut: int, run: LoaderRun) -> str:
    """Say how a run differs from what the reference has after `cut` batches; "" if it does not."""
    expected, got = reference[cut:], run.batches
    said = [_first_difference(reference, cut, got)]
    if run.error:
        said.append(run.error)
    elif any(said) or len(got) != len(expected):
        whole, seen = _counts(reference), _counts([*reference[:cut], *got])
        more = seen - whole
        repeated = sum(number for key, number in more.items() if key in whole)
        numbers = {
            "lost": (whole - seen).total(),
            "repeated": repeated,
            "not in the uninterrupted run": more.total() - repeated,
        }
        said += [f"{count_of_batches(number)} {what}" for what, number in numbers.items() if number]
        if len(got) != len(expected):
            said.append(f"{count_of_batches(len(got))} came instead of {len(expected)}")
    return "; ".join(filter(None, said))


def _first_difference(
    reference: Sequence[ReceivedBatch], cut: int, got: Sequence[ReceivedBatch]
) -> str:
    for at, (right, batch) in enumerate(zip(reference[cut:], got, strict=False), cut):
        if fields := [*differing(right.content, batch.content)]:
            same = [other for other, each in enumerate(reference) if each.content == batch.content]
            if same:
                other = reference[min(same, key=lambda other: abs(other - at))]
                return f"{right.where} is the one that came as {other.where}"
            named = "".join(f", {name}" for name in fields[:_MOST_FIELDS] if name)
            more = len(fields) - _MOST_FIELDS
            return f"{right.where}{named}{f' and {more} more' * (more > 0)} differ"
        if batch.epoch != right.epoch:
            return f"{right.where} came in epoch {batch.epoch}"
    return ""


def _counts(batches: Iterable[ReceivedBatch]) -> Counter[Digested]:
    return Counter(each.content for each in batches)


def count_of_batches(count: int) -> str:
    """Return "1 batch", "2 batches"."""
    return f"{count:,} batch{'es' * (count != 1)}"
