"""Pack the encoded samples of a batch, such as JPEG files, into one tensor of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from forebay.base.batches import PackedBytes, leaves
from forebay.collating.rules import (
    ByField,
    Collation,
    Misfit,
    Path,
    Rule,
    default_at,
    described_value,
    fields_of,
    refusal,
)
from forebay.memory.packing import new_tensor

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
            odd = Misfit(path, None, f"{described_value(samples[0])}, without encoded bytes,", "")
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
        raise refusal(Misfit(path, index, described_value(sample), ""), count, _ADVICE)
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
