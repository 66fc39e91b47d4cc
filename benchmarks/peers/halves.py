"""Two plain processes with half of the inputs each, without any communication."""

from __future__ import annotations

import multiprocessing

from benchmarks.peers import WORKERS, loop


def run(task: str, sources: list[str], folder: str) -> int:
    processes = [
        multiprocessing.Process(target=loop.run, args=(task, sources[at::WORKERS], folder))
        for at in range(WORKERS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return len(sources) if not any(process.exitcode for process in processes) else 0
