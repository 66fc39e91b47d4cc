"""Write shards in the MDS format, version 2, from its description."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_CODES = {
    name: code
    for code, name in {
        8: "uint8",
        9: "int8",
        16: "uint16",
        17: "int16",
        18: "float16",
        32: "uint32",
        33: "int32",
        34: "float32",
        64: "uint64",
        65: "int64",
        66: "float64",
    }.items()
}


def mds_shard(columns: Mapping[str, str], samples: Sequence[Mapping[str, Any]], **config: Any):
    """Return the bytes of a shard with these columns, given their encodings."""
    sizes = [fixed_size(each) for each in columns.values()]
    described = {
        "column_encodings": [*columns.values()],
        "column_names": [*columns],
        "column_sizes": sizes,
        "compression": None,
        "format": "mds",
        "hashes": [],
        "size_limit": 1 << 26,
        "version": 2,
        **config,
    }
    text = json.dumps(described, sort_keys=True).encode()
    rows = [_sample(columns, sizes, each) for each in samples]
    offsets = np.cumsum([4 * (len(rows) + 2) + len(text), *map(len, rows)])
    head = struct.pack("<I", len(rows)) + offsets.astype("<u4").tobytes()
    return head + text + b"".join(rows)


def write_mds(folder: Path, columns: Mapping[str, str], shards: Sequence[Sequence[Any]]) -> None:
    """Write shards and their index to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = []
    for at, samples in enumerate(shards):
        name, data = f"shard.{at:05}.mds", mds_shard(columns, samples)
        (folder / name).write_bytes(data)
        listed.append(
            {
                "column_encodings": [*columns.values()],
                "column_names": [*columns],
                "column_sizes": [fixed_size(each) for each in columns.values()],
                "compression": None,
                "format": "mds",
                "hashes": [],
                "version": 2,
                "raw_data": {"basename": name, "bytes": len(data), "hashes": {}},
                "samples": len(samples),
                "size_limit": 1 << 26,
                "zip_data": None,
            }
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": listed}))


def fixed_size(encoding: str) -> int | None:
    """Return the bytes of each value of an encoding; None if they differ."""
    name, _, rest = encoding.partition(":")
    if name == "int":
        return 8
    if name in _CODES:
        return np.dtype(name).itemsize
    dtype, _, shape = rest.partition(":")
    if name == "ndarray" and shape:
        return int(np.prod([*map(int, shape.split(","))])) * np.dtype(dtype).itemsize
    return None


def _sample(columns: Mapping[str, str], sizes: Sequence[int | None], sample: Mapping[str, Any]):
    values = [encoded(each, sample[name]) for name, each in columns.items()]
    open_sizes = [len(each) for each, size in zip(values, sizes, strict=True) if size is None]
    return struct.pack(f"<{len(open_sizes)}I", *open_sizes) + b"".join(values)


def encoded(encoding: str, value: Any) -> bytes:
    """Return a value in an encoding; bytes as they are."""
    name, _, rest = encoding.partition(":")
    if isinstance(value, bytes):
        return value
    if name == "ndarray":
        return _array(value, *rest.partition(":")[::2])
    if name == "int":
        return struct.pack("<q", value)
    if name in _CODES:
        return np.dtype(name).type(value).tobytes()
    if name == "json":
        return json.dumps(value).encode()
    if name in ("pil", "jpeg", "png"):
        return _image(name, value)
    if name.startswith(("list[", "jpeg")):
        inner = name[5:-1] if name.startswith("list[") else "jpeg"
        images = [encoded(inner, each) for each in value]
        sizes = struct.pack(f"<{len(images)}I", *map(len, images))
        start = bytes(4) if name.startswith("list[") else b""
        return start + struct.pack("<I", len(images)) + sizes + b"".join(images)
    return str(value).encode()  # str, str_int, str_float, str_decimal


def _array(value: Any, dtype: str, shape: str) -> bytes:
    head = b"" if dtype else bytes([_CODES[value.dtype.name]])
    if not shape:
        width = next(at for at in range(4) if max(value.shape) < 1 << (8 << at))
        head += (
            bytes([value.ndim << 2 | width]) + np.array(value.shape, f"<u{1 << width}").tobytes()
        )
    return head + value.tobytes()


def _image(form: str, image: Any) -> bytes:
    if form == "pil":
        mode = image.mode.encode()
        return struct.pack("<III", *image.size, len(mode)) + mode + image.tobytes()
    out = io.BytesIO()
    image.save(out, format=form.upper())
    return out.getvalue()
