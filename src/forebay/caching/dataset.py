"""`CachedDataset`: the samples of a finished cache, over memory-mapped files.

index ── // per_shard ──> shard, mapped when first read ──> leaves ──> sample ──> transform
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import index as as_index
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import Dataset

from forebay.caching.cache_table import table_of
from forebay.caching.index import CachePlan
from forebay.caching.sample_layout import (
    Classes,
    Identity,
    loaded_class,
    namedtuples_of,
    rebuilder,
)
from forebay.caching.shard_reader import Shards
from forebay.observe.notebook_html import summary
from forebay.units import counted


class CachedDataset(Dataset[Any]):
    """The samples of a cache, as the dataset returned them; made by `cache` and `open_cache`.

    Tensors and arrays are contiguous and view the file's pages in memory, which all processes
    share. They may be written to: neither the file nor other processes change, but this process
    sees the change when it reads the sample again, so `clone()` what you change in place. A
    `transform` need not: it receives copies.

    It is pickled as the names of its files, so little is sent to spawned workers. It keeps no file
    open.

    Attributes:
        directory: Where the files are.
        transform: Called with each sample, each time it is read; may be set at any time.
    """

    def __init__(
        self,
        directory: Path,
        plan: CachePlan,
        transform: Callable[[Any], Any] | None = None,
        classes: Classes | None = None,
    ) -> None:
        self.directory = directory
        self.transform = transform
        self._plan = plan
        self._classes = {**_loaded(plan), **(classes or {})}
        self._shards = Shards(directory, plan)
        self._rebuild = rebuilder(plan.structure, self._classes)

    def __len__(self) -> int:
        return self._plan.samples

    def __getitem__(self, index: int) -> Any:
        """Return a sample.

        Args:
            index: From 0, or negative to count from the end.

        Raises:
            IndexError: There is no such sample.
            TypeError: The index is not an integer.
            InputError: Its shard is missing or damaged.
        """
        sample = self._read(self._position(index))
        return sample if self.transform is None else self.transform(_own(sample))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return samples, in the order asked for."""
        samples = [self._read(self._position(index)) for index in indices]
        if self.transform is None:
            return samples
        return [self.transform(_own(sample)) for sample in samples]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def table(self) -> pa.Table:
        """Return all samples as an Arrow table over the mapped files: one row each, in order."""
        return table_of([self._shards[at] for at in range(len(self._shards))])

    def __repr__(self) -> str:
        shards = counted(len(self._shards), "shard")
        return f"<CachedDataset {str(self.directory)!r}: {len(self):,} samples in {shards}>"

    def _repr_html_(self) -> str:
        """Return the summary for a notebook."""
        facts = {
            "samples": len(self),
            "shards": len(self._shards),
            "directory": self.directory,
            "transform": self.transform,
        }
        return summary("CachedDataset", facts)

    def __reduce__(self) -> Any:
        classes = {at: cls for at, cls in self._classes.items() if loaded_class(at) is cls}
        return CachedDataset, (self.directory, self._plan, self.transform, classes)

    def _position(self, index: int) -> int:
        at = as_index(index)  # also of a tensor, as the indices of a Subset may be
        position = at if at >= 0 else at + self._plan.samples
        if not 0 <= position < self._plan.samples:
            raise IndexError(f"there is no sample {index}: there are {len(self):,}")
        return position

    def _read(self, position: int) -> Any:
        number, row = divmod(position, self._plan.per_shard)
        return self._rebuild(iter(self._shards[number].leaves(row)))


def _loaded(plan: CachePlan) -> dict[Identity, type]:
    found = {each: loaded_class(each) for each in namedtuples_of(plan.structure)}
    return {each: cls for each, cls in found.items() if cls is not None}


def _own(sample: Any) -> Any:
    """Return a sample with copies of its tensors and arrays."""
    if isinstance(sample, torch.Tensor):
        return sample.clone()
    if isinstance(sample, np.ndarray):
        return sample.copy()
    if isinstance(sample, dict):
        for key, value in sample.items():  # it was created by this call
            sample[key] = _own(value)
        return sample
    if isinstance(sample, tuple) and hasattr(sample, "_fields"):
        return type(sample)(*map(_own, sample))
    if isinstance(sample, list | tuple):
        return type(sample)(map(_own, sample))
    return sample
