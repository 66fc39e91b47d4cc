"""Plain Ray tasks, one call per input, with a limit on concurrent calls."""

from __future__ import annotations

from typing import Any

import ray
from benchmarks.work import Into

UNDER_WAY, TOGETHER = 512, 64


def run(task: str, sources: list[str], folder: str, size: int = 1) -> int:
    calls: Any = ray.remote(each)
    work = ray.put(Into(task, folder))
    done, pending = 0, []
    for at in range(0, len(sources), size):
        pending.append(calls.remote(work, sources[at : at + size]))
        if len(pending) >= UNDER_WAY:
            # Several at once: waiting for one at a time takes longer than the calls do.
            ready, pending = ray.wait(pending, num_returns=TOGETHER)
            done += sum(map(len, ray.get(ready)))
    return done + sum(map(len, ray.get(pending)))


def each(work: Into, sources: list[str]) -> list[dict[str, int]]:
    return [work(source) for source in sources]
