"""What the user says by `set_epoch`, on a sampler or on a dataset, and what is likely to come.

    sampler.set_epoch(3)  ──>  Watch.value = 3  ──>  Said  ──>  the plan of the next epoch

A buffer makes batches of epochs that have not begun, so it has to foresee what `set_epoch` will be
called with. Whoever calls it counts up, so one more is expected, or a step as large as the last one
was; where that was wrong, what was made is dropped and made anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class Watch:
    """Takes the place of an object's `set_epoch`, and remembers what it was called with.

    It hangs on the object itself and travels with it, by pickle too.

    Attributes:
        value: The last argument; None before the first call.
    """

    def __init__(self, target: Any) -> None:
        """Watch `target`."""
        self.value: int | None = None
        self._target = target
        self._own = getattr(target, "__dict__", {}).get("set_epoch")

    @classmethod
    def on(cls, target: Any) -> Watch | None:
        """Return the watch of an object, hung up now if need be; None if it cannot have one."""
        if not hasattr(target, "set_epoch"):
            return None
        there = getattr(target, "__dict__", {}).get("set_epoch")
        if isinstance(there, Watch):
            return there
        watch = cls(target)
        try:
            target.set_epoch = watch
        except AttributeError:  # it has __slots__
            return None
        return watch

    def __call__(self, epoch: int) -> Any:
        """Be `set_epoch`."""
        self.value = epoch
        return self.apply(epoch)

    def apply(self, epoch: int) -> Any:
        """Call the real `set_epoch`, without taking it for the user's word."""
        target, kind = self._target, type(self._target)
        if self._own is not None:
            return self._own(epoch)
        if hasattr(kind, "set_epoch"):
            return kind.set_epoch(target, epoch)
        return target.__getattr__("set_epoch")(epoch)  # it forwards what it does not have itself


@dataclass(frozen=True, slots=True)
class Said:
    """What `set_epoch` was, or is expected to be, called with before an epoch.

    Attributes:
        values: The last argument on each watched object; None where it was never called.
    """

    values: tuple[int | None, ...]

    def after(self, steps: Sequence[int]) -> Said:
        """Return what is expected next, if values go on by these steps."""
        pairs = zip(self.values, steps, strict=True)
        return Said(tuple(None if value is None else value + step for value, step in pairs))

    def steps_from(self, before: Said | None) -> tuple[int, ...]:
        """Return how far the values went since the epoch before; 1 where that cannot be said."""
        if before is None:
            return (1,) * len(self.values)
        pairs = zip(before.values, self.values, strict=True)
        return tuple(1 if None in (old, new) else new - old for old, new in pairs)  # type: ignore[operator]


class Watches:
    """The watches on what a loader's batches rest on: sampler, sampler within it, dataset.

    Args:
        sampler: The outer sampler.
        dataset: What has the dataset's `set_epoch`; None if nothing has.
    """

    def __init__(self, sampler: Any, dataset: Any) -> None:
        """Hang the watches up."""
        self._samplers = [Watch.on(each) for each in (sampler, getattr(sampler, "sampler", None))]
        self._dataset = Watch.on(dataset)

    def said(self) -> Said:
        """Return what the user has said by now."""
        watches = (*self._samplers, self._dataset)
        return Said(tuple(None if watch is None else watch.value for watch in watches))

    def take_over(self, values: Sequence[int | None]) -> None:
        """Say what was said in the program that a state is from."""
        for watch, value in zip((*self._samplers, self._dataset), values, strict=False):
            if watch is not None and value is not None:
                watch(value)

    def set_samplers(self, said: Said) -> None:
        """Set the samplers to an epoch."""
        self._set(self._samplers, said)

    def set_dataset(self, said: Said) -> None:
        """Set this process's dataset to an epoch."""
        self._set([self._dataset], Said(said.values[-1:]))

    def _set(self, watches: Sequence[Watch | None], said: Said) -> None:
        users = self.said()
        for watch, value in zip(watches, said.values, strict=False):
            if watch is not None and value is not None:
                watch.apply(value)
        # One may have passed it on to another, which took it for the user's word.
        for watch, value in zip((*self._samplers, self._dataset), users.values, strict=True):
            if watch is not None:
                watch.value = value
