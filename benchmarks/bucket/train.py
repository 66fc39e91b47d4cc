"""Programs that read forebay's cache, and say which batches they got.

`python -m benchmarks.bucket.train cells JSON` reads one epoch in several worlds and hashes the
global batches. `... train FOLDER JSON` is a training that is killed and continues.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.bucket.readers import keep
from benchmarks.bucket.stores import BUCKET

# Divisible by all sizes of worlds.
BATCH = 48
STATE, LOG = "state.json", "batches.txt"


def opened(given: dict[str, Any]) -> Any:
    """Return the cache."""
    import forebay

    kept = {name: given[name] for name in ("disk", "directory") if given.get("disk")}
    return forebay.open_cache(f"s3://{BUCKET}/forebay", window=given["window"], **kept)


def loaders(dataset: Any, world: int, workers: int) -> list[Any]:
    """Return the loader of each rank."""
    import forebay

    return [
        forebay.DataLoader(
            dataset,
            BATCH // world,
            shuffle=True,
            seed=3,
            collate_fn=keep,
            num_workers=workers,
            world_size=world,
            rank=rank,
            drop_last=True,
        )
        for rank in range(world)
    ]


def digest(samples: Any) -> str:
    """Return a hash of samples: labels and bytes."""
    found = hashlib.sha256()
    for each in samples:
        found.update(each["label"].to_bytes(8, "little"))
        found.update(each["image"])
    return found.hexdigest()[:16]


def cells(given: dict[str, Any]) -> None:
    """Print the hash of an epoch that is read by some worlds, one after another.

    `given["parts"]` has the steps that each world makes, before the next one continues.
    """
    found, state, step = hashlib.sha256(), None, 0
    began = time.perf_counter()
    for world, steps, directory in given["parts"]:
        dataset = opened(given | ({"directory": directory} if directory else {}))
        ranks = loaders(dataset, world, given["workers"])
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
        for at, parts in enumerate(zip(*ranks, strict=True), 1):
            found.update(digest(chain(*parts)).encode())
            step += 1
            if at == steps:
                break
        state = ranks[0].state_dict()
        for rank in ranks:
            rank.close()
    seconds = time.perf_counter() - began
    print()
    answer = {"hash": found.hexdigest()[:16], "steps": step, "s": seconds}
    print(json.dumps(answer), flush=True)


def train(folder: Path, given: dict[str, Any]) -> None:
    """Read epochs; note each batch, then the state after it, so that a kill loses nothing."""
    dataset = opened(given)
    (loader,) = loaders(dataset, 1, given["workers"])
    state = folder / STATE
    if state.exists():
        loader.load_state_dict(json.loads(state.read_text()))
    with (folder / LOG).open("a") as log, loader:
        while loader.epoch < given["epochs"]:
            epoch = loader.epoch
            for batch in loader:
                log.write(f"{epoch} {digest(batch)}\n")
                log.flush()
                temporary = folder / f"{STATE}.new"
                temporary.write_text(json.dumps(loader.state_dict()))
                temporary.replace(state)
                if given.get("pace_s"):
                    time.sleep(given["pace_s"])
    print()
    print(json.dumps({"done": True}), flush=True)


def processes(trainer: int, pids: list[int]) -> dict[str, list[int]]:
    """Return the processes of a training by what they are."""
    found: dict[str, list[int]] = {"fetcher": [], "worker": [], "trainer": [trainer]}
    for pid in pids:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if b"forebay.caching.fetcher" in words:
                found["fetcher"].append(pid)
            elif pid != trainer and parent not in (1, trainer):  # a child of what forks workers
                found["worker"].append(pid)
    return found


if __name__ == "__main__":
    if sys.argv[1] == "cells":
        cells(json.loads(sys.argv[2]))
    else:
        train(Path(sys.argv[1]), json.loads(sys.argv[2]))
