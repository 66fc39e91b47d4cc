"""litdata.map: it writes files and takes no metadata, so the result of the work is dropped."""

from __future__ import annotations

import os

os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"  # the check needs the network

import litdata

from benchmarks.peers import WORKERS
from benchmarks.work import TASKS


class Staged:
    """Its function gets a temporary folder; files in there are moved to the output folder."""

    def __init__(self, task: str) -> None:
        self._task = TASKS[task]

    def __call__(self, source: str, output_dir: str) -> None:
        self._task(source, os.path.join(output_dir, os.path.basename(source)))


def run(task: str, sources: list[str], folder: str) -> int:
    litdata.map(Staged(task), sources, folder, num_workers=WORKERS, reorder_files=False)
    return len(sources)
