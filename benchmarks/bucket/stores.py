"""The same samples in a bucket, written by each library's own writer in its own format."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

BUCKET = "bucket"
# A sample is a string of bytes as long as a JPEG of 500 x 375 pixels, and a label.
MEAN_BYTES = 100_000
# Each sample is a part of these random bytes, which nothing compresses, after its number.
POOL_BYTES = 32 << 20
HEAD = "<q"
# A shard of the others: as their documentation recommends for buckets.
SHARD_BYTES = 64 << 20
ROWS_PER_GROUP = 256


class Samples:
    """Samples that are made when they are asked for."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool = np.random.default_rng(0).bytes(POOL_BYTES)
        sizes = np.random.default_rng(1).lognormal(np.log(MEAN_BYTES) - 0.125, 0.5, count)
        self._sizes = np.clip(sizes, 10_000, 1_000_000).astype(np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of all samples."""
        return int(self._sizes.sum())

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._count:
            raise IndexError(index)
        size = int(self._sizes[index])
        start = index * 7919 % (POOL_BYTES - size)
        return {
            "image": struct.pack(HEAD, index) + self._pool[start : start + size - 8],
            "label": index,
        }


def number_of(image: Any) -> int:
    """Return the number of a sample, from its bytes."""
    return int(struct.unpack_from(HEAD, image)[0])


def forebay(samples: Samples, folder: Path) -> None:
    """Write forebay's cache."""
    import forebay

    forebay.cache(samples, folder, num_workers=2, progress=False)


def litdata(samples: Samples, folder: Path) -> None:
    """Write LitData's chunks."""
    os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"  # the check needs the network
    import litdata

    litdata.optimize(
        samples.__getitem__,
        list(range(len(samples))),
        str(folder),
        chunk_bytes=SHARD_BYTES,
        num_workers=1,
        verbose=False,
    )


def mosaic(samples: Samples, folder: Path) -> None:
    """Write Mosaic's MDS shards."""
    from benchmarks.bucket.mosaic import prepare

    prepare()
    from streaming import MDSWriter

    columns = {"image": "bytes", "label": "int"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=SHARD_BYTES) as out:
        for sample in _all(samples):
            out.write(sample)


def webdataset(samples: Samples, folder: Path) -> None:
    """Write tar files."""
    from webdataset import ShardWriter

    folder.mkdir(parents=True)
    with ShardWriter(f"{folder}/%05d.tar", maxsize=SHARD_BYTES, verbose=0) as out:
        for sample in _all(samples):
            number = sample["label"]
            out.write({"__key__": f"{number:08}", "jpg": sample["image"], "cls": str(number)})


def parquet(samples: Samples, folder: Path) -> None:
    """Write Parquet files, as Hugging Face has them."""
    from datasets import Dataset

    folder.mkdir(parents=True)
    each = max(SHARD_BYTES * 4 // MEAN_BYTES, 1)
    for number, first in enumerate(range(0, len(samples), each)):
        some = [samples[at] for at in range(first, min(first + each, len(samples)))]
        path = folder / f"{number:05}.parquet"
        Dataset.from_list(some).to_parquet(path, batch_size=ROWS_PER_GROUP)


def objects(samples: Samples, folder: Path) -> None:
    """Write one object for each sample; its label is its name."""
    folder.mkdir(parents=True)
    for sample in _all(samples):
        (folder / f"{sample['label']:08}").write_bytes(sample["image"])


WRITERS: dict[str, Callable[[Samples, Path], None]] = {
    each.__name__: each for each in (forebay, litdata, mosaic, webdataset, parquet, objects)
}


def _all(samples: Samples) -> Iterator[dict[str, Any]]:
    return (samples[at] for at in range(len(samples)))


def main(form: str, count: str, folder: str) -> None:
    """Write the samples in one format."""
    WRITERS[form](Samples(int(count)), Path(folder))
    print(form)


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
