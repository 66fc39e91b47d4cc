"""A loader in Hugging Face's Accelerate: `accelerator.prepare(loader)` returns the loader itself.

    Accelerator.prepare ── _is_accelerate_prepared ──> prepare ──> ranks, device, whole last batches
    iter(loader) ──> Prepared.batches ──> GradientState: whether this is the last batch
    save_state, load_state ── use_stateful_dataloader ──> state_dict, load_state_dict

Accelerate makes a stock loader of the dataset and the sampler of one that it prepares. One that has
been prepared it takes as it is, and a state it saves of one that says that it has one. A loader of
forebay does both: it divides its batches among processes, and has one position for all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset

from forebay.errors import OptionError
from forebay.loading.iterators import BatchIterator
from forebay.loading.late_arguments import check_ranks, set_arguments, values_of_ranks
from forebay.loading.samplers import length_of
from forebay.loading.selections import Start
from forebay.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Prepared:
    """How a loader is used by Accelerate.

    Attributes:
        device: Where batches are sent; None if the loader itself moves them, or nothing does.
        non_blocking: Whether that may end later.
    """

    device: torch.device | None
    non_blocking: bool

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of an epoch; while one is used, Accelerate knows whether it is last."""
        from accelerate.state import GradientState
        from accelerate.utils import send_to_device

        own = loader.batch_sampler  # which `join_uneven_inputs` sets this of
        if loader._ranks is not None and loader._ranks.world_size > 1:
            vars(loader)["tail"] = "fill" if getattr(own, "even_batches", True) else "uneven"
        iterator = loader._begun()
        gradients, epoch = GradientState(), _Epoch(iterator)
        gradients._add_dataloader(epoch)
        try:
            while True:
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                if self.device is not None:
                    batch = send_to_device(batch, self.device, non_blocking=self.non_blocking)
                yield batch
                del batch  # its memory is for the next one
        finally:
            gradients._remove_dataloader(epoch)


class _Epoch:
    """What Accelerate asks of a loader that is iterated."""

    def __init__(self, iterator: BatchIterator) -> None:
        self._pipeline = iterator.pipeline

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the last batch was returned."""
        planner = self._pipeline.planner
        return planner is None or not planner.has_next(reads=True)

    @property
    def remainder(self) -> int:
        """How many samples the last batch has of all ranks, 0 for as many as others; -1: unknown.

        The first so many of those that ranks gather are the dataset's, the others repeated.
        """
        kind, planner = self._pipeline.kind, self._pipeline.planner
        start = Start(0) if planner is None else planner.start
        end = kind.end_of(start)
        length = length_of(kind.sampler) if end is None else end - start.sample
        if kind.drop_last or length is None or kind.batch_size is None:
            return -1
        ranks = 1 if kind.ranks is None else kind.ranks.world_size
        return int(length % (kind.batch_size * ranks))


# ---- prepare -------------------------------------------------------------------------------------


def prepare(loader: Any, accelerator: Any, device_placement: bool | None = None) -> None:
    """Make a loader one of the processes of an Accelerator, with its settings."""
    try:
        _prepare(loader, accelerator, device_placement)
    except AttributeError as error:  # which `getattr` with a default would hide
        raise RuntimeError(
            f"this version of accelerate cannot be used with a forebay.DataLoader: {error}\n"
            "  Nothing was prepared. docs/how-to/frameworks.md names the version that was tried."
        ) from error


def _prepare(loader: Any, accelerator: Any, device_placement: bool | None) -> None:
    ranks, size = _ranks_of(accelerator), loader.batch_size
    _check(loader, accelerator, ranks)
    values = values_of_ranks(loader, ranks)
    if values and accelerator.split_batches and size is not None:
        size //= ranks.world_size
        values |= {"batch_size": size}
        values |= {"batch_sampler": BatchSampler(loader.sampler, size, loader.drop_last)}
    places = accelerator.device_placement if device_placement is None else device_placement
    device = accelerator.device if places and loader.device is None else None
    if device is not None and device.type == "cuda":
        values["device"] = device
    set_arguments(loader, values)
    is_sent = device is not None and device.type != "cpu"
    vars(loader).update(
        _prepared=Prepared(device if is_sent else None, accelerator.non_blocking),
        use_stateful_dataloader=True,
        total_batch_size=None if size is None else size * ranks.world_size,
        total_dataset_length=length_of(loader.dataset),
    )
    for each in (loader.sampler, loader.dataset):
        if callable(getattr(each, "set_epoch", None)):
            vars(loader).setdefault("set_epoch", each.set_epoch)
    own_sampler, is_torchs = loader.batch_sampler, type(loader.batch_sampler) is BatchSampler
    if is_torchs:
        own_sampler.even_batches = accelerator.even_batches and loader.tail != "uneven"
    former = sys.modules["accelerate"].skip_first_batches  # which its method calls
    accelerator.skip_first_batches = partial(_skip, former)


def _ranks_of(accelerator: Any) -> Ranks:
    """Return the ranks that have batches of their own: not those that share a model's layers."""
    mesh, together = accelerator.torch_device_mesh, 1
    for name in mesh.mesh_dim_names if mesh is not None else ():
        if name in ("tp", "cp"):
            together *= mesh[name].size()
    return Ranks(accelerator.num_processes // together, accelerator.process_index // together)


def _check(loader: Any, accelerator: Any, ranks: Ranks) -> None:
    """Refuse what cannot be prepared."""
    check_ranks(loader, ranks, "the Accelerator")
    own, world_size = loader._ranks, ranks.world_size
    is_stream, size = isinstance(loader.dataset, IterableDataset), loader.batch_size
    steps = accelerator.gradient_accumulation_steps
    left = own is None and accelerator.split_batches and (size or 0) % world_size
    refused = [
        (
            bool(accelerator.dispatch_batches),
            "dispatch_batches=True with a forebay.DataLoader: each process reads its own part of "
            "the batches, and none sends them to others\n"
            "  Nothing was prepared. Leave dispatch_batches out.",
        ),
        (
            is_stream and world_size > 1,
            f"an iterable dataset cannot be divided among {world_size} processes: only a map-style "
            "dataset can\n"
            "  Nothing was prepared. Use a map-style dataset; or torch's arguments alone, without "
            "forebay.use(): then Accelerate sends the batches from one process.",
        ),
        (
            is_stream and steps > 1,
            f"gradient_accumulation_steps={steps} with an iterable dataset: that a batch is the "
            "last is known only when the next one is asked for, and the group would go on in the "
            "next epoch\n"
            "  Nothing was prepared. Use a map-style dataset, or a loader with torch's arguments "
            "alone.",
        ),
        (
            bool(left),
            f"split_batches=True divides batch_size={size} among {world_size} processes, and "
            f"{left} samples are left\n"
            f"  Nothing was prepared. Use a batch_size that {world_size} divides.",
        ),
    ]
    for is_refused, words in refused:
        if is_refused:
            raise OptionError(words)


# ---- skip ----------------------------------------------------------------------------------------


def _skip(former: Callable[..., Any], dataloader: Any, num_batches: int = 0) -> Any:
    """Return what yields the rest of an epoch; of a loader that is not forebay's, as before."""
    if not isinstance(getattr(dataloader, "_prepared", None), Prepared):
        return former(dataloader, num_batches)
    return rest_of_epoch(dataloader, num_batches)


def rest_of_epoch(loader: Any, batches: int) -> Any:
    """Return what yields the current epoch of a loader after so many batches.

    That is the loader itself if `load_state` brought it there.
    """
    state = loader.state_dict()
    epoch, returned, made_with = state["epoch"], state["batch"], state["made_with"]
    if returned == batches:
        return loader
    if returned:
        raise OptionError(
            f"skip_first_batches(loader, {batches}), and the loader is after {returned} batches of "
            f"epoch {epoch}, where load_state() brought it\n"
            "  Nothing was changed. Leave skip_first_batches() out: the loader goes on there."
        )
    if made_with["kind"] == "plan" and state["seed"] is not None:
        size, length = made_with["global_batch_size"], made_with["length"]
        whole = length - length % size if made_with["drop_last"] else length
        loader.load_state_dict(state | {"batch": batches, "sample": min(batches * size, whole)})
        return loader
    return _Rest(loader, batches)


class _Rest:
    """Yields an epoch of a loader without its first batches, which are made and dropped."""

    def __init__(self, loader: Any, batches: int) -> None:
        self._loader, self._batches = loader, batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return max(len(self._loader) - self._batches, 0)

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self._loader)
        for _ in range(self._batches):
            next(iterator, None)
        yield from iterator
