"""Make samples in workers, and again in a fork of this process, and compare them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)

from forebay.base.batch_digests import digested, not_compared, shown_leaves, unread
from forebay.base.datasets import getitems_of, sequence_rows
from forebay.base.formatting import counted
from forebay.base.process import moved_since, read_positions
from forebay.base.randomness import generators_kept
from forebay.errors import OptionError
from forebay.loading.audit_process import AuditProcess
from forebay.loading.fetch import MapFetcher
from forebay.loading.kind import LoaderKind
from forebay.loading.messages import AuditedSample, BatchRequest
from forebay.loading.plan_kind import PlanKind
from forebay.loading.sampler_kind import ReadsSampler
from forebay.loading.second_maker import MadeBefore, SecondMaker

# How long samples may take in a process: one that hangs is killed.
ANSWER_S = 60.0
WITHIN_ONE, BETWEEN_PROCESSES = "two results in one process", "the results of two processes"
_NO_ANSWER = (
    "check() made {samples} in workers, and another process did not make them again: it ended, or "
    "took more than {seconds:g} s\n"
    "  Nothing was changed. It is a fork of this one, and has none of its threads, connections "
    "and open devices: open what needs these when the first sample is read."
)


@dataclass(frozen=True, slots=True)
class SampleDifference:
    """A part of a sample that is not the same each time."""

    index: Any
    field: str
    between: str


@dataclass(frozen=True, slots=True)
class SampleCheck:
    """What `DataLoader.check` found; false if samples differ or cannot be compared.

    Attributes:
        samples: How many were compared.
        seed: The loader's seed; None if it has none.
        differences: The first difference of each sample and field.
        shared_files: Files that this process has open and that workers read from the position that
            all of them share, so that one may get what another asked for.
        not_compared: Which parts of samples have no state that Python can read, with their classes.
    """

    samples: int
    seed: int | None
    differences: tuple[SampleDifference, ...]
    shared_files: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Return whether all samples were the same each time, and no file is shared."""
        return not (self.differences or self.shared_files or self.not_compared)

    def __str__(self) -> str:
        """Return the answer as sentences."""
        what = counted(self.samples, "sample")
        seed = "without a seed" if self.seed is None else f"with seed={self.seed}"
        if self:
            return f"{what}, made in workers and again in another process {seed}, were the same."
        lines = [
            f"  sample {each.index!r}{each.field and ', ' + each.field}: {each.between} differ"
            for each in self.differences
        ]
        advice = (
            "Set seed= for samples that are functions of the seed."
            if self.seed is None
            else "They draw from a generator that forebay cannot reach, one made in __getitem__ "
            "for example, or depend on earlier samples, the time, a count of calls or the worker."
        )
        if not self.differences:
            advice = ""
        if self.shared_files:
            lines.append(f"  {_shared(*self.shared_files)}")
        if self.not_compared:
            lines.append(f"  {unread(self.not_compared)}")
        heading = f"{what}, made in workers and again in another process {seed}:"
        return "\n".join(filter(None, [heading, *lines, advice]))


def _shared(*paths: str) -> str:
    return (
        f"{', '.join(paths)}: open before the workers began, which read from one shared position. "
        "Two that read at once get each other's bytes, without an error. Open it in each worker, "
        "when the first sample is read"
    )


def spread_indices(count: int, length: int) -> list[int]:
    """Return at most so many indices below `length`, from the first to the last."""
    count = max(min(count, length), 1)
    return [number * (length - 1) // max(count - 1, 1) for number in range(count)]


def _indices(kind: LoaderKind, count: int) -> list[Any]:
    """Return the indices of at most `count` samples that the loader reads.

    They are the first ones of a sampler of the user. It is copied: the loader reads the original.
    """
    sampler = kind.index_sampler
    inner = getattr(sampler, "sampler", None) if type(sampler) is BatchSampler else sampler
    other = None
    if isinstance(kind, ReadsSampler) and type(inner) not in (RandomSampler, SequentialSampler):
        with suppress(Exception):  # it refuses to be copied
            other = copy.deepcopy(sampler, {id(kind.dataset): kind.dataset})
    if other is None:
        return spread_indices(count, kind.length) if kind.length else []
    batches = other if kind.auto_collation else ([each] for each in other)
    return [*islice(chain.from_iterable(batches), count)]


def check_samples(kind: LoaderKind, samples: int, loader: Callable[..., Any]) -> SampleCheck:
    """Make some samples of a loader several times, and compare them; see `DataLoader.check`.

    Args:
        loader: Makes a `DataLoader`.
    """
    dataset = kind.dataset
    if samples < 1:
        raise OptionError(f"check() needs a number of samples of at least 1; got {samples!r}")
    with generators_kept():
        indices = [] if isinstance(dataset, IterableDataset) else _indices(kind, samples)
    if not indices:
        raise OptionError("check() needs a map-style dataset with samples")
    if isinstance(kind, PlanKind) or sequence_rows(dataset):
        dataset = _InAnyOrder(dataset)
    before, moved = read_positions(), set[str]()
    try:
        found = _made(kind, dataset, indices, loader)
    except Exception as error:
        moved = moved_since(before)
        if moved:
            error.add_note(f"forebay: {_shared(*sorted(moved))}")
        raise
    moved = moved_since(before)  # now, when only workers have read
    differences = _differences(kind, dataset, found)
    opaque = dict.fromkeys(
        f"{path or 'a sample'} ({name})"
        for each in found
        for audited in each.audited
        for path, name in not_compared(audited.digest)
    )
    return SampleCheck(
        len(indices), kind.seed, tuple(differences), tuple(sorted(moved)), tuple(opaque)
    )


class _InAnyOrder(Dataset[Any]):
    """The samples of a mixture, or its rows, whose order is otherwise their own."""

    def __init__(self, dataset: Any) -> None:
        self.inner = dataset  # not `dataset`: it is none of those that others look into
        if (together := getitems_of(dataset)) is not None:
            self.__getitems__ = together

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: Any) -> Any:
        return self.inner[index]


def _made(
    kind: LoaderKind, dataset: Any, indices: Sequence[Any], loader: Callable[..., Any]
) -> list[MadeBefore]:
    """Make samples in two workers, and their batches if `collate_fn` may do something to them."""
    size = max(len(indices) // 8, 1)  # so that both workers read at once
    found, functions = list[MadeBefore](), list[Callable[[Any], Any]]([list])
    is_whole = getitems_of(dataset) is not None
    if kind.collate_fn not in (default_collate, default_convert) and kind.auto_collation:
        functions.append(kind.collate_fn)
    for collate_fn in functions:
        with (
            generators_kept(),
            warnings.catch_warnings(),
            loader(
                dataset,
                batch_size=size,
                sampler=indices,
                collate_fn=collate_fn,
                num_workers=2,
                worker_init_fn=kind.worker_init_fn,
                multiprocessing_context=kind.multiprocessing_context,
                seed=kind.seed,
                timeout=ANSWER_S,
            ) as batches,
        ):
            warnings.filterwarnings("ignore", "This DataLoader will create")
            warnings.filterwarnings("ignore", "a sample is not a function of")  # it says so itself
            for number, batch in enumerate(batches):
                at = number * size
                asked = [*indices[at : at + size]]
                request = BatchRequest(asked, 0, number, at)
                whole = {-1: batch} if collate_fn is not list else dict(enumerate(batch))
                audited = (
                    AuditedSample(offset, digested(each), shown_leaves(each), is_whole, {})
                    for offset, each in whole.items()
                )
                found.append(MadeBefore(request, (*audited,)))
    return found


def _differences(
    kind: LoaderKind, dataset: Any, found: Sequence[MadeBefore]
) -> list[SampleDifference]:
    """Make them again in a fork, which has made nothing before, in the opposite order."""
    spec = replace(kind.spec(), auto_collation=True, seed=kind.seed, fetcher=MapFetcher)
    spec = replace(spec, dataset=dataset, concurrency=1, worker_init_fn=None, num_workers=2)
    process = AuditProcess(lambda: _answering(SecondMaker(spec, is_thorough=True), found))
    differences: dict[tuple[str, str], SampleDifference] = {}
    try:
        for number in range(len(found)):
            process.send(len(found) - 1 - number)
            answers = process.received(ANSWER_S)
            if not answers:
                asked = found[len(found) - 1 - number].request.samples_shown
                raise OptionError(_NO_ANSWER.format(samples=asked, seconds=ANSWER_S))
            for each in answers[0]:
                between = BETWEEN_PROCESSES if each.is_stable else WITHIN_ONE
                one = SampleDifference(each.sample, each.field, between)
                differences.setdefault((repr(each.sample), each.field), one)
    finally:
        process.close()
    return sorted(differences.values(), key=lambda each: (repr(each.index), each.field))


def _answering(second: SecondMaker, found: Sequence[MadeBefore]) -> Callable[[int], Any]:
    return lambda number: second.differences(found[number])
