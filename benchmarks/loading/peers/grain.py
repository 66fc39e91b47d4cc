"""Grain: NumPy views of the same samples, batched in its workers, which have one thread each.

Its shared memory takes only NumPy arrays. The datasets are in memory, for which its documentation
advises against threads that read ahead. torch's threads, two in each of two workers on two cores,
would halve its rate of JPEGs; `worker_init_fn=None` leaves them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import absl.logging
import grain
import torch
from torch.utils.data import Dataset

absl.logging.set_verbosity(absl.logging.ERROR)  # otherwise it logs that a JAX profiler is missing


class Samples:
    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return as_numpy(self._dataset[index])


def as_numpy(sample: Any) -> Any:
    if isinstance(sample, torch.Tensor):
        return sample.numpy()
    if isinstance(sample, tuple):
        return tuple(as_numpy(part) for part in sample)
    if isinstance(sample, dict):
        return {key: as_numpy(part) for key, part in sample.items()}
    return sample


def quiet(_worker: int, _workers: int) -> None:
    torch.set_num_threads(1)


def loader(
    dataset: Dataset[Any],
    batch_size: int,
    num_workers: int,
    shuffle: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    persistent_workers: bool = False,  # noqa: ARG001 - it has none
    multiprocessing_context: str | None = None,  # noqa: ARG001 - it always spawns
    worker_init_fn: Callable[[int, int], None] | None = quiet,
) -> Iterable[Any]:
    source = grain.MapDataset.source(Samples(dataset))
    if shuffle:
        source = source.shuffle(seed=0)
    return (
        source.batch(batch_size, batch_fn=collate_fn)
        .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        .mp_prefetch(
            grain.MultiprocessingOptions(num_workers, per_worker_buffer_size=2),
            worker_init_fn=worker_init_fn,
        )
    )
