"""Progress on stderr: a bar on a terminal, otherwise a line now and then.

A stderr that is missing, closed or cannot be written to never raises: work goes on unseen.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from forebay.observe.run_trace import RunTrace

# Without a terminal: seconds until the first line, and the longest wait between two.
FIRST_LINE_S = 10.0
SLOWEST_LINE_S = 60.0


class Progress:
    """Show how many inputs are done, how many failed, the rate and the time left.

    Args:
        total: Number of inputs.
        done: Number of inputs that were done before this run.
        visible: Whether to show anything.
        clock: Returns monotonic seconds.
        unit: What one input is called.

    Attributes:
        trace: When they ended.
    """

    def __init__(
        self,
        total: int,
        done: int = 0,
        visible: bool = True,
        clock: Callable[[], float] = time.monotonic,
        unit: str = "input",
    ) -> None:
        """Start the clock."""
        self.done = done
        self.failed = 0
        self.total = total
        self.unit = unit
        self.trace = RunTrace()
        self._before = done
        self._clock = clock
        self._began = clock()
        self._visible = visible
        self._bar: Any = None
        self._next_line = self._began + FIRST_LINE_S
        self._pause = FIRST_LINE_S
        if visible and _is_terminal():
            from tqdm import tqdm

            interval = tqdm.monitor_interval
            tqdm.monitor_interval = 0  # its watching thread would make forking unsafe
            with suppress(OSError):
                self._bar = tqdm(total=total, initial=done, unit=unit, dynamic_ncols=True)
            tqdm.monitor_interval = interval

    def update(self, done: int, failed: int) -> None:
        """Add inputs that ended in this run: `done` that succeeded, and `failed`."""
        self.done += done
        self.failed += failed
        self.trace.ended(done, failed)
        if self._bar is not None:
            with suppress(OSError):
                self._bar.update(done + failed)
                if self.failed:
                    self._bar.set_postfix(failed=self.failed, refresh=False)
        elif self._visible and self._clock() >= self._next_line:
            self._pause = min(self._pause * 2, SLOWEST_LINE_S)
            self._next_line = self._clock() + self._pause
            note(self.line())

    def rate(self) -> float:
        """Return how many inputs ended per second in this run."""
        ended = self.done - self._before + self.failed
        return ended / max(self._clock() - self._began, 1e-9)

    def line(self) -> str:
        """Return the state of the run in one line."""
        rate = self.rate()
        left = self.total - self.done - self.failed
        eta = duration(left / rate) if rate else "unknown"
        return (
            f"{self.done:,} of {self.total:,} done, {self.failed:,} failed, "
            f"{rate:,.1f} {self.unit}s/s, {eta} left"
        )

    def close(self) -> None:
        """Leave the terminal as it was found."""
        if self._bar is not None:
            with suppress(OSError):
                self._bar.close()


def note(text: str) -> None:
    """Write a line to stderr, if that is possible."""
    if sys.stderr is None:  # print would write to stdout
        return
    try:
        print(f"forebay: {text}", file=sys.stderr, flush=True)  # noqa: T201 - this is its job
    except Exception:  # noqa: BLE001 - a full disk, a reader that is gone, or the user's own object
        _discard_unwritten()


def _discard_unwritten() -> None:
    """Empty the buffer of stderr: Python exits with code 120 if it cannot write it at the end."""
    with suppress(Exception):
        descriptor = sys.stderr.fileno()
        kept, null = os.dup(descriptor), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, descriptor)
            sys.stderr.flush()
        finally:
            os.dup2(kept, descriptor)
            os.close(kept)
            os.close(null)


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, OSError, ValueError):  # missing, the user's own object, or closed
        return False


def duration(seconds: float) -> str:
    """Return a duration as text: "42 s", "3 min 20 s", "2 h 5 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def counted(number: int, noun: str) -> str:
    """Return a count with its noun: "1 input", "1,000 inputs"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
