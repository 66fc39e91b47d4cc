"""Make samples several times, here and in workers, and compare them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from forebay.base.batch_digests import differing, digested, not_compared, unread
from forebay.base.formatting import counted
from forebay.base.process import moved_since, read_positions
from forebay.base.randomness import generators_kept
from forebay.errors import OptionError
from forebay.loading.kind import LoaderKind
from forebay.loading.sampler_kind import ReadsSampler


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
            return f"{what}, made twice here and twice in workers {seed}, were the same each time."
        lines = [
            f"  sample {each.index!r}{each.field and ', ' + each.field}: {each.between} differ"
            for each in self.differences
        ]
        advice = (
            "Set seed= for samples that are functions of the seed."
            if self.seed is None
            else "They draw from a generator that forebay cannot reach, one made in __getitem__ "
            "for example, or depend on earlier samples, the time or the process."
        )
        if not self.differences:
            advice = ""
        if self.shared_files:
            lines.append(f"  {_shared(*self.shared_files)}")
        if self.not_compared:
            lines.append(f"  {unread(self.not_compared)}")
        heading = f"{what}, made twice here and twice in workers {seed}:"
        return "\n".join(filter(None, [heading, *lines, advice]))


def _shared(*paths: str) -> str:
    return (
        f"{', '.join(paths)}: open before the workers began, which read from one shared position. "
        "Two that read at once get each other's bytes, without an error. Open it in each worker, "
        "when the first sample is read"
    )


def apart(dataset: Any, depth: int = 8) -> Any:
    """Return a copy of a dataset, and of those within it, that shares all that they have.

    What it opens when a sample is read, it opens for itself: workers that begin later do not share
    that file.
    """
    own = getattr(dataset, "__dict__", None)
    if type(own) is not dict or isinstance(dataset, torch.Tensor) or not depth:
        return dataset
    try:
        other = copy.copy(dataset)
        if "dataset" in own and own["dataset"] is not dataset:
            vars(other)["dataset"] = apart(own["dataset"], depth - 1)
    except Exception:  # noqa: BLE001 - the user's class may refuse
        return dataset
    return other


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


def compared(
    indices: Sequence[Any], made: Callable[[int], Sequence[Any]], seed: int | None
) -> SampleCheck:
    """Make samples in several ways, and compare them."""
    before, moved = read_positions(), set[str]()
    try:
        worker, other = made(2), made(2)
    except Exception as error:
        moved = moved_since(before)
        if moved:
            error.add_note(f"forebay: {_shared(*sorted(moved))}")
        raise
    moved = moved_since(before)  # now, when only workers have read
    worker, other = [*map(digested, worker)], [*map(digested, other)]
    here, again = ([*map(digested, made(0))] for _ in range(2))
    pairs = (
        ("two results in this process", here, again),
        ("two results in workers", worker, other),
        ("this process and a worker", here, worker),
    )
    found: dict[tuple[int, str], SampleDifference] = {}
    for between, ones, twos in pairs:
        for number, (one, two) in enumerate(zip(ones, twos, strict=True)):
            for field in differing(one, two):
                difference = SampleDifference(indices[number], field, between)
                found.setdefault((number, field), difference)
    opaque = dict.fromkeys(
        f"{path or 'a sample'} ({kind})"
        for each in (*here, *worker)
        for path, kind in not_compared(each)
    )
    return SampleCheck(
        len(indices), seed, tuple(found.values()), tuple(sorted(moved)), tuple(opaque)
    )


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
    here = apart(dataset)

    def made(num_workers: int) -> list[Any]:
        with (
            warnings.catch_warnings(),
            loader(
                dataset if num_workers else here,
                batch_size=max(len(indices) // 8, 1),  # so that both workers read at once
                sampler=indices,
                collate_fn=list,
                num_workers=num_workers,
                worker_init_fn=kind.worker_init_fn if num_workers else None,
                multiprocessing_context=kind.multiprocessing_context if num_workers else None,
                seed=kind.seed,
            ) as batches,
        ):
            warnings.filterwarnings("ignore", "This DataLoader will create")
            return [sample for batch in batches for sample in batch]

    with generators_kept():
        return compared(indices, made, kind.seed)
