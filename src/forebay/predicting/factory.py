"""Factories of models: whether one makes the model that it made before."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from forebay.base.randomness import seed_generators
from forebay.errors import ChangedError
from forebay.pools.events import Refusal
from forebay.predicting.reader import SEED
from forebay.runs.fingerprint import WEIGHTS, describe
from forebay.runs.source_code import HASH, dumps, sha256_of


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
