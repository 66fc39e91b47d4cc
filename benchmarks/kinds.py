"""Batches of every kind and of every size, beside torch's DataLoader.

As a program it is the runs of one kind, or of one size: `python -m benchmarks.kinds WHAT NAME
QUICK`. Spawned workers import this file, so it imports nothing heavy by itself.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import hashlib
import itertools
import json
import pathlib
import pickle
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.call import Call
from benchmarks.measure import Ground
from benchmarks.preprocess import Rows, show
from benchmarks.watch import available_mib

WORKERS = 2
LIMIT_S = 600.0
ROUNDS, QUICK_ROUNDS = 3, 1
SECONDS, QUICK_SECONDS = 0.5, 0.1
# Batches before the clock starts.
WARM = 8
BUFFER = "64MB"
# MB of a batch of one sample, the batches of an epoch, workers, and prefetch_factor. Memory of
# the largest: two samples, and what is prefetched and in use.
SIZES = {
    100: (8, 2, 2),
    250: (8, 2, 2),
    500: (8, 2, 2),
    1000: (8, 2, 2),
    1100: (8, 2, 2),
    2400: (6, 2, 1),
    4000: (5, 1, 1),
}
# The loaders, in turn.
LOADERS = ("torch", "forebay", "buffer")


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    name: str
    values: Any


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return Slots, (self.value,)


def as_list(samples: list[Any]) -> list[Any]:
    """Leave the samples as they are."""
    return samples


def kinds() -> dict[str, tuple[Any, int, bool]]:
    """Return by name: a sample, the samples of a batch, and whether default_collate is used."""
    warnings.simplefilter("ignore")  # of torch's prototypes
    import numpy as np
    import torch
    from PIL import Image

    numbers = torch.Generator().manual_seed(0)
    noise = np.random.default_rng(0)
    image = torch.randint(0, 256, (3, 224, 224), dtype=torch.uint8, generator=numbers)
    picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    sparse = torch.eye(64).to_sparse()
    day = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    structured = np.zeros(100, [("x", "f4"), ("y", "i8")])
    text = "word " * 400
    found: dict[str, tuple[Any, int, bool]] = {
        "strings of 20 characters": ("a name of 20 letters", 256, True),
        "strings of 2,000 characters": (text, 256, True),
        "strings of 2,000 letters beyond ASCII": ("wörd " * 400, 256, True),
        "strings of 200,000 characters": (text * 100, 32, True),
        "bytes of 100": (b"x" * 100, 256, True),
        "bytes of 100,000": (b"x" * 100_000, 32, True),
        "bytearrays of 100,000": (bytearray(100_000), 32, False),
        "an integer": (12345, 256, True),
        "a float": (1.5, 256, True),
        "a bool": (True, 256, True),
        "None": (None, 256, False),
        "lists of 20 integers": (list(range(20)), 256, True),
        "lists of 20 integers, not collated": (list(range(20)), 256, False),
        "lists of different lengths": (list(range(500)), 64, False),
        "dicts of three numbers": ({"a": 1, "b": 2.5, "c": True}, 256, True),
        "dicts of strings": ({"id": "abc", "title": "a title", "text": text}, 64, True),
        "nested dicts, not collated": ({"a": {"b": [1, 2, {"c": "d"}]}, "e": (1, 2)}, 128, False),
        "a NamedTuple of tensors": (Pair(torch.ones(16), torch.tensor(1)), 64, True),
        "a dataclass": (Record("name", torch.ones(64)), 64, False),
        "an object with slots": (Slots(torch.ones(64)), 64, False),
        "tensors of different lengths": (torch.ones(1000), 32, False),
        "arrays of different lengths": (np.ones(1000, np.float32), 32, False),
        "small tensors": (torch.ones(4), 32, True),
        "uint8 images": (image, 32, True),
        "float32 images": (image.float(), 32, True),
        "float16": (torch.ones(1000, dtype=torch.float16), 64, True),
        "bfloat16": (torch.ones(1000, dtype=torch.bfloat16), 64, True),
        "complex64": (torch.ones(1000, dtype=torch.complex64), 64, True),
        "transposed tensors": (torch.ones(300, 300).t(), 16, False),
        "float64 arrays": (noise.random((64, 64)), 64, True),
        "int16 arrays": (np.ones((2, 8000), np.int16), 32, True),
        "arrays of bool": (np.ones(10_000, bool), 64, True),
        "arrays of strings": (np.array(["abc", "defgh"] * 50), 64, False),
        "arrays of dates": (np.arange(1000).astype("M8[s]"), 64, False),
        "structured arrays": (structured, 64, False),
        "arrays of objects": (np.array([1, "two", None], object), 64, False),
        "sparse tensors": (sparse, 32, False),
        "sparse tensors, compressed": (sparse.to_sparse_csr(), 32, False),
        "nested tensors": (torch.nested.nested_tensor([torch.ones(3), torch.ones(5)]), 8, False),
        "PIL images": (picture, 16, False),
        "dates, decimals, paths, sets": (
            (day, decimal.Decimal("1.5"), pathlib.PurePosixPath("/a/b"), {1, 2}),
            64,
            False,
        ),
        "image, label and name": ((image, 3, "name.jpg"), 32, True),
    }
    return found


def loading_kinds(_: Ground, quick: bool) -> None:
    """Print the table of kinds."""
    print(f"samples made beforehand; {WORKERS} workers; batches/s")
    rows = Rows()
    for name in kinds():
        found = _run("kind", name, quick)
        rates = {each: statistics.median(runs) for each, runs in found.items()}
        ratios = [rates[each] / rates["torch"] for each in ("forebay", "buffer")]
        spreads = [
            min(a / b for a, b in zip(found[each], found["torch"], strict=True))
            for each in ("forebay", "buffer")
        ]
        rows.append(
            (
                name,
                f"{rates['torch']:,.0f}",
                *(f"{ratio:.2f}" for ratio in ratios),
                *(f"{least:.2f}" for least in spreads),
            )
        )
    columns = ("", "torch", "forebay, x torch", "with a buffer", "least of turns", "with a buffer")
    show(columns, rows)
    print(
        f"medians of {ROUNDS} turns, in which the loaders take turns; more is better. Batches are\n"
        f'equal to torch\'s. buffer="{BUFFER}".'
    )


def loading_sizes(_: Ground, quick: bool) -> None:
    """Print the table of sizes."""
    print("seconds for batches of one float32 sample, made by torch.full; whole epochs")
    rows = Rows()
    for mb, (count, workers, prefetch) in SIZES.items():
        title = f"{mb:,} MB, {count} batches"
        needed = mb * (2 * workers + workers * prefetch + 2) * 1e6 / 2**20
        if needed > available_mib() or (quick and mb > 500):
            rows.append((title, "not run"))
            continue
        found = _run("size", str(mb), quick)
        times = {each: statistics.median(runs) for each, runs in found.items()}
        rows.append(
            (
                title,
                str(workers),
                *(f"{times[each]:.2f} s" for each in LOADERS),
                *(f"{times[each] / times['torch']:.2f}" for each in ("forebay", "buffer")),
                *(f"{min(found[each]):.2f}-{max(found[each]):.2f}" for each in LOADERS),
            )
        )
    columns = ("", "workers", "torch", "forebay", "with a buffer", "of torch's", "with a buffer")
    show((*columns, "torch", "forebay", "with a buffer"), rows)
    print(
        f"medians of {ROUNDS} turns after one that is not counted; less is better. Behind them,\n"
        "the fastest and the slowest. The buffer has the size of three batches. prefetch_factor\n"
        "is 1 from 2,400 MB on, for torch as well."
    )


def _run(what: str, name: str, quick: bool) -> dict[str, list[float]]:
    with Call("benchmarks.kinds", what, name, str(int(quick))) as call:
        return dict(json.loads(call.answer(LIMIT_S)))


def _loader(name: str) -> Callable[..., Any]:
    import torch.utils.data

    import forebay

    return torch.utils.data.DataLoader if name == "torch" else forebay.DataLoader


def kind(name: str, quick: bool) -> dict[str, list[float]]:
    """Return the rates of each loader, turn by turn."""
    from torch.utils.data import Dataset

    sample, size, is_collated = kinds()[name]
    seconds = QUICK_SECONDS if quick else SECONDS
    found: dict[str, list[float]] = {each: [] for each in LOADERS}
    digests = set()
    # As different objects: pickle would write the same one only once.
    samples = [pickle.loads(pickle.dumps(sample)) for _ in range(size)]

    class Prepared(Dataset[Any]):
        def __len__(self) -> int:
            return 10**7

        def __getitem__(self, index: int) -> Any:
            return samples[index % size]

    for _turn in range(QUICK_ROUNDS if quick else ROUNDS):
        for each in LOADERS:
            arguments: dict[str, Any] = {"batch_size": size, "num_workers": WORKERS}
            if not is_collated:
                arguments["collate_fn"] = as_list
            if each == "buffer":
                arguments["buffer"] = BUFFER
            loader = _loader(each)(Prepared(), **arguments)
            batches = iter(loader)
            digests.add(_digest(next(batches)))
            for _ in itertools.islice(batches, WARM):
                pass
            count, began = 0, time.perf_counter()
            while (elapsed := time.perf_counter() - began) < seconds:
                next(batches)
                count += 1
            found[each].append(count / elapsed)
            del batches
            if each != "torch":
                loader.close()
    if len(digests) > 1:
        raise RuntimeError(f"{name}: the loaders returned different batches")
    return found


def size(name: str, quick: bool) -> dict[str, list[float]]:
    """Return the seconds of each loader for an epoch, turn by turn."""
    import torch
    from torch.utils.data import Dataset

    count, workers, prefetch = SIZES[int(name)]
    floats = int(name) * 250_000

    class Volumes(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return count

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((floats,), float(index))

    found: dict[str, list[float]] = {each: [] for each in LOADERS}
    for turn in range(1 + (QUICK_ROUNDS if quick else ROUNDS)):
        for each in LOADERS:
            arguments: dict[str, Any] = {"num_workers": workers, "prefetch_factor": prefetch}
            if each == "buffer":
                arguments["buffer"] = 3 * 4 * floats
            loader = _loader(each)(Volumes(), **arguments)
            began = time.perf_counter()
            numbers = [float(batch[0, -1]) for batch in loader]
            seconds = time.perf_counter() - began
            if each != "torch":
                loader.close()
            if numbers != [float(index) for index in range(count)]:
                raise RuntimeError(f"{each} returned {numbers}")
            if turn:
                found[each].append(seconds)
    return found


def _digest(batch: Any) -> str:
    """Return a hash of a batch, equal for equal batches."""
    import torch

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.is_nested:
                return [plain(each) for each in value.unbind()]
            dense = value.to_dense() if value.layout is not torch.strided else value
            return str(value.dtype), tuple(value.shape), dense.contiguous().view(-1).tolist()[:999]
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        if dataclasses.is_dataclass(value):
            return plain(vars(value))
        if isinstance(value, Slots):
            return plain(value.value)
        if hasattr(value, "dtype"):
            return str(value.dtype), value.tolist()
        return value.tobytes() if hasattr(value, "tobytes") else repr(value)

    return hashlib.sha256(pickle.dumps(plain(batch))).hexdigest()


def main(what: str, name: str, quick: str) -> None:
    """Do the runs and print their results, as JSON."""
    found = {"kind": kind, "size": size}[what](name, bool(int(quick)))
    print()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
