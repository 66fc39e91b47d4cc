"""Run a call in a separate process, and find all its descendants by a mark in the environment."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

MARK = "BENCHMARK_MARK"
# Installed packages are compiled; without this, each new interpreter could compile forebay again.
_COMPILED = {"PYTHONDONTWRITEBYTECODE": ""}


class Call:
    """A running program of this package; leaving the block ends all its remaining processes.

    The mark is an environment variable, which all descendants inherit, also those in other
    sessions: forebay's workers and joblib's would not be found by session or group.

    Args:
        module: The program.
        arguments: Its arguments.
        talks: Whether its stdin and stdout are pipes of this process.
        settings: Variables of its environment.
    """

    def __init__(self, module: str, *arguments: str, talks: bool = False, **settings: str) -> None:
        self._mark = f"{MARK}={uuid.uuid4().hex}".encode()
        mark = dict([self._mark.decode().split("=")])
        # Files, not pipes: a library's processes may outlive their program, and would hold a pipe.
        self._stdout, self._stderr = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE if talks else None,
            stdout=subprocess.PIPE if talks else self._stdout,
            stderr=self._stderr,
            text=True,
            env=os.environ | _COMPILED | settings | mark,
        )

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the process and all its descendants."""
        while left := self.left():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for each in (self._stdout, self._stderr, self.process.stdin, self.process.stdout):
            if each is not None:
                each.close()

    def left(self) -> list[int]:
        """Return the processes of this call that still run."""
        return _marked(self._mark)

    def answer(self, limit_s: float) -> str:
        """Wait for its end and return the last line it printed.

        Raises:
            RuntimeError: It failed, or took longer than `limit_s`.
        """
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{self.process.args} did not end in {limit_s:g} s") from None
        stdout, stderr = self.printed()
        if self.process.returncode:
            raise RuntimeError(f"{self.process.args} failed:\n{stderr}")
        return stdout.splitlines()[-1]

    def printed(self) -> tuple[str, str]:
        """Return what it wrote to stdout and stderr until now."""
        # By place: the program writes where this process's position is.
        files = self._stdout.fileno(), self._stderr.fileno()
        stdout, stderr = (os.pread(each, os.fstat(each).st_size, 0) for each in files)
        return stdout.decode(errors="replace"), stderr.decode(errors="replace")


def own_processes() -> list[int]:
    """Return this process, which a `Call` started, and all processes that it started."""
    return _marked(f"{MARK}={os.environ[MARK]}".encode())


def _marked(mark: bytes) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            # A zombie has no environment, and a process that has just ended has no file.
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found
