"""How each library reads the samples of a bucket, shuffled, in batches of 64, decoding nothing.

Each is tuned as its documentation says; `TRIED` has the numbers of workers and threads that are
tried, and the tables show the best of them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset

from benchmarks.bucket.stores import BUCKET

BATCH = 64
# Samples that WebDataset and Hugging Face shuffle among: about as many as forebay's window has.
SHUFFLED = 2_000


@dataclass(frozen=True, slots=True)
class Target:
    """What is to be read.

    Attributes:
        url: Of the server.
        folder: Where the server's objects are; only for the names of shards.
        scratch: A folder for what a library keeps on disk.
        workers: Worker processes.
        threads: Requests at once of each process, where a library can be told.
        epochs: How many.
        options: Of forebay's `open_cache`, and "world" and "rank".
    """

    url: str
    folder: str
    scratch: str
    count: int
    workers: int = 2
    threads: int = 16
    epochs: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> tuple[int, int]:
        """Rank and number of ranks."""
        return int(self.options.get("rank", 0)), int(self.options.get("world", 1))


Epochs = Iterator[Iterable[Sequence[Any]]]


def keep(samples: Any) -> list[Any]:
    """Return the samples of a batch as they are."""
    return list(samples)


def loaded(kind: Callable[..., Any], dataset: Any, target: Target, **more: Any) -> Epochs:
    """Yield a loader like torch's once for each epoch."""
    loader = kind(
        dataset,
        batch_size=BATCH,
        num_workers=target.workers,
        collate_fn=keep,
        persistent_workers=True,
        **more,
    )
    for _ in range(target.epochs):
        yield loader


def forebay(target: Target) -> Epochs:
    """By blocks, through the process that fetches."""
    import forebay

    rank, world = target.world
    given = {"window": "256MB", **target.options}
    buffer = given.pop("buffer", None)
    opened = {name: given[name] for name in ("window", "disk", "directory") if name in given}
    dataset = forebay.open_cache(f"s3://{BUCKET}/forebay", **opened)
    loader = forebay.DataLoader(
        dataset,
        batch_size=BATCH // world if given.get("split") else BATCH,
        shuffle=True,
        seed=0,
        num_workers=target.workers,
        collate_fn=keep,
        world_size=world,
        rank=rank,
        persistent_workers=target.workers > 0,
        drop_last=bool(given.get("split")),
        **({"buffer": buffer} if buffer else {}),
    )
    with loader:
        for _ in range(target.epochs):
            yield loader


def litdata(target: Target) -> Epochs:
    """By chunks, through a cache on disk."""
    os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"  # the check needs the network
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # it has no setting for that
    dataset = StreamingDataset(
        f"s3://{BUCKET}/litdata",
        cache_dir=target.scratch,
        shuffle=True,
        seed=0,
        max_cache_size=target.options.get("disk", "100GB"),
        storage_options={"endpoint_url": target.url},
    )
    yield from loaded(StreamingDataLoader, dataset, target)


def mosaic(target: Target) -> Epochs:
    """By shards, through a cache on disk; a client is made in each process, not inherited."""
    from benchmarks.bucket.mosaic import prepare

    prepare()
    os.environ["S3_ENDPOINT_URL"] = target.url
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    limit = target.options.get("disk")
    dataset = StreamingDataset(
        remote=f"s3://{BUCKET}/mosaic",
        local=target.scratch,
        shuffle=True,
        shuffle_seed=0,
        batch_size=BATCH,
        num_canonical_nodes=1,
        cache_limit=limit,
        predownload=16 * BATCH,
    )
    for stream in dataset.streams:  # what workers inherit would mix their answers
        if getattr(stream, "_downloader", None) is not None:
            stream._downloader.clean_up()
    yield from loaded(StreamingDataLoader, dataset, target)


def webdataset(target: Target, form: str = "webdataset") -> Epochs:
    """By tar files in sequence, one connection of curl for each worker."""
    import webdataset as wds

    names = sorted(path.name for path in Path(target.folder, BUCKET, form).glob("*.tar"))
    urls = [f"{target.url}/{BUCKET}/{form}/{name}" for name in names]
    dataset = (
        wds.WebDataset(urls, shardshuffle=len(urls), empty_check=False, seed=0)
        .shuffle(SHUFFLED // target.workers)
        .to_tuple("jpg", "cls")
        .batched(BATCH, collation_fn=keep)
    )
    loader = wds.WebLoader(
        dataset, batch_size=None, num_workers=target.workers, persistent_workers=True
    )
    for _ in range(target.epochs):
        yield loader


def huggingface(target: Target) -> Epochs:
    """By row groups of Parquet files."""
    import pyarrow as pa
    import pyarrow.dataset as ds
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    form = target.options.get("form", "parquet")
    names = sorted(path.name for path in Path(target.folder, BUCKET, form).glob("*"))
    client = {"endpoint_url": target.url}
    dataset = load_dataset(
        "parquet",
        data_files=[f"s3://{BUCKET}/{form}/{name}" for name in names],
        split="train",
        streaming=True,
        storage_options={"client_kwargs": client},
        columns=target.options.get("columns"),
        # As its documentation advises for streaming: ahead, and in large ranges.
        fragment_scan_options=ds.ParquetFragmentScanOptions(
            cache_options=pa.CacheOptions(prefetch_limit=1, range_size_limit=128 << 20)
        ),
    ).shuffle(seed=0, buffer_size=SHUFFLED // max(target.workers, 1))
    for epoch, loader in enumerate(loaded(DataLoader, dataset, target)):
        dataset.set_epoch(epoch)
        yield loader


class Objects(Dataset[Any]):
    """One object for each sample; a worker reads a batch with several requests at once."""

    def __init__(self, target: Target, client: Callable[[Target], Callable[[str], Any]]) -> None:
        self._target, self._client = target, client
        self._pool: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return self._target.count

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._target.threads)
            self._get = self._client(self._target)
        found = self._pool.map(self._get, (f"objects/{index:08}" for index in indices))
        return [*zip(found, indices, strict=True)]


def over_obstore(target: Target) -> Callable[[str], Any]:
    """Return what gets an object, by obstore."""
    from obstore.store import S3Store

    store = S3Store(BUCKET, endpoint=target.url, client_options={"allow_http": True})
    return lambda key: bytes(store.get(key).bytes())


def over_boto3(target: Target) -> Callable[[str], Any]:
    """Return what gets an object, by boto3."""
    import boto3
    from botocore.config import Config

    config = Config(max_pool_connections=target.threads)
    client = boto3.client("s3", endpoint_url=target.url, config=config)
    return lambda key: client.get_object(Bucket=BUCKET, Key=key)["Body"].read()


def over_s3fs(target: Target) -> Callable[[str], Any]:
    """Return what gets an object, by s3fs; its requests are made by one event loop."""
    import s3fs

    system = s3fs.S3FileSystem(client_kwargs={"endpoint_url": target.url})
    return lambda key: system.cat_file(f"{BUCKET}/{key}")


def _own(client: Callable[[Target], Callable[[str], Any]]) -> Callable[[Target], Epochs]:
    def read(target: Target) -> Epochs:
        objects = Objects(target, client)
        yield from loaded(DataLoader, objects, target, shuffle=True, prefetch_factor=4)

    return read


def bare(target: Target) -> Epochs:
    """GETs of forebay's blocks, by the client that forebay has, whose bytes are dropped."""
    import json

    import obstore
    from obstore.store import S3Store

    from forebay.caching.layout import BLOCKS, INDEX, Blocks, shard_name

    folder = Path(target.folder, BUCKET, "forebay")
    index = json.loads((folder / INDEX).read_bytes())
    samples, each = (int(index["plan"][name]) for name in ("samples", "per_shard"))
    known = int(index["blocks"]["count"]), int(index["blocks"]["crc32"])
    blocks = Blocks((folder / BLOCKS).read_bytes(), samples, each, index["sizes"], known)
    spans = [
        (shard_name(int(blocks.first[at]) // each), int(blocks.offset[at]), int(blocks.length[at]))
        for at in range(len(blocks))
    ]
    store = S3Store(BUCKET, endpoint=target.url, client_options={"allow_http": True})

    def get(span: tuple[str, int, int]) -> int:
        name, start, length = span
        return len(obstore.get_range(store, f"forebay/{name}", start=start, length=length))

    with ThreadPoolExecutor(target.threads) as pool:
        for _ in range(target.epochs):
            random.shuffle(spans)
            yield ([nbytes] for nbytes in pool.map(get, spans))


READERS: dict[str, Callable[[Target], Epochs]] = {
    "bare": bare,
    "forebay": forebay,
    "litdata": litdata,
    "mosaic": mosaic,
    "webdataset": webdataset,
    "huggingface": huggingface,
    "obstore": _own(over_obstore),
    "boto3": _own(over_boto3),
    "s3fs": _own(over_s3fs),
}
