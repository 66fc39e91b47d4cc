"""The logger "forebay": deaths and replacements of workers, and failures, as they happen.

    WARNING   a worker died or was killed; an input, a batch or a sample failed; with
              `progress=False`, what a run on a Ray cluster waits for
    INFO      a worker was replaced; a task is tried again; a run begins or ends; the number of
              workers changed (`num_workers="auto"`)

Nothing is printed unless the program configures logging. A run with a million failures does not
log a million lines: at most `MAX_LINES` messages of each kind are logged in `WINDOW_S` seconds,
and the next one says how many were omitted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from forebay.errors import printable
from forebay.failures import Failure

MAX_LINES = 20
WINDOW_S = 60.0


class RepeatFilter(logging.Filter):
    """Let through at most `MAX_LINES` records with the same format string in each window.

    Args:
        clock: Returns monotonic seconds.
    """

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
        if now - began >= WINDOW_S:
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


def log_worker_died(worker_id: int, failure: Failure) -> None:
    """Log that a worker died."""
    log.warning("worker %d died: %s", worker_id, _in_one_line(failure.message))


def log_worker_killed(worker_id: int) -> None:
    """Log that a worker is killed because its task exceeded the time limit."""
    log.warning("worker %d is killed: its task takes longer than timeout", worker_id)


def log_worker_replaced(worker_id: int) -> None:
    """Log that a worker is started in place of one that died."""
    log.info("worker %d is replaced", worker_id)


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
    return f"{failure.error}: {_in_one_line(failure.message)}".removesuffix(": ")


def _in_one_line(message: str) -> str:
    return printable(message.partition("\n")[0])
