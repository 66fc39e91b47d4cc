"""The user's model: what it is, where it runs, and how it is called."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from forebay.errors import OptionError
from forebay.predicting.records import Found, Loaded


def is_factory(model: Any) -> bool:
    """Tell whether something makes a model, rather than being one.

    A class does, and a callable that needs no argument and has no place for any number of them.

    Raises:
        OptionError: It cannot be called at all.
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
    """Have a module as it is for inference, and leave it as it was."""
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
    """A model that is ready to be called.

    Args:
        model: A module, which is set to `eval` and moved, or a function.
        device: Where to; None for where the module's parameters are.

    Attributes:
        device: Where batches are moved; None if they stay where they are.
    """

    def __init__(self, model: Any, device: str | torch.device | None) -> None:
        """See the class."""
        self.device = None if device is None else torch.device(device)
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
        """Return what the model makes of a batch."""
        if self.device is not None:
            batch = _moved(batch, self.device)
        with torch.inference_mode() if self._is_module else nullcontext():
            return self._model(batch)

    def ahead(self, found: Iterator[Found]) -> Iterator[Found]:
        """Pass batches on; on a GPU, each is copied there while the one before is worked on."""
        if self.device is None or self.device.type != "cuda":
            yield from found
            return
        copies = torch.cuda.Stream(self.device)
        waiting: tuple[Found, torch.cuda.Event] | None = None
        for each in found:
            with torch.cuda.stream(copies):
                try:
                    there = [
                        Loaded(one.indices, _moved(one.batch, self.device)) for one in each.loaded
                    ]
                except torch.OutOfMemoryError:
                    there = each.loaded  # moved when its turn comes, in smaller batches
                copied = torch.cuda.Event()
                copied.record(copies)
            if waiting is not None:
                yield self._arrived(*waiting)
            waiting = Found(there, each.lost), copied
        if waiting is not None:
            yield self._arrived(*waiting)

    def _arrived(self, found: Found, copied: torch.cuda.Event) -> Found:
        here = torch.cuda.current_stream(self.device)
        copied.wait(here)
        for one in found.loaded:
            for tensor in _tensors_of(one.batch):
                tensor.record_stream(here)  # its memory is not the copying stream's to reuse
        return found


def _moved(batch: Any, device: torch.device) -> Any:
    if hasattr(batch, "to"):  # a tensor, a PackedSequence, a tokenizer's batch
        if isinstance(batch, torch.Tensor):
            return batch.to(device, non_blocking=True)
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: _moved(item, device) for key, item in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_moved(item, device) for item in batch))
    if type(batch) in (list, tuple):
        return type(batch)(_moved(item, device) for item in batch)
    return batch


def _tensors_of(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        if batch.is_cuda:
            yield batch
    elif isinstance(batch, Mapping):
        for item in batch.values():
            yield from _tensors_of(item)
    elif isinstance(batch, list | tuple):
        for item in batch:
            yield from _tensors_of(item)
