"""Make whole batches by indexing, for datasets that only consist of tensors, arrays or columns.

    TensorDataset, tensor, array        one index_select for each
    forebay.from_table(columns=)        one take for each column
    Hugging Face dataset                the same, with the types that the dataset itself returns
    Subset, StackDataset                of any of these

For every other dataset, samples are made one by one and collated.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import index as as_index
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.utils.data import Dataset, StackDataset, Subset, TensorDataset, default_collate

from forebay.base.formatting import byte_size, counted, summary
from forebay.base.origins import Origin
from forebay.base.torch_internals import collates_as_usual
from forebay.errors import InputError, shortened

if TYPE_CHECKING:
    from forebay.columns.arrow_columns import Columns


@dataclass(frozen=True, slots=True)
class Slicer:
    """Makes batches by indexing: what default_collate gives for the single samples, bit for bit.

    Attributes:
        cut: Makes a batch of an int64 tensor of indices.
        nbytes: About how many bytes a row has.
        has_samples: Whether a batch may also be made of single samples, if it cannot be cut.
    """

    cut: Callable[[torch.Tensor], Any]
    nbytes: int
    has_samples: bool = True

    def __call__(self, index: Any) -> Any:
        """Return the batch of some indices, in any sequence."""
        rows = torch.as_tensor(index)
        if rows.is_floating_point():
            raise TypeError("an index must be an integer")
        return self.cut(rows.to(torch.int64))


class ColumnDataset(Dataset[dict[str, Any]]):
    """A map-style dataset of some columns of a table; made by `from_table(table, columns=...)`.

    Attributes:
        columns: A `Columns`, or what has its methods and reads blocks when they are needed.
    """

    def __init__(self, columns: Any) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def by_blocks(self) -> Any:
        """What says how columns of a file are read by blocks; None for columns in memory."""
        return getattr(self.columns, "dataset", None)

    def origins(self, *, reads: bool = True) -> Sequence[Origin]:
        """Return the files of the rows, in order, or a hash of those in memory."""
        found: Sequence[Origin] = self.columns.origins(reads)
        return found

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a row: tensors, strings and bytes by column."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return some rows, with one take for each column."""
        found = self.columns.each([sample_number(index) for index in indices])
        columns = map(_values, found.values())
        return [dict(zip(found, row, strict=True)) for row in zip(*columns, strict=True)]

    def __repr__(self) -> str:
        count, nbytes = counted(len(self.columns.types), "column"), self.columns.nbytes
        return f"<ColumnDataset: {len(self):,} rows, {count}, {nbytes:,} bytes>"

    def _repr_html_(self) -> str:
        """Return the summary for a notebook."""
        facts = {"samples": len(self), "size": byte_size(self.columns.nbytes)}
        return summary("ColumnDataset", facts | {"columns": shortened(self.columns.types)})


def _values(column: Any) -> Sequence[Any]:
    """Return the values of rows as samples have them: tensors, strings, bytes, lists, dicts."""
    if not isinstance(column, list):
        return torch.from_numpy(column).unbind()
    return [torch.from_numpy(each) if isinstance(each, np.ndarray) else each for each in column]


def sample_number(index: object) -> int:
    """Return the index of one sample; a slice is refused with what to use instead."""
    if isinstance(index, slice):
        raise TypeError(
            "a dataset returns one sample at a time and does not support slices\n"
            "  Use torch.utils.data.Subset(dataset, range(start, stop)) for a part of it."
        )
    return as_index(index)  # type: ignore[arg-type]  # it raises TypeError for others


def slicing(dataset: Any, collate_fn: Any) -> Slicer | None:
    """Return what makes batches by indexing; None if indexing does not suffice."""
    if collate_fn is not default_collate or not collates_as_usual():
        return None
    return _slicing(dataset)


def _slicing(dataset: Any) -> Slicer | None:
    kind = type(dataset)
    if kind is Subset:
        inner = _slicing(dataset.dataset)
        return inner and replace(inner, cut=_Chosen(dataset.indices, inner.cut))
    if kind is StackDataset:
        return _stacked(dataset.datasets)
    if kind is TensorDataset and dataset.tensors:
        # A list, since default_collate turns tuples into lists.
        return _stacked(dataset.tensors) if all(map(_is_plain, dataset.tensors)) else None
    if _is_plain(dataset) and dataset.dim() > 0:
        return Slicer(partial(_pick, dataset), dataset[:1].nbytes)
    if kind is np.ndarray and dataset.ndim and dataset.dtype.isnative and dataset.flags.writeable:
        # With one dimension samples are NumPy's numbers, and torch does not take all of them.
        kinds = "biufc" if dataset.ndim > 1 or dataset.itemsize == 1 else "bifc"
        return _slicing(torch.from_numpy(dataset)) if dataset.dtype.kind in kinds else None
    if kind is ColumnDataset:  # a subclass may have other samples
        columns = dataset.columns
        return Slicer(partial(_tensors_of, columns), columns.nbytes // len(columns))
    hugging_face = sys.modules.get("datasets.arrow_dataset")
    if hugging_face is not None and kind is hugging_face.Dataset and len(dataset):
        return _of_hugging_face(dataset)
    return None


def _stacked(parts: Any) -> Slicer | None:
    """Return what makes a list of batches, or a dict of them, of datasets side by side."""
    names = list(parts) if isinstance(parts, dict) else None
    slicers = [_slicing(each) for each in (parts if names is None else parts.values())]
    found = [each for each in slicers if each is not None and each.has_samples]
    if len(found) < len(slicers):
        return None

    def cut(rows: torch.Tensor) -> Any:
        batches = [each.cut(rows) for each in found]
        return batches if names is None else dict(zip(names, batches, strict=True))

    return Slicer(cut, sum(each.nbytes for each in found))


class _Chosen:
    """Makes batches of the indices of a `Subset`."""

    def __init__(self, indices: Any, cut: Callable[[torch.Tensor], Any]) -> None:
        self._indices, self._cut = indices, cut
        self._rows: torch.Tensor | None = None

    def __call__(self, rows: torch.Tensor) -> Any:
        """Return a batch."""
        if self._rows is None:  # not before: most slicers are only asked whether there is one
            found = torch.as_tensor(self._indices)
            if found.is_floating_point() or found.dim() != 1:
                raise TypeError("an index must be an integer")
            self._rows = found.to(torch.int64)
        return self._cut(self._rows[rows])


def _pick(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    try:
        return torch.index_select(tensor, 0, rows)
    except IndexError:  # index_select does not accept negative indices, but is five times as fast
        return tensor[rows]


def _is_plain(value: Any) -> bool:
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.requires_grad
        and not value.is_nested
        and not value.is_quantized
    )


def _tensors_of(columns: Columns, rows: torch.Tensor) -> dict[str, Any]:
    """Return the rows of some columns as tensors and lists, by name."""
    return {
        name: values if isinstance(values, list) else torch.from_numpy(values)
        for name, values in columns.take(rows.numpy()).items()
    }


# ---- hugging face --------------------------------------------------------------------------------
# A dataset of the library `datasets` is an Arrow table, mapped from files, and a format, which
# converts rows. A few rows are asked for, to learn the types: where these are not plainly those of
# the columns, batches are made of the dataset's own samples.

_FORMATS = (None, "torch", "numpy", "arrow")


# The slicer of each dataset, and what it depends on: making one reads rows.
_slicers: WeakKeyDictionary[Any, tuple[Any, Slicer | None]] = WeakKeyDictionary()


def _of_hugging_face(dataset: Any) -> Slicer | None:
    """Return what makes batches of a dataset's columns; None if its samples have to be read."""
    state: Any = None
    try:
        known = {name: str(value) for name, value in dataset.format.items()}
        state = id(dataset.data), id(_indices_of(dataset)), known
        if (before := _slicers.get(dataset)) is not None and before[0] == state:
            return before[1]
        found = _of_table(dataset)
    except Exception as error:  # noqa: BLE001 - types that no batch has, or another version
        _warn_of_samples(dataset, error)
        found = None
    _slicers[dataset] = state, found
    return found


def _warn_of_samples(dataset: Any, error: Exception) -> None:
    """Warn that batches are made of single samples, which the user may not expect."""
    try:
        default_collate(dataset.__getitems__([0]))
    except Exception:  # noqa: BLE001 - then a loader raises it as well
        return
    why = str(error).partition("\n")[0]
    warnings.warn(
        f"the columns of the Hugging Face dataset cannot be read as they are: {why}\n  So its "
        "samples are read one by one, which gives the same batches but takes much longer. "
        "dataset.select_columns([...]) leaves columns out.",
        RuntimeWarning,
        stacklevel=2,
    )


def _indices_of(dataset: Any) -> Any:
    """Return the rows that a Hugging Face dataset selects, as a table; None if those are all."""
    return getattr(dataset, "_indices", None)


def _of_table(dataset: Any) -> Slicer | None:
    form, table, indices = dataset.format, dataset.data.table, _indices_of(dataset)
    is_arrow, shown = form["type"] == "arrow", set(form["columns"])
    has_others = form["output_all_columns"] and len(shown) < table.num_columns
    if form["type"] not in _FORMATS or has_others:
        return None
    table = table.select([name for name in table.column_names if name in shown])
    if not is_arrow:
        for name in table.column_names:
            if table.column(name).null_count:
                raise InputError(f"column {shortened(name)} has nulls")
    from forebay.columns.column_types import open_columns

    columns = open_columns(table, "the dataset in Arrow format")
    order = None if indices is None else open_columns(indices.table, "its indices")

    def cut(rows: torch.Tensor) -> Any:
        if order is not None:
            rows = torch.from_numpy(next(iter(order.take(rows.numpy()).values())).astype("i8"))
        return _tensors_of(columns, rows)

    slicer = Slicer(cut, columns.nbytes // len(columns), has_samples=not is_arrow)
    return slicer if is_arrow else _converted(slicer, dataset)


def _converted(slicer: Slicer, dataset: Any) -> Slicer | None:
    """Return a slicer with the types of a dataset's samples; None if they are not so simple."""
    from forebay.base.batch_digests import digested

    convert: dict[str, Callable[[Any], Any]] = {}

    def cut(rows: torch.Tensor) -> Any:
        batch = slicer.cut(rows)
        return {name: function(batch[name]) for name, function in convert.items()}

    for row in {0, len(dataset) // 2, len(dataset) - 1}:
        expected = default_collate(dataset.__getitems__([row]))
        for name, values in expected.items():
            if isinstance(values, torch.Tensor):
                convert.setdefault(name, partial(torch.Tensor.to, dtype=values.dtype))
            else:
                of_numpy = dataset.format["type"] is not None
                convert.setdefault(name, _list_of(type(values[0]), of_numpy))
        if digested(cut(torch.tensor([row]))) != digested(expected):
            return None
    return replace(slicer, cut=cut)


def _list_of(kind: type, of_numpy: bool) -> Callable[[list[Any]], list[Any]]:
    """Return what makes strings or bytes of another type; NumPy's end before trailing zeros."""
    if not of_numpy:
        return list
    zero: Any = b"\0" if issubclass(kind, bytes) else "\0"
    return lambda values: [kind(each.rstrip(zero)) for each in values]
