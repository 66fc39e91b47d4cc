"""What `data` of `predict` are: a Dataset, a DataLoader, a table, or files.

table ──> a row for each sample, whose columns are stored beside the predictions
files ──> the same, with their names as the only column
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pyarrow as pa
import torch
from pyarrow import compute
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, default_collate

from forebay.base.arrow_arrays import array_of
from forebay.base.datasets import is_map_style
from forebay.base.files import is_url, local_file, shown_values
from forebay.devices.device import Device, copying_device
from forebay.errors import InputError, OptionError, cut_own_frames
from forebay.failures import Failure
from forebay.inputs.listing import Listing, list_inputs
from forebay.inputs.other_inputs import is_table
from forebay.loader import DataLoader
from forebay.loading.iterators import BatchIterator
from forebay.loading.messages import BatchError, BatchResult, Result
from forebay.loading.progress import LoaderProgress
from forebay.loading.selections import RangeSampler
from forebay.observe.record import Trace
from forebay.options import (
    Ray,
    check_backend,
    check_positive,
    check_timeout,
    checked_workers,
    cluster_of,
    plain_number,
    whole_cores,
)

if TYPE_CHECKING:
    from forebay.observe.diagnosis import Diagnosis
    from forebay.packed import PackedSequence

# The columns for a sample's number and its name.
INDEX, SOURCE = "index", "source"

# ---- metadata rows -------------------------------------------------------------------------------
# A metadata table: its columns, and fingerprints of its rows for change detection.


class Table(NamedTuple):
    """A metadata table, or files as one of their names.

    Attributes:
        rows: The columns that are stored beside the predictions.
        files: Paths and URLs, if samples are made of files; None for those that are made of rows.
    """

    rows: pa.Table
    listing: Listing
    files: PackedSequence[str] | None = None


def open_table(data: Any, folder: str | os.PathLike[str] | None) -> Table:
    """Return a table whose columns can be stored beside the predictions."""
    from forebay.inputs.tables import find_table, read_memory_table, read_table

    is_named = isinstance(data, str | os.PathLike)
    source = find_table(data) if is_named else data
    listing = list_inputs(source, folder)  # raises if there are no rows, or columns of one name
    rows = read_table(source) if is_named else read_memory_table(data, listing.folder)[0]
    if INDEX in rows.column_names:
        shown = repr(os.fspath(source)) if is_named else f"the {type(data).__name__}"
        raise OptionError(
            f"{'the table ' if is_named else ''}{shown} has a column {INDEX!r}, the name that "
            "predict gives to the number of the row\n  Nothing was started. Rename the column."
        )
    return Table(rows.replace_schema_metadata(None).combine_chunks(), listing)


def open_files(data: Any, output: str | os.PathLike[str]) -> Table:
    """Return the files that a folder, a glob or a list names, those in the output folder aside."""
    from forebay.inputs.own_outputs import keep_apart, without_outputs
    from forebay.packed import PackedSequence

    keep_apart(data, output)
    listing = without_outputs(list_inputs(data), output)
    inputs = (*listing,)  # once: their number, names and identities belong together
    names = array_of([each.source for each in inputs], pa.string())
    files = PackedSequence([getattr(each, "opens", each.source) for each in inputs])
    whole = Listing("paths", (), listing.description, lambda: iter(inputs), total=len(inputs))
    return Table(names_table(names), whole, files)


def load_file(load: Callable[[Path], Any], location: str) -> Any:
    """Return the sample of a file, which is downloaded while `load` works if it is a URL's."""
    with local_file(location) as path:
        return load(path)


def shown_rows(rows: pa.Table) -> pa.Table:
    """Return a table without the credentials of its URLs, as it is stored beside predictions."""
    for at, field in enumerate(rows.schema):
        if "string" not in str(field.type):
            continue
        column = rows.column(at)
        is_plain = pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
        if is_plain and not compute.any(compute.match_substring(column, "://")).as_py():
            continue
        values = column.to_pylist()
        if (shown := shown_values(values)) != values:
            rows = rows.set_column(at, field, pa.array(shown, field.type))
    return rows


def names_array(names: Iterable[str]) -> pa.Array:
    """Return the names of samples; of one that is not UTF-8, the escapes that messages show."""
    plain = [each.encode(errors="backslashreplace").decode() for each in names]
    return array_of(plain, pa.string())


def names_table(names: pa.Array) -> pa.Table:
    """Return the names of samples as a table that can be stored beside the predictions."""
    return pa.table({SOURCE: names})


# ---- data ----------------------------------------------------------------------------------------
# Create the reader for the `data` argument: a Dataset, a DataLoader or a table.

BATCH_SIZE = 64
# Arguments of a loader that are used for its workers.
_KEPT = ("prefetch_factor", "worker_init_fn", "multiprocessing_context")


def table_of(
    data: Any,
    load: Callable[[Any], Any] | None,
    folder: str | os.PathLike[str] | None,
    output: str | os.PathLike[str],
) -> Table | None:
    """Return the table or files that `data` are or name; None for a Dataset or a DataLoader.

    A list of dicts is a table, and one of paths names files, if there is `load`; otherwise a list
    is a Dataset of samples.
    """
    is_named = isinstance(data, str | os.PathLike)
    has_function = load is not None or folder is not None
    is_list = isinstance(data, list | tuple)
    if _are_files(data, has_function):
        if callable(load) and folder is None:
            return open_files(data, output)
        if folder is None:
            list_inputs(data)  # raises if there are none
            raise _no_function(data, "names files", "a file's path", "of them")
    elif is_named or (is_table(data) and not (is_list and not has_function)):
        if callable(load):
            return open_table(data, folder)
        if is_named and not is_url(os.fspath(data)):
            from forebay.inputs.tables import find_table

            find_table(data)  # raises if there is none
        raise _no_function(data, "is a table", "a row as a dict", "from its rows")
    for name, value in (("folder", folder), ("load", load)):
        if value is not None:
            what = "a table in memory" if name == "folder" else "files and the rows of a table"
            raise OptionError(
                f"{name}= is for {what}, and data is a {type(data).__name__}\n"
                f"  Nothing was started. Leave {name} out, or pass a table, files or the path of "
                "either as data."
            )
    return None


def _are_files(data: Any, has_function: bool) -> bool:
    """Return whether data name files which are no table."""
    if isinstance(data, list | tuple):
        return has_function and bool(data) and isinstance(data[0], str | os.PathLike)
    if not isinstance(data, str | os.PathLike):
        return False
    from forebay.inputs.tables import names_files

    return names_files(data)


def _no_function(data: Any, what: str, given: str, source: str) -> OptionError:
    """Return the error for data of which no function makes samples."""
    is_named = isinstance(data, str | os.PathLike)
    shown = repr(os.fspath(data)) if is_named else f"the {type(data).__name__}"
    return OptionError(
        f"{shown} {what}, and no function makes samples {source}\n"
        f"  Nothing was started. Pass load=, or --load FILE.py:FUNCTION: it is given {given} "
        "and returns the sample."
    )


def reader_of(
    data: Any,
    load: Callable[[Any], Any] | None,
    table: Table | None,
    batch_size: int | None,
    num_workers: int | Literal["auto"] | None,
    backend: str | Ray,
    collate_fn: Callable[[Any], Any] | None,
    timeout: float | None,
    part_size: int,
) -> RangeReader:
    """Return the reader of the samples, from the arguments of `predict`."""
    dataset, settings = data, {}
    workers, timeout = checked_workers(num_workers), plain_number(timeout)
    batch_size, part_size = plain_number(batch_size), plain_number(part_size)
    check_backend(backend)
    check_timeout(timeout or None)
    if table is not None:
        from forebay.items import ItemDataset, from_table

        assert load is not None, "table_of made sure"
        if table.files is None:
            dataset = from_table(table.rows, load, folder=table.listing.folder)
        else:
            dataset = ItemDataset(table.files, partial(load_file, load))
    elif isinstance(data, TorchDataLoader):
        dataset = data.dataset
        batch_size = batch_size or _batch_size_of(data)
        workers = data.num_workers if workers is None else workers
        backend = getattr(data, "backend", "process") if backend == "process" else backend
        collate_fn = collate_fn or data.collate_fn
        timeout = timeout or data.timeout or None
        settings = {name: getattr(data, name) for name in _KEPT} if workers else {}
    _check_dataset(dataset)
    if collate_fn is default_collate:
        collate_fn = None
    if workers is None and cluster_of(backend) is None:
        workers = whole_cores()
    batch_size = BATCH_SIZE if batch_size is None else batch_size
    check_positive("batch_size", batch_size)
    check_positive("part_size", part_size)
    if len(dataset) < 1:
        raise InputError(f"data has {len(dataset)} samples\n  There is nothing to predict.")
    return RangeReader(
        dataset=dataset,
        part_size=part_size,
        batch_size=min(batch_size, part_size),
        collate_fn=collate_fn,
        num_workers=workers,
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


# ---- batches -------------------------------------------------------------------------------------
# Batches of sample ranges, in order, each with the samples that could not be loaded.
#
#     parts 2 3 5 ──> ranges of samples ──> DataLoader ──> Loaded, Loaded, …
#
# A batch never crosses the end of a part. A sample's random numbers depend on its index only, so
# they are the same for any batch size and number of workers, and after a kill.

# The seed of samples that draw random numbers.
SEED = 0
# Samples that fail are the limit if batches with them take so large a share of the model's time.
FAILING_SHARE = 0.2


class Loaded(NamedTuple):
    """One batch, ready for the model.

    Attributes:
        batch: The collated samples; None if there are none.
    """

    indices: list[int]
    batch: Any
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeReader:
    """Reads a dataset range by range. Picklable if the dataset is.

    Attributes:
        collate_fn: Makes a batch of a list of samples; None for torch's default.
        num_workers: Number of workers; 0 for this process; None for as many as a cluster has room
            for, with a factory; an `AutoWorkers` for as many as the model needs.
        device: Where batches of worker processes are copied before they are taken, if there is
            memory; None for host memory.
    """

    dataset: Any
    part_size: int
    batch_size: int
    collate_fn: Callable[[Any], Any] | None
    num_workers: int | None
    backend: str | Ray
    timeout: float
    settings: dict[str, Any]
    device: torch.device | Device | None = None

    def read(self, parts: Sequence[Sequence[int]], trace: Trace | None = None) -> Iterator[Loaded]:
        """Yield the batches of these samples of parts, one part after the other.

        Every sample comes exactly once, in `indices` or in `failures`.
        """
        return self._read(self._loader(parts, self.num_workers or 0, self.backend), trace)

    def load(self, indices: Sequence[int]) -> Iterator[Loaded]:
        """Load samples again in this process; yield one batch, or several if collating fails."""
        return self._read(self._loader([indices], 0, "process"))

    def diagnosis(self, trace: Trace, failing_share: float = 0.0) -> Diagnosis:
        """Return why the model waited, while a trace was recorded.

        Args:
            failing_share: The part of the model's time for batches with samples that fail.
        """
        from forebay.loading.facts import diagnosis_of, setup_now

        loader = self._loader([], self.num_workers or 0, self.backend)
        setup = setup_now(loader._kind().setup, trace)
        setup = replace(setup, consumer="the model", step="the model", concurrency=None)
        found = diagnosis_of(trace, setup, loader.dataset)
        of_all = failing_share * (1.0 - found.wait_share)
        if of_all < max(FAILING_SHARE, found.wait_share):
            return found
        verdict = (
            f"Samples that fail are the limit: {failing_share:.0%} of the model's time went into "
            "batches with such samples, which are halved until each is found. Fix the samples that "
            "`failures` lists, or leave them out."
        )
        return replace(found, cause="consumer", advice={}, expected_rate=None, verdict=verdict)

    def _loader(
        self, ranges: Sequence[Sequence[int]], num_workers: int, backend: str | Ray
    ) -> DataLoader[Any]:
        in_workers: dict[str, Any] = {"backend": backend, "timeout": self.timeout}
        if copying_device(self.device) is not None:  # the model moves batches to any other
            in_workers["device"] = self.device
        return DataLoader(
            self.dataset,
            batch_sampler=RangeSampler(ranges, self.batch_size),
            collate_fn=self.collate_fn,
            num_workers=num_workers,
            seed=SEED,
            on_error="skip",
            **(in_workers | self.settings if num_workers else {}),
        )

    def _read(self, loader: DataLoader[Any], trace: Trace | None = None) -> Iterator[Loaded]:
        # Not `iter(loader)`: the page of `forebay top` is that of the run.
        progress = LoaderProgress(trace=trace)
        try:
            for request, result in BatchIterator(loader, loader._kind(), progress).results():
                yield from self._loaded(list(request.index), result)
        finally:
            progress.close()

    def _loaded(self, indices: list[int], result: Result) -> Iterator[Loaded]:
        if isinstance(result, BatchResult):
            failed = {failure.index for failure in result.failures}
            kept = [index for index in indices if index not in failed] if failed else indices
            yield Loaded(kept, result.batch, tuple(map(_of_sample, result.failures)))
        elif len(indices) == 1:
            yield Loaded([], None, (_of_sample(_failure(result), indices[0]),))
        else:
            middle = len(indices) // 2
            in_worker = int(isinstance(result, Failure))  # a sample may kill its process
            # Not on a cluster, where it could wait for ever for room that the others have.
            backend = self.backend if self.backend in ("process", "thread") else "process"
            halves = [indices[:middle], indices[middle:]]
            yield from self._read(self._loader(halves, in_worker, backend))


def _failure(result: Result) -> Failure:
    """Return the failure of a batch that could not be made."""
    if isinstance(result, Failure):
        return result
    assert isinstance(result, BatchError)
    try:
        result._replace(notes=()).reraise()  # the notes are about this DataLoader
    except Exception as error:  # noqa: BLE001 - whatever the collate function raises
        cut_own_frames(error)
        return Failure.of(error)


def _of_sample(failure: Failure, index: int | None = None) -> Failure:
    source = failure.source if index is None else index
    return failure._replace(source=source, epoch=None, batch=None, exception=None)
