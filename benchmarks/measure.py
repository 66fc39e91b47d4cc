"""One run of one peer in a separate process, so that no peer inherits another's imports.

As a program it is that process: `python -m benchmarks.measure PEER TASK COUNT SOURCES FOLDER`.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.call import Call
from benchmarks.work import PIECES

SOURCES = "sources"
# A peer that takes longer has hung. None of them takes a quarter of it.
LIMIT_S = 120.0
# On a disk at rest, creating a file takes 5 to 15 times as long as writing to an existing one; on
# ext4 after many deletions 150 times. And how long to wait for the disk to come to rest.
TIRED = 40.0
REST_S = 400.0


class Missing(Exception):  # noqa: N818 - no error: the peer is not installed here
    """A peer whose library is not installed."""


class Ground:
    """The folder for all files: the sources once, and a separate folder for each run's outputs.

    Nothing is deleted before the end. ext4 does not reuse the inode of a deleted file for up to
    five minutes, and skips each such inode in its search for a free one: after many deletions,
    creating a file takes up to thirty times as long, for every peer. If an earlier benchmark has
    left the disk in that state, each run waits until it is over. The peers' temporary files are in
    another folder, since litdata deletes as many files as there are inputs.

    Attributes:
        kills: How often a process is killed in tables that do so; 0 for as often as usual.
        loaders: Which loaders are driven in `exactness`; empty for all.
        histories: Through which histories; empty for all.
        page: Whether `exactness` stores its results and writes its page.
    """

    def __init__(
        self,
        root: Path,
        count: int,
        kills: int = 0,
        loaders: tuple[str, ...] = (),
        histories: tuple[str, ...] = (),
        page: bool = False,
    ) -> None:
        self.root, self.kills, self.page = root, kills, page
        self.loaders, self.histories = loaders, histories
        self.sources = root / SOURCES
        self._count = count
        self._probes = root / "probes"
        # Removed when this process ends; litdata leaves a folder in it for each input.
        self._temporary = tempfile.TemporaryDirectory(prefix="bench-")

    def fresh(self) -> Path:
        """Return a new, empty folder on a disk at rest, with no earlier write still under way."""
        if not self.sources.exists():  # made on first use, since not every table needs them
            self.sources.mkdir()
            for at in range(self._count):
                (self.sources / f"{at:07}").write_bytes(b"0123456789")
        folder = Path(tempfile.mkdtemp(dir=self.root))
        until = time.monotonic() + REST_S
        while (strain := self._strain()) > TIRED and time.monotonic() < until:
            print(f"(waiting: creating a file costs {strain:.0f} writes)", file=sys.stderr)
            time.sleep(10)
        os.sync()
        return folder

    def _strain(self) -> float:
        """Return how many times as long creating a file takes as writing to an existing one."""
        self._probes.mkdir(exist_ok=True)
        folder = tempfile.mkdtemp(dir=self._probes)
        created, written = [
            statistics.median(_seconds_to_write(f"{folder}/{at}", flags) for at in range(100))
            for flags in (os.O_CREAT, 0)
        ]
        return created / written

    def call(self, peer: str, task: str, count: int, folder: Path, **settings: str) -> Call:
        """Start one run."""
        arguments = [peer, task, str(count), str(self.sources), str(folder)]
        return Call("benchmarks.measure", *arguments, TMPDIR=self._temporary.name, **settings)

    def seconds(self, peer: str, task: str, count: int) -> float:
        """Return the seconds of one whole call, with start and end of its workers, without imports.

        Raises:
            Missing: The peer's library is not installed.
            RuntimeError: The peer failed, hung, or lost something.
        """
        folder = self.fresh()
        with self.call(peer, task, count, folder) as call:
            answer = json.loads(call.answer(LIMIT_S))
        if "missing" in answer:
            raise Missing(answer["missing"])
        found, files = outputs(folder), count * PIECES.get(task, 1)
        if answer["results"] != count or found != files:
            raise RuntimeError(f"{peer}: {answer['results']} results, {found} files of {files}")
        return float(answer["seconds"])


def _seconds_to_write(path: str, flags: int) -> float:
    began = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | flags)
    os.write(descriptor, b"0123456789")
    os.close(descriptor)
    return time.perf_counter() - began


def outputs(folder: Path) -> int:
    """Return the number of complete outputs in a folder; other files of a peer do not count."""
    whole = 0
    for entry in os.scandir(folder):
        if entry.name.isdecimal():
            whole += outputs(Path(entry)) if entry.is_dir() else entry.stat().st_size == 10
    return whole


def main(peer: str, task: str, count: str, sources: str, folder: str) -> None:
    """Run one peer and print its time, as JSON."""
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
