"""Prepare a batch for the user: on the loader's device, and transformed there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from forebay.devices.device_api import Device
from forebay.devices.which_device import copying_device
from forebay.loading.messages import BatchRequest, BatchResult
from forebay.loading.settings import Settings
from forebay.plan.seeds import DEVICE, seed_of
from forebay.randomness import generators_seeded, seeded_generator


class HandOut:
    """Moves and transforms the batches of one loader, in the thread that takes them.

    Args:
        settings: The settings of the loader.

    Attributes:
        device: Where the feed copies batches in advance; None if they stay in host memory.
        is_needed: Whether a batch has to be moved or transformed when it is returned.
    """

    def __init__(self, settings: Settings) -> None:
        loader = settings.loader
        pins = bool(loader.pin_memory)
        self.device: Device | None = copying_device(loader.device, pins=pins)
        self._transform: Callable[..., Any] | None = loader.device_transform
        # With the device "cpu" batches are returned as they were made: in host memory.
        moves = loader.device is not None and self.device is not None
        self.is_needed = moves or self._transform is not None
        self._takes_generator = _takes_generator(self._transform)
        self._replays = loader.seed is not None and not settings.is_iterable

    def __call__(self, request: BatchRequest, result: BatchResult, seed: int | None) -> Any:
        """Return the batch on the device, transformed.

        Args:
            request: Which batch it is.
            result: The batch, which the feed may have moved.
            seed: The loader's seed; None for random numbers that depend on the generators.

        Raises:
            Exception: What the transform raised.
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
