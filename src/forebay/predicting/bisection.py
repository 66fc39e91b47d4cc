"""Calls the model on batches, and halves those on which it fails, down to single samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from forebay import trees
from forebay.batches import halves
from forebay.failures import Failure
from forebay.observe.event_log import log
from forebay.predicting.range_reader import Loaded
from forebay.torch_internals import version_of


class Predicted(NamedTuple):
    """What the model returned for some samples."""

    indices: list[int]
    outputs: Any


class Bisection:
    """Calls a model, and attributes its exceptions to single samples.

    Once the device runs out of memory, further batches are no larger than what fits.

    Args:
        model: Called with a batch.
        load: Loads samples again, for a batch that cannot be split, or that the model has changed.
    """

    def __init__(
        self, model: Callable[[Any], Any], load: Callable[[list[int]], Iterator[Loaded]]
    ) -> None:
        self._model, self._load = model, load
        self._most: int | None = None  # samples that fit on the device

    def __call__(self, loaded: Loaded) -> Iterator[Predicted | Failure]:
        """Yield the model's outputs for a batch, in its order, and the samples that failed.

        Raises:
            BaseException: The model raised something other than an Exception.
        """
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
    return [(id(leaf), _version(leaf)) for leaf in trees.leaves(batch)]


def _version(leaf: Any) -> object:
    if isinstance(leaf, np.ndarray):
        return object()  # an array does not tell, so it counts as changed
    version = version_of(leaf) if isinstance(leaf, torch.Tensor) else 0
    return object() if version < 0 else version
