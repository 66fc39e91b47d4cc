"""The page of a loader or a run: a small JSON file that it writes each second, for `forebay top`.

A page is written beside its place and renamed, so a reader finds one state or the next, and neither
side waits for the other.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from forebay.base.machine import is_private, private_folder
from forebay.base.process import is_alive, kernel, state_and_start
from forebay.errors import shown_location
from forebay.observe.progress import Progress, RunTrace
from forebay.observe.record import Trace

# A page that would be larger is not written, and one that is larger is not read.
PAGE_BYTES = 32_768
_SUFFIX = ".page"
# Files that are looked at, in each folder.
MAX_PAGES = 256
# A file that cannot be read, and was not written for this long, has no writer any more.
_ABANDONED_S = 3600.0


class LivePage:
    """The file of one loader or run, made when there is something to write.

    Nothing here raises: without a folder, on a full disk, or with data that does not fit, there is
    no file, or an older one.
    """

    def __init__(self) -> None:
        self._path: str | None = None
        self._owner = 0
        self._cleans = False
        self._lock = threading.Lock()  # two threads may record at a time: one of them writes

    def __call__(self, record: Any) -> None:
        """Write what is to be seen of a record now."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            with suppress(Exception):  # showing something must not end a training
                if (data := self.state_of(record)) is not None:
                    self._write(data)
        finally:
            self._lock.release()

    def state_of(self, record: Any) -> Mapping[str, Any] | None:
        """Return what to write; None to write nothing."""
        return record  # type: ignore[no-any-return]

    def _write(self, data: Mapping[str, Any]) -> None:
        pid = os.getpid()
        if pid != self._owner:  # a fork has its own
            self._path, self._owner = None, pid
            self._process = {
                "pid": pid,
                "process_start": state_and_start(pid)[1],
                "kernel": kernel(),
                "program": os.path.basename(sys.argv[0]) if sys.argv else "",
            }
        data = {**data, "at": time.time(), **self._process}
        content = json.dumps(data, allow_nan=False, separators=(",", ":")).encode()
        if len(content) > PAGE_BYTES:
            return
        path = self._path
        # The folder may end with the user's session, and another user could make it again.
        if path is None or not is_private(os.path.dirname(path)):
            folder = private_folder()
            if folder is None:
                return
            path = self._path = os.path.join(folder, f"{pid}-{secrets.token_hex(4)}{_SUFFIX}")
            self._cleans = True
        elif self._cleans:  # not with the first page, which takes the trainer longest
            living_pages(os.path.dirname(path))
            self._cleans = False
        _replace(path, content)
        if self._path is None:  # removed by another thread meanwhile
            os.unlink(path)

    def remove(self) -> None:
        """Remove the file, unless it is that of the process that this one was forked from."""
        path, self._path = self._path, None
        if path is not None and self._owner == os.getpid():
            with suppress(OSError):
                os.unlink(path)


def read_page(path: str) -> dict[str, Any] | None:
    """Return the data of a file; None if it is gone, or no page."""
    from forebay.base.files import open_regular  # what only publishes a page needs no files

    try:
        with open_regular(path, follows=False) as file:
            content = file.read(PAGE_BYTES + 1)
        data = json.loads(content) if len(content) <= PAGE_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def living_pages(folder: str) -> list[dict[str, Any]]:
    """Return the data of the pages in a folder; remove the files of processes that have ended."""
    try:
        names = sorted(os.listdir(folder))[:MAX_PAGES]
    except OSError:
        return []
    found = []
    for path in (os.path.join(folder, name) for name in names):
        data = read_page(path)
        with suppress(OSError):
            # What cannot be read and is old: its writer was killed within a write.
            is_old = time.time() - os.lstat(path).st_mtime > _ABANDONED_S
            if is_old if data is None else is_dead(data):
                os.unlink(path)
            elif data is not None and path.endswith(_SUFFIX):
                found.append(data)
    return found


def is_dead(data: Mapping[str, Any]) -> bool:
    """Return whether the process of a page is known to have ended."""
    pid, start = data.get("pid"), data.get("process_start")
    if type(pid) is not int or not 0 < pid < 2**31 or not isinstance(start, str):
        return False
    return data.get("kernel") == kernel() and not is_alive(pid, start)


def _replace(path: str, content: bytes) -> None:
    temporary = f"{path}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise


# ---- recent work ---------------------------------------------------------------------------------
# The last seconds of a loader: how busy each worker was, how long training waited.

SECONDS = 30
# More workers than this are not shown one by one.
MAX_LANES = 64

# Seconds of work, or of waiting, by second of the clock.
_Seconds = dict[int, float]


class RecentWork:
    """What a trace recorded in the last `SECONDS`, second by second, derived from totals."""

    def __init__(self) -> None:
        self._waits: _Seconds = {}
        self._lanes: dict[int, _Seconds] = {}
        self._busy_before: dict[int, float] = {}
        self._totals: deque[tuple[float, ...]] = deque(maxlen=SECONDS + 1)

    def update(self, trace: Trace, now: float) -> dict[str, Any]:
        """Return what a page shows of the last seconds."""
        if not self._totals:
            self._totals.append((trace.began_at, 0, 0.0))
        before, _, waited_before = self._totals[-1]
        passed, taken, waited_s = _added(self._totals, now, trace.taken_count, trace.waited_s)
        oldest = int(now) - SECONDS
        add_seconds(self._waits, trace.waited_s - waited_before, before, now, oldest)
        lanes = range(min(max(trace.num_workers, 1), MAX_LANES))
        for lane in lanes:
            busy, row = trace.busy_s.get(lane, 0.0), self._lanes.setdefault(lane, {})
            add_seconds(row, busy - self._busy_before.get(lane, 0.0), before, now, oldest)
            self._busy_before[lane] = busy
        # Without the present second, which is not over.
        last = range(max(oldest, int(trace.began_at)), int(now))
        return {
            "rate": taken / max(passed, 1e-9),
            "wait_share": min(waited_s / max(passed, 1e-9), 1.0),
            "waits": _as_digits(self._waits, last),
            "lanes": [_as_digits(self._lanes[lane], last) for lane in lanes],
        }


def _added(earlier: deque[tuple[float, ...]], *totals: float) -> list[float]:
    """Return what was added to totals, the first of them the time, in about `SECONDS`."""
    earlier.append(totals)
    while len(earlier) > 1 and earlier[1][0] <= totals[0] - SECONDS:
        earlier.popleft()  # one from before is kept: from there the seconds are counted
    return [total - before for total, before in zip(totals, earlier[0], strict=True)]


def add_seconds(row: _Seconds, seconds: float, begin: float, end: float, oldest: int) -> None:
    """Add seconds of work, evenly to the time from `begin` to `end`.

    What does not fit there was begun earlier, and is added to the seconds before, where they have
    room. Seconds before `oldest` are forgotten.
    """
    excess, second, room = seconds - (end - begin), int(begin), begin - int(begin)
    while excess > 0 and second >= oldest:
        added = max(min(room - row.get(second, 0.0), excess), 0.0)
        row[second] = row.get(second, 0.0) + added
        excess, second, room = excess - added, second - 1, 1.0
    share = min(seconds / (end - begin), 1.0) if end > begin else 0.0
    for second in range(max(int(begin), oldest), int(end) + 1):
        overlap = min(end, second + 1) - max(begin, second)
        row[second] = row.get(second, 0.0) + overlap * share
    for second in [each for each in row if each < oldest]:
        del row[second]


def _as_digits(row: _Seconds, seconds: Sequence[int]) -> str:
    return "".join(str(min(round(row.get(second, 0.0) * 9), 9)) for second in seconds)


# ---- live run ------------------------------------------------------------------------------------
# A run of `preprocess`, `predict` or `cache`, as `forebay top` sees it.


class LiveRun(LivePage):
    """The page of a run."""

    def __init__(self, verb: str, output: str, progress: Progress) -> None:
        super().__init__()
        self._verb, self._progress = verb, progress
        from forebay.base.files import absolute  # a loader, whose page is here too, needs no files

        self._output = shown_location(absolute(output))
        began_at = progress.trace.began_at
        self._began = time.time() - (time.monotonic() - began_at)
        self._ended = deque[tuple[float, ...]]([(began_at, 0)], maxlen=SECONDS + 1)

    def state_of(self, trace: RunTrace) -> dict[str, Any]:
        """Return the present state of the run."""
        now, progress = time.monotonic(), self._progress
        passed, ended = _added(self._ended, now, trace.done + trace.failed)
        # Of predict and cache it would be a range of samples.
        name, since = (self._verb == "preprocess" and trace.longest) or ("", now)
        return {
            **trace.snapshot(),
            "kind": self._verb,
            "title": self._output,
            "began": self._began,
            "rate": ended / passed if passed > 0 else 0.0,
            "unit": progress.unit,
            "done": progress.done,
            "failed": trace.failed,
            "total": progress.total,
            "longest": name[:1000],
            "longest_since": time.time() - (now - since),
        }
