"""Recognize factories, and call the user's model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from forebay.batches import moved
from forebay.devices.device_api import Device
from forebay.devices.which_device import device_of
from forebay.errors import OptionError


def is_factory(model: Any) -> bool:
    """Tell whether `model` returns a model when called, rather than being one.

    A class does, and a callable that has no required argument and neither *args nor **kwargs.

    Raises:
        OptionError: It cannot be called.
    """
    if isinstance(model, type):
        return True
    if not callable(model):
        raise OptionError(
            f"the model must be an nn.Module or a function of a batch; got {type(model).__name__}\n"
            "  Nothing was started."
        )
    if isinstance(model, torch.nn.Module):
        return False
    try:
        parameters = inspect.signature(model).parameters.values()
    except (ValueError, TypeError):  # built in
        return False
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(one.default is not one.empty and one.kind not in open_ended for one in parameters)


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Set a module to `eval` for the block, and restore the mode of each submodule."""
    if not isinstance(model, torch.nn.Module):
        yield
        return
    modes = {part: part.training for part in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


class Model:
    """A model on its device.

    Args:
        model: A module, which is set to `eval` and moved, or a function.
        device: The device; None for that of the module's parameters.

    Attributes:
        device: Where batches are moved; None if they stay where they are.
        copies_to: The same device, to which batches may be copied before the model is called.
    """

    def __init__(self, model: Any, device: str | torch.device | Device | None) -> None:
        self.device = device_of(device)
        self._model = model
        self._is_module = isinstance(model, torch.nn.Module)
        if self._is_module:
            model.eval()
            if self.device is None:
                first = next(model.parameters(), None)
                self.device = None if first is None else first.device
            else:
                model.to(self.device)
        self.copies_to = device if isinstance(device, Device) else self.device

    def __call__(self, batch: Any) -> Any:
        """Return the model's outputs for a batch."""
        if self.device is not None:
            batch = moved(batch, self.device)
        with torch.inference_mode() if self._is_module else nullcontext():
            return self._model(batch)
