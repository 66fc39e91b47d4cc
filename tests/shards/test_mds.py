"""Shards of MosaicML Streaming: every encoding but pickle, and refusals of what is damaged."""

from __future__ import annotations

import io
import pickle
import struct
from decimal import Decimal

import numpy as np
import pytest
from PIL import Image

from forebay import InputError
from forebay.shards.mds import MdsShards
from kit.mds_writer import encoded, mds_shard
from kit.shard_reading import BytesShard, ReadShard

RANDOM = np.random.default_rng(0)
IMAGE = Image.fromarray(RANDOM.integers(0, 255, (5, 7, 3), np.uint8))
GRAY = IMAGE.convert("L")
COLUMNS = {"id": "int", "text": "str", "data": "bytes", "label": "uint8"}
SAMPLES = [{"id": -at, "text": "ü" * at, "data": bytes(range(at)), "label": at} for at in range(20)]
# Of each encoding a value that it holds.
VALUES = {
    "bytes": b"\x00\xff",
    "str": "ünïcode",
    "int": -(1 << 40),
    **{f"uint{bits}": (1 << bits) - 1 for bits in (8, 16, 32, 64)},
    **{f"int{bits}": -(1 << bits - 1) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": -1.5 for bits in (16, 32, 64)},
    "str_int": 1 << 100,
    "str_float": 1e-300,
    "str_decimal": Decimal("1.000000000000000000000000000001"),
    "json": {"a": [1, None, {"b": "ü"}]},
    "ndarray": np.arange(12, dtype="f8").reshape(3, 4),
    "ndarray:int16": np.arange(600, dtype="i2").reshape(300, 2),
    "ndarray:uint8:2,3": np.arange(6, dtype="u1").reshape(2, 3),
}
IMAGES = {
    "pil": IMAGE,
    "jpeg": IMAGE,
    "png": GRAY,
    "list[pil]": [IMAGE, GRAY],
    "list[jpeg]": [IMAGE],
    "list[png]": [],
    "jpeg_array": [IMAGE, GRAY],
    "jpegarray": [GRAY],
}


def read(data, columns=None):
    return ReadShard(MdsShards(), BytesShard(data, "shard.00000.mds"), columns)


def one(encoding, value):
    """Return the value that is read of a shard with one sample."""
    (found,) = read(mds_shard({"before": "str", "x": encoding, "after": "int"}, [
        {"before": "b", "x": value, "after": 1}
    ])).read([0])  # fmt: skip
    assert (found["before"], found["after"]) == ("b", 1)
    return found["x"]


@pytest.mark.parametrize("encoding", VALUES)
def test_a_value_has_the_type_of_its_encoding(encoding):
    """Numbers of a width are NumPy's, arrays are writable, all others are Python's."""
    value = VALUES[encoding]
    found = one(encoding, value)
    if isinstance(value, np.ndarray):
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert found.flags.writeable
        assert (found == value).all()
    else:
        assert found == value
        is_wide = encoding.removesuffix("8").rstrip("123456") in ("uint", "int", "float")
        is_numpy = is_wide and encoding != "int"
        assert type(found) is (np.dtype(encoding).type if is_numpy else type(value))


@pytest.mark.parametrize("encoding", IMAGES)
def test_images_are_those_of_pillow(encoding):
    """An image has the pixels that Pillow decodes from the stored bytes."""
    value = IMAGES[encoding]
    found = one(encoding, value)
    assert isinstance(found, list) == isinstance(value, list)
    pairs = zip(*([each] if not isinstance(each, list) else each for each in (found, value)),
                strict=True)  # fmt: skip
    for ours, theirs in pairs:
        if "jpeg" in encoding:
            theirs = Image.open(io.BytesIO(encoded("jpeg", theirs)))
        assert (ours.mode, ours.size, ours.tobytes()) == (
            theirs.mode,
            theirs.size,
            theirs.tobytes(),
        )


def test_pickles_are_refused():
    """A column of pickles is an error, and nothing is run; other columns can be read."""
    data = mds_shard({"x": "pkl", "y": "int"}, [{"x": pickle.dumps(1), "y": 2}])
    with pytest.raises(InputError, match="column 'x' holds pickles, and forebay unpickles nothing"):
        read(data)
    assert read(data, ["y"]).read([0]) == [{"y": 2}]


def test_only_the_head_is_read_for_the_index():
    """Of a shard of a megabyte, the offsets and the description of columns are read."""
    shard = BytesShard(mds_shard({"x": "bytes"}, [{"x": bytes(100_000)}] * 10))
    found = MdsShards().find(shard)
    assert found.rows.sum() == 10
    assert shard.was_read < 1000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: struct.pack("<I", 1 << 31) + data[4:], "2,147,483,648 samples do not fit"),
        (lambda data: data[:-1], "its samples lie from"),
        (lambda data: data[:8] + data[4:8] + data[12:], "or not in order"),
        (
            lambda data: data.replace(b'"version": 2', b'"version": 1'),
            "it is of version 1 of 'mds'",
        ),
        (lambda data: data.replace(b'"str"', b'"sta"'), "column 'text' has the encoding 'sta'"),
        (lambda data: data.replace(b'"uint8"]', b'"uint8" '), "no description of its columns"),
        (lambda data: data.replace(b"[8, null", b"[8, -123"), "its columns are not those"),
        (lambda data: data[:2], "2 bytes at 0|4 bytes at 0"),
    ],
    ids=["count", "truncated", "order", "version", "encoding", "json", "size", "empty"],
)
def test_a_damaged_shard_is_named(change, words):
    """Counts, offsets and columns that cannot be are an error that names the shard."""
    with pytest.raises(InputError, match=r"shard\.00000\.mds.*" + f"({words})"):
        read(change(mds_shard(COLUMNS, SAMPLES)))


@pytest.mark.parametrize(
    ("encoding", "value", "words"),
    [
        ("ndarray", b"\x08\x07" + b"\xff" * 8 + b"x", "an array of shape"),
        ("ndarray", b"\x07\x04\x01x", "column 'x'"),
        ("ndarray", b"", "column 'x'"),
        ("pil", struct.pack("<III", 1 << 31, 1 << 31, 3) + b"RGB" + bytes(9), "an image of"),
        ("jpeg", b"no image", "column 'x'"),
        ("list[png]", bytes(4) + b"\xff\xff\xff\xff", "4,294,967,295 images in 8 bytes"),
        ("jpeg_array", struct.pack("<III", 1, 1 << 30, 0), "an image lies outside"),
        ("json", b"[" * 100_000, "column 'x' is nested too deeply"),
        ("str", b"\xff", "column 'x'"),
        ("str_int", b"9" * 5000, "column 'x'"),
        ("str_decimal", b"one", "column 'x'"),
    ],
)
def test_a_damaged_value_names_its_column(encoding, value, words):
    """A value that claims more than it has fails, before memory is taken for it."""
    with pytest.raises(ValueError, match=words):
        one(encoding, value)


def test_sizes_within_a_sample_are_checked():
    """Columns that claim more bytes than their sample has are an error."""
    data = bytearray(mds_shard({"x": "str"}, [{"x": "abc"}]))
    data[-7:-3] = struct.pack("<I", 1 << 31)
    with pytest.raises(ValueError, match="columns of 2,147,483,652 bytes in a sample of 7"):
        read(bytes(data)).read([0])
