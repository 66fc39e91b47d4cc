"""Padding: collate tensors of different shapes, directly into the batch's memory.

samples ──> dense tensors that agree ──> allocate the batch ──> write each into its row

Every byte of a large batch is written once: a value of a sample, or padding.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, pairwise, repeat
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.utils.data import StackDataset, Subset, TensorDataset, default_collate

from forebay.base.batches import PackedBytes, differing, leaves
from forebay.base.formatting import counted
from forebay.base.torch_internals import collates_as_usual
from forebay.collating.rules import (
    ByField,
    Collation,
    Misfit,
    Path,
    Rule,
    default_at,
    described,
    fields_of,
    odd_one,
    refusal,
    shown,
)
from forebay.errors import OptionError
from forebay.memory.packing import new_tensor

if TYPE_CHECKING:
    from forebay.base.arrow_arrays import Columns

_DENSE = (
    "pad() takes dense tensors, arrays and sequences of numbers. To pad a field of a sample: "
    "by_field(NAME=pad()), or by_field({INDEX: pad()}) for a tuple."
)
# Bytes. For a smaller batch, it is faster to fill the whole than each margin.
SMALL = 1 << 16


class Padded(NamedTuple):
    """Padded values and their lengths; the result of `pad(lengths=True)`.

    Attributes:
        values: [batch, longest, ...], as without `lengths`.
        lengths: int64 [batch]: the size of each sample's first dimension.
    """

    values: torch.Tensor
    lengths: torch.Tensor

    @property
    def mask(self) -> torch.Tensor:
        """Bool [batch, longest]: True at a sample's own values, False at padding."""
        positions = torch.arange(self.values.shape[1], device=self.lengths.device)
        return positions < self.lengths[:, None]


@dataclass(frozen=True)
class Pad(Collation):
    """The collate function that `pad` returns."""

    value: float
    multiples: tuple[int, ...]
    lengths: bool

    def collate(self, samples: Sequence[Any], path: Path) -> torch.Tensor | Padded:
        """See `pad`."""
        tensors = _tensors(samples, path)
        first = tensors[0]
        needed = max(len(self.multiples), int(self.lengths))
        if first.dim() < needed:
            odd = Misfit(path, None, described(first), "")
            advice = f"multiple_of and lengths need {counted(needed, 'dimension')} or more."
            raise refusal(odd, len(tensors), advice)
        check_value("pad(value", self.value, first.dtype, path)
        shapes = [tensor.shape for tensor in tensors]
        multiples = chain(self.multiples, repeat(1))
        shape = [len(tensors)]
        for sizes, multiple in zip(zip(*shapes, strict=True), multiples, strict=False):
            shape.append(-(-max(sizes) // multiple) * multiple)
        values = new_tensor(shape, first.dtype) if first.is_cpu else first.new_empty(shape)
        lengths = [sizes[0] for sizes in shapes] if first.dim() else []
        self._fill(values, tensors, lengths)
        if not self.lengths:
            return values
        return Padded(values, torch.tensor(lengths, dtype=torch.int64))

    def _fill(self, values: torch.Tensor, tensors: list[torch.Tensor], lengths: list[int]) -> None:
        """Write each sample, and padding after its end in each dimension."""
        sizes, others = values.shape[1:], values.shape[2:]
        if lengths and all(tensor.shape[1:] == others for tensor in tensors):
            write_rows(values, zip(tensors), lengths, self.value)
            return
        filled = values.nbytes < SMALL
        if filled:
            values.fill_(self.value)
        for row, tensor in zip(values.unbind(), tensors, strict=True):
            for dimension, (size, whole) in enumerate(zip(tensor.shape, sizes, strict=True)):
                if size < whole:
                    if not filled:
                        row.narrow(dimension, size, whole - size).fill_(self.value)
                    row = row.narrow(dimension, 0, size)
            row.copy_(tensor)


def write_rows(
    batch: torch.Tensor,
    rows: Iterable[Sequence[torch.Tensor]],
    lengths: Iterable[int],
    value: float,
) -> None:
    """Write the tensors of each row one after another, and padding after the last.

    It is a single call for all rows: for short tensors, the calls take most of the time.

    Args:
        batch: [rows, size, ...].
        lengths: The sizes of each row's tensors in the first dimension, together.
    """
    size, others = batch.shape[1], batch.shape[2:]
    missing = [size - length for length in lengths]
    margins = batch.new_full((sum(missing), *others), value).split_with_sizes(missing)
    pieces = [each for row, margin in zip(rows, margins, strict=True) for each in (*row, margin)]
    torch.cat(pieces, out=batch.flatten(0, 1))


def check_value(option: str, value: float, dtype: torch.dtype, path: Path) -> None:
    """Raise OptionError if a value to pad with is not one of a dtype.

    Args:
        option: What gave the value, such as "pad(value".
    """
    if dtype.is_floating_point or dtype.is_complex:
        low, high = torch.finfo(dtype).min, torch.finfo(dtype).max
        fits = not math.isfinite(value) or low <= value <= high
    else:
        whole = None if dtype is torch.bool else torch.iinfo(dtype)
        low, high = (0, 1) if whole is None else (whole.min, whole.max)
        fits = low <= value <= high and value == int(value)
    if not fits:
        name = str(dtype).removeprefix("torch.")
        raise OptionError(
            f"{option}={value}) is not a value of {name}, the samples' dtype"
            f"{f' in field {shown(path)}' if path else ''}\n"
            f"  Its values range from {low} to {high}. The batch was not made. Choose "
            "another value, or have the dataset return another dtype."
        )


def _tensors(samples: Sequence[Any], path: Path) -> list[torch.Tensor]:
    """Return samples as dense tensors that agree in dimensions, dtype and device."""
    count = len(samples)
    tensors = [dense(sample, at, count, path, _DENSE) for at, sample in enumerate(samples)]
    untyped = [
        tensor is not sample and not isinstance(sample, np.ndarray) and tensor.shape == (0,)
        for sample, tensor in zip(samples, tensors, strict=True)
    ]
    if any(untyped) and not all(untyped):
        # An empty sequence has no dtype, so it matches the others.
        model = tensors[untyped.index(False)]
        empty = model.new_empty((0,) * max(model.dim(), 1))
        tensors = [empty if untyped[at] else tensor for at, tensor in enumerate(tensors)]
    first = tensors[0]
    kind = first.dim(), first.dtype, first.device
    if all((one.dim(), one.dtype, one.device) == kind for one in tensors):
        return tensors
    # Shapes may differ, so they do not decide which sample is odd, but they help the reader.
    odd = odd_one(path, [_kind(tensor) for tensor in tensors])
    assert odd is not None and odd.number is not None
    odd = odd._replace(what=f"{odd.what}, of shape {tuple(tensors[odd.number].shape)}")
    advice = "pad() only changes sizes: have the dataset return one dtype and number of dimensions."
    raise refusal(odd, count, advice)


def _kind(tensor: torch.Tensor) -> str:
    dimensions = counted(tensor.dim(), "dimension")
    device = "" if tensor.is_cpu else f" on {tensor.device}"
    return f"{str(tensor.dtype).removeprefix('torch.')} with {dimensions}{device}"


def dense(sample: Any, index: int, count: int, path: Path, advice: str) -> torch.Tensor:
    """Return a sample as a dense tensor, with its memory where torch can use that.

    Args:
        index: The number of the sample, of `count`.
        advice: What to do if it is no such tensor.
    """
    try:
        if isinstance(sample, np.ndarray):
            # torch warns of read-only arrays and rejects negative strides.
            whole = sample.flags.writeable and min(sample.strides, default=0) >= 0
            return torch.from_numpy(sample if whole else sample.copy())
        if not isinstance(sample, torch.Tensor):
            return torch.tensor(sample)
    except (TypeError, ValueError, RuntimeError) as error:
        odd = Misfit(path, index, f"{described(sample)}, which is not a tensor ({error})", "")
        raise refusal(odd, count, advice) from error
    is_dense = sample.layout is torch.strided and not (sample.is_nested or sample.is_quantized)
    if not is_dense or sample.requires_grad:
        grad = ", with a gradient: detach() it" if sample.requires_grad else ""
        raise refusal(Misfit(path, index, described(sample) + grad, ""), count, advice)
    return sample


# ---- byte packing --------------------------------------------------------------------------------

_ADVICE = (
    "packed() takes encoded bytes: bytes, bytearrays, and uint8 arrays or tensors of one "
    "dimension in host memory. Return those from the dataset, such as path.read_bytes()."
)


@dataclass(frozen=True)
class Pack(Collation):
    """The collate function that `packed` returns.

    Attributes:
        is_required: Whether samples without any encoded bytes are an error. Otherwise they are
            collated as torch does it.
    """

    is_required: bool = True

    def collate(self, samples: Sequence[Any], path: Path) -> Any:
        """See `packed`."""
        if not samples or any(map(_is_encoded, samples)):
            return _packed(samples, path)
        if not any(_is_encoded(leaf) for sample in samples for leaf in leaves(sample)):
            if not self.is_required:
                return default_at(samples, path)
            odd = Misfit(path, None, f"{described(samples[0])}, without encoded bytes,", "")
            raise refusal(odd, len(samples), _ADVICE)
        fields = fields_of(samples[0]) or ()
        rules: dict[Any, Rule] = dict.fromkeys(fields, replace(self, is_required=False))
        return ByField(rules).collate(samples, path)


def _packed(samples: Sequence[Any], path: Path) -> PackedBytes:
    """Copy samples into one tensor, each once."""
    views = [_view(sample, index, len(samples), path) for index, sample in enumerate(samples)]
    offsets = list(accumulate(map(len, views), initial=0))
    data = new_tensor((offsets[-1],), torch.uint8)
    # Slices of a memoryview cost a fifth of those of an array or tensor.
    whole = data.numpy().data
    for view, (first, end) in zip(views, pairwise(offsets), strict=True):
        whole[first:end] = view
    return PackedBytes(data, torch.tensor(offsets, dtype=torch.int64))


def _view(sample: Any, index: int, count: int, path: Path) -> memoryview:
    """Return the bytes of a sample."""
    if not _is_encoded(sample):
        raise refusal(Misfit(path, index, described(sample), ""), count, _ADVICE)
    if isinstance(sample, torch.Tensor):
        sample = sample.numpy()
    view = sample.data if isinstance(sample, np.ndarray) else memoryview(sample)
    return view if view.format == "B" else memoryview(bytes(sample))  # numpy.bytes_


def _is_encoded(value: Any) -> bool:
    if isinstance(value, bytes | bytearray):
        return True
    if isinstance(value, np.ndarray):
        return value.dtype == np.uint8 and value.ndim == 1
    if isinstance(value, torch.Tensor):
        is_dense = value.layout is torch.strided and not value.is_nested
        return is_dense and value.is_cpu and value.dtype is torch.uint8 and value.dim() == 1
    return isinstance(value, memoryview) and value.format == "B" and value.ndim == 1


# ---- slicing -------------------------------------------------------------------------------------
# Make whole batches by indexing, for datasets that only consist of tensors, arrays or columns.
#
#     TensorDataset, tensor, array        one index_select for each
#     forebay.from_table(columns=)        one take for each column
#     Hugging Face dataset                the same, with the types that the dataset itself returns
#     Subset, StackDataset                of any of these


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
    if "columns_to_slice" in vars(kind):  # forebay's; a subclass may have other samples
        columns: Columns = dataset.columns_to_slice
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
    try:
        known = {name: str(value) for name, value in dataset.format.items()}
        state = id(dataset.data), id(_indices_of(dataset)), known
        if (found := _slicers.get(dataset)) is None or found[0] != state:
            found = _slicers[dataset] = state, _of_table(dataset)
    except Exception:  # noqa: BLE001 - another version, or samples that cannot be collated
        return None
    return found[1]


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
    if not is_arrow and any(column.null_count for column in table.columns):
        return None
    from forebay.base.arrow_arrays import Columns

    columns = Columns(table, "the dataset in Arrow format")
    order = None if indices is None else Columns(indices.table, "its indices")

    def cut(rows: torch.Tensor) -> Any:
        if order is not None:
            rows = torch.from_numpy(next(iter(order.take(rows.numpy()).values())).astype("i8"))
        return _tensors_of(columns, rows)

    slicer = Slicer(cut, columns.nbytes // len(columns), has_samples=not is_arrow)
    return slicer if is_arrow else _converted(slicer, dataset)


def _converted(slicer: Slicer, dataset: Any) -> Slicer | None:
    """Return a slicer with the types of a dataset's samples; None if they are not so simple."""
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
        if any(differing(cut(torch.tensor([row])), expected)):
            return None
    return replace(slicer, cut=cut)


def _list_of(kind: type, of_numpy: bool) -> Callable[[list[Any]], list[Any]]:
    """Return what makes strings or bytes of another type; NumPy's end before trailing zeros."""
    if not of_numpy:
        return list
    zero: Any = b"\0" if issubclass(kind, bytes) else "\0"
    return lambda values: [kind(each.rstrip(zero)) for each in values]
