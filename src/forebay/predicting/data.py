"""Create the reader for the `data` argument: a Dataset, a DataLoader or a table."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, default_collate

from forebay.errors import InputError, OptionError
from forebay.items import from_table
from forebay.jobs.inputs.memory_tables import is_table
from forebay.jobs.table.table_reader import find_table
from forebay.options import (
    Ray,
    check_backend,
    check_positive,
    check_timeout,
    checked_workers,
    cluster_of,
    whole_cores,
)
from forebay.predicting.metadata_rows import Table, open_table
from forebay.predicting.range_reader import RangeReader
from forebay.sample_names import is_map_style

BATCH_SIZE = 64
# Arguments of a loader that are used for its workers.
_KEPT = ("prefetch_factor", "worker_init_fn", "multiprocessing_context")


@dataclass(frozen=True, slots=True)
class ReaderSettings:
    """The arguments of `predict` that determine how data is read."""

    batch_size: int | None
    num_workers: int | Literal["auto"] | None
    backend: str | Ray
    collate_fn: Callable[[Any], Any] | None
    timeout: float | None
    part_size: int


def table_of(
    data: Any,
    load: Callable[[dict[str, Any]], Any] | None,
    folder: str | os.PathLike[str] | None = None,
) -> Table | None:
    """Return the table that `data` is or names; None if it is neither a table nor a path.

    A list of dicts is a table if there is `load`; otherwise it is a Dataset of samples.

    Raises:
        OptionError: There is a table without `load`, or `load` or `folder` without a table.
        InputError: It cannot be read.
    """
    is_named = isinstance(data, str | os.PathLike)
    is_list = isinstance(data, list | tuple)
    if is_named or (is_table(data) and not (is_list and load is None and folder is None)):
        if not callable(load):
            if is_named and "://" not in os.fspath(data):
                find_table(data)  # raises if there is none
            shown = repr(os.fspath(data)) if is_named else f"the {type(data).__name__}"
            raise OptionError(
                f"{shown} is a table, and no function makes samples from its rows\n"
                "  Nothing was started. Pass load=, or --load FILE.py:FUNCTION: it is given a row "
                "as a dict and returns the sample."
            )
        return open_table(data, folder)
    for name, value in (("load", load), ("folder", folder)):
        if value is not None:
            raise OptionError(
                f"{name}= is for the rows of a table, and data is a {type(data).__name__}\n"
                f"  Nothing was started. Leave {name} out, or pass a table or its path as data."
            )
    return None


def reader_of(
    data: Any,
    load: Callable[[dict[str, Any]], Any] | None,
    table: Table | None,
    wanted: ReaderSettings,
) -> RangeReader:
    """Return the reader of the samples.

    Raises:
        OptionError: A setting is impossible, or the samples have no indices.
        InputError: There are no samples.
    """
    dataset, settings = data, {}
    batch_size, backend = wanted.batch_size, wanted.backend
    num_workers = checked_workers(wanted.num_workers)
    collate_fn, timeout = wanted.collate_fn, wanted.timeout
    check_backend(backend)
    check_timeout(timeout or None)
    if table is not None:
        assert load is not None, "table_of made sure"
        dataset = from_table(table.rows, load, folder=table.listing.folder)
    elif isinstance(data, TorchDataLoader):
        dataset = data.dataset
        batch_size = batch_size or _batch_size_of(data)
        num_workers = data.num_workers if num_workers is None else num_workers
        backend = getattr(data, "backend", "process") if backend == "process" else backend
        collate_fn = collate_fn or data.collate_fn
        timeout = timeout or data.timeout or None
        settings = {name: getattr(data, name) for name in _KEPT} if num_workers else {}
    _check_dataset(dataset)
    if collate_fn is default_collate:
        collate_fn = None
    if num_workers is None and cluster_of(backend) is None:
        num_workers = whole_cores()
    batch_size = BATCH_SIZE if batch_size is None else batch_size
    check_positive("batch_size", batch_size)
    check_positive("part_size", wanted.part_size)
    samples = len(dataset)
    if samples < 1:
        raise InputError(f"data has {samples} samples\n  There is nothing to predict.")
    return RangeReader(
        dataset=dataset,
        samples=samples,
        part_size=wanted.part_size,
        batch_size=min(batch_size, wanted.part_size),
        collate_fn=collate_fn,
        num_workers=num_workers,
        backend=backend,
        timeout=timeout or 0,
        settings=settings,
    )


def _batch_size_of(loader: Any) -> int:
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if not isinstance(size, int):
        raise OptionError(
            f"the loader has no batch size: it has batch_size={loader.batch_size!r} and a custom "
            "batch sampler\n"
            "  Nothing was started. Pass batch_size= to predict."
        )
    return size


def _check_dataset(dataset: Any) -> None:
    if isinstance(dataset, IterableDataset):
        raise OptionError(
            "predict needs a map-style dataset: the samples of an iterable dataset have no index, "
            "by which a run could continue and failures be named\n"
            f"  Nothing was started; got {type(dataset).__name__}. Give it __getitem__ and "
            "__len__."
        )
    if not is_map_style(dataset):
        raise OptionError(
            "data must be a map-style Dataset, a DataLoader, or a table or its path; got "
            f"{type(dataset).__name__}\n  Nothing was started."
        )
