"""Make the batches of a library's dataset in several ways, and print their digests as JSON.

A program of its own: a library that is imported stays in its process, with its threads.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from library_datasets import AUGMENTING, COMPUTING, COUNT, READING
from torch.utils.data import Dataset

import forebay
from forebay import DataLoader


class WithThreads(Dataset[Any]):
    """The samples of a dataset, and how many threads the libraries have that know it."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.dataset[index], most_threads()


def most_threads() -> int:
    """Return the highest number of threads of a library that is loaded."""
    from threadpoolctl import threadpool_info

    asked = {
        "cv2": lambda cv2: cv2.getNumThreads(),
        "polars": lambda polars: polars.thread_pool_size(),
        "pyarrow": lambda pyarrow: pyarrow.cpu_count(),
        "torch": lambda torch: torch.get_num_threads(),
    }
    counts = [ask(sys.modules[name]) for name, ask in asked.items() if name in sys.modules]
    return max(counts + [each["num_threads"] for each in threadpool_info()])


def digest(batches: Any) -> str:
    """Return a string that depends on each bit of the batches."""
    found = hashlib.sha256()
    for batch in batches:
        found.update(f"{batch.dtype} {batch.shape}".encode() + batch.numpy().tobytes())
    return found.hexdigest()


def made(dataset: Dataset[Any], **options: Any) -> tuple[str, int]:
    """Return the digest of an epoch, and the highest number of threads while it was made."""
    with DataLoader(WithThreads(dataset), batch_size=3, shuffle=True, seed=0, **options) as loader:
        batches, threads = zip(*loader, strict=True)
    return digest(batches), int(torch.stack(threads).max())


def computed(name: str, folder: Path) -> dict[str, Any]:
    """Return what workers make that import the library, and those that have it from here."""
    dataset = COMPUTING[name](folder)
    # The pool of polars does not survive a fork.
    fresh = {"multiprocessing_context": "forkserver"} if name == "polars" else {}
    return {
        "1 worker, which imports it": made(dataset, num_workers=1),
        "here": made(dataset),
        "1 worker": made(dataset, num_workers=1, **fresh),
        "2 workers": made(dataset, num_workers=2, **fresh),
    }


def read(name: str, folder: Path) -> dict[str, Any]:
    """Return what is read before, in and after workers; the file was opened before."""
    dataset = READING[name](folder)
    return {
        "before": made(dataset),
        "1 worker": made(dataset, num_workers=1),
        "2 workers": made(dataset, num_workers=2),
        "after": made(dataset),
    }


WAYS: dict[str, dict[str, Any]] = {
    "again": {},
    "1 worker": {"num_workers": 1},
    "2 workers": {"num_workers": 2},
    "5 workers": {"num_workers": 5},
    "a buffer": {"num_workers": 2, "buffer": "1MB"},
    "threads": {"num_workers": 3, "backend": "thread"},
}


def augmented(name: str, folder: Path) -> dict[str, Any]:
    """Return two epochs in each way, and what a resume, caches and `preprocess` make."""

    try:
        import_module(name)
    except RuntimeError as error:  # torchvision does not fit each build of torch
        return {"error": str(error)}

    def loader(**options: Any) -> Any:
        dataset = AUGMENTING[name](folder)  # new, with generators that the system seeded
        return DataLoader(dataset, batch_size=3, shuffle=True, seed=0, **options)

    found = {}
    for way, options in {"here": {}, **WAYS}.items():
        with loader(**options) as batches:
            epochs = [list(batches), list(batches)]
        found[way] = digest(epochs[0] + epochs[1]), len({digest([each]) for each in epochs[0]})
    with loader(num_workers=2) as first:
        iterator = iter(first)
        parts = [next(iterator), next(iterator)]
        state = first.state_dict()
    with loader(num_workers=1) as second:
        second.load_state_dict(state)
        parts += [*second, *second]
    found["a resume"] = digest(parts), found["here"][1]
    for number in range(COUNT):
        (folder / f"{number}.input").write_text(str(number))
    sources = sorted(folder.glob("*.input"))
    for workers in (1, 3):
        dataset = AUGMENTING[name](folder)
        forebay.cache(dataset, folder / f"cache-{workers}", num_workers=workers)
        work = functools.partial(augment, dataset)
        report = forebay.preprocess(work, sources, folder / f"{workers}", num_workers=workers)
        assert (report.done, report.failed) == (COUNT, 0), report
        found[f"cache, {workers} workers"] = digest_of_files(folder / f"cache-{workers}", "*.arrow")
        found[f"preprocess, {workers} workers"] = digest_of_files(folder / f"{workers}", "*.npy")
    return found


def augment(dataset: Any, source: Path, out: Any) -> dict[str, Any]:
    """Save a sample that depends on random numbers."""
    sample = dataset[int(source.read_text())]
    path = out.file(f"{source.stem}.npy")
    np.save(path, sample.numpy())
    return {"path": path, "sum": float(sample.double().sum())}


def digest_of_files(folder: Path, pattern: str) -> tuple[str, int]:
    """Return a string that depends on each byte of some files, and how many there are."""
    files = sorted(folder.rglob(pattern))
    return hashlib.sha256(b"".join(each.read_bytes() for each in files)).hexdigest(), len(files)


KINDS = {"computed": computed, "read": read, "augmented": augmented}


def results(kind: str, name: str, folder: Path) -> dict[str, Any]:
    """Return what the program prints for a library; skip the test if it is not installed."""
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    unset = {key: value for key, value in os.environ.items() if "NUM_THREADS" not in key}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, kind, name, str(folder)],
        # albumentations looks for a newer version of itself.
        env={**unset, "NO_ALBUMENTATIONS_UPDATE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "error" in found:
        pytest.skip(f"{name} cannot be imported: {found['error']}")
    return found


if __name__ == "__main__":
    kind, name, folder = sys.argv[1:]
    print(json.dumps(KINDS[kind](name, Path(folder))))
