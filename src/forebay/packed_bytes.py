"""Encoded samples of a batch, such as JPEG files, in one tensor; made by `collate.packed`.

    data     |ff d8 ff … d9|ff d8 … d9|ff d8 ff … d9|     uint8
    offsets  0             n          m            total  int64

`trees` treats an instance as a leaf, and it has no `to` method: decoders, also those that decode on
a GPU, take encoded bytes from host memory, so they stay there when a batch is moved to a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import index as as_index
from typing import overload

import torch


class PackedBytes:
    """Samples that are byte strings of different lengths, one after the other in one tensor.

    `len(packed)` is the number of samples, `packed[i]` is sample i: a uint8 tensor [its length],
    a view of `data`. `packed[i:j]` is a `PackedBytes` of these samples, with a view of `data`.
    `list(packed)` is the list of tensors that `decode_jpeg` of torchvision and torchcodec takes.

    With `DataLoader(device=)`, and in `predict(device=)`, it stays in host memory, because
    decoders take encoded bytes from there: `decode_jpeg(list(packed), device="cuda")`. For a kernel
    that reads them on the device use `packed.data.to(device)`.

    Attributes:
        data: uint8 [bytes of all samples], contiguous.
        offsets: int64 [samples + 1], in host memory, ascending from 0: sample i is
            `data[offsets[i]:offsets[i + 1]]`.
    """

    __slots__ = ("data", "offsets")

    def __init__(self, data: torch.Tensor, offsets: torch.Tensor) -> None:
        self.data = data
        self.offsets = offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> PackedBytes: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | PackedBytes:
        count = len(self)
        if isinstance(index, slice):
            first, end, step = index.indices(count)
            if step != 1:
                raise ValueError(f"a slice of PackedBytes must have step 1; got {step}")
            offsets = self.offsets[first : max(first, end) + 1]
            return PackedBytes(self.data[offsets[0] : offsets[-1]], offsets - offsets[0])
        at = as_index(index)
        if not -count <= at < count:
            raise IndexError(f"there is no sample {at}: there are {count}")
        first, end = self.offsets[at % count :][:2].tolist()
        return self.data[first:end]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.data.split_with_sizes(self.offsets.diff().tolist()))

    def __repr__(self) -> str:
        return f"PackedBytes({len(self)} samples, {self.data.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.data.nbytes + self.offsets.nbytes

    def pin_memory(self) -> PackedBytes:
        """Return the same samples in page-locked memory, as `pin_memory=True` of a loader does."""
        return PackedBytes(self.data.pin_memory(), self.offsets.pin_memory())
