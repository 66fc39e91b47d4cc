"""Where predict's batches come from: a forebay.DataLoader over the parts that are still to do.

    parts 0 1 [2 3 4] 5 [6] ── one loader a row of parts ──> batches, in dataset order

A batch never crosses the end of a part. The generators are seeded for each batch by its first
sample, so that what is random is the same for any number of workers, and after a kill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import default_collate

from forebay.errors import WorkerDiedError
from forebay.loader import DataLoader
from forebay.loading.seeding import seed_generators
from forebay.options import Ray
from forebay.plan.seeds import SAMPLE, seed_of
from forebay.predicting.records import Found, Loaded, LostSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A dataset, how it is cut, and how it is loaded. Travels by pickle.

    Attributes:
        dataset: Map-style.
        samples: How many it has.
        part_size: Samples of a part; the last may have fewer.
        batch_size: Samples of a batch; the last of a part may have fewer.
        collate_fn: Makes a batch of a list of samples; None for torch's default.
        num_workers: Who loads; 0 for this process; None for as many as a cluster has room for,
            where each makes whole parts.
        backend: Where they run.
        timeout: Seconds that a batch may take; 0 for any.
        settings: Further arguments for the loader.
        pins: Whether batches are to lie in page-locked memory.
    """

    dataset: Any
    samples: int
    part_size: int
    batch_size: int
    collate_fn: Callable[[Any], Any] | None
    num_workers: int | None
    backend: str | Ray
    timeout: float
    settings: dict[str, Any]
    pins: bool = False

    @property
    def batches_in_part(self) -> int:
        """The batches of a whole part."""
        return -(-self.part_size // self.batch_size)

    def indices(self, number: int) -> list[int]:
        """Return the samples of a batch, counted over all parts; none behind a part's end."""
        part, batch = divmod(number, self.batches_in_part)
        first = part * self.part_size
        begin = first + batch * self.batch_size
        end = min(begin + self.batch_size, first + self.part_size, self.samples)
        return list(range(begin, end))

    def read(self, parts: Sequence[int]) -> Iterator[Found]:
        """Yield what comes of each batch of these parts; the last part may have fewer.

        Args:
            parts: Their numbers, growing.
        """
        for first, last in _rows_of(parts):
            end = (last + 1) * self.batches_in_part
            while not self.indices(end - 1):
                end -= 1
            yield from self._read(first * self.batches_in_part, end)

    def load(self, indices: list[int], num_workers: int = 0) -> Found:
        """Load some samples by themselves, in this process unless they may end theirs."""
        loader: DataLoader[Any] = DataLoader(
            _Samples(self.dataset),
            batch_sampler=[indices],
            collate_fn=_Collate(self.collate_fn or default_collate),
            num_workers=num_workers,
            timeout=self.timeout if num_workers else 0,
            **(self.settings if num_workers else {}),
        )
        with loader:
            try:
                return _found(indices, next(iter(loader)))
            except Exception as error:  # noqa: BLE001 - whatever the user's code raises
                return self._again(indices, error)

    def _read(self, first: int, end: int) -> Iterator[Found]:
        loader: DataLoader[Any] = DataLoader(
            _Samples(self.dataset),
            batch_sampler=_Plan(self, first, end),
            collate_fn=_Collate(self.collate_fn or default_collate),
            num_workers=self.num_workers or 0,
            backend=self.backend,
            timeout=self.timeout,
            pin_memory=self.pins,
            **self.settings,
        )
        with closing(loader):
            batches = iter(loader)
            for number in range(first, end):
                try:
                    found = _found(self.indices(number), next(batches))
                except Exception as error:  # noqa: BLE001 - whatever the user's code raises
                    found = self._again(self.indices(number), error)
                yield found

    def _again(self, indices: list[int], error: Exception) -> Found:
        """Return what can be loaded of a batch that failed as a whole, by halving it."""
        if len(indices) == 1:
            return Found([], [LostSample.of(indices[0], error)])
        num_workers = 1 if isinstance(error, WorkerDiedError) else 0
        middle = len(indices) // 2
        halves = [self.load(half, num_workers) for half in (indices[:middle], indices[middle:])]
        return Found(
            [each for half in halves for each in half.loaded],
            [each for half in halves for each in half.lost],
        )


class _Plan:
    """The batches of some parts in a row: lists of indices, made as they are asked for."""

    def __init__(self, source: Source, first: int, end: int) -> None:
        self._source, self._numbers = source, range(first, end)

    def __iter__(self) -> Iterator[list[int]]:
        return map(self._source.indices, self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


class _Torn(NamedTuple):
    """What there is of a batch of which samples failed: a list of samples, or what it became."""

    kept: list[int]
    rest: Any
    lost: list[LostSample]


class _Samples:
    """A dataset that gives the samples of a batch together, and instead of raising tells which."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        seed_generators(seed_of(0, SAMPLE, indices[0]))
        together = getattr(self._dataset, "__getitems__", None)
        if together is not None:
            try:
                return list(together(indices))
            except Exception:  # noqa: BLE001, S110 - one by one it shows which sample it is
                pass
        samples, kept, lost = [], [], []
        for index in indices:
            try:
                samples.append(self._dataset[index])
            except Exception as error:  # noqa: BLE001 - whatever the user's code raises
                lost.append(LostSample.of(index, error))
            else:
                kept.append(index)
        return [_Torn(kept, samples, lost)] if lost else samples


class _Collate:
    """Makes a batch of what `_Samples` gave."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, samples: list[Any]) -> Any:
        first = samples[0]
        if not isinstance(first, _Torn):
            return self._collate_fn(samples)
        return first._replace(rest=self._collate_fn(first.rest) if first.kept else None)


def _rows_of(parts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of those that follow each other."""
    begin = 0
    for at in range(1, len(parts) + 1):
        if at == len(parts) or parts[at] != parts[at - 1] + 1:
            yield parts[begin], parts[at - 1]
            begin = at


def _found(indices: list[int], batch: Any) -> Found:
    if not isinstance(batch, _Torn):
        return Found([Loaded(indices, batch)], [])
    return Found([Loaded(batch.kept, batch.rest)] if batch.kept else [], batch.lost)
