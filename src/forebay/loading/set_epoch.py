"""Record the arguments of `set_epoch` on a sampler or dataset, and predict the next ones.

    sampler.set_epoch(3)  ──>  SetEpochRecorder.value = 3  ──>  values of the next planned epoch

A buffer makes batches of epochs that have not begun, so the argument of the next call has to be
predicted: one more than the last one, or a step as large as the last step. Where the prediction was
wrong, what was made is dropped and made again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from forebay.loading.changes import attributes, fingerprint

# Last arguments of `set_epoch` on: the outer sampler, the sampler within it, the dataset. None
# where it was never called, or does not exist.
Values = tuple[int | None, ...]


class SetEpochRecorder:
    """Replaces the `set_epoch` of one object, and remembers what it was called with.

    It is stored on the object itself and travels with it, by pickle too.

    Attributes:
        value: The last argument; None before the first call.
        writes: Attributes of the object that calls have changed.
    """

    def __init__(self, target: Any) -> None:
        """Record the calls on `target`."""
        self.value: int | None = None
        self.writes: frozenset[str] = frozenset({"set_epoch"})
        self._target = target
        self._own = getattr(target, "__dict__", {}).get("set_epoch")

    @classmethod
    def on(cls, target: Any) -> SetEpochRecorder | None:
        """Return the recorder of an object, installed if need be; None if it cannot have one."""
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
        with suppress(TypeError):  # whatever else the user's own `set_epoch` takes
            epoch = operator.index(epoch)  # of a tensor, or of numpy's integers
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
        return target.__getattr__("set_epoch")(epoch)  # it forwards what it does not have itself


class SetEpochRecorders:
    """The recorders on everything that a loader's batches depend on.

    Args:
        sampler: The outer sampler; None to record nothing on samplers.
        dataset: The dataset, or a subset of one that has `set_epoch`; None likewise.
    """

    def __init__(self, sampler: Any, dataset: Any) -> None:
        """Install the recorders."""
        inner = getattr(sampler, "sampler", None)
        self._targets = (sampler, inner, owner_of_set_epoch(dataset))
        self._all = [SetEpochRecorder.on(each) for each in self._targets]

    def fingerprint(self) -> Any:
        """Return what differs once the user has changed a sampler, other than by `set_epoch`."""
        return [
            fingerprint(thing, frozenset() if recorder is None else recorder.writes)
            for thing, recorder in zip(self._targets[:2], self._all, strict=False)
        ]

    def dataset_fingerprint(self, dataset: Any) -> Any:
        """Return the same of a dataset."""
        recorder = self._all[2]
        owner, writes = self._targets[2], frozenset() if recorder is None else recorder.writes
        own = fingerprint(dataset, writes if owner is dataset else frozenset())
        return own if owner in (None, dataset) else (own, fingerprint(owner, writes))

    def values(self) -> Values:
        """Return what `set_epoch` was called with last, on each."""
        return tuple(None if each is None else each.value for each in self._all)

    def restore(self, values: Sequence[int | None]) -> None:
        """Call `set_epoch` as it was called before a state was saved."""
        for recorder, value in zip(self._all, values, strict=False):
            if recorder is not None and value is not None:
                recorder(value)

    def call_on_dataset(self, values: Values) -> None:
        """Call the dataset's `set_epoch` with these values, not as the user's call."""
        self._call((None, None, *values[-1:]))

    @contextmanager
    def on_samplers(self, values: Values) -> Iterator[None]:
        """Set the samplers to the epoch of these values for the block."""
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
        # One may have passed the call on to another, whose recorder took it for the user's.
        for recorder, value in zip(self._all, users, strict=True):
            if recorder is not None:
                recorder.value = value


def next_values(last: Values, before: Values | None) -> Values:
    """Return what `set_epoch` is expected to be called with after `last`.

    Args:
        last: The values of one epoch.
        before: Those of the epoch before it, if they are known.
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
