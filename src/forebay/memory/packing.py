"""Packing batches to be sent between processes; `packed_batch.py` unpacks them.

The batch is pickled with its buffers out of band. Buffers are copied into the slot, once, or were
created there (see `collate_into`). The in-band pickle that remains is sent by pipe if it is small,
and in the slot otherwise. The reader unpickles it over the slot, without a copy, and may write to
the tensors.

    worker                                   owner of the slab
    packer.begin(slot)                       slot = slab.take()
    batch = collate(samples)
    packed = packer.pack(batch)
    del batch
    packed = packer.seal(packed)  ------->   slot = packed.settle(slab, slot)
                                             memory = memory_of(packed, slab, slot)
                                             batch = unpack(packed, memory)
"""

from __future__ import annotations

import ctypes
import io
import pickle
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from threading import get_ident
from typing import Any, Literal, cast

import numpy as np
import torch

from forebay.base import torch_internals
from forebay.base.torch_internals import TypedStorage, UntypedStorage
from forebay.memory.layout import Cursor, Slot
from forebay.memory.packed_batch import PackedBatch
from forebay.memory.slab import Slab

# ---- batch pickler -------------------------------------------------------------------------------
# Pickles a batch without the bytes of its tensors and arrays: the in-band pickle of protocol 5.
#
# The bytes are written to a slot in the order in which pickle visits them. Buffers that do not fit
# stay in the pickle. The functions at the end rebuild a batch.

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
    """Pickles a batch, and copies its buffers into a slot."""

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
        """Pickle a batch."""
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
            if code is None or obj.requires_grad or not is_plain_tensor(obj):
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


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is dense numbers in this process's memory."""
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
        indices = tensor.crow_indices(), tensor.col_indices()
        return _compressed, (*indices, tensor.values(), shape, layout)
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        indices = tensor.ccol_indices(), tensor.row_indices()
        return _compressed, (*indices, tensor.values(), shape, layout)
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


# ---- allocation ----------------------------------------------------------------------------------
# Allocate a tensor for the current batch: in its slot, in a worker that has one, or on the heap.
#
#     collate_into(packer) ── the packer's allocator ───┐
#     collate.pad ─────────── new_tensor(shape, dtype) ─┴──> in the slot, or torch.empty
#
# A collate function need not know whether it runs in a worker. A tensor that is created in the slot
# is not copied again.

# Returns a tensor in the slot, or None if that is impossible.
Allocator = Callable[[Sequence[int], torch.dtype], torch.Tensor | None]

# The last one is used. It is global, like torch's table of collate functions: a worker makes one
# batch at a time.
_allocators: list[Allocator] = []


def new_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous tensor in this process's memory, its values unset, to be written to.

    It must be returned in the batch: in a worker, its memory may be used again once the batch is
    gone.
    """
    made = _allocators[-1](shape, dtype) if _allocators else None
    return torch.empty(tuple(shape), dtype=dtype, device="cpu") if made is None else made


# ---- packing -------------------------------------------------------------------------------------

# A batch this small is sent entirely by pipe and never uses a slot.
INLINE_BYTES = 1 << 14
# For a smaller tensor, allocating on the heap and copying is faster than allocating in the slot.
WORTH_PLACING = 1 << 14


_NOTHING = memoryview(bytearray())


class Packer:
    """Packs one batch after another, in a worker."""

    def __init__(self, slab: Slab, on_class: Callable[[type], None] | None = None) -> None:
        """Pack into slots of this slab; `on_class` is called with each class in a batch."""
        self._slab = slab
        self._pickler = BatchPickler(on_class)
        self._alive: weakref.ref[Any] | None = None
        self._used, self._thread = 0, 0
        # Whether user code drops its references to the batches that it returns.
        self._trusting = True
        self.begin(None)

    def begin(self, slot: Slot | None) -> None:
        """Start a batch; call it after its samples were loaded and before they are collated.

        Otherwise tensors that the dataset itself stacks would be in a slot that is used again.
        After a batch that failed, `begin(None)` ends it.

        Args:
            slot: Where to put the bytes. None: they are sent in the in-band pickle.
        """
        self._view = _NOTHING if slot is None else self._slab.view(slot)
        if slot is None:
            self._pickler.aim(self._view, 0)
        else:
            reserve = partial(self._slab.reserve, slot) if self._slab.is_bounded else None
            address = ctypes.addressof(ctypes.c_char.from_buffer(self._view))
            self._pickler.aim(self._view, address, reserve)
        self._owner, self._alive = _NOTHING, None
        self._thread = get_ident()

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Return a tensor in the slot, its values unset, for collation to write into."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < WORTH_PLACING or not self._trusting or self._thread != get_ident():
            return None
        at = self._pickler.cursor.take(nbytes)
        if at is None:
            return None
        if self._alive is None:
            # All tensors of this batch share one base array, which tells whether any is alive.
            array = np.frombuffer(self._view, np.uint8)
            self._owner, self._alive = array.data, weakref.ref(array)
        return torch.frombuffer(self._owner[at : at + nbytes], dtype=dtype).resize_(shape)

    def pack(self, batch: Any) -> PackedBatch:
        """Pack a batch. Drop the batch, then `seal` what is returned, before it is sent."""
        try:
            in_band, buffers = self._pickler.pickled(batch, INLINE_BYTES)
        finally:
            self._used = used = self._pickler.cursor.used
            refused = self._pickler.cursor.refused
            self._pickler.aim(_NOTHING, 0)
            self._owner = _NOTHING
        body = bytearray(self._view[:used]) if used <= INLINE_BYTES else None
        nbytes = used + len(in_band) if isinstance(in_band, bytes) else used
        return PackedBatch(in_band, buffers, body, nbytes, refused=refused)

    def seal(self, packed: PackedBatch) -> PackedBatch:
        """Return the record to send; call it after the worker has dropped the batch.

        A `collate_fn` may keep a reference to the batch. Its tensors must not change then, so this
        slot is never used again, and later batches are not collated into slots.
        """
        if self._alive is None or self._alive() is None:
            return packed
        self._trusting = False
        body = packed.body or bytearray(self._view[: self._used])
        return packed._replace(body=body, kept=True)


def collate_into(packer: Packer) -> Callable[[], None]:
    """Make torch's default_collate stack tensors in the packer's slot; for a worker process.

    This also works if a user's `collate_fn` calls default_collate. The results equal torch's.
    Tensors from `new_tensor` are in the slot, too.
    """

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        def collate_tensors(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
            first = batch[0]
            dtype = first.dtype
            if type(first) is not torch.Tensor or dtype not in CODES or not is_plain_tensor(first):
                return cast(torch.Tensor, original(batch, collate_fn_map=collate_fn_map))
            shape = (len(batch), *first.shape)
            out = packer.new(shape, dtype)
            if out is None:
                stacked = torch.stack(batch)
                if stacked.dtype is dtype and stacked.is_contiguous() and not stacked.requires_grad:
                    return stacked
                # torch's own workers also stack into a contiguous tensor like the first, or raise.
                out = torch.empty(shape, dtype=dtype, device="cpu")
            return torch.stack(batch, out=out)

        return collate_tensors

    def allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        return packer.new(shape, dtype) if dtype in CODES else None

    restore_torch = torch_internals.replace_tensor_collation(replace)
    _allocators.append(allocate)

    def undo() -> None:
        restore_torch()
        _allocators.remove(allocate)

    return undo
