"""Padding: collate tensors of different shapes, directly into the batch's memory.

samples ──> dense tensors that agree ──> allocate the batch ──> write each into its row

Every byte of a large batch is written once: a value of a sample, or padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np
import torch

from forebay.base.formatting import counted
from forebay.collating.rules import (
    Collation,
    Misfit,
    Path,
    described_value,
    odd_one,
    refusal,
    shown,
)
from forebay.errors import OptionError
from forebay.memory.packing import new_tensor

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
            odd = Misfit(path, None, described_value(first), "")
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
        odd = Misfit(path, index, f"{described_value(sample)}, which is not a tensor ({error})", "")
        raise refusal(odd, count, advice) from error
    is_dense = sample.layout is torch.strided and not (sample.is_nested or sample.is_quantized)
    if not is_dense or sample.requires_grad:
        grad = ", with a gradient: detach() it" if sample.requires_grad else ""
        raise refusal(Misfit(path, index, described_value(sample) + grad, ""), count, advice)
    return sample
