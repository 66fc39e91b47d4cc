"""What forebay writes and a later one has to open: states, a cache, an index, two runs.

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

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import forebay

# Batches that were returned before a state was taken.
TAKEN = 3
# The time of the shard, by which an index knows it.
SHARD_TIME = 1_000_000_000
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


# A loader of each kind.
LOADERS: dict[str, Callable[[], Any]] = {
    "plan": lambda: forebay.DataLoader(Numbers(), 2, shuffle=True, seed=5),
    "plan of ranks": lambda: forebay.DataLoader(Numbers(), 2, seed=5, world_size=2, rank=0),
    "mixture": lambda: forebay.DataLoader(
        forebay.mix({"a": (Numbers(), 3.0), "b": (Numbers(), 1.0)}, samples=20), 2, seed=5
    ),
    "sampler": lambda: forebay.DataLoader(Numbers(), 2, sampler=range(19, -1, -1), seed=5),
    "torch": lambda: forebay.DataLoader(Stream(), 2),
    "torch's sampler": lambda: forebay.DataLoader(range(20), 2),
    "iterable": lambda: forebay.DataLoader(Stream(), 2, seed=5),
}


def rest_of(loader: DataLoader) -> Any:
    """Return what a loader returns of this epoch and of the next, JSON-serializable."""
    return [[_plain(batch) for batch in loader] for _ in range(2)]


def _plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else [_plain(each) for each in batch]


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


def run_outputs(folder: Path) -> Any:
    """Make or continue a run; the failure stays."""
    return forebay.preprocess(shout, ROWS, folder, retries=0, **QUIET)


def run_predictions(folder: Path) -> Any:
    """Make or continue predictions."""
    return forebay.predict(double, [0.5, 1.5, 2.5], folder, batch_size=2, **QUIET)


def write_shard(folder: Path) -> None:
    """Write a tar of three samples, with a time that an index may know."""
    folder.mkdir()
    with tarfile.open(folder / "part-000.tar", "w") as tar:
        for number in range(3):
            data = f"text {number}".encode()
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    os.utime(folder / "part-000.tar", (SHARD_TIME, SHARD_TIME))


def main(folder: Path) -> None:
    """Write all."""
    folder.mkdir()
    states = {}
    for kind, made in LOADERS.items():
        loader = made()
        batches = iter(loader)
        for _ in range(TAKEN):
            next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        states[kind] = {"state": state, "rest": rest_of(loaded(made(), state))}
    (folder / "states.json").write_text(json.dumps(states, indent=1) + "\n")
    with contextlib.chdir(folder):  # so that no path of this machine is recorded
        forebay.cache(Things(), "cache", **QUIET)
        run_outputs(Path("outputs"))
        run_predictions(Path("predictions"))
        write_shard(Path("shards"))
        forebay.index_shards("shards", "index", **QUIET)


def loaded(loader: Any, state: dict[str, Any]) -> Any:
    """Return a loader that continues from a state."""
    loader.load_state_dict(state)
    return loader


if __name__ == "__main__":
    main(Path(sys.argv[1]))
