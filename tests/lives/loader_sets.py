"""What samples are read from: memory, caches and shards of all formats, in a folder or a bucket."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import signal
import socket
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import torch
from torch.utils.data import Dataset

import forebay
from kit.mds_writer import write_mds
from kit.range_connections import Loop
from kit.range_faults import Settings
from kit.range_server import BACKLOG, Service, control, environment_of

from . import loader_data as data

SHARDS = ("tar", "parquet", "jsonl", "arrow", "mds")
STORED = (*SHARDS, "cache")
PARTS = (range(8), range(8, 16), range(16, data.COUNT))


class Stored(Dataset):
    """What a cache is made from."""

    def __init__(self, layout: str) -> None:
        self.layout = layout

    def __len__(self) -> int:
        return data.COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        return data.stored_sample(index, self.layout)


def layout_of(kind: str, place: str) -> str:
    """Return which columns stored samples have."""
    return "tar" if kind == "tar" else "nested" if place == "nested" else "plain"


def store(kind: str, place: str, folder: Path) -> None:
    """Write all samples to a folder."""
    layout, is_small = layout_of(kind, place), place == "compressed"
    if kind == "cache":
        forebay.cache(
            Stored(layout),
            folder,
            num_workers=0,
            progress=False,
            shard_bytes=500,
            compression="zstd" if is_small else None,
        )
        return
    folder.mkdir(parents=True)
    shards = [[data.stored_sample(each, layout) for each in part] for part in PARTS]
    if kind == "mds":
        write_mds(folder, {"id": "int", "name": "str"}, shards)
        return
    for number, samples in enumerate(shards):
        write_shard(kind, folder, number, samples, is_small=is_small)


def write_shard(
    kind: str, folder: Path, number: int, samples: list[dict[str, Any]], *, is_small: bool
) -> None:
    """Write one shard, by a rename."""
    suffix = f".{kind}.gz" if is_small and kind in ("tar", "jsonl") else f".{kind}"
    part = folder / f"_part-{number:03}"
    if kind == "parquet":
        codec = "zstd" if is_small else "none"
        pa.parquet.write_table(
            pa.Table.from_pylist(samples), part, row_group_size=2, compression=codec
        )
    elif kind == "arrow":
        table = pa.Table.from_pylist(samples)
        options = pa.ipc.IpcWriteOptions(compression="zstd" if is_small else None)
        with pa.ipc.new_file(part, table.schema, options=options) as writer:
            for batch in table.to_batches(max_chunksize=2):
                writer.write_batch(batch)
    else:
        packed = _tar(samples) if kind == "tar" else _lines(samples)
        part.write_bytes(gzip.compress(packed) if is_small else packed)
    part.rename(folder / f"part-{number:03}{suffix}")


def _tar(samples: list[dict[str, Any]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for sample in samples:
            for extension, content in sample.items():
                info = tarfile.TarInfo(f"{int(sample['id']):06}.{extension}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def _lines(samples: list[dict[str, Any]]) -> bytes:
    lines = b"".join(json.dumps(each).encode() + b"\n" for each in samples)
    return lines.removesuffix(b"\n") if len(samples) % 2 else lines


def opened(
    kind: str, place: str, folder: Path, kept: Path, decode: data.Decode
) -> forebay.ShardDataset | forebay.CachedDataset:
    """Open what was stored."""
    location = f"s3://{folder.parent.name}/{folder.name}" if is_remote(place) else folder
    options: dict[str, Any] = {}
    if place == "kept":
        options = {"directory": kept, "disk": "1MB"}
    if kind == "cache":
        return forebay.open_cache(location, decode, **options)
    return forebay.open_shards(location, format=kind, transform=decode, progress=False, **options)


def is_remote(place: str) -> bool:
    """Return whether samples are in a bucket."""
    return place in ("bucket", "kept")


class Bucket:
    """A server of buckets in a process of its own, and what clients of it need."""

    def __init__(self, root: Path) -> None:
        listening = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self.process = os.fork()
        if not self.process:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            loop = Loop()
            service = Service(root.resolve(), loop)
            service.set(Settings())
            loop.start(service.accept(listening))
            try:
                loop.run()
            finally:
                os._exit(1)
        listening.close()

    @property
    def environment(self) -> dict[str, str]:
        """What S3 clients read from the environment."""
        return environment_of(self.url)

    def fault(self, kind: str, count: int, seconds: float) -> None:
        """Answer some of the next requests with a fault."""
        control(
            self.url,
            json.dumps({"faults": [{"kind": kind, "count": count, "seconds": seconds}]}),
        )

    def close(self) -> None:
        """End the server."""
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)


@contextlib.contextmanager
def bucket(place: str, root: Path) -> Iterator[Bucket | None]:
    """Serve the buckets of a folder, if a place needs it."""
    if not is_remote(place):
        yield None
        return
    server = Bucket(root)
    try:
        yield server
    finally:
        server.close()


def in_memory(kind: str, maker: data.Maker, version: int) -> Any:
    """Return a dataset that is not stored."""
    if kind == "columns":
        numbers = torch.arange(data.COUNT)
        columns = {
            "id": numbers,
            "value": numbers**2,
            "name": [f"n{each}" for each in range(data.COUNT)],
        }
        return forebay.from_table(columns, columns=["id", "value", "name"])
    if kind == "mix":
        sources = {
            "a": (data.Table(maker, version, 9), 1.0),
            "b": (data.Table(maker, version, 14, 100), 2.0),
        }
        return forebay.mix(sources, samples=data.COUNT)
    lengths = [1 + each % 4 for each in range(data.COUNT)]
    if kind == "packed":
        return forebay.pack_sequences(data.Table(maker, version), lengths, size=5)
    if kind == "grouped":
        return forebay.batch_by_length(data.Table(maker, version), lengths, max_tokens=12)
    classes = {
        "map": data.Table,
        "groups": data.Groups,
        "epochal": data.Epochal,
        "stream": data.Stream,
        "stream-shuffled": data.Shuffled,
        "stream-state": data.Stateful,
        "stream-epoch": data.EpochStream,
        "stream-state-epoch": data.StatefulEpochStream,
    }
    return classes[kind](maker, version)
