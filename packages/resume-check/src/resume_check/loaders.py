"""Check that a loader of any class resumes exactly.

    uninterrupted   [0 1 2 3 4 5 | 0 1 2 3 4 5]                two of them, which must be equal
    cut             [0 1 2] state_dict(), SIGKILL
    resumed                 load_state_dict() [3 4 5 | 0 …]    must give what was left

Each is a forked process of its own (`processes.py`).
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from resume_check.comparison import (
    LoaderRun,
    ReceivedBatch,
    count_of_batches,
    difference_after,
)
from resume_check.digests import not_compared, unread
from resume_check.processes import LACKING, LoaderJob, run_apart
from resume_check.words import OptionError, counted

_MOST_BATCHES = 10_000


@dataclass(frozen=True, slots=True)
class ResumeDifference:
    """What is not as in the uninterrupted run.

    Attributes:
        after: How many batches came before the state was taken; 0 for the uninterrupted run itself.
        workers: With which `num_workers` the loader was resumed; None for its default.
        what: What differs, in words.
    """

    after: int
    workers: int | None
    what: str


@dataclass(frozen=True, slots=True)
class ResumeCheck:
    """What `check_resume` found; false if a resumed run differs, or nobody can say.

    Attributes:
        batches: How many batches the uninterrupted run has.
        epochs: In how many epochs; one that had none is not counted.
        cuts: After how many batches the run was cut, once for each.
        workers: With which `num_workers` the loader was resumed too, beside its default.
        differences: One for each resumed run that differs.
        not_compared: Which parts of batches have no state that Python can read, with their classes.
    """

    batches: int
    epochs: int
    cuts: tuple[int, ...]
    workers: tuple[int, ...]
    differences: tuple[ResumeDifference, ...]
    not_compared: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Return whether every resumed run gave the batches that were left."""
        return not self.differences and not self.not_compared

    def __str__(self) -> str:
        """Return the answer as sentences."""
        cuts = ", ".join(map(str, self.cuts))
        what = (
            f"{count_of_batches(self.batches)} in {counted(self.epochs, 'epoch')}, cut after {cuts}"
        )
        if self.workers:
            what += f", resumed also with num_workers={', '.join(map(str, self.workers))}"
        if not self.cuts:
            what = "Nothing was cut"
        if self:
            return f"{what}: each resumed run gave the batches that were left."
        lines = [f"  {_where(each)}: {each.what}" for each in self.differences]
        if self.not_compared:
            lines.append(f"  {unread(self.not_compared)}")
        return "\n".join([f"{what}:", *lines])


def check_resume(
    make_loader: Callable[..., Any],
    *,
    epochs: int = 2,
    cuts: Iterable[int] | None = None,
    workers: Iterable[int] = (),
    kill: bool = True,
    timeout: float = 60.0,
) -> ResumeCheck:
    """Check that a loader of any class continues from a state with exactly the remaining batches.

    A run is `for epoch in range(epochs): for batch in loader`, in a forked process of its own. It
    is made twice without interruption. For each cut, another run takes `loader.state_dict()` after
    so many batches and ends. In a new process a new loader gets the state with `load_state_dict`,
    before its first iteration, and must give the rest of that epoch and all later ones: equal in
    every bit, in order. A state taken after the last batch of an epoch may be followed by an empty
    rest of it. Each process seeds `random`, numpy and torch in the same way when it starts, and
    restores nothing but the loader.

    Call it before the program uses CUDA, which does not work in forked processes. Batches are not
    kept, but digests of tensors, arrays and the states of objects; what has no state that Python
    can read, such as a generator, is named, and the answer is false.

    Args:
        make_loader: Returns a new loader, with `__iter__`, `state_dict` and `load_state_dict`; may
            be a lambda. Its epochs must end, and have at most 10,000 batches together. It may have
            a parameter `num_workers`.
        epochs: How many epochs a run has, at least 1.
        cuts: After how many batches of the run it is cut; None for the first, one in the middle,
            the last but one and the last of the first epoch, and one in the second.
        workers: The loader is also resumed with these `num_workers`, which `make_loader` is called
            with; otherwise it is called with its default. If it has none, that is the first of
            these, or else 0.
        kill: Whether SIGKILL ends the process of the cut run and its children right after the
            state, with batches in flight; otherwise its loop ends there, and then the process.
        timeout: Seconds without a batch or a state after which a process counts as hanging.

    Returns:
        What differs: true if nothing does and all could be compared; `print` shows it in sentences.

    Raises:
        OptionError: The loader lacks one of these methods, it has no batches, or an argument is
            impossible.
    """
    if not callable(make_loader):
        raise OptionError(
            "check_resume() needs a function that returns a new loader; got "
            f"{type(make_loader).__qualname__}\n"
            "  Nothing was run. Each run needs a loader of its own: pass lambda: DataLoader(...)."
        )
    parameter = _parameter_of(make_loader)
    try:
        others, wanted = tuple(workers), None if cuts is None else sorted({*cuts})
        is_possible = epochs >= 1 and timeout > 0 and min(others, default=0) >= 0
    except TypeError:  # a number in place of a list
        is_possible = False
    if not is_possible:
        raise OptionError(
            "check_resume() needs at least 1 epoch, a positive timeout, and lists of cuts and of "
            f"workers of at least 0; got epochs={epochs}, timeout={timeout}, cuts={cuts}, "
            f"workers={workers}"
        )
    if others and parameter is None:
        raise OptionError("workers= needs a make_loader with a parameter num_workers")
    default = None
    if parameter is not None and parameter.default is parameter.empty:
        default, others = (others[0], others[1:]) if others else (0, ())

    def run(job: LoaderJob) -> LoaderRun:
        return run_apart(make_loader, job, timeout)

    whole = run(LoaderJob(epochs, default, most=_MOST_BATCHES + 1))
    if whole.error.startswith(LACKING):
        raise OptionError(
            f"{whole.error}\n  Nothing was checked: a loader resumes by state_dict() and "
            "load_state_dict(), as forebay.DataLoader and torchdata's StatefulDataLoader do."
        )
    reference = whole.batches
    if len(reference) > _MOST_BATCHES:
        raise OptionError(
            f"the loader gave more than {_MOST_BATCHES:,} batches and did not end\n"
            "  Nothing was checked: its epochs must end; return one with less data."
        )
    opaque = dict.fromkeys(
        f"{path or 'a batch'} ({kind})"
        for batch in reference
        for path, kind in not_compared(batch.content)
    )

    def result(cuts: Sequence[int], *found: ResumeDifference) -> ResumeCheck:
        held = len({batch.epoch for batch in reference})
        return ResumeCheck(len(reference), held, tuple(cuts), others, found, tuple(opaque))

    if whole.error:
        return result((), ResumeDifference(0, None, whole.error))
    if not reference:
        raise OptionError(
            f"the loader has no batches in {counted(epochs, 'epoch')}: nothing to cut"
        )
    chosen = _default_cuts(reference) if wanted is None else wanted
    if not all(1 <= cut <= len(reference) for cut in chosen):
        raise OptionError(f"cuts must be from 1 to {len(reference)}, the batches; got {chosen}")
    again = run(LoaderJob(epochs, default))
    if differs := difference_after(reference, 0, again):
        what = f"two runs with equal seeds differ, so no resume can be exact: {differs}; set a seed"
        return result((), ResumeDifference(0, None, what))

    found = []
    for cut in chosen:
        state = run(LoaderJob(epochs, default, stop_after=cut, kill=kill))
        if state.state is None:
            what = state.error or f"it gave only {count_of_batches(len(state.batches))}"
            found.append(ResumeDifference(cut, None, f"no state: {what}"))
            continue
        last, following = reference[cut - 1], reference[cut : cut + 1]
        is_boundary = not following or following[0].epoch != last.epoch
        for number in (None, *others):
            job = LoaderJob(
                epochs,
                default if number is None else number,
                state=state.state,
                epoch=last.epoch + is_boundary,
                number=0 if is_boundary else last.number + 1,
                is_boundary=is_boundary,
                most=2 * len(reference),
            )
            if what := difference_after(reference, cut, run(job)):
                found.append(ResumeDifference(cut, number, what))
    return result(chosen, *found)


def _parameter_of(make_loader: Callable[..., Any]) -> inspect.Parameter | None:
    with suppress(TypeError, ValueError):  # builtins may have no signature
        return inspect.signature(make_loader).parameters.get("num_workers")
    return None


def _default_cuts(reference: Sequence[ReceivedBatch]) -> list[int]:
    lengths = Counter(batch.epoch for batch in reference)
    (_, length), *later = sorted(lengths.items())
    cuts = {1, length // 2, length - 1, length}
    cuts.update(length + max(1, second // 2) for _, second in later[:1])
    return sorted(cuts - {0})


def _where(difference: ResumeDifference) -> str:
    where = f"after {count_of_batches(difference.after)}" if difference.after else "uninterrupted"
    workers = difference.workers
    return where if workers is None else f"{where}, num_workers={workers}"
