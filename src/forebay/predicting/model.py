"""Recognize factories, and call the user's model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from forebay.base.batches import halves, leaves, moved
from forebay.base.torch_internals import version_of
from forebay.devices.device import Device, device_of
from forebay.errors import OptionError
from forebay.failures import Failure
from forebay.observe.progress import log
from forebay.predicting.reader import Loaded


def is_factory(model: Any) -> bool:
    """Return whether `model` returns a model when called, rather than being one.

    A class does, and a callable that has no required argument and neither *args nor **kwargs.
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
        device: The device; None for that of the module's parameters.

    Attributes:
        device: Where batches are moved; None if they stay where they are.
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


# ---- bisection -----------------------------------------------------------------------------------
# Calls the model on batches, and halves those on which it fails, down to single samples.


class Predicted(NamedTuple):
    """What the model returned for some samples."""

    indices: list[int]
    outputs: Any


class Bisection:
    """Calls a model, and attributes its exceptions to single samples.

    Once the device runs out of memory, further batches are no larger than what fits.
    """

    def __init__(
        self, model: Callable[[Any], Any], load: Callable[[list[int]], Iterator[Loaded]]
    ) -> None:
        self._model, self._load = model, load
        self._most: int | None = None  # samples that fit on the device

    def __call__(self, loaded: Loaded) -> Iterator[Predicted | Failure]:
        """Yield the model's outputs for a batch, in its order, and the samples that failed."""
        left = [loaded]
        while left:
            one = left.pop()
            yield from one.failures
            count = len(one.indices)
            if not count:
                continue
            if self._most is None or count <= self._most:
                before = _state(one.batch)
                outcome = self._tried(one)
                if outcome is not None:
                    yield outcome
                    continue
                if _state(one.batch) != before:  # its halves would be predicted from other values
                    one = one._replace(batch=None)
            left += reversed(self._halves(one))

    def _tried(self, one: Loaded) -> Predicted | Failure | None:
        """Return the outputs, or the failure of a single sample; None to halve the batch."""
        count, index = len(one.indices), one.indices[0]
        # The exception must be freed before the next try: its frames hold what filled the memory.
        try:
            return Predicted(one.indices, self._model(one.batch))
        except torch.OutOfMemoryError as error:
            self._most = max(count // 2, 1)
            text = "memory ran out with a batch of %d samples: from now on they have at most %d"
            log.info(text, count, self._most)
            failure = Failure.of(error, source=index) if count == 1 else None
        except Exception as error:  # noqa: BLE001 - whatever the user's code raises
            return Failure.of(error, source=index) if count == 1 else None
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return failure

    def _halves(self, one: Loaded) -> list[Loaded]:
        middle = len(one.indices) // 2
        indices = one.indices[:middle], one.indices[middle:]
        cut = halves(one.batch, len(one.indices))
        if cut is not None:
            return [Loaded(*pair) for pair in zip(indices, cut, strict=True)]
        return [loaded for half in indices for loaded in self._load(half)]


def _state(batch: Any) -> list[tuple[Any, ...]]:
    """Return a list that differs after a batch was changed, in place or as a container."""
    return [(id(leaf), _version(leaf)) for leaf in leaves(batch)]


def _version(leaf: Any) -> object:
    if isinstance(leaf, np.ndarray):
        return object()  # an array does not tell, so it counts as changed
    version = version_of(leaf) if isinstance(leaf, torch.Tensor) else 0
    return object() if version < 0 else version
