"""A loader in Ray Train: `prepare_data_loader(loader)` returns the loader itself.

    prepare_data_loader ── loader.sampler, is it divided? ──> divided_sampler ──> ranks
                        ── a wrapper for a device ──> on_device ──> the loader

Of a loader that is not divided, Ray makes a stock loader around its dataset; and around each one
another, which moves batches to the device and takes each of them before it is asked for it. A
loader of forebay does both itself, and has a position.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from forebay.errors import OptionError
from forebay.loading.late_arguments import check_ranks, set_arguments, values_of_ranks
from forebay.pools.ray_internals import replace_train_wrapper
from forebay.ranks import process_group

LIBRARY = "Ray Train"


def wrap_no_loader(kind: type) -> None:
    """Have Ray Train put nothing around a loader of this class."""
    replace_train_wrapper(partial(on_device, kind))


def on_device(
    kind: type,
    former: Callable[..., Any],
    loader: Any,
    device: torch.device,
    auto_transfer: bool = False,
) -> Any:
    """Return a loader whose batches come on a device: a loader of a class itself."""
    if not isinstance(loader, kind):
        return former(loader, device, auto_transfer)
    if device.type not in ("cpu", "cuda"):
        raise OptionError(
            f"prepare_data_loader() is to move batches to {str(device)!r}, and a "
            "forebay.DataLoader copies them to 'cpu' or 'cuda'\n"
            "  Nothing was prepared. Pass move_to_device=False, and move each batch in the "
            "training loop."
        )
    known: Any = loader
    if device.type == "cuda" and known.device is None:
        set_arguments(known, {"device": device})
    return loader


def divided_sampler(loader: Any) -> Any:
    """Divide a loader among the workers of Ray Train; return a sampler that tells Ray so.

    A loader with torch's arguments alone gets the DistributedSampler that Ray would give to one of
    torch's class.
    """
    sampler, ranks = vars(loader)["sampler"], process_group()
    check_ranks(loader, ranks, LIBRARY)
    is_divided = isinstance(sampler, DistributedSampler)
    if ranks.world_size == 1 or is_divided or isinstance(loader.dataset, IterableDataset):
        return sampler
    if type(loader.batch_sampler) not in (type(None), BatchSampler):
        raise OptionError(
            f"the batches of a {type(loader.batch_sampler).__name__} cannot be divided among the "
            f"{ranks.world_size} workers of Ray Train\n"
            "  Nothing was prepared. Pass batch_size=, and sampler= if need be; or give each "
            "worker its own batches, and pass add_dist_sampler=False to prepare_data_loader()."
        )
    if loader._is_named:
        set_arguments(loader, values_of_ranks(loader, ranks))
        return DistributedSampler(loader.dataset, *ranks)
    if not isinstance(sampler, RandomSampler | SequentialSampler):
        warnings.warn(
            f"Ray Train replaces the {type(sampler).__name__} of a loader with torch's arguments "
            "alone by a DistributedSampler. Pass seed= to divide the batches of your sampler.",
            stacklevel=4,
        )
    is_shuffled = not isinstance(sampler, SequentialSampler)
    values: dict[str, Any] = {
        "sampler": DistributedSampler(loader.dataset, *ranks, shuffle=is_shuffled)
    }
    if loader.batch_sampler is not None:
        own = BatchSampler(values["sampler"], loader.batch_size, loader.drop_last)
        values |= {"batch_sampler": own}
    set_arguments(loader, values)
    return loader.sampler


def refuse_wrapper() -> None:
    """Refuse to be iterated by Ray's own wrapper, which takes a batch before it is asked for it."""
    raise OptionError(
        "prepare_data_loader() of Ray Train put another loader around this one, which would be a "
        "batch ahead of the training, and so would its state\n"
        "  No batch was returned. Make the loader in the training function, or pass "
        "move_to_device=False, and device= to the loader."
    )
