"""What forebay writes and a later one has to open: states, a cache, an index, runs, reports.

`python earlier_files.py FOLDER` writes all of it, in a copy in /tmp: paths are recorded. Until the
first release, a change of a format writes `files/` anew; afterwards each release adds a folder, and
none changes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

import forebay
from forebay.caching.kept_blocks import KeptBlocks
from forebay.collate import pad, sequences

# Batches that were returned before a state was taken.
TAKEN = 3
# The time of the shard, by which an index knows it.
SHARD_TIME = 1_000_000_000
SHARD_SAMPLES = 8
# Of calls that work in this process.
QUIET: dict[str, Any] = {"num_workers": 0, "progress": False}


class Numbers(Dataset):
    """Sample k is k, and a random number."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return index, random.randrange(1000)


class Stream(IterableDataset):
    """0, 1, …, 19."""

    def __iter__(self):
        return iter(range(20))


class StatefulStream(IterableDataset):
    """The same, with a state."""

    def __init__(self):
        self.next = 0

    def __iter__(self):
        while self.next < 20:
            self.next += 1
            yield self.next - 1
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class StatefulSampler(Sampler):
    """20 indices that follow from a state, which goes on from epoch to epoch."""

    def __init__(self):
        self.count = 0

    def __iter__(self):
        for _ in range(20):
            self.count += 1
            yield 7 * self.count % 20

    def __len__(self):
        return 20

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Things(Dataset):
    """Samples of many types."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return {
            "image": torch.full((2, 3), index, dtype=torch.uint8),
            "vector": [0.5] * index,
            "name": f"thing {index}",
            "more": {"is_odd": bool(index % 2), "at": (index, None)},
        }


TEXTS = [torch.full((length,), length) for length in (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)]
LENGTHS = [len(text) for text in TEXTS]


def _mixture() -> Any:
    sources = {"a": (Numbers(), 3.0), "b": (Numbers(), 1.0)}
    return forebay.DataLoader(forebay.mix(sources, samples=20), 2, seed=5)


def _windows() -> Any:
    """Return a loader of the cache, of the numbers in the names of its samples."""
    cached = forebay.open_cache("cache", lambda thing: int(thing["name"].split()[1]), window=1)
    return forebay.DataLoader(cached, 1, shuffle=True, seed=5)


def _shards() -> Any:
    opened = forebay.open_shards("shards", index="index", progress=False)
    return forebay.DataLoader(opened, 2, shuffle=True, seed=5, collate_fn=_keys)


def _keys(samples: list[Any]) -> list[str]:
    return [sample["__key__"] for sample in samples]


# A loader of each kind, where the folder of all files is the working one.
LOADERS: dict[str, Callable[[], Any]] = {
    "plan": lambda: forebay.DataLoader(Numbers(), 2, shuffle=True, seed=5),
    "plan of ranks": lambda: forebay.DataLoader(Numbers(), 2, seed=5, world_size=2, rank=0),
    "windows": _windows,
    "shards": _shards,
    "rows": lambda: forebay.DataLoader(
        forebay.pack_sequences(TEXTS, LENGTHS, size=8),
        1,
        shuffle=True,
        seed=5,
        collate_fn=sequences(size=8),
    ),
    "batches by length": lambda: forebay.DataLoader(
        forebay.batch_by_length(TEXTS, LENGTHS, max_tokens=9),
        None,
        shuffle=True,
        seed=5,
        collate_fn=pad(),
    ),
    "mixture": _mixture,
    "mixture with other weights": _mixture,
    "sampler": lambda: forebay.DataLoader(Numbers(), 2, sampler=range(19, -1, -1), seed=5),
    "sampler with a state": lambda: forebay.DataLoader(
        Numbers(), 2, sampler=StatefulSampler(), seed=5
    ),
    "torch": lambda: forebay.DataLoader(Stream(), 2),
    "torch's sampler": lambda: forebay.DataLoader(range(20), 2),
    "iterable": lambda: forebay.DataLoader(Stream(), 2, seed=5),
    "iterable with a state": lambda: forebay.DataLoader(StatefulStream(), 2, seed=5),
    "states of workers": lambda: forebay.DataLoader(StatefulStream(), 2, num_workers=2),
}
# What is done after the first batch, where a state has something of that.
CHANGES: dict[str, Callable[[Any], None]] = {
    "mixture with other weights": lambda loader: loader.set_weights({"a": 1.0, "b": 3.0}),
}


def rest_of(loader: DataLoader) -> Any:
    """Return what a loader returns of this epoch and of the next, JSON-serializable."""
    return [[_plain(batch) for batch in loader] for _ in range(2)]


def _plain(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {name: _plain(value) for name, value in batch.items()}
    return [_plain(each) for each in batch] if isinstance(batch, list | tuple) else batch


def plain_thing(sample: dict[str, Any]) -> Any:
    """Return a sample of `Things` as something that can be compared."""
    return sample | {"image": sample["image"].tolist()}


def shout(row, out):
    """Write a file for each row but one, which fails."""
    if row["text"] == "bad":
        raise ValueError("not this one")
    out.file(f"{row['text']}.txt").write_text(row["text"].upper())
    return {"letters": len(row["text"])}


ROWS = [{"text": text} for text in ("a", "bb", "bad", "dddd")]


def double(batch):
    """Be a model."""
    return {"twice": batch * 2}


def run_outputs(folder: Path, rows: list[dict[str, str]] = ROWS) -> Any:
    """Make or continue a run; the failure stays."""
    return forebay.preprocess(shout, rows, folder, retries=0, **QUIET)


def run_predictions(folder: Path) -> Any:
    """Make or continue predictions."""
    return forebay.predict(double, [0.5, 1.5, 2.5], folder, batch_size=2, **QUIET)


def write_shard(folder: Path) -> None:
    """Write a tar of some samples, with a time that an index may know."""
    folder.mkdir()
    with tarfile.open(folder / "part-000.tar", "w") as tar:
        for number in range(SHARD_SAMPLES):
            data = f"text {number}".encode()
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    os.utime(folder / "part-000.tar", (SHARD_TIME, SHARD_TIME))


def report_of_loader(path: Path, epochs: int = 1) -> None:
    """Write the report of a loader after some epochs of ten batches."""
    loader = forebay.DataLoader(Numbers(), 2, seed=5)
    for _ in range(epochs):
        list(loader)
    loader.report(path)


# Blocks of a cache in a bucket, on a disk, and how many bytes they may take there.
BLOCKS = [b"first", b"second" * 100]
DISK_BYTES = 1 << 15


def kept_blocks(folder: Path) -> KeptBlocks:
    """Open the directory of the blocks."""
    return KeptBlocks(folder, "a cache", DISK_BYTES, np.array([*map(len, BLOCKS)]))


def write_blocks(folder: Path) -> None:
    """Write the blocks to a disk."""
    found = kept_blocks(folder)
    for number, block in enumerate(BLOCKS):
        found.add(number, memoryview(block))


def main(folder: Path) -> None:
    """Write all."""
    folder.mkdir()
    with contextlib.chdir(folder):  # so that no path of this machine is recorded
        forebay.cache(Things(), "cache", **QUIET)
        run_outputs(Path("outputs")).save("run.html")
        run_predictions(Path("predictions"))
        write_shard(Path("shards"))
        forebay.index_shards("shards", "index", **QUIET)
        report_of_loader(Path("loader.html"))
        write_blocks(Path("blocks"))
        states = {kind: state_and_rest(kind) for kind in LOADERS}
        Path("states.json").write_text(json.dumps(states, indent=1) + "\n")


def state_and_rest(kind: str) -> dict[str, Any]:
    """Return the state of a loader after some batches, and those that follow."""
    loader = LOADERS[kind]()
    batches = iter(loader)
    for number in range(TAKEN):
        next(batches)
        if number == 0 and kind in CHANGES:
            CHANGES[kind](loader)
    state = json.loads(json.dumps(loader.state_dict()))
    return {"state": state, "rest": rest_of(loaded(LOADERS[kind](), state))}


def loaded(loader: Any, state: dict[str, Any]) -> Any:
    """Return a loader that continues from a state."""
    loader.load_state_dict(state)
    return loader


if __name__ == "__main__":
    main(Path(sys.argv[1]))
