"""One run of one peer in a process of its own, so that no peer inherits another's imports.

As a program it is that process: `python -m benchmarks.measure PEER TASK COUNT SOURCES FOLDER`.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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

    def command(self, peer: str, task: str, count: int, folder: Path) -> list[str]:
        """Return the command line of one run."""
        arguments = [peer, task, str(count), str(self.sources), str(folder)]
        return [sys.executable, "-m", "benchmarks.measure", *arguments]

    def seconds(self, peer: str, task: str, count: int) -> float:
        """Return what one whole call takes: start-up and end of its workers in, imports not.

        Raises:
            Missing: The peer's library is not installed.
            RuntimeError: The peer failed, hung, or lost something.
        """
        folder = self.fresh()
        process = start(self.command(peer, task, count, folder))
        try:
            stdout, stderr = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{peer} did not end in {LIMIT_S:g} s") from None
        finally:
            end(process)
        if process.returncode:
            raise RuntimeError(f"{peer} failed:\n{stderr}")
        answer = json.loads(stdout.splitlines()[-1])
        if "missing" in answer:
            raise Missing(answer["missing"])
        found = outputs(folder)
        if answer["results"] != count or found != count:
            raise RuntimeError(f"{peer}: {answer['results']} results, {found} files of {count}")
        return float(answer["seconds"])


def start(command: list[str], **settings: str) -> subprocess.Popen[str]:
    """Start a process as the leader of a session, so that its workers can be found and ended."""
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | settings,
    )


def end(process: subprocess.Popen[str]) -> None:
    """End a process and whatever it left running."""
    for pid in session(process.pid):
        os.kill(pid, signal.SIGKILL)
    process.kill()
    process.communicate()


def session(leader: int) -> list[int]:
    """Return the processes of a session that are still running, the leader too if it is."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended meanwhile
                continue
            if fields[0] not in "ZX" and int(fields[3]) == leader:
                found.append(int(entry.name))
    return found


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
