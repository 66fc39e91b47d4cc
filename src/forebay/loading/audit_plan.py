"""Decide which samples are made a second time, and what a difference means. PURE.

audited_offsets(step, size, is_first)  which samples of a batch a worker describes for the audit
is_due(made_s, cost_s)             whether an epoch after the first one is audited
Difference, words_of               what was not the same, in words
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# The largest share of the workers' time that the audit takes, after the first epoch.
SHARE = 0.005
# How many samples of the first batch are made again, and after how many batches one more: five of
# the first epoch, some after others of their batch and some of other workers. Of later epochs, one.
_OF_FIRST, _LATER_STEPS = 3, (1, 8)
# Which batch is made again as a whole, if its samples are not made one by one, or not collated by
# torch.
_WHOLE = 1


def audited_offsets(step: int, size: int, *, is_first: bool) -> tuple[int, ...]:
    """Return which samples of a batch are made again; -1 for the whole batch.

    Args:
        step: How many batches of the epoch come before it, since the epoch was begun.
        is_first: Whether it is the first epoch of the loader.
    """
    if not is_first:
        return (0,) * (step == 0 and size > 0)
    # Not the very first sample alone: what it draws for all others would be drawn again.
    count = min(_OF_FIRST, size) if size > 1 else 0
    steps = (*_LATER_STEPS, *range(2, 2 + _OF_FIRST - count))
    count = count if step == 0 else min(steps.count(step), size)
    found = sorted({at * (size - 1) // max(count - 1, 1) for at in range(count)})
    return (*found, *(-1,) * (step == _WHOLE))


def is_due(made_s: float, cost_s: float) -> bool:
    """Return whether another audit is a small share of what workers have done since the last.

    Args:
        made_s: What they have taken for batches since then.
        cost_s: What an audit takes.
    """
    return cost_s <= made_s * SHARE


class Difference(NamedTuple):
    """A part of a sample that was not the same when it was made a second time.

    Attributes:
        sample: Its index; of a whole batch, its indices.
        field: Which part of it; "" if it is the sample itself.
        first: The value in the batch, as far as it can be shown.
        second: The value when it was made again.
        is_stable: Whether it was the same when it was made a third time, where the second was.
    """

    epoch: int
    sample: object
    field: str
    first: str
    second: str
    is_stable: bool
    is_batch: bool = False

    def __str__(self) -> str:
        """Return it in one line."""
        what = "the batch of samples" if self.is_batch else "sample"
        field = f", {self.field}" if self.field else ""
        values = f": {self.first}, and then {self.second}" if self.first != self.second else ""
        return f"{what} {self.sample!r} of epoch {self.epoch}{field}{values}"


_STABLE = (
    "It is the same each time in one process, and differs between processes: it depends on which "
    "worker makes it, on samples that were made before, on what is drawn when it is first needed "
    "(a permutation, a split), or on a change of the dataset since the workers were started."
)
_CHANGING = (
    "It differs each time that it is made: it draws from a generator that is not seeded (OpenCV's, "
    "one that is made anew for each sample), or depends on the time or on a count of calls."
)
_ADVICE = (
    "Samples differ between runs, numbers of workers and resumes. Draw from random, numpy.random, "
    "torch or generators that the dataset keeps, and draw in __init__ what all samples share. "
    "After a change of the dataset call loader.refresh(). If samples cannot be made twice, set "
    "dataset.made_once = True."
)


def words_of(differences: Sequence[Difference], seed: int | None) -> str:
    """Return a warning for the first difference, with the likely reasons."""
    first = differences[0]
    more = len({(each.epoch, str(each.sample)) for each in differences}) - 1
    others = f", and {more} more" if more else ""
    return (
        f"a sample is not a function of seed={seed}, epoch and index: {first}{others}\n"
        "  forebay made it a second time, in another process, from the dataset as it is now. The "
        "batches are unchanged.\n"
        f"  {_STABLE if first.is_stable else _CHANGING}\n  {_ADVICE}"
    )
