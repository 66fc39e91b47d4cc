"""Pickles a batch without the bytes of its tensors and arrays: the in-band pickle of protocol 5.

The bytes are written to a slot in the order in which pickle visits them. Buffers that do not fit
stay in the pickle. The functions at the end rebuild a batch.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch

from forebay import torch_internals
from forebay.engine.memory.slab_layout import Cursor
from forebay.torch_internals import TypedStorage, UntypedStorage

# A dtype is sent as its index in this list. Older torch lacks the last few.
_DTYPES = [
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
        *("float8_e8m0fnu", "float4_e2m1fn_x2"),
    )
    if hasattr(torch, name)
]
CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}

# Placeholder in a pickle for bytes that are already in the slot: the next buffer.
_PLACED = pickle.PickleBuffer(bytearray(1))


class BatchPickler(pickle.Pickler):
    """Pickles a batch, and copies its buffers into a slot.

    Args:
        on_class: Called with each class before it is pickled by its name.
    """

    def __init__(self, on_class: Callable[[type], None] | None = None) -> None:
        self._on_class = on_class
        self._file = io.BytesIO()
        super().__init__(self._file, protocol=5, buffer_callback=self._buffer)
        self._buffers: list[tuple[int, int]] = []

    def aim(
        self,
        view: memoryview,
        address: int,
        reserve: Callable[[int, int], str | None] | None = None,
    ) -> None:
        """Use this slot, whose first byte has this address; `reserve` is its `Cursor`'s."""
        self._view = view
        self._address = address
        self._capacity = len(view)
        self.cursor = Cursor(len(view), reserve)

    def pickled(
        self, batch: Any, most: int
    ) -> tuple[bytes | tuple[int, int], tuple[tuple[int, int], ...]]:
        """Pickle a batch.

        Args:
            batch: The batch.
            most: If the in-band pickle is larger, it is written to the slot, too.

        Returns:
            The in-band pickle, or its offset and length; and those of each buffer.
        """
        try:
            self.dump(batch)
            size = self._file.tell()
            at = self.cursor.take(size) if size > most else None
            if at is None:
                return self._file.getvalue(), tuple(self._buffers)
            with self._file.getbuffer() as written:
                self._view[at : at + size] = written[:size]
            return (at, size), tuple(self._buffers)
        finally:
            # Reused, since creating a pickler costs as much as pickling a small batch.
            self.clear_memo()
            self._file.seek(0)
            self._file.truncate()
            self._buffers.clear()

    def reducer_override(self, obj: Any) -> Any:
        """Reduce tensors and arrays; pickle calls this for every type that is not built in."""
        kind = type(obj)
        if kind is torch.Tensor:
            code = CODES.get(obj.dtype)
            if code is None or obj.requires_grad or not is_plain(obj):
                return _unusual(obj)
            if obj.is_contiguous() and (nbytes := obj.nbytes):
                return _tensor, (self._place(obj, nbytes), code, *obj.shape)
            return self._strided(obj, code)
        if kind is np.ndarray:
            return self._array(obj)
        if kind is UntypedStorage and obj.device.type == "cpu":
            if not obj.nbytes():
                return UntypedStorage, (0,)
            whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(obj)
            return _storage, (self._place(whole, obj.nbytes()),)
        if kind is TypedStorage:
            # torch would write a whole file in its own format into the pickle.
            return torch_internals.typed, (torch_internals.untyped(obj), obj.dtype)
        if self._on_class is not None and isinstance(obj, type):
            self._on_class(obj)
        return NotImplemented

    def _strided(self, tensor: torch.Tensor, code: int) -> Any:
        shape, stride = tuple(tensor.shape), tensor.stride()
        if not tensor.numel():
            return _empty, (code, shape, stride)
        span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if span > 2 * tensor.numel():
            # Mostly gaps: a slice of a large tensor.
            tensor = tensor.contiguous()
            return _tensor, (self._place(tensor, tensor.nbytes), code, *shape)
        return _as_strided, (self._place(tensor, span * tensor.itemsize), code, shape, stride)

    def _place(self, tensor: torch.Tensor, nbytes: int) -> pickle.PickleBuffer | bytearray:
        """Put a tensor's bytes, gaps included, into the slot, or return them."""
        address = tensor.data_ptr()
        inside = address - self._address
        if 0 <= inside <= self._capacity - nbytes:
            # It was collated into the slot.
            self._buffers.append((inside, nbytes))
            return _PLACED
        at = self.cursor.take(nbytes)
        if at is None:
            return bytearray((ctypes.c_char * nbytes).from_address(address))
        ctypes.memmove(self._address + at, address, nbytes)
        self._buffers.append((at, nbytes))
        return _PLACED

    def _array(self, array: np.ndarray[Any, Any]) -> Any:
        """Reduce an array as numpy does, but for any strides and dtypes, and writable."""
        dtype = array.dtype
        if dtype.hasobject or not dtype.itemsize:
            return NotImplemented
        order: Literal["F", "C"] = "F" if array.flags.fnc else "C"
        at = self.cursor.take(array.nbytes) if array.nbytes else None
        room: Any = bytearray(array.nbytes) if at is None else self._view[at : at + array.nbytes]
        np.copyto(np.ndarray(array.shape, dtype, room, order=order), array)
        if at is not None:
            self._buffers.append((at, array.nbytes))
            room = _PLACED
        # Numeric dtypes are sent as one letter; others are pickled.
        name = dtype.char if dtype.isbuiltin == 1 and dtype.kind in "biufc" else dtype
        return np.ndarray, (array.shape, name, room, 0, None, order)

    def _buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Return whether a buffer stays in the pickle."""
        if buffer is _PLACED:
            return False
        raw = buffer.raw()
        at = self.cursor.take(raw.nbytes)
        if at is None:
            return True
        self._view[at : at + raw.nbytes] = raw
        self._buffers.append((at, raw.nbytes))
        return False


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is dense numbers in this process's memory."""
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and not (tensor.is_nested or tensor.is_neg() or tensor.is_conj())
    )


def _unusual(tensor: torch.Tensor) -> Any:
    """Reduce a tensor that is not plain, or leave it to torch."""
    if tensor.requires_grad:
        if not tensor.is_leaf:
            raise RuntimeError(
                "a batch holds a tensor with a gradient history, which cannot leave its process\n"
                f"  It has shape {tuple(tensor.shape)} and comes from {tensor.grad_fn}.\n"
                "  The batch was not sent. Return tensor.detach() from the dataset or collate_fn."
            )
        return _with_grad, (tensor.detach(),)
    # torch's own pickles of these leak every tensor, or warn when they are read.
    layout, shape = tensor.layout, tuple(tensor.shape) if not tensor.is_nested else ()
    if layout is torch.sparse_coo:
        return _sparse, (*torch_internals.sparse_parts(tensor), shape, tensor.is_coalesced())
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = tensor.crow_indices(), tensor.col_indices(), tensor.values()
        return _compressed, (*parts, shape, layout)
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = tensor.ccol_indices(), tensor.row_indices(), tensor.values()
        return _compressed, (*parts, shape, layout)
    if tensor.is_quantized and tensor.qscheme() is torch.per_tensor_affine:
        scale, zero_point = tensor.q_scale(), tensor.q_zero_point()
        return torch_internals.quantized, (tensor.int_repr(), scale, zero_point)
    return NotImplemented


# The functions that an in-band pickle calls. Reshaping in place is faster than a view.


def _tensor(data: Any, code: int, *shape: int) -> torch.Tensor:
    return torch.frombuffer(data, dtype=_DTYPES[code]).resize_(shape)


def _as_strided(
    data: Any, code: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    return torch.frombuffer(data, dtype=_DTYPES[code]).as_strided_(shape, stride)


def _empty(code: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=_DTYPES[code], device="cpu")


def _with_grad(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_()


def _sparse(
    indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], coalesced: bool
) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        indices, values, shape, is_coalesced=coalesced, check_invariants=False
    )


def _compressed(
    outer: torch.Tensor,
    inner: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, ...],
    layout: torch.layout,
) -> torch.Tensor:
    return torch.sparse_compressed_tensor(
        outer, inner, values, shape, layout=layout, check_invariants=False
    )


def _storage(data: Any) -> UntypedStorage:
    return torch.frombuffer(data, dtype=torch.uint8).untyped_storage()
