"""What a run does, recorded and shown: the log, its trace, and a bar or a line on stderr."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from forebay.base.formatting import duration
from forebay.errors import printable, shown_location, without_credentials
from forebay.failures import Failure
from forebay.observe.record import DURATION_BINS, BaseTrace, Slowest, duration_bin

# ---- event log -----------------------------------------------------------------------------------
# The logger "forebay": deaths and replacements of workers, and failures, as they happen.
#
#     WARNING   a worker died or was killed; an input, a batch or a sample failed; with
#               `progress=False`, what a run on a Ray cluster waits for
#     INFO      a worker was replaced; a task is tried again; a run begins or ends; the number of
#               workers changed (`num_workers="auto"`)
#
# Nothing is printed unless the program configures logging. A run with a million failures does not
# log a million lines: at most `MAX_LINES` messages of each kind are logged in `LOG_WINDOW_S`
# seconds, and the next one says how many were omitted.

MAX_LINES = 20
LOG_WINDOW_S = 60.0


class RepeatFilter(logging.Filter):
    """Let through at most `MAX_LINES` records with the same format string in each window."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        # By format string: when the window began, and the number of records in it.
        self._windows: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record; the first of a window says how many were omitted."""
        now, kind = self._clock(), str(record.msg)
        began, count = self._windows.get(kind, (now, 0))
        omitted = 0
        if now - began >= LOG_WINDOW_S:
            omitted = max(count - MAX_LINES, 0)
            began, count = now, 0
        self._windows[kind] = began, count + 1
        if omitted:
            record.msg += " (%s similar messages were not logged)"
            record.args = (*(record.args or ()), f"{omitted:,}")
        return count < MAX_LINES


log = logging.getLogger("forebay")
log.addHandler(logging.NullHandler())  # otherwise Python prints warnings to stderr
log.addFilter(RepeatFilter())


def log_retry(name: str, attempt: int, failure: Failure) -> None:
    """Log that an attempt failed, and that another follows."""
    log.info(
        "%s failed in attempt %d and is tried again: %s", printable(name), attempt, _error(failure)
    )


def log_failed(name: str, failure: Failure) -> None:
    """Log that an input or a batch failed, with no further attempt."""
    log.warning("%s failed: %s", printable(name), _error(failure))


def log_samples_failed(failures: Iterable[Failure]) -> None:
    """Log the samples that failed and are skipped."""
    for failure in failures:
        where = "" if failure.epoch is None else f", epoch {failure.epoch}, batch {failure.batch}"
        log.warning(
            "sample %s%s failed: %s", printable(str(failure.source)), where, _error(failure)
        )


def _error(failure: Failure) -> str:
    return f"{failure.error}: {in_one_line(failure.message)}".removesuffix(": ")


def in_one_line(message: str) -> str:
    """Return the first line of a message, safe to print."""
    return printable(message.partition("\n")[0])


# ---- run trace -----------------------------------------------------------------------------------
# What a run of `preprocess`, `predict` or `cache` did, and when.
#
# progress ── ended ──> RunTrace ──> report, `forebay top`
#   engine ── took ────────┘

# Seconds after which a task that is still running is shown.
LONG_S = 5.0


class RunTrace(BaseTrace):
    """Records what a run does, in bounded memory."""

    def __init__(self) -> None:
        super().__init__(time.monotonic())
        self.ended_at = self.began_at
        self.done = self.failed = 0
        self.bins = [0] * DURATION_BINS
        self.tasks, self.busy_s = 0, 0.0
        self.at_once = 1  # tasks of each worker
        self.retries = 0
        self.slowest = Slowest[tuple[float, int]]()  # seconds and number of a task
        # Returns the task that has run for longest, and when it began on the clock of `began_at`.
        self.longest_task: Callable[[], tuple[str, float] | None] = lambda: None
        self.longest: tuple[str, float] | None = None
        self._published: tuple[object, ...] = ()

    def snapshot(self) -> dict[str, Any]:
        """Return the totals up to the last input or sample that ended."""
        seconds = max(self.ended_at - self.began_at, 0.0)
        capacity = seconds * self.num_workers * self.at_once
        return {
            "seconds": seconds,
            "ended": self.done + self.failed,
            "num_workers": self.num_workers,
            "busy_s": self.busy_s,
            "busy_share": min(self.busy_s / capacity, 1.0) if capacity else 0.0,
            "retries": self.retries,
        }

    def took(self, tasks: Sequence[tuple[int, float]]) -> None:
        """Record tasks that succeeded, and how many seconds each took."""
        every = [seconds for _, seconds in tasks]
        self.tasks += len(every)
        self.busy_s += sum(every)
        for seconds in every:
            self.bins[duration_bin(seconds)] += 1
        if max(every, default=-1.0) > self.slowest.least:
            for task, seconds in tasks:
                if seconds > self.slowest.least:
                    self.slowest.add((seconds, task))

    def spent(self, seconds: float) -> None:
        """Record the seconds that a worker spent on a task that succeeded or failed."""
        self.tasks += 1
        self.busy_s += seconds

    def ended(self, done: int, failed: int) -> None:
        """Record inputs or samples that ended."""
        now = self.ended_at = time.monotonic()
        self.done += done
        self.failed += failed
        self.publish(now)

    def publish(self, now: float) -> None:
        """Publish what changed since the last publication, if the next one is due.

        The loop of the run calls it while nothing ends: otherwise what ended just after a
        publication would not be seen until the next input ends.
        """
        if now >= self.publish_due:
            found = self.longest_task()
            self.longest = found if found is not None and now - found[1] >= LONG_S else None
            # While a task runs for long, the rate falls.
            state = (self.done, self.failed, self.num_workers, self.longest and now)
            if state != self._published:
                self._published = state
                self.show(now)


# ---- progress ------------------------------------------------------------------------------------

# Without a terminal: seconds until the first line, and the longest wait between two.
FIRST_LINE_S = 10.0
SLOWEST_LINE_S = 60.0
# Characters of an output's name that a label shows.
NAME_LENGTH = 40


class Progress:
    """Show how many inputs are done, how many failed, the rate and the time left."""

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
        self.done = done  # by earlier runs, too
        self.total = total
        self.unit = unit
        self.trace = RunTrace()
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
        """Count inputs that ended in this run."""
        self.done += done
        self.trace.ended(done, failed)
        if self._bar is not None:
            with suppress(OSError):
                self._bar.total = self.total  # more inputs may be known by now
                self._bar.update(done + failed)
                if self.trace.failed:
                    self._bar.set_postfix(failed=self.trace.failed, refresh=False)
        elif self._visible and self._clock() >= self._next_line:
            self._pause = min(self._pause * 2, SLOWEST_LINE_S)
            self._next_line = self._clock() + self._pause
            note(self.line())

    def rate(self) -> float:
        """Return how many inputs ended per second in this run."""
        return (self.trace.done + self.trace.failed) / max(self._clock() - self._began, 1e-9)

    def line(self) -> str:
        """Return the state of the run in one line."""
        rate, failed = self.rate(), self.trace.failed
        left = self.total - self.done - failed
        eta = duration(left / rate, digits=2) if rate else "unknown"
        label = f"{self._label}: " if self._label else ""
        return (
            f"{label}{self.done:,} of {self.total:,} done, {failed:,} failed, "
            f"{rate:,.1f} {self.unit}s/s, {eta} left"
        )

    def close(self) -> None:
        """Close the bar, and log how the run ended."""
        counts = f"{self.done:,}", f"{self.total:,}", f"{self.trace.failed:,}"
        log.info("%s: ends; %s of %s done, %s failed", self._label or "a run", *counts)
        if self._bar is not None:
            with suppress(OSError):
                self._bar.close()


def note(text: str) -> None:
    """Write a line to stderr, if that is possible."""
    if sys.stderr is None:  # print would write to stdout
        return
    try:
        text = without_credentials(text)
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


def run_label(verb: str, output: str | os.PathLike[str]) -> str:
    """Return the label of a run: a verb, and the last component of its output path."""
    path = shown_location(os.fspath(output))
    name = printable(path.rstrip("/").rpartition("/")[2] or path)
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
