"""A run of `preprocess`, `predict` or `cache`, as `forebay top` sees it."""

from __future__ import annotations

import os
import time
from collections import deque

from forebay.live.live_page import LivePage
from forebay.live.recent_work import SECONDS
from forebay.observe.progress import Progress
from forebay.observe.run_trace import RunTrace


class LiveRun:
    """Publishes a run, when its trace says so.

    Args:
        verb: The entry point.
        output: The folder, or its URL.
        progress: How far the run is.
    """

    def __init__(self, verb: str, output: str, progress: Progress) -> None:
        self._page = LivePage()
        self._verb, self._progress = verb, progress
        self._output = output if "://" in output else os.path.abspath(output)
        self._began = time.time()
        self._ended: deque[tuple[float, int]] = deque(maxlen=SECONDS + 1)
        progress.trace.publication.begin(self, 0.0)

    def __call__(self, trace: RunTrace) -> None:
        """Write the present state of the run; never raises."""
        now, ended = time.monotonic(), trace.done + trace.failed
        self._ended.append((now, ended))
        while len(self._ended) > 1 and self._ended[1][0] <= now - SECONDS:
            self._ended.popleft()
        began, before = self._ended[0]
        progress = self._progress
        # Of predict and cache it would be a range of samples.
        name, since = (self._verb == "preprocess" and trace.longest) or ("", now)
        self._page.publish(
            {
                "kind": self._verb,
                "title": self._output,
                "began": self._began,
                "rate": (ended - before) / (now - began) if now > began else 0.0,
                "num_workers": trace.num_workers,
                "unit": progress.unit,
                "done": progress.done,
                "failed": progress.failed,
                "total": progress.total,
                "longest": name[:1000],
                "longest_since": time.time() - (now - since),
            }
        )

    def remove(self) -> None:
        """Remove what is shown."""
        self._page.remove()
