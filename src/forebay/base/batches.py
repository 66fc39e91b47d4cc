"""Samples and batches in any containers: walk them, count bytes, move, pin, split."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserList
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from operator import index as as_index
from typing import Any, NamedTuple, overload

import numpy as np
import torch

from forebay.base import torch_internals

# ---- containers ----------------------------------------------------------------------------------
# Walk the containers that samples and batches are made of.
#
#     {"image": tensor, "boxes": [a, b]}  ── leaves ──>  tensor, a, b
#                                         ── mapped ──>  {"image": f(tensor), "boxes": [f(a), f(b)]}
#
# Containers are mappings, lists, tuples, NamedTuples, and instances of dataclasses and attrs
# classes. Everything else is a leaf.


class Container(NamedTuple):
    """The contents of one container."""

    kind: str
    keys: tuple[Any, ...]
    values: tuple[Any, ...]


def opened(value: Any) -> Container | None:
    """Return the contents of a container; None for a leaf."""
    kind = type(value)
    if kind is dict or isinstance(value, Mapping):
        return Container("mapping", tuple(value), tuple(value.values()))
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None)
        if names is not None:
            return Container("namedtuple", tuple(names), tuple(value))
        return Container("sequence", tuple(range(len(value))), tuple(value))
    if isinstance(value, list | UserList):
        return Container("sequence", tuple(range(len(value))), tuple(value))
    names = field_names(kind)
    if names is None:
        return None
    # Fields with `init=False` may be unset.
    names = tuple(name for name in names if hasattr(value, name))
    return Container("fields", names, tuple(getattr(value, name) for name in names))


def field_names(kind: type) -> tuple[str, ...] | None:
    """Return the fields of a dataclass or an attrs class; None for any other class."""
    if dataclasses.is_dataclass(kind):
        return tuple(each.name for each in dataclasses.fields(kind))
    attributes = getattr(kind, "__attrs_attrs__", None)
    return None if attributes is None else tuple(each.name for each in attributes)


def rebuilt(value: Any, branch: Container, values: Sequence[Any]) -> Any:
    """Return a container like `value` with other values for the same keys.

    It has the same type, and attributes that are not fields are the same objects
    (the `default_factory` of a defaultdict). The `__init__` of a dataclass is not called. A
    sequence whose class cannot be called with a list of its items becomes a plain tuple or list.
    """
    if branch.kind == "mapping":
        if type(value) is dict:
            return dict(zip(branch.keys, values, strict=True))
        if isinstance(value, MutableMapping):
            whole = copy.copy(value)
            for key, each in zip(
                branch.keys, values, strict=True
            ):  # not `update`, which may differ
                whole[key] = each
            return whole
        kind: Any = type(value)
        return kind(dict(zip(branch.keys, values, strict=True)))
    if branch.kind == "namedtuple":
        return type(value)._make(values)
    if branch.kind == "fields":
        whole = copy.copy(value)
        for name, each in zip(branch.keys, values, strict=True):
            object.__setattr__(whole, name, each)  # it may be frozen
        return whole
    try:
        return type(value)(values)
    except TypeError:
        return tuple(values) if isinstance(value, tuple) else list(values)


def leaves(tree: Any, *, lists: bool = True) -> Iterator[Any]:
    """Yield the leaves of a tree, in order; a list is a leaf without `lists`."""
    branch = opened(tree) if lists or not isinstance(tree, list) else None
    if branch is None:
        yield tree
        return
    for value in branch.values:
        yield from leaves(value, lists=lists)


def mapped(function: Callable[[Any], Any], tree: Any, *, lists: bool = True) -> Any:
    """Return the same tree with each leaf replaced by what `function` returns for it."""
    branch = opened(tree) if lists or not isinstance(tree, list) else None
    if branch is None:
        return function(tree)
    return rebuilt(tree, branch, [mapped(function, each, lists=lists) for each in branch.values])


# ---- packed bytes --------------------------------------------------------------------------------
# Encoded samples of a batch, such as JPEG files, in one tensor; made by `collate.packed`.
#
#     data     |ff d8 ff … d9|ff d8 … d9|ff d8 ff … d9|     uint8
#     offsets  0             n          m            total  int64
#
# An instance is a leaf, and it has no `to` method: decoders, also those that
# decode on a GPU, take encoded bytes from host memory, so they stay there when a batch is moved
# to a device.


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


# ---- batches -------------------------------------------------------------------------------------

# Attributes of attributes are followed so far: deeper than any batch, so this ends cycles.
MAX_DEPTH = 4
_COMPRESSED = (torch.sparse_csr, torch.sparse_bsr, torch.sparse_csc, torch.sparse_bsc)


def nbytes(batch: Any) -> int:
    """Return the bytes of all tensors, arrays and byte strings in a batch.

    For an object that is not a container and has no `nbytes`, its attributes are counted, such as
    the tensors of a PyG graph. Objects with two references count twice.
    """
    return sum(_leaf_nbytes(leaf, depth=0) for leaf in leaves(batch))


def _leaf_nbytes(leaf: Any, depth: int) -> int:
    if isinstance(leaf, torch.Tensor):
        return _tensor_nbytes(leaf)
    if isinstance(leaf, bytes | bytearray | memoryview):
        return memoryview(leaf).nbytes
    if isinstance(leaf, str | int | float | type) or leaf is None:
        return 0
    size = getattr(leaf, "nbytes", None)
    if isinstance(size, int):
        return size
    known = getattr(leaf, "__dict__", None)
    if known is None or depth >= MAX_DEPTH:
        return 0
    return sum(_leaf_nbytes(each, depth + 1) for each in leaves(known))


def _tensor_nbytes(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.strided and not tensor.is_nested:
        return tensor.nbytes
    if tensor.is_nested:
        return sum(map(_tensor_nbytes, tensor.unbind()))
    if tensor.layout is torch.sparse_coo:
        indices, values = torch_internals.sparse_parts(tensor)
        return indices.nbytes + values.nbytes
    if tensor.layout not in _COMPRESSED:  # the size of others, such as mkldnn's, is unknown
        return tensor.numel() * tensor.element_size()
    by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    outer = tensor.crow_indices() if by_row else tensor.ccol_indices()
    inner = tensor.col_indices() if by_row else tensor.row_indices()
    return outer.nbytes + inner.nbytes + tensor.values().nbytes


def tensor_bytes(tensor: torch.Tensor) -> Any:
    """Return the numbers of a strided tensor, in order, as a NumPy array of bytes.

    They are a copy if the tensor has gaps, is on a device, or is the view of a conjugate.
    """
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # torch takes a tensor of one element as contiguous, whatever its stride.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy()


def moved(batch: Any, device: torch.device, *, non_blocking: bool = True) -> Any:
    """Return a batch with its tensors on a device; other leaves are the same objects.

    An object with a `to` method, such as a PackedSequence, a graph or a tokenizer's batch, is moved
    with that.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=non_blocking)
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    branch = opened(batch)
    if branch is None:
        return batch
    values = [moved(value, device, non_blocking=non_blocking) for value in branch.values]
    return rebuilt(batch, branch, values)


def tensors_of(batch: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch, also those that are attributes of its objects."""
    for leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif depth < MAX_DEPTH and isinstance(known := getattr(leaf, "__dict__", None), dict):
            yield from tensors_of(known, depth + 1)


def pinned(batch: Any) -> Any:
    """Return a batch in page-locked memory, as `pin_memory=True` gives it.

    Tensors, and objects with a `pin_memory` method, are replaced by its result; containers keep
    their types, and all other leaves are the same objects.
    """
    if callable(getattr(batch, "pin_memory", None)):
        return batch.pin_memory()
    branch = opened(batch)
    if branch is None:
        return batch
    return rebuilt(batch, branch, [pinned(value) for value in branch.values])


def halves(batch: Any, count: int) -> tuple[Any, Any] | None:
    """Cut a batch of `count` samples after its first half.

    Args:
        count: How many samples it has, at least 2.
    """
    middle = count // 2
    try:
        return _cut(batch, count, slice(0, middle)), _cut(batch, count, slice(middle, count))
    except (_UnknownError, RecursionError):  # of a batch that contains itself
        return None


class _UnknownError(Exception):
    """It is unknown which samples a value belongs to."""


def items_in(value: Any) -> int | None:
    """Return the size of the first dimension of a tensor, an array or a list; None for others."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return len(value) if value.ndim else None
    return len(value) if isinstance(value, list) else None


def _has_rows(value: Any, count: int) -> bool:
    if isinstance(value, torch.Tensor) and (value.is_nested or value.layout is not torch.strided):
        return False
    return isinstance(value, torch.Tensor | np.ndarray) and value.shape[:1] == (count,)


def _cut(value: Any, count: int, which: slice) -> Any:
    if isinstance(value, PackedBytes):
        if len(value) != count:
            raise _UnknownError
        return value[which]
    if isinstance(value, torch.Tensor | np.ndarray):
        if not _has_rows(value, count):
            raise _UnknownError
        return value[which]
    branch = opened(value)
    if branch is None:
        raise _UnknownError
    if type(value) in (list, tuple) and all(
        isinstance(item, str | bytes | int | float) for item in value
    ):
        if len(value) != count:
            raise _UnknownError
        return value[which]
    if type(value) is list and len(value) == count and all(_has_rows(one, count) for one in value):
        raise _UnknownError  # a list of fields, or of samples
    return rebuilt(value, branch, [_cut(item, count, which) for item in branch.values])
