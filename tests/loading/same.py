"""`assert_same`: two batches are equal, type for type and bit for bit."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy
import torch


def assert_same(a: Any, b: Any, where: str = "batch") -> None:
    """Fail unless both are of one type and hold the same bits, however deep they are nested."""
    assert type(a) is type(b), f"{where}: {type(a)} and {type(b)}"
    if isinstance(a, torch.Tensor):
        _assert_same_tensor(a, b, where)
    elif isinstance(a, numpy.ndarray):
        _assert_same_array(a, b, where)
    elif isinstance(a, numpy.generic):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), f"{where}: {a!r} and {b!r}"
    elif isinstance(a, float):
        assert struct.pack("d", a) == struct.pack("d", b), f"{where}: {a!r} and {b!r}"
    elif isinstance(a, Mapping):
        # The order of keys is part of what a user sees.
        assert list(a) == list(b), f"{where}: keys {list(a)} and {list(b)}"
        for key in a:
            assert_same(a[key], b[key], f"{where}[{key!r}]")
        _assert_same_attributes(a, b, where)
    elif isinstance(a, type):
        assert a is b, f"{where}: {a} and {b}"
    elif isinstance(a, str | bytes | bytearray | range | Set):
        assert a == b, f"{where}: {a!r} and {b!r}"
    elif isinstance(a, Sequence):
        assert len(a) == len(b), f"{where}: {len(a)} and {len(b)} items"
        for position, (one, other) in enumerate(zip(a, b, strict=True)):
            assert_same(one, other, f"{where}[{position}]")
        _assert_same_attributes(a, b, where)
    elif type(a).__eq__ is object.__eq__:
        _assert_same_attributes(a, b, where)
    elif hasattr(a, "__dataclass_fields__"):
        # Compared by `==`, its tensors would be neither true nor false.
        for name in a.__dataclass_fields__:
            assert_same(getattr(a, name), getattr(b, name), f"{where}.{name}")
    else:
        assert a == b, f"{where}: {a!r} and {b!r}"


def _assert_same_attributes(a: Any, b: Any, where: str) -> None:
    for name, value in getattr(a, "__dict__", {}).items():
        assert_same(value, getattr(b, name), f"{where}.{name}")


def _assert_same_tensor(a: torch.Tensor, b: torch.Tensor, where: str) -> None:
    for name in ("dtype", "layout", "device", "requires_grad", "is_quantized", "is_nested"):
        one, other = getattr(a, name), getattr(b, name)
        assert one == other, f"{where}: {name} {one} and {other}"
    if a.is_nested:
        assert_same(list(a.unbind()), list(b.unbind()), where)
        return
    assert a.shape == b.shape, f"{where}: shapes {a.shape} and {b.shape}"
    if a.layout is torch.sparse_coo:
        assert a.is_coalesced() == b.is_coalesced(), f"{where}: only one is coalesced"
        assert_same(a._indices(), b._indices(), f"{where}._indices()")
        assert_same(a._values(), b._values(), f"{where}._values()")
        return
    if a.layout is not torch.strided:
        compressed = "row" if a.layout in (torch.sparse_csr, torch.sparse_bsr) else "col"
        plain = "col" if compressed == "row" else "row"
        for part in (f"c{compressed}_indices", f"{plain}_indices", "values"):
            assert_same(getattr(a, part)(), getattr(b, part)(), f"{where}.{part}()")
        return
    if a.is_quantized:
        assert a.qscheme() == b.qscheme(), f"{where}: {a.qscheme()} and {b.qscheme()}"
        assert (a.q_scale(), a.q_zero_point()) == (b.q_scale(), b.q_zero_point()), where
        assert_same(a.int_repr(), b.int_repr(), f"{where}.int_repr()")
        return
    # `empty_like` keeps the strides of a tensor without gaps, and only the order of the axes of
    # any other: whether a copy kept another tensor's gaps is nobody's concern.
    one, other = torch.empty_like(a).stride(), torch.empty_like(b).stride()
    assert one == other, f"{where}: strides {one} and {other}"
    assert _bits(a).equal(_bits(b)), f"{where}: {a} and {b}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # Of a subclass, the bits alone.
    return plain.as_subclass(torch.Tensor).view(torch.uint8)


def _assert_same_array(a: Any, b: Any, where: str) -> None:
    assert a.dtype == b.dtype, f"{where}: {a.dtype} and {b.dtype}"
    assert a.shape == b.shape, f"{where}: shapes {a.shape} and {b.shape}"
    assert a.flags.writeable == b.flags.writeable, f"{where}: only one is writeable"
    # As with tensors: the order of axes, not the gaps.
    one, other = numpy.empty_like(a).strides, numpy.empty_like(b).strides
    assert one == other, f"{where}: strides {one} and {other}"
    if a.dtype.hasobject:
        assert_same(a.tolist(), b.tolist(), where)
    else:
        assert a.tobytes() == b.tobytes(), f"{where}: {a!r} and {b!r}"
    if isinstance(a, numpy.ma.MaskedArray):
        assert_same(numpy.ma.getmaskarray(a), numpy.ma.getmaskarray(b), f"{where}.mask")
