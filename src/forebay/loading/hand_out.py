"""Prepare a batch for the user: on the loader's device, and transformed there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from forebay.base.randomness import generators_seeded, seeded_generator
from forebay.devices.device import Device, copying_device
from forebay.loading.kind import LoaderKind
from forebay.loading.messages import BatchRequest, BatchResult
from forebay.seeds import DEVICE, seed_of


class HandOut:
    """Moves and transforms the batches of one loader, in the thread that takes them.

    Attributes:
        device: Where the feed copies batches in advance; None if they stay in host memory.
    """

    def __init__(self, kind: LoaderKind) -> None:
        self.device: Device | None = copying_device(kind.device, pins=bool(kind.pin_memory))
        self._transform = kind.device_transform
        # With the device "cpu" batches are returned as they were made: in host memory.
        moves = kind.device is not None and self.device is not None
        self.is_needed = moves or self._transform is not None
        self._takes_generator = _takes_generator(self._transform)
        self._replays = kind.replays

    def __call__(self, request: BatchRequest, result: BatchResult, seed: int | None) -> Any:
        """Return the batch on the device, transformed.

        Args:
            seed: The loader's seed; None for random numbers that depend on the generators.
        """
        batch, device = result.batch, self.device
        if device is not None and self.is_needed and not result.is_moved:
            batch = device.moved(batch)
        if self._transform is None:
            return batch
        if seed is not None:
            seed = seed_of(seed, DEVICE, request.epoch, request.batch)
        try:
            if device is None:
                return self._transformed(batch, seed)
            with device.on_copy_stream():
                batch = self._transformed(batch, seed)
        except Exception as error:
            error.add_note(f"forebay: device_transform raised it, for {request}")
            if self._replays:
                error.add_note(request.replay_note)
            raise
        device.hand_over(batch)
        return batch

    def _transformed(self, batch: Any, seed: int | None) -> Any:
        transform, device = self._transform, self.device
        assert transform is not None
        if self._takes_generator:
            where = "cpu" if device is None else device.torch_device
            generator = None if seed is None else seeded_generator(seed, where)
            return transform(batch, generator=generator)
        if seed is None:
            return transform(batch)
        other = None if device is None else device.default_generator()
        with generators_seeded(seed, *([] if other is None else [other])):
            return transform(batch)


def _takes_generator(function: Callable[..., Any] | None) -> bool:
    if function is None:
        return False
    try:
        return "generator" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # built in
        return False
