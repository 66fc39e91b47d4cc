"""What the user says by `set_epoch`, on a sampler or on a dataset, and what is likely to come.

    sampler.set_epoch(3)  ──>  Watch.value = 3  ──>  the plan of the next epoch

A buffer makes batches of epochs that have not begun, so it has to foresee what `set_epoch` will be
called with. Whoever calls it counts up, so one more is expected each time; where that was wrong,
what was made is dropped and made anew.
"""

from __future__ import annotations

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
        return type(self._target).set_epoch(self._target, epoch)


def expected(value: int | None, epochs_on: int) -> int | None:
    """Return what `set_epoch` will have been called with so many epochs from now."""
    return None if value is None else value + epochs_on
