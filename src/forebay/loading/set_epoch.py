"""Record the arguments of `set_epoch` on a sampler or dataset, and predict the next ones.

    sampler.set_epoch(3)  ──>  SetEpochRecorder.value = 3  ──>  values of the next planned epoch

With a buffer, batches are made for epochs that have not begun, so the argument of the next call is
predicted: the last one plus the last step, or plus one. If the prediction was wrong, the batches
are dropped and made again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import Any

import numpy as np
import torch

from forebay.base.torch_internals import version_of

# ---- changes -------------------------------------------------------------------------------------
# Detect changes made to a sampler or dataset after batches were planned.
#
# With a buffer, epochs are planned before they begin. Such a plan depends on a sampler's weights
# or the length of a dataset, and is dropped when those change. The comparison is shallow:
# attributes by value or identity, tensors also by their version, built-in containers also by
# their length. No code of an attribute's own class runs: a `__len__` may have side effects. After
# a change that it cannot detect (an array modified in place, an attribute of an attribute), the
# user calls `DataLoader.refresh`.

_BY_VALUE = (bool, int, float, complex, str, bytes, type(None))


def attributes(thing: Any) -> dict[str, Any]:
    """Return a comparable value for each attribute by name, without generators: those change."""
    known = getattr(thing, "__dict__", {})
    return {
        name: _token(value)
        for name, value in list(known.items())
        if not isinstance(value, torch.Generator)
    }


def fingerprint(thing: Any, ignored: frozenset[str] = frozenset()) -> Any:
    """Return a value that differs once the object has changed."""
    known = {name: token for name, token in attributes(thing).items() if name not in ignored}
    return id(thing), length_of(thing), known


def _token(value: Any) -> Any:
    if isinstance(value, _BY_VALUE):
        return value
    if isinstance(value, torch.Tensor):
        return id(value), version_of(value), None if value.is_nested else tuple(value.shape)
    if isinstance(value, np.ndarray):
        return id(value), value.shape
    # MONAI's `Compose.__len__` seeds all random transforms.
    is_built_in = not isinstance(getattr(type(value), "__len__", None), FunctionType)
    return id(value), length_of(value) if is_built_in else None


def length_of(thing: Any) -> int | None:
    """Return the length of an object; None if it has none."""
    if not isinstance(thing, Sized):
        return None
    try:
        return len(thing)
    except Exception:  # noqa: BLE001 - the user's class may raise anything; it has no length then
        return None


# ---- set epoch -----------------------------------------------------------------------------------

# Last arguments of `set_epoch` on: the outer sampler, the inner sampler, the dataset. None if it
# was never called, or does not exist.
Values = tuple[int | None, ...]


class SetEpochRecorder:
    """Replaces the `set_epoch` of one object and records the argument of each call.

    It is an attribute of that object, and is copied and pickled with it.

    Attributes:
        value: The last argument; None before the first call.
    """

    def __init__(self, target: Any) -> None:
        """Record the calls on `target`."""
        self.value: int | None = None
        self.writes: frozenset[str] = frozenset({"set_epoch"})
        self._target = target
        self._own = getattr(target, "__dict__", {}).get("set_epoch")

    @classmethod
    def on(cls, target: Any) -> SetEpochRecorder | None:
        """Return the recorder of an object, after installing it; None if that is not possible."""
        if not hasattr(target, "set_epoch"):
            return None
        installed = getattr(target, "__dict__", {}).get("set_epoch")
        if isinstance(installed, SetEpochRecorder):
            return installed
        recorder = cls(target)
        try:
            target.set_epoch = recorder
        except AttributeError:  # it has __slots__
            return None
        return recorder

    def __call__(self, epoch: int) -> Any:
        """Record the argument and call the object's own `set_epoch`."""
        with suppress(TypeError):  # the user's `set_epoch` may take something else
            epoch = operator.index(epoch)  # also for tensors and NumPy integers
        self.value = epoch
        return self.apply(epoch)

    def apply(self, epoch: int) -> Any:
        """Call the object's own `set_epoch` without recording it as the user's call."""
        before = attributes(self._target)
        returned = self._call(epoch)
        after = attributes(self._target)
        self.writes |= {name for name in after if before.get(name, self) != after[name]}
        return returned

    def _call(self, epoch: int) -> Any:
        target, kind = self._target, type(self._target)
        if self._own is not None:
            return self._own(epoch)
        if hasattr(kind, "set_epoch"):
            return kind.set_epoch(target, epoch)
        return target.__getattr__("set_epoch")(epoch)  # a wrapper that forwards attributes


class SetEpochRecorders:
    """The recorders on the samplers and the dataset of a loader.

    Args:
        sampler: The outer sampler; None to leave samplers without recorders.
        dataset: The dataset, or a subset of one that has `set_epoch`; None for no recorder.
    """

    def __init__(self, sampler: Any, dataset: Any) -> None:
        """Install the recorders."""
        inner = getattr(sampler, "sampler", None)
        self._targets = (sampler, inner, owner_of_set_epoch(dataset))
        self._all = [SetEpochRecorder.on(each) for each in self._targets]

    def fingerprint(self) -> Any:
        """Return a value that differs once a sampler was changed, except by `set_epoch`."""
        return [
            fingerprint(thing, frozenset() if recorder is None else recorder.writes)
            for thing, recorder in zip(self._targets[:2], self._all, strict=False)
        ]

    def dataset_fingerprint(self, dataset: Any) -> Any:
        """Return a value that differs once a dataset was changed, except by `set_epoch`."""
        recorder = self._all[2]
        owner, writes = self._targets[2], frozenset() if recorder is None else recorder.writes
        own = fingerprint(dataset, writes if owner is dataset else frozenset())
        return own if owner in (None, dataset) else (own, fingerprint(owner, writes))

    def values(self) -> Values:
        """Return the last argument of `set_epoch` on each object."""
        return tuple(None if each is None else each.value for each in self._all)

    def restore(self, values: Sequence[int | None]) -> None:
        """Call `set_epoch` with the arguments recorded in a saved state."""
        for recorder, value in zip(self._all, values, strict=False):
            if recorder is not None and value is not None:
                recorder(value)

    def call_on_dataset(self, values: Values) -> None:
        """Call the dataset's `set_epoch` with its value, without recording the call."""
        self._call((None, None, *values[-1:]))

    @contextmanager
    def on_samplers(self, values: Values) -> Iterator[None]:
        """Call `set_epoch` of the samplers with these values for the duration of the block."""
        self._call((*values[:2], None))
        try:
            yield
        finally:
            self._call((*self.values()[:2], None))

    def _call(self, values: Sequence[int | None]) -> None:
        users = self.values()
        for recorder, value in zip(self._all, values, strict=False):
            if recorder is not None and value is not None:
                recorder.apply(value)
        # A `set_epoch` may call that of another object, which then recorded this call.
        for recorder, value in zip(self._all, users, strict=True):
            if recorder is not None:
                recorder.value = value


def next_values(last: Values, before: Values | None) -> Values:
    """Return the expected arguments of the next `set_epoch`.

    Args:
        before: The arguments for the epoch before that one; None if they are not known.
    """
    if before is None:
        before = (None,) * len(last)
    return tuple(
        None if new is None else new + (1 if old is None else new - old)
        for old, new in zip(before, last, strict=True)
    )


def owner_of_set_epoch(dataset: Any) -> Any:
    """Return the dataset that has a `set_epoch`, looking into subsets; None if there is none."""
    while dataset is not None and not hasattr(dataset, "set_epoch"):
        dataset = getattr(dataset, "dataset", None)
    return dataset
