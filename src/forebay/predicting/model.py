"""The user's model: recognized or made by a factory, called, halved where it fails; its outputs."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from forebay.base.batches import halves, leaves, mapped, moved
from forebay.base.randomness import seed_generators
from forebay.base.torch_internals import version_of
from forebay.collating.rules import described_value
from forebay.devices.device import Device, device_of
from forebay.errors import ChangedError, OptionError
from forebay.failures import Failure
from forebay.observe.progress import log
from forebay.pools.events import Refusal
from forebay.predicting.data import SEED, Loaded
from forebay.runs.fingerprint import WEIGHTS, describe
from forebay.runs.source_code import HASH, dumps, sha256_of


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


class Predicted(NamedTuple):
    """What the model returned for some samples."""

    indices: list[int]
    outputs: Any


# So many samples fail alike before the model is taken for one of other batches.
_ALIKE = 3


class Bisection:
    """Calls a model, and attributes its exceptions to single samples.

    Once the device runs out of memory, further batches are no larger than what fits.

    Attributes:
        model_s: Seconds in the model; halving a batch counts.
        failing_s: The part of that for batches with samples that fail.
    """

    def __init__(
        self, model: Callable[[Any], Any], load: Callable[[list[int]], Iterator[Loaded]]
    ) -> None:
        self._model, self._load = model, load
        self._most: int | None = None  # samples that fit on the device
        self._alike: list[str] | None = []  # errors of the first samples; None once a batch worked
        self.model_s = self.failing_s = 0.0

    def __call__(self, loaded: Loaded) -> Iterator[Predicted | Failure]:
        """Yield the model's outputs for a batch, in its order, and the samples that failed."""
        left, is_failing = [loaded], False
        while left:
            one = left.pop()
            yield from one.failures
            count = len(one.indices)
            if not count:
                continue
            if self._most is None or count <= self._most:
                before, most, began = _state(one.batch), self._most, time.perf_counter()
                outcome = self._tried(one)
                is_failing |= outcome is None and self._most == most
                self._add_time(began, is_failing)
                if outcome is not None:
                    yield outcome
                    continue
                if _state(one.batch) != before:  # its halves would be predicted from other values
                    one = one._replace(batch=None)
            began = time.perf_counter()
            left += reversed(self._halves(one))
            self._add_time(began, is_failing)

    def _add_time(self, began: float, is_failing: bool) -> None:
        took = time.perf_counter() - began
        self.model_s += took
        self.failing_s += took if is_failing else 0.0

    def _tried(self, one: Loaded) -> Predicted | Failure | None:
        """Return the outputs, or the failure of a single sample; None to halve the batch."""
        count, index = len(one.indices), one.indices[0]
        # The exception must be freed before the next try: its frames hold what filled the memory.
        try:
            found = Predicted(one.indices, self._model(one.batch))
            self._alike = None
            return found
        except torch.OutOfMemoryError as error:
            self._most = max(count // 2, 1)
            text = "memory ran out with a batch of %d samples: from now on they have at most %d"
            log.info(text, count, self._most)
            failure = Failure.of(error, source=index) if count == 1 else None
        except Exception as error:  # noqa: BLE001 - whatever the user's code raises
            if count > 1:
                return None
            self._refuse_tuples(error, one.batch)
            note_on_batch(error, one.batch)
            return Failure.of(error, source=index)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return failure

    def _refuse_tuples(self, error: Exception, batch: Any) -> None:
        """Raise OptionError if no sample can be what the model takes: a tuple for one argument."""
        is_wrong_type = isinstance(error, TypeError | AttributeError)
        if self._alike is None or not is_wrong_type or not isinstance(batch, list | tuple):
            self._alike = None
            return
        self._alike.append(type(error).__name__)
        if len(self._alike) < _ALIKE:
            return
        reason = str(error).partition("\n")[0]
        raise OptionError(
            f"the model was called with a {type(batch).__name__} of {len(batch)}, since the "
            f"samples are tuples, and failed: {type(error).__name__}: {reason}\n"
            "  The first samples all failed so, and nothing was kept of them. Pass a function that "
            "takes the batch apart, such as lambda batch: model(batch[0]), or a dataset or "
            "collate_fn= without what the model does not take."
        ) from error

    def _halves(self, one: Loaded) -> list[Loaded]:
        middle = len(one.indices) // 2
        indices = one.indices[:middle], one.indices[middle:]
        cut = halves(one.batch, len(one.indices))
        if cut is not None:
            return [Loaded(*pair) for pair in zip(indices, cut, strict=True)]
        return [loaded for half in indices for loaded in self._load(half)]


def _state(batch: Any) -> list[tuple[Any, ...]]:
    """Return a list that differs after a batch was changed, in place or as a container."""
    try:
        return [(id(leaf), _version(leaf)) for leaf in leaves(batch)]
    except RecursionError:  # it contains itself, so it counts as changed
        return [(object(),)]


def _version(leaf: Any) -> object:
    if isinstance(leaf, np.ndarray):
        return object()  # an array does not tell, so it counts as changed
    version = version_of(leaf) if isinstance(leaf, torch.Tensor) else 0
    return object() if version < 0 else version


Wait = Callable[[], None]


def copy_from_gpu(outputs: Any) -> tuple[Any, Wait] | None:
    """Start to copy outputs that are on a GPU to page-locked memory; None if none are."""
    try:
        device = next((each.device for each in leaves(outputs) if _is_on_gpu(each)), None)
    except RecursionError:  # they contain themselves, which `rows_of_outputs` says
        return None
    if device is None:
        return None
    copies = mapped(_copied, outputs)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return copies, event.synchronize


def _is_on_gpu(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_cuda


def _copied(leaf: Any) -> Any:
    if not _is_on_gpu(leaf) or leaf.layout is not torch.strided or leaf.is_nested:
        return leaf
    return leaf.detach().to("cpu", non_blocking=True)


def in_host_memory(
    outcomes: Iterator[Predicted | Failure],
    start: Callable[[Any], tuple[Any, Wait] | None] = copy_from_gpu,
) -> Iterator[Predicted | Failure]:
    """Yield outcomes in their order, with outputs on a GPU copied to host memory.

    Such a copy is started, without waiting, when the model has been called, and awaited after the
    model was called for the next batch. Other outcomes are yielded as they come.

    Args:
        start: Starts to copy outputs; returns the copy and how to wait for it, or None if they are
            in host memory.
    """
    started: tuple[Predicted, Wait] | None = None
    for outcome in outcomes:
        before, started = started, None
        if isinstance(outcome, Predicted) and (copy := start(outcome.outputs)) is not None:
            outputs, wait = copy
            started = outcome._replace(outputs=outputs), wait
        if before is not None:
            yield _awaited(*before)
        if started is None:
            yield outcome
    if started is not None:
        yield _awaited(*started)


def _awaited(outcome: Predicted, wait: Wait) -> Predicted:
    wait()
    return outcome


# ---- factories -----------------------------------------------------------------------------------
# Whether a factory makes the model that it made before.


class ModelFactory:
    """Calls a factory, and compares the weights of its model with those of an earlier run.

    Args:
        changed: The message for weights that changed.
        known: Hashes of the weights before; None to accept any.

    Attributes:
        weights: The hash of those of the model; "" before it was made, or if it has none.
    """

    def __init__(self, make: Any, changed: str, known: Collection[str] | None) -> None:
        self._make, self._changed = make, changed
        self.known, self.weights = known, ""

    def model(self) -> Any:
        """Return the model; weights that it draws at random are the same in every worker."""
        seed_generators(SEED)
        model = self._make()
        self.weights = hash_of_weights(model)
        if self.known and self.weights not in self.known:
            raise Refusal("stop") from ChangedError(self._changed)
        return model


def hash_of_weights(model: Any) -> str:
    """Return a hash of a model's parameters, buffers and arrays; "" if it has none."""
    found = [
        (name, text)
        for name, text in describe(model).parameters
        if WEIGHTS in name or text.startswith(HASH)
    ]
    return sha256_of(dumps(found).encode()) if found else ""


class SameWeightsError(Exception):
    """The weights are those of the earlier run: raised to end a run that only compares them."""


class WeightsCheck:
    """Makes the model in a worker, where nothing else is to be done, to compare its weights."""

    def __init__(self, factory: ModelFactory) -> None:
        self._factory = factory

    def __call__(self, row: object, out: object) -> None:
        """End the run, with one error or the other, so that nothing is recorded."""
        self._factory.model()
        raise Refusal("stop") from SameWeightsError()


# ---- what the model was called with --------------------------------------------------------------
# For an error of the user's that may come from that.

# Errors of code that was given another kind of batch than it takes.
_ERRORS = (TypeError, AttributeError, KeyError, IndexError)
# How many elements of a batch are described.
_SHOWN = 4


def note_on_batch(error: Exception, batch: Any) -> None:
    """Add to an exception what the batch is, and what to change, if it is no plain tensor."""
    if isinstance(error, _ERRORS) and not isinstance(batch, torch.Tensor):
        error.add_note(f"forebay: {_words_of(batch)}")


def _words_of(batch: Any) -> str:
    if isinstance(batch, Mapping):
        parts = [f"{key!r}: {described_value(value)}" for key, value in [*batch.items()][:_SHOWN]]
        advice = (
            "A batch is one argument, and is not unpacked. Pass a model that takes the dict, or "
            "return only what the model takes from the dataset, or from collate_fn."
        )
        return _sentence(batch, parts, advice)
    if not isinstance(batch, list | tuple):
        return _sentence(batch, [], _advice_on(batch))
    parts = [described_value(value) for value in batch[:_SHOWN]]
    if all(isinstance(each, str | bytes) for each in batch):
        advice = (
            "Strings stay a list of strings. Make tensors of them in collate_fn, such as with a "
            "tokenizer, or in the model."
        )
    elif isinstance(batch[0], torch.Tensor) and len(batch) > 1:
        advice = (
            "A batch of (x, y) is one argument. For a model that takes x alone, return only x from "
            "the dataset, or choose it: collate_fn=lambda samples: torch.stack([x for x, *_ in "
            "samples])."
        )
    else:
        advice = _advice_on(batch)
    return _sentence(batch, parts, advice)


def _sentence(batch: Any, parts: list[str], advice: str) -> str:
    more = ", …" if len(parts) == _SHOWN < len(batch) else ""
    shown = f": {', '.join(parts)}{more}" if parts else ""
    return f"the model was called with {described_value(batch)}{shown}\n  {advice}"


def _advice_on(batch: Any) -> str:
    if isinstance(batch, np.ndarray) and batch.dtype == object:
        return "Torch makes no tensor of objects. Give the array a dtype of numbers in the dataset."
    return "Make what the model takes in the dataset, or in collate_fn."
