"""Datasets, streams and samplers with large states of their own: what a batch costs."""

from __future__ import annotations

import multiprocessing
import resource
import time
import warnings
from importlib import import_module
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from benchmarks.loading.peers import NAMES
from benchmarks.measure import Ground
from benchmarks.preprocess import show

ROUNDS, QUICK_ROUNDS = 3, 1
# At most so many batches, and about so long; a state is asked for after each `ASKED`-th.
BATCHES, MOST_S, ASKED = 400, 6.0, 100
FLOATS = 10 << 20  # 40 MiB
INDICES = 2_000_000


class Module(torch.nn.Module):
    """A module that is used as a map-style dataset: its tables are in its `state_dict`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.rand(FLOATS))

    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.table[index]


class Tensors(Dataset[Any]):
    """Tensors by name, as in a TensorDict: a whole batch at once, and a state with all of them."""

    def __init__(self) -> None:
        rows = 4 * BATCHES
        self.of = {"a": torch.arange(rows), "b": torch.rand(rows, FLOATS // rows)}

    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitems__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        return {
            name: each[indices, :64] if each.dim() > 1 else each[indices]
            for name, each in self.of.items()
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.of)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.of = dict(state)


class Stream(IterableDataset[Any]):
    """A stream with a buffer, such as one to shuffle in."""

    def __init__(self) -> None:
        self.buffer = torch.rand(FLOATS)

    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        share = 4 * BATCHES // (info.num_workers if info else 1)
        yield from (self.buffer[index] for index in range(share))

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"buffer": self.buffer}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.buffer = state["buffer"]


class Order:
    """A sampler that keeps its permutation in its state."""

    def __init__(self) -> None:
        self.at, self.order = 0, torch.randperm(INDICES)

    def __len__(self) -> int:
        return INDICES

    def __iter__(self) -> Any:
        while self.at < INDICES:
            self.at += 1
            yield int(self.order[self.at - 1])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.order = state["at"], state["order"]


class Numbers(Dataset[torch.Tensor]):
    """As many tensors as the sampler has indices."""

    def __len__(self) -> int:
        return INDICES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def same(batch: Any) -> Any:
    """Return what a dataset returned for a whole batch."""
    return batch


# Name: dataset, what is passed to every loader, and what is passed to forebay's besides.
ROWS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "an nn.Module of 40 MiB as a dataset": (Module, {"num_workers": 2}, {}),
    "tensors of 40 MiB, __getitems__": (Tensors, {"num_workers": 2, "collate_fn": same}, {}),
    "a stream with a buffer of 40 MiB": (Stream, {"num_workers": 2}, {}),
    "a sampler of 2 million, no workers": (Numbers, {}, {}),
    "a sampler of 2 million": (Numbers, {"num_workers": 2}, {}),
    "the same with seed=0": (Numbers, {"num_workers": 2}, {"seed": 0}),
    'the same with buffer="10MB"': (Numbers, {"num_workers": 2}, {"buffer": "10MB"}),
}


def _measure(sender: Connection, row: str, peer: str, asks: bool) -> None:
    """Send milliseconds per batch, and by how many megabytes the trainer's peak grew."""
    warnings.simplefilter("ignore")
    dataset, arguments, own = ROWS[row]
    arguments = {"batch_size": 4, **arguments, **(own if peer == "forebay" else {})}
    if dataset is Numbers:
        arguments["sampler"] = Order()
    made = import_module(f"benchmarks.loading.peers.{peer}").loader(dataset(), **arguments)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    batches = iter(made)
    next(batches)  # workers have started then, which takes long on a busy machine
    began, count = time.perf_counter(), 0
    for count, _ in enumerate(batches, 1):
        if asks and count % ASKED == 0:
            made.state_dict()
        if count == BATCHES - 1 or time.perf_counter() - began > MOST_S:
            break
    seconds = time.perf_counter() - began
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    sender.send((seconds * 1e3 / count, grown / 1024))


def _apart(row: str, peer: str, asks: bool) -> tuple[float, float]:
    """Measure in a new process: peaks are of a process."""
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_measure, args=(sender, row, peer, asks))
    process.start()
    sender.close()
    try:
        found: tuple[float, float] = receiver.recv()
    finally:
        process.join()
    return found


def loading_states(_: Ground, quick: bool) -> None:
    """Print the time of a batch and the trainer's growth; with states asked for and without.

    torchdata's loader takes its default, a snapshot after each batch.
    """
    ways = [("torch", False), ("forebay", False), ("forebay", True)]
    try:
        import_module("torchdata.stateful_dataloader")
        ways += [("stateful", False), ("stateful", True)]
    except ImportError:
        print("torchdata is not installed, so its StatefulDataLoader is left out")
    lines = []
    for row in ROWS:
        found: dict[Any, list[tuple[float, float]]] = {way: [] for way in ways}
        for _ in range(QUICK_ROUNDS if quick else ROUNDS):
            for way in ways:
                found[way].append(_apart(row, *way))
        base = median(ms for ms, _ in found[ways[0]])
        for way in ways:
            ms = median(each for each, _ in found[way])
            grown = median(each for _, each in found[way])
            name = NAMES[way[0]][0] + f", asked each {ASKED} batches" * way[1]
            lines.append((row, name, f"{ms:.2f}", f"{ms / base:.2f}", f"{grown:,.0f}"))
    show(("", "", "ms a batch", "of torch", "trainer's growth, MB"), lines)
