"""When a record is shown to other processes: about once a second, while something is recorded."""

from __future__ import annotations

import math
from typing import Any, Protocol

PUBLISH_S = 1.0


class Publisher(Protocol):
    """Shows a record to other processes. It does not raise, and returns soon."""

    def __call__(self, record: Any, /) -> None:
        """Show the present state; called in the thread that recorded something."""

    def remove(self) -> None:
        """Show nothing until the next call."""


class Publication:
    """Calls a publisher, once there is one.

    Attributes:
        due: When to call `renew` next, on the clock of the record.
        publisher: Shows the record; None before `begin`.
    """

    def __init__(self) -> None:
        self.due = math.inf
        self.publisher: Publisher | None = None

    def begin(self, publisher: Publisher, at: float) -> None:
        """Show the record from a moment on."""
        self.publisher, self.due = publisher, at

    def renew(self, record: Any, now: float) -> None:
        """Show the present state of the record."""
        self.due = now + PUBLISH_S
        if self.publisher is not None:
            self.publisher(record)

    def remove(self) -> None:
        """Show nothing until something is recorded again."""
        if self.publisher is not None:
            self.publisher.remove()
