"""Progress: a bar in a notebook or on a terminal, otherwise a line on stderr now and then.

If stderr is missing, closed or not writable, nothing is shown and no error is raised.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from forebay.errors import printable
from forebay.observe.event_log import log
from forebay.observe.run_trace import RunTrace
from forebay.units import duration

# Without a terminal: seconds until the first line, and the longest wait between two.
FIRST_LINE_S = 10.0
SLOWEST_LINE_S = 60.0
# Characters of an output's name that a label shows.
NAME_LENGTH = 40


class Progress:
    """Show how many inputs are done, how many failed, the rate and the time left.

    Args:
        total: Number of inputs; the attribute may be raised while inputs are still listed.
        done: Number of inputs that were done before this run.
        visible: Whether to show progress.
        clock: Returns monotonic seconds.
        unit: The noun for one input.
        label: The operation and the name of its output; see `label_of`.

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
        label: str = "",
    ) -> None:
        """Start the clock."""
        self.done = done
        self.failed = 0
        self.total = total
        self.unit = unit
        self.trace = RunTrace()
        self._before = done
        self._clock = clock
        self._label = label
        self._began = clock()
        self._visible = visible
        self._bar: Any = None
        self._next_line = self._began + FIRST_LINE_S
        self._pause = FIRST_LINE_S
        if visible and (_is_notebook() or _is_terminal()):
            self._bar = self._new_bar()
        log.info("%s: begins; %s of %s done", label or "a run", f"{done:,}", f"{total:,}")

    def _new_bar(self) -> Any:
        from tqdm import tqdm

        bar_class = _notebook_bar() if _is_notebook() else tqdm
        interval = tqdm.monitor_interval
        tqdm.monitor_interval = 0  # a monitor thread would make forking unsafe
        try:
            return bar_class(
                desc=self._label or None,
                total=self.total,
                initial=self.done,
                unit=self.unit,
                **_bar_size(),
            )
        except OSError:
            return None
        finally:
            tqdm.monitor_interval = interval

    def update(self, done: int, failed: int, metadata: Sequence[str] = ()) -> None:
        """Count inputs that ended in this run.

        Args:
            done: How many succeeded.
            failed: How many failed.
            metadata: The ledger's metadata of each input that succeeded, for subclasses.
        """
        self.done += done
        self.failed += failed
        self.trace.ended(done, failed)
        if self._bar is not None:
            with suppress(OSError):
                self._bar.total = self.total  # more inputs may be known by now
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
        eta = duration(left / rate, digits=2) if rate else "unknown"
        label = f"{self._label}: " if self._label else ""
        return (
            f"{label}{self.done:,} of {self.total:,} done, {self.failed:,} failed, "
            f"{rate:,.1f} {self.unit}s/s, {eta} left"
        )

    def close(self) -> None:
        """Close the bar, and log how the run ended."""
        counts = f"{self.done:,}", f"{self.total:,}", f"{self.failed:,}"
        log.info("%s: ends; %s of %s done, %s failed", self._label or "a run", *counts)
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
    """Empty the buffer of stderr: Python exits with code 120 if it cannot flush it at exit."""
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


def label_of(verb: str, output: str | os.PathLike[str]) -> str:
    """Return the label of a run: a verb, and the last component of its output path."""
    name = printable(os.fspath(output).rstrip("/").rpartition("/")[2] or os.fspath(output))
    return f"{verb} {name if len(name) <= NAME_LENGTH else name[: NAME_LENGTH - 1] + '…'}"


def _is_notebook() -> bool:
    """Return whether this process is a notebook's kernel; imports nothing."""
    try:
        return "IPKernelApp" in sys.modules["IPython"].get_ipython().config
    except (KeyError, AttributeError):  # IPython is not imported, or runs no shell
        return False


def _notebook_bar() -> Any:
    """Return tqdm's bar for notebooks; without ipywidgets it is the one for terminals."""
    from tqdm import TqdmWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TqdmWarning)  # about ipywidgets
        from tqdm.auto import tqdm
    return tqdm


def _bar_size() -> dict[str, Any]:
    """Return tqdm's arguments for the size; it shows nothing on a terminal without a size."""
    with suppress(AttributeError, OSError, ValueError):
        if os.get_terminal_size(sys.stderr.fileno()).columns == 0:
            return {"ncols": 80, "nrows": 24}
    return {"dynamic_ncols": True}


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, OSError, ValueError):  # missing, the user's own object, or closed
        return False
