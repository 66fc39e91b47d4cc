"""Recognize factories, check devices, and call the user's model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch

from forebay.batches import is_transparent, moved
from forebay.errors import OptionError
from forebay.predicting.range_reader import Loaded
from forebay.trees import leaves


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


def device_of(device: str | torch.device | None) -> torch.device | None:
    """Return the device that the user named.

    Raises:
        OptionError: There is no such device.
    """
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise OptionError(
            f"device={device!r} is not valid: {reason}\n"
            "  Nothing was started. Name one such as 'cpu', 'cuda' or 'cuda:1'."
        ) from error


def check_device(device: torch.device | None) -> None:
    """Make sure that a device is on this machine.

    Raises:
        OptionError: It is a GPU that torch does not find.
    """
    if device is None or device.type != "cuda":
        return
    # This does not initialize CUDA, after which forked workers could not use it.
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise OptionError(
            f"device={str(device)!r} is not available: torch finds {count} CUDA devices here\n"
            f"  Nothing was started. Use device='cpu'; or look at torch.version.cuda (it is "
            f"{torch.version.cuda}), the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES."
        )


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
    """

    def __init__(self, model: Any, device: torch.device | None) -> None:
        self.device = device
        self._model = model
        self._is_module = isinstance(model, torch.nn.Module)
        if self._is_module:
            model.eval()
            if self.device is None:
                first = next(model.parameters(), None)
                self.device = None if first is None else first.device
            else:
                model.to(self.device)

    def __call__(self, batch: Any) -> Any:
        """Return the model's outputs for a batch."""
        if self.device is not None:
            batch = moved(batch, self.device)
        with torch.inference_mode() if self._is_module else nullcontext():
            return self._model(batch)

    def ahead(self, batches: Iterator[Loaded]) -> Iterator[Loaded]:
        """Yield the batches; on a GPU, copy each there while the model processes the previous one.

        A batch that holds tensors in an object of unknown type is moved only when the model is
        called: a tensor that is copied on another stream must be recorded on the one that uses it.
        """
        if self.device is None or self.device.type != "cuda":
            yield from batches
            return
        copies = torch.cuda.Stream(self.device)
        waiting: tuple[Loaded, torch.cuda.Event] | None = None
        for loaded in batches:
            with torch.cuda.stream(copies):
                # If memory runs out, smaller batches are moved when the model is called.
                with suppress(torch.OutOfMemoryError):
                    if is_transparent(loaded.batch):
                        loaded = loaded._replace(batch=moved(loaded.batch, self.device))
                copied = torch.cuda.Event()
                copied.record(copies)
            if waiting is not None:
                yield self._arrived(*waiting)
            waiting = loaded, copied
        if waiting is not None:
            yield self._arrived(*waiting)

    def _arrived(self, loaded: Loaded, copied: torch.cuda.Event) -> Loaded:
        here = torch.cuda.current_stream(self.device)
        copied.wait(here)
        for leaf in leaves(loaded.batch):
            if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                leaf.record_stream(here)  # or the copy stream would reuse its memory
        return loaded
