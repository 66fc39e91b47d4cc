"""One run of one peer in a process of its own, so that no peer inherits another's imports.

As a program it is that process: `python -m benchmarks.measure PEER TASK COUNT SOURCES FOLDER`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.call import Call

SOURCES = "sources"
# A peer that takes longer has hung. None of them takes a quarter of it.
LIMIT_S = 120.0


class Missing(Exception):  # noqa: N818 - no error: the peer is not installed here
    """A peer whose library is not installed."""


class Ground:
    """The folder that everything is written to: the sources once, each run's outputs in its own.

    Nothing is deleted before the end: ext4 creates files slowly for a while after many deletions.
    """

    def __init__(self, root: Path, count: int) -> None:
        self.root = root
        self.sources = root / SOURCES
        self.sources.mkdir()
        for at in range(count):
            (self.sources / f"{at:07}").write_bytes(b"0123456789")

    def fresh(self) -> Path:
        """Return a new, empty folder, with no write of an earlier run still under way."""
        folder = Path(tempfile.mkdtemp(dir=self.root))
        os.sync()
        return folder

    def call(self, peer: str, task: str, count: int, folder: Path, **settings: str) -> Call:
        """Start one run."""
        arguments = [peer, task, str(count), str(self.sources), str(folder)]
        return Call("benchmarks.measure", *arguments, **settings)

    def seconds(self, peer: str, task: str, count: int) -> float:
        """Return what one whole call takes: start-up and end of its workers in, imports not.

        Raises:
            Missing: The peer's library is not installed.
            RuntimeError: The peer failed, hung, or lost something.
        """
        folder = self.fresh()
        with self.call(peer, task, count, folder) as call:
            answer = json.loads(call.answer(LIMIT_S))
        if "missing" in answer:
            raise Missing(answer["missing"])
        found = outputs(folder)
        if answer["results"] != count or found != count:
            raise RuntimeError(f"{peer}: {answer['results']} results, {found} files of {count}")
        return float(answer["seconds"])


def outputs(folder: Path) -> int:
    """Return how many whole outputs a folder has; what a peer keeps for itself does not count."""
    whole = 0
    for entry in os.scandir(folder):
        whole += entry.name.isdecimal() and entry.stat().st_size == 10
    return whole


def main(peer: str, task: str, count: str, sources: str, folder: str) -> None:
    """Run one peer and print what it took, as JSON."""
    try:
        run = importlib.import_module(f"benchmarks.peers.{peer}").run
    except ModuleNotFoundError as error:
        if error.name == "forebay":
            raise
        print(json.dumps({"missing": error.name}))
        return
    inputs = [os.path.join(sources, f"{at:07}") for at in range(int(count))]
    began = time.perf_counter()
    results = run(task, inputs, folder)
    seconds = time.perf_counter() - began
    print()
    print(json.dumps({"seconds": seconds, "results": results}))


if __name__ == "__main__":
    main(*sys.argv[1:])
