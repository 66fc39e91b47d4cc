"""The attributes of a loader that the files of `loading/` read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch

from forebay.buffer import Buffer
from forebay.observe.diagnosis import Diagnosis
from forebay.options import Ray
from forebay.ranks import Ranks


class LoaderArguments(Protocol):
    """A `DataLoader`: its arguments, as attributes, and what it derives from them when made.

    Most of them may be changed later, so they are read at each use.
    """

    dataset: Any
    batch_size: int | None
    sampler: Any
    batch_sampler: Any
    num_workers: int
    collate_fn: Any
    pin_memory: bool
    drop_last: bool
    timeout: float
    worker_init_fn: Any
    multiprocessing_context: Any
    generator: Any
    prefetch_factor: int | None
    persistent_workers: bool
    in_order: bool
    buffer: Buffer | None
    backend: Literal["process", "thread", "ray"] | Ray
    seed: int | None
    on_error: Literal["raise", "skip"]
    world_size: int | Literal["auto"] | None
    tail: Literal["repeat", "uneven"]
    device: str | torch.device | None
    device_transform: Callable[..., Any] | None
    # Only `Settings` reads these.
    _ranks: Ranks | None
    _prefetch_is_set: bool  # whether `prefetch_factor` was given
    _by_torchs_rules: bool  # see `Settings`

    def diagnose(self) -> Diagnosis:
        """See `DataLoader`."""
