"""Make datasets of files, rows of a table and IDs: items, and a function that loads one of them.

    from_folder ── paths ───┐
    from_table ─── rows ────┼──> ItemDataset(items, load):  dataset[i] is load(items[i])
    from_ids ───── ids ─────┘
    from_table ─── columns ────> ColumnDataset, in `columns/slicing.py`

The items are packed (see `packed.py`): they are pickled once, as bytes, and workers share them.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from torch.utils.data import Dataset

from forebay.base.arrow_arrays import GROUP_ROWS
from forebay.base.files import is_url
from forebay.base.formatting import byte_size, counted, summary
from forebay.base.row_values import python_values
from forebay.columns.slicing import ColumnDataset, sample_number
from forebay.errors import InputError, OptionError, short_tracebacks, shortened
from forebay.inputs.chosen_columns import columns_of_table, no_table
from forebay.inputs.listing import list_folder
from forebay.inputs.other_inputs import is_table
from forebay.inputs.row_paths import file_columns, files_of_row, located, with_open_paths
from forebay.inputs.search import divided_glob, matches, patterns_of
from forebay.inputs.tables import are_paths, names_files, read_memory_table, read_tables, tables_in
from forebay.packed import PackedSequence

if TYPE_CHECKING:
    import pyarrow


class ItemDataset(Dataset[Any]):
    """A map-style dataset of packed items; made by `from_folder`, `from_table` and `from_ids`."""

    def __init__(
        self,
        items: PackedSequence[Any],
        load: Callable[[Any], Any],
        labels: PackedSequence[Any] | Callable[[Any], Any] | None = None,
        files: Callable[[Any], list[str]] | None = None,
        columns: tuple[str, ...] = (),
    ) -> None:
        self.items, self.columns = items, columns
        self._files = files
        self._load = load
        self._labels = labels

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        """Load and return a sample."""
        position = sample_number(index)
        item = self.items[position]
        try:
            sample = self._load(item)
            if self._labels is None:
                return sample
            return sample, self._labels(item) if callable(self._labels) else self._labels[position]
        except Exception as error:
            error.add_note(f"forebay: it was raised for item {position}: {shortened(item)}")
            raise

    def source_of(self, index: int) -> str:
        """Return what a sample is made of, for the column `source` of a table.

        That is the path of a file, the path that a row names (of the columns `destination`,
        `source`, `path`, `file`, `filename`, `input` the first that has one; in a table without
        these, a column whose first values are files), or the ID. It is the index for a row that
        names no path.
        """
        position = sample_number(index)
        item = self.items[position]
        if self._files is None:
            return str(item)
        return next(iter(self._files(item)), None) or str(range(len(self))[position])

    def files_of(self, index: int) -> list[str]:
        """Return the files that a sample is made of, as far as they are known: any may change."""
        item = self.items[sample_number(index)]
        return [str(item)] if self._files is None else self._files(item)

    def __repr__(self) -> str:
        return f"<ItemDataset: {len(self):,} items, {self.items.nbytes:,} bytes>"

    def _repr_html_(self) -> str:
        """Return the summary for a notebook."""
        facts: dict[str, object] = {
            "samples": len(self),
            "memory": byte_size(self.items.nbytes),
        }
        if len(self):
            facts |= {
                "first item": shortened(self.items[0]),
                "last item": shortened(self.items[-1]),
            }
        return summary("ItemDataset", facts)


@short_tracebacks
def from_folder(
    folder: str | os.PathLike[str], load: Callable[[Path], Any], pattern: str = "**/*"
) -> ItemDataset:
    """Return a dataset of the files in a folder: one sample per file.

    The folder is listed once, now. Files come in the order of their paths as strings, the same on
    every machine. Links are followed. Hidden files, and files in hidden folders, are left out, and
    so is the metadata table of an output folder: `from_table` is for its rows.

    Args:
        folder: Where the files are, directly or in subfolders; or, as of `preprocess`, a glob such
            as "in/*.wav", which is a folder and a pattern at once.
        load: Called with a file's absolute path when its sample is requested; it returns the
            sample. For worker processes that are not forked it must be picklable.
        pattern: Which files: a path relative to `folder` in which `*`, `?` and `[...]` stand for
            parts of a name, and `**` for any folders. "*.wav" only matches files at the top level.

    Raises:
        InputError: There is no such folder, it cannot be read, or no file in it matches.
        OptionError: `load` cannot be called, or the pattern leads out of the folder.
    """
    _check_load(load)
    wanted = pattern.split("/")
    if not pattern or ".." in wanted or "" in wanted:
        raise OptionError(
            f"pattern={pattern!r} must be a relative path of names, such as '**/*.wav'\n"
            "  Name a folder above as `folder`."
        )
    if is_url(os.fspath(folder)):
        raise InputError(
            f"from_folder: {os.fspath(folder)!r} is a URL, and from_folder lists a local folder\n"
            "  List the files with fsspec and pass their URLs to from_ids; load is called with one."
        )
    root = Path(folder).expanduser().absolute()
    if glob.has_magic(str(root)) and pattern == "**/*" and not root.exists():
        top, pattern = divided_glob(str(root))
        root = Path(top)
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "does not exist"
        raise InputError(f"from_folder: {root} {what}\n  The working folder is {os.getcwd()}.")
    start, patterns = len(os.path.join(root, "")), patterns_of(pattern)
    names = (one.source[start:] for one in list_folder(os.path.join(root, "")))
    tables = tables_in(str(root))
    items = PackedSequence(
        name for name in names if name not in tables and matches(name.split("/"), patterns)
    )
    if not items:
        raise InputError(
            f"from_folder: no file in {root} matches pattern={pattern!r}\n"
            "  The folder does contain files. '**/*' matches all but hidden ones; '*' those at "
            "the top level."
        )
    return ItemDataset(
        items, partial(_load_file, str(root), load), files=partial(_file_of, str(root))
    )


@overload
def from_table(
    table: Any,
    load: Callable[[dict[str, Any]], Any] | None = None,
    *,
    columns: None = None,
    folder: str | os.PathLike[str] | None = None,
) -> ItemDataset: ...
@overload
def from_table(table: Any, *, columns: Iterable[str]) -> ColumnDataset: ...
@short_tracebacks
def from_table(
    table: Any,
    load: Callable[[dict[str, Any]], Any] | None = None,
    *,
    columns: Iterable[str] | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> ItemDataset | ColumnDataset:
    """Return a dataset of the rows of a table, such as a manifest or what `preprocess` wrote.

    The table is read once, now. A row is a dict of its columns, in the table's order, with None
    for a missing value. NaN is a number, except in a DataFrame of pandas and in a list of dicts,
    which may come from one: there it is a missing value. The column `destination` names an output
    of `preprocess`, relative to the table; the row has the file's absolute path, which may not lead
    out of that folder. So has a row whose path is relative to the table, and not to the working
    folder. All other columns are passed unchanged; periods and intervals of pandas are strings, and
    a time beyond the year 9999 is a `numpy.datetime64`.

    With `columns`, a sample is a dict of these columns, and a loader takes whole batches from them,
    hundreds of times as fast as row by row: a dict of tensors, and of lists for strings and bytes.
    Columns may be numbers, booleans, strings, bytes, categories, and lists of numbers; numbers keep
    their dtypes, and missing values among floats are NaN. Arrays of any shape, as `predict` writes
    them, are tensors; other lists and structs are lists of Python values. Batches of lists with
    different lengths need a `collate_fn`, as in `collate.by_field(tokens=collate.pad())`. Columns
    in memory are used as they are, without a copy if they have no missing values and are not
    booleans. Those of a .parquet, .csv or .jsonl file are read into memory, once; those of
    .arrow or .feather files without compression are mapped, also if they are larger than the
    memory. Of Parquet files that are larger, row groups are read when they are needed, and a
    `DataLoader` with `seed=` shuffles them by windows, as `open_shards` says.

    Args:
        table: A file ending in .csv, .tsv, .jsonl, .ndjson or .parquet, text also with .gz, .bz2,
            .xz or .zst behind it; a list or a glob of such files, whose rows come one after
            another; the output folder of `preprocess`; the fsspec URL of either, from which a
            `destination` is a URL (see `open_output`); a DataFrame of pandas or polars; a
            `pyarrow.Table`; or a list of dicts. A column of a CSV file is bool, int or float if all
            its cells can be read as such. Row labels of pandas are left out; `reset_index()` makes
            them a column. With `columns` also a dict of arrays, tensors or lists; a local file
            ending in .arrow or .feather; and several .parquet files, or several of Arrow: a folder,
            with its folders, such as the output of `predict`; a glob, or a pattern with braces; a
            list of these; paths, or URLs of one bucket, whose row groups are fetched when they are
            needed, by windows. Rows come in the sorted order of the paths, and columns need the
            same types in all files.
        load: Called with a row when its sample is requested; it returns the sample. Without it the
            row is the sample.
        columns: Names of columns, to make batches by column.
        folder: Where the relative `destination` of a table in memory starts; None for the working
            folder. A table in a file is in its own folder.

    Raises:
        InputError: There is no such table, it cannot be read, or it has no rows; or `folder` is
            None, and the first relative destination is not in the working folder. With `columns`:
            one is missing, there twice, has another type, or a missing value that cannot be NaN.
        OptionError: `load` cannot be called, there is a folder with a table in a file, or
            `columns` is given together with `load` or `folder`.
    """
    if columns is not None:
        if load is not None or folder is not None:
            other = "load=" if load is not None else "folder="
            raise OptionError(
                f"from_table: columns= makes batches by column, and {other} is for single rows\n"
                f"  Leave one of the two out."
            )
        return ColumnDataset(columns_of_table(table, columns))
    _check_load(load, optional=True)
    start: str | None
    if isinstance(table, str | os.PathLike) or are_paths(table):
        if folder is not None:
            raise OptionError(
                f"from_table: folder={os.fspath(folder)!r} is for tables in memory, and the table "
                f"is {shortened(table)}\n  Leave folder out: a table in a file is in its own "
                "folder."
            )
        name, table, start = read_tables(table)
    elif is_table(table):
        name = f"from_table: the {type(table).__name__}"
        table, start = read_memory_table(table, folder)
    else:
        raise no_table(table)
    known = tuple(table.column_names)
    if not table.num_rows or not known:
        raise InputError(f"{name} has no rows\n  A dataset needs at least one.")
    if len(set(known)) < len(known):
        raise InputError(
            f"{name} has two columns with the same name: {list(known)}\n  Rename one of them."
        )
    items = PackedSequence(_rows(table))
    local = None if start is None or is_url(start) else start
    first = (dict(zip(known, values, strict=True)) for values in items)
    watched = file_columns(known, first, local)
    row_of = partial(_load_row, known, start, watched)
    files_of = partial(_files_of_row, row_of, watched)
    return ItemDataset(items, partial(row_of, load), files=files_of, columns=known)


@short_tracebacks
def from_ids(
    ids: Iterable[Any],
    load: Callable[[Any], Any],
    labels: Mapping[Any, Any] | Callable[[Any], Any] | None = None,
) -> ItemDataset:
    """Return a dataset of IDs: one sample per ID.

    Args:
        ids: Any iterable of IDs: strings, numbers, tuples. A set is sorted by `str`.
        load: Called with an ID when its sample is requested; it returns the sample, such as
            `torch.load(f"data/{id}.pt")`.
        labels: A mapping from ID to label, looked up and packed now; or a function of an ID, called
            together with `load`. With either the sample is (what load returned, label).

    Raises:
        InputError: There are no IDs, or one of them has no label.
        OptionError: `load` or `labels` cannot be used.
    """
    _check_load(load)
    if isinstance(ids, str | bytes):
        raise OptionError(
            f"from_ids takes many IDs; got one string, {shortened(ids)}\n  Put it into a list."
        )
    if isinstance(ids, set | frozenset):  # its order changes from run to run
        ids = sorted(ids, key=str)
    # Arrays, tensors and series give Python's own numbers, which are packed as such.
    items = PackedSequence(ids.tolist() if hasattr(ids, "tolist") else ids)
    if not items:
        raise InputError("from_ids: there are no IDs\n  A dataset needs at least one.")
    if labels is None or callable(labels):
        return ItemDataset(items, load, labels)
    if not isinstance(labels, Mapping):
        raise OptionError(
            "labels must be a mapping from ID to label, or a function; got "
            f"{type(labels).__name__}\n  For a list in the IDs' order: dict(zip(ids, labels)). "
            "For a pandas Series with the IDs as its index: labels.to_dict()."
        )
    missing = sum(item not in labels for item in items)
    if missing:
        first = next(item for item in items if item not in labels)
        known = f"There {'is' if len(labels) == 1 else 'are'} {counted(len(labels), 'label')}"
        if labels:  # shows whether the keys are, for example, strings where the IDs are numbers
            known += f", the first of them for {next(iter(labels))!r}"
        raise InputError(
            f"from_ids: {missing:,} of {len(items):,} IDs have no label; the first is {first!r}\n"
            f"  {known}. Leave those IDs out, or give them labels."
        )
    return ItemDataset(items, load, PackedSequence(labels[item] for item in items))


def dataset_from(inputs: Any, load: Callable[[Any], Any]) -> ItemDataset:
    """Return a dataset of what a path, a glob, a table or a list of paths or IDs stands for."""
    is_named = isinstance(inputs, str | os.PathLike)
    if is_table(inputs) or (is_named and not names_files(inputs)):
        return from_table(inputs, load)
    if is_named:
        return from_folder(inputs, load)
    if isinstance(inputs, Mapping | Dataset) or not isinstance(inputs, Iterable):
        raise OptionError(
            f"load= is for paths and rows of a table, and the samples are of a "
            f"{type(inputs).__name__}\n"
            "  Nothing was started. Leave load out, or pass a folder, a glob, a list of paths or a "
            "table."
        )
    return from_ids(inputs, load)


def _check_load(load: object, optional: bool = False) -> None:
    if not (callable(load) or (optional and load is None)):
        raise OptionError(
            f"load must be a function that returns a sample; got {type(load).__name__}\n"
            "  It is called with one item whenever its sample is asked for."
        )


def _load_file(folder: str, load: Callable[[Path], Any], name: str) -> Any:
    return load(Path(folder, name))


def _file_of(folder: str, name: str) -> list[str]:
    return [os.path.join(folder, name)]


def _load_row(
    columns: tuple[str, ...],
    folder: str | None,
    watched: tuple[str, ...],
    load: Callable[[dict[str, Any]], Any] | None,
    values: tuple[Any, ...],
) -> Any:
    row = located(dict(zip(columns, values, strict=True)), folder)
    row = with_open_paths(row, watched, folder)
    return row if load is None else load(row)


def _files_of_row(
    row_of: Callable[..., dict[str, Any]], watched: tuple[str, ...], values: tuple[Any, ...]
) -> list[str]:
    return [path for path, _ in files_of_row(row_of(None, values), watched)]


def _rows(table: pyarrow.Table) -> Iterator[tuple[Any, ...]]:
    for batch in table.to_batches(max_chunksize=GROUP_ROWS):
        yield from zip(*map(python_values, batch.columns), strict=True)
