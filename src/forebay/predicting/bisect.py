"""The model over batches; where it fails, over ever smaller ones, down to the sample that it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from forebay.predicting.records import Found, Loaded, LostSample
from forebay.predicting.split import halves


class Predicted(NamedTuple):
    """What the model returned for some samples."""

    indices: list[int]
    outputs: Any


class Bisection:
    """Calls a model, and lays what it raises to a sample.

    Where the device's memory runs out, all further batches are no larger than what fits.

    Args:
        model: Called with a batch.
        load: Loads samples anew, for a batch that cannot be cut.
    """

    def __init__(self, model: Callable[[Any], Any], load: Callable[[list[int]], Found]) -> None:
        """See the class."""
        self._model, self._load = model, load
        self._most: int | None = None  # samples that fit on the device

    def __call__(self, loaded: Loaded) -> Iterator[Predicted | LostSample]:
        """Yield the model's outputs for a batch, in its order, and the samples that it failed on.

        Raises:
            BaseException: What is no Exception, such as KeyboardInterrupt.
        """
        left: list[Loaded | LostSample] = [loaded]
        while left:
            one = left.pop()
            if isinstance(one, LostSample):
                yield one
                continue
            count = len(one.indices)
            if self._most is None or count <= self._most:
                outcome = self._tried(one)
                if outcome is not None:
                    yield outcome
                    continue
            left += reversed(self._halves(one))

    def _tried(self, one: Loaded) -> Predicted | LostSample | None:
        """Return what came of calling the model; None if it is to be tried with less."""
        count = len(one.indices)
        # The exception must be gone before the next try: its frames hold what filled the memory.
        try:
            return Predicted(one.indices, self._model(one.batch))
        except torch.OutOfMemoryError as error:
            self._most = max(count // 2, 1)
            lost = LostSample.of(one.indices[0], error) if count == 1 else None
        except Exception as error:  # noqa: BLE001 - whatever the user's code raises
            return LostSample.of(one.indices[0], error) if count == 1 else None
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return lost

    def _halves(self, one: Loaded) -> list[Loaded | LostSample]:
        middle = len(one.indices) // 2
        indices = one.indices[:middle], one.indices[middle:]
        cut = halves(one.batch, len(one.indices))
        if cut is not None:
            return [Loaded(*pair) for pair in zip(indices, cut, strict=True)]
        parts: list[Loaded | LostSample] = []
        for half in indices:
            found = self._load(half)
            parts += [*found.loaded, *found.lost]
        return parts
