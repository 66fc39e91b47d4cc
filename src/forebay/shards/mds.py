"""Shards of MosaicML Streaming (MDS, version 2): the samples follow offsets and a description.

    number of samples │ offsets, from the shard's beginning │ JSON: columns │ samples
    sample: sizes of those columns that have none of their own │ values

A value is what Streaming returns for its encoding, and an array is writable. Nothing is unpickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.base.table_files import refuse
from forebay.errors import InputError, shortened
from forebay.shards.format import (
    BlockDecoder,
    FoundBlocks,
    ShardFile,
    ShardFormat,
    blocks_of,
    check_names,
)

_AGAIN = "If it is truncated, copy it again; it must be a shard of version 2."
_PICKLE = "pkl"
_MOST_HEADER_BYTES = 16 << 20
_SCALARS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
_FLOATS = ("float16", "float32", "float64")
# The first byte of an array without a dtype of its column.
_DTYPES = {8: "u1", 9: "i1", 16: "u2", 17: "i2", 18: "f2", 32: "u4", 33: "i4", 34: "f4"} | {
    64: "u8",
    65: "i8",
    66: "f8",
}


class MdsShards(ShardFormat):
    """Shards that `MDSWriter` wrote."""

    name = "mds"
    suffixes = (".mds",)
    reads_all = False

    def matches(self, head: bytes) -> bool:
        """See `ShardFormat`."""
        return b'"column_encodings"' in head and b'"mds"' in head  # few samples, or JSON of others

    def find(self, shard: ShardFile) -> FoundBlocks:
        """See `ShardFormat`."""
        count = int(np.frombuffer(shard.read(0, 4), "<u4")[0])
        begin = 4 * (count + 2)
        if begin > shard.size:
            what = f"{count:,} samples do not fit into {shard.size:,} bytes"
            refuse(shard.name, what, _AGAIN)
        places = np.frombuffer(shard.read(4, begin - 4), "<u4").astype(np.int64)
        if (np.diff(places) <= 0).any() or places[0] < begin or places[-1] != shard.size:
            what = f"its samples lie from {places[0]:,} to {places[-1]:,} of {shard.size:,} bytes"
            refuse(shard.name, f"{what}, or not in order", _AGAIN)
        if places[0] - begin > _MOST_HEADER_BYTES:
            what = f"the description of its columns has {places[0] - begin:,} bytes"
            refuse(shard.name, what, _AGAIN)
        info = bytes(shard.read(begin, int(places[0]) - begin))
        try:
            _columns_of(info)
        except ValueError as error:
            refuse(shard.name, str(error), _AGAIN, error)
        return blocks_of(places[:-1].tolist(), int(places[-1]))._replace(info=info)

    def chosen(
        self, info: bytes, extents: npt.NDArray[np.int64], columns: Sequence[str]
    ) -> npt.NDArray[np.bool_]:
        """See `ShardFormat`: whole samples are needed."""
        check_names(_columns_of(info)[0], columns)
        return np.ones(len(extents), bool)

    def decoder(self, info: bytes, columns: Sequence[str] | None) -> BlockDecoder:
        """See `ShardFormat`."""
        return _Samples(*_columns_of(info), columns)


def _columns_of(info: bytes) -> tuple[list[str], list[str], list[int | None]]:
    """Return names, encodings and fixed sizes of the columns; raise ValueError."""
    try:
        found = json.loads(info)
        version, form = found["version"], found["format"]
        names, encodings, sizes = (
            list(found[f"column_{each}"]) for each in ("names", "encodings", "sizes")
        )
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"no description of its columns: {shortened(error)}") from error
    if (version, form) != (2, "mds"):
        raise ValueError(f"it is of version {shortened(version)} of {shortened(form)}")
    is_text = all(isinstance(each, str) for each in (*names, *encodings))
    is_size = all(each is None or (type(each) is int and 0 <= each < 1 << 32) for each in sizes)
    if not (is_text and is_size and len(names) == len(set(names)) == len(encodings) == len(sizes)):
        raise ValueError("its columns are not those of a shard")
    for name, encoding in zip(names, encodings, strict=True):
        try:
            if encoding != _PICKLE:
                _reader_of(encoding)
        except (ValueError, LookupError) as error:
            raise ValueError(f"column {name!r} has the encoding {shortened(encoding)}") from error
    return names, encodings, sizes


class _Samples(BlockDecoder):
    """The samples of a shard."""

    def __init__(
        self,
        names: list[str],
        encodings: list[str],
        sizes: list[int | None],
        columns: Sequence[str] | None,
    ) -> None:
        self._names, self._order = names, columns
        self._sizes = np.array([each or 0 for each in sizes], np.int64)
        self._open = np.flatnonzero(self._sizes == 0)
        self._readers = list[Callable[[memoryview], Any] | None]()
        for name, each in zip(names, encodings, strict=True):
            is_chosen = columns is None or name in columns
            if is_chosen and each == _PICKLE:
                raise InputError(
                    f"column {name!r} holds pickles, and forebay unpickles nothing that it reads\n"
                    "  Name the other columns in columns=, or write the shards again with another "
                    "encoding, such as json or ndarray."
                )
            self._readers.append(_reader_of(each) if is_chosen else None)

    def sample(self, data: memoryview) -> Any:
        """See `BlockDecoder`."""
        begin, sizes = 4 * len(self._open), self._sizes
        if begin:
            if begin > len(data):
                raise ValueError(f"a sample of {len(data):,} bytes, too few for its columns")
            sizes = sizes.copy()
            sizes[self._open] = np.frombuffer(data[:begin], "<u4")
        sizes = sizes.tolist()
        if begin + sum(sizes) != len(data):
            what = f"columns of {begin + sum(sizes):,} bytes in a sample of {len(data):,}"
            raise ValueError(what)
        found = {}
        for name, read, size in zip(self._names, self._readers, sizes, strict=True):
            if read is not None:
                found[name] = _value(name, read, data[begin : begin + size])
            begin += size
        return found if self._order is None else {name: found[name] for name in self._order}


def _value(name: str, read: Callable[[memoryview], Any], data: memoryview) -> Any:
    try:
        return read(data)
    except ImportError as error:
        what = f"column {name!r} holds images, which need Pillow"
        raise InputError(f"{what}\n  Run: pip install pillow") from error
    except RecursionError as error:
        raise ValueError(f"column {name!r} is nested too deeply") from error
    except Exception as error:
        raise ValueError(f"column {name!r}: {shortened(error)}") from error


# ---- encodings -----------------------------------------------------------------------------------


def _reader_of(encoding: str) -> Callable[[memoryview], Any]:
    """Return what reads values of an encoding; raise KeyError or ValueError for none."""
    name, _, rest = encoding.partition(":")
    if name == "ndarray":
        dtype, _, sizes = rest.partition(":")
        shape = tuple(map(int, sizes.split(","))) if sizes else None
        if dtype and dtype not in _SCALARS + _FLOATS:
            raise ValueError(dtype)
        return partial(_array, dtype, shape)
    if name in _SCALARS + _FLOATS:
        return partial(_scalar, np.dtype(name).newbyteorder("<"))
    return _READERS[encoding]


def _scalar(dtype: np.dtype[Any], data: memoryview) -> Any:
    (value,) = np.frombuffer(data, dtype)
    return value


def _array(dtype: str, shape: tuple[int, ...] | None, data: memoryview) -> Any:
    if not dtype:
        dtype, data = _DTYPES[data[0]], data[1:]
    if shape is None:
        dims, width = data[0] >> 2, 1 << data[0] % 4
        shape = tuple(np.frombuffer(data[1 : 1 + dims * width], f"<u{width}").tolist())
        data = data[1 + dims * width :]
    kind = np.dtype(dtype).newbyteorder("<")
    if math.prod(shape) * kind.itemsize != len(data):
        raise ValueError(f"an array of shape {shape} and {kind} in {len(data):,} bytes")
    return np.frombuffer(data, kind).reshape(shape).astype(dtype)


def _text(data: memoryview) -> str:
    return str(data, "utf-8")


def _encoded_image(form: str, data: memoryview) -> Any:
    from PIL import Image

    return Image.open(BytesIO(data), formats=[form])


def _raw_image(data: memoryview) -> Any:
    from PIL import Image

    width, height, length = np.frombuffer(data[:12], "<u4").tolist()
    mode, pixels = _text(data[12 : 12 + length]), data[12 + length :]
    if width * height > 8 * len(pixels):  # Pillow takes the memory before it looks
        raise ValueError(f"an image of {width:,} x {height:,} in {len(pixels):,} bytes")
    return Image.frombytes(mode, (width, height), bytes(pixels))


def _images(read: Callable[[memoryview], Any], begin: int, data: memoryview) -> list[Any]:
    """Return a list: after `begin` bytes the number of images, their sizes, and the images."""
    (count,) = np.frombuffer(data[begin : begin + 4], "<u4").tolist()
    at = begin + 4 + 4 * count
    if at > len(data):
        raise ValueError(f"{count:,} images in {len(data):,} bytes")
    found = []
    for size in np.frombuffer(data[begin + 4 : at], "<u4").tolist():
        if at + size > len(data):
            raise ValueError("an image lies outside of its value")
        found.append(read(data[at : at + size]))
        at += size
    return found


_JPEG, _PNG = partial(_encoded_image, "JPEG"), partial(_encoded_image, "PNG")
_READERS: dict[str, Callable[[memoryview], Any]] = {
    "bytes": bytes,
    "str": _text,
    "int": lambda data: int(_scalar(np.dtype("<i8"), data)),
    "str_int": lambda data: int(_text(data)),
    "str_float": lambda data: float(_text(data)),
    "str_decimal": lambda data: Decimal(_text(data)),
    "json": lambda data: json.loads(_text(data)),
    "pil": _raw_image,
    "jpeg": _JPEG,
    "png": _PNG,
    "list[pil]": partial(_images, _raw_image, 4),
    "list[jpeg]": partial(_images, _JPEG, 4),
    "list[png]": partial(_images, _PNG, 4),
    "jpeg_array": partial(_images, _JPEG, 0),
    "jpegarray": partial(_images, _JPEG, 0),
}
