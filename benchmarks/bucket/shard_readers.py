"""How each library reads shards in place, shuffled, in batches of 64, decoding no image.

Each is tuned as its documentation says. `options` of a target has the form, and the columns.
"""

from __future__ import annotations

import atexit
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from benchmarks.bucket.readers import (
    BATCH,
    Epochs,
    Target,
    huggingface,
    keep,
    loaded,
    mosaic,
    webdataset,
)
from benchmarks.bucket.stores import BUCKET

# As much disk as any peer asks for.
_CACHE_BYTES = 20 << 30


def bare(target: Target) -> Epochs:
    """GETs of the bytes of shards that forebay needs, which are dropped."""
    import obstore
    from obstore.store import S3Store

    from forebay.shards.blocks import ShardBlocks
    from forebay.shards.sources import INDEX_NAME, OpenIndex

    index = OpenIndex(f"{target.options['index']}/{INDEX_NAME}", b"", "").index
    blocks = ShardBlocks(index, target.options["columns"])
    spans = [
        (f"{target.options['form']}/{index.listed(index.shard_of(block)).name}", *span)
        for block in range(len(blocks))
        for span in blocks.requests(block)
    ]
    store = S3Store(BUCKET, endpoint=target.url, client_options={"allow_http": True})

    def get(span: tuple[str, int, int]) -> int:
        name, start, length = span
        return len(obstore.get_range(store, name, start=start, length=length))

    with ThreadPoolExecutor(target.threads) as pool:
        for _ in range(target.epochs):
            random.shuffle(spans)
            yield ([nbytes] for nbytes in pool.map(get, spans))


def forebay(target: Target) -> Epochs:
    """By blocks, with an index that was made before, or without one."""
    import forebay

    given = target.options
    dataset = forebay.open_shards(
        f"s3://{BUCKET}/{given['form']}",
        index=given.get("index"),
        columns=given.get("columns"),
        window=given["window"],
        progress=False,
    )
    yield from _loader_epochs(dataset, target, collate_fn=keep)


def by_column(target: Target) -> Epochs:
    """Tables by column: no sample is made."""
    import forebay

    given = target.options
    columns = given["columns"]
    dataset = forebay.from_table(f"s3://{BUCKET}/{given['form']}", columns=columns)
    for epoch in _loader_epochs(dataset, target):
        yield ([*zip(*map(_listed, map(batch.get, columns)), strict=True)] for batch in epoch)


def _listed(values: Any) -> list[Any]:
    return values if isinstance(values, list) else values.tolist()


def _loader_epochs(dataset: Any, target: Target, **more: Any) -> Epochs:
    import forebay

    with forebay.DataLoader(
        dataset,
        batch_size=BATCH,
        shuffle=True,
        seed=0,
        num_workers=target.workers,
        persistent_workers=target.workers > 0,
        **more,
    ) as loader:
        for _ in range(target.epochs):
            yield loader


def litdata_tables(target: Target) -> Epochs:
    """Parquet files, each downloaded as a whole; their index was made before."""
    os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"  # the check needs the network
    from litdata import StreamingDataLoader, StreamingDataset, index_parquet_dataset
    from litdata.streaming.item_loader import ParquetLoader

    _allow_http()
    index = Path(target.folder, f"litdata-{target.options['form']}")
    if not index.exists():
        index.mkdir()
        index_parquet_dataset(str(Path(target.folder, BUCKET, target.options["form"])), str(index))
    dataset = StreamingDataset(
        f"s3://{BUCKET}/{target.options['form']}",
        item_loader=ParquetLoader(),
        index_path=str(index),
        cache_dir=target.scratch,
        shuffle=True,
        seed=0,
        storage_options={"endpoint_url": target.url},
    )
    # It refuses to be forked: Polars has threads.
    given = {"multiprocessing_context": "forkserver", "worker_init_fn": _allow_http}
    yield from loaded(StreamingDataLoader, dataset, target, **given)


def _allow_http(_worker: int = 0) -> None:
    """Have LitData read from a server without TLS, for which it has no setting."""
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True


def litdata_raw(target: Target) -> Epochs:
    """An object for each sample, since it does not look into tars."""
    os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"
    from litdata.raw import StreamingRawDataset

    _allow_http()
    dataset = StreamingRawDataset(
        f"s3://{BUCKET}/objects/",
        cache_dir=target.scratch,
        storage_options={"endpoint_url": target.url},
    )
    given = {"prefetch_factor": 4, "worker_init_fn": _allow_http}
    yield from loaded(DataLoader, dataset, target, shuffle=True, **given)


def zephon(target: Target) -> Epochs:
    """Shards are downloaded as a whole, and samples come from a window of eight of them."""
    from zephon import Pipeline
    from zephon.io import CacheOptions, Dataset, StoreOptions
    from zephon.work import MixtureSpec, StaticMixtureWorkSource

    dataset = Dataset.from_path("samples", f"s3://{BUCKET}/{target.options['form']}")
    source = StaticMixtureWorkSource(
        [dataset],
        MixtureSpec({"samples": 1.0}),
        chunk_size=BATCH,  # else it repeats samples to fill a chunk of 16,384
        shuffle_within_shard=True,
        shuffle_block_size=target.options["block"],
        seed=0,
    )
    cache = CacheOptions(enabled=True, root=target.scratch, limit_bytes=_CACHE_BYTES)
    pipeline = (
        Pipeline(source)
        .options(io_options=StoreOptions(cache=cache))
        .prefetch(buffer_size=target.options["block"], parallelism=target.threads)
        .batch(microbatch_size=BATCH, drop_last=False)
    )
    for _ in range(target.epochs):
        yield ([each.payload for each in batch.records] for batch in pipeline)


def wids_samples(paths: list[str]) -> Callable[[int], Any]:
    """Return what reads a sample of local tars, by wids."""
    import wids.wids

    shards = []
    for path in paths:
        count = len(wids.wids.IndexedTarSamples(path=path))
        shards.append({"url": path, "nsamples": count})
    dataset = wids.ShardListDataset(shards, transformations=[])
    return dataset.__getitem__


def webshart_samples(paths: list[str]) -> Callable[[int], Any]:
    """Return what reads the files of a sample of local tars, by webshart; it needs an index."""
    import webshart

    folder, made = str(Path(paths[0]).parent), tempfile.mkdtemp()
    atexit.register(shutil.rmtree, made)
    webshart.MetadataExtractor().extract_metadata(folder, made)
    dataset = webshart.discover_dataset(folder, metadata=made)
    readers = [dataset.open_shard(at) for at in range(dataset.num_shards)]
    places = [(reader, at) for reader in readers for at in range(0, len(reader.filenames()), 2)]

    def sample(index: int) -> Any:
        reader, at = places[index]
        return reader.read_file(at), reader.read_file(at + 1)

    return sample


READERS: dict[str, Callable[[Target], Epochs]] = {
    "bare-shards": bare,
    "shards": forebay,
    "shards-by-column": by_column,
    "webdataset-shards": partial(webdataset, form="tars"),
    "huggingface-shards": huggingface,
    "litdata-tables": litdata_tables,
    "litdata-raw": litdata_raw,
    "zephon": zephon,
    "mosaic-shards": mosaic,
}
