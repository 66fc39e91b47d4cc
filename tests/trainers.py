"""Scripts that use torch, in processes of their own, to be interrupted, killed or run to their end.

Importing torch takes seconds, so one process does it once and is forked for each script: that
one's end is a real interpreter's end, and its process id is its process group and its session.
Warnings are errors there, and torch has one thread.

    test ── source ──> server ── fork ──> script ── fork ──> zygote, workers, ...
         <── pid, how it ended ──┘
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any, NamedTuple

from large_pages import use_large_pages

# Longest wait for something that is sure to happen, on a loaded machine.
PATIENCE_S = 180.0
# In the environment of the server and whatever comes of it: finds orphans too.
MARK = "FOREBAY_TEST_TRAINER"

# What every script begins with.
PRELUDE = """
import gc, multiprocessing, os, signal, sys, threading
import torch, forebay
from pathlib import Path
from kit.faults import Gate, hang
from torch.utils.data import Dataset, IterableDataset

class Numbers(Dataset):
    def __init__(self, count, wide=4):
        self.count, self.wide = count, wide
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        return torch.full((self.wide,), index, dtype=torch.float32)

class Gated(Numbers):
    def __init__(self, count, at, gate):
        super().__init__(count)
        self.at, self.gate = at, gate
    def __getitem__(self, index):
        if index == self.at:
            self.gate.wait()
        return super().__getitem__(index)
"""


class Ending(NamedTuple):
    """How a script ended; the code is negative for a signal, as in `subprocess`."""

    code: int
    out: str
    err: str


class Script:
    """A script that runs."""

    def __init__(self, server: Trainers, pid: int, folder: Path) -> None:
        self.pid = pid
        self._server = server
        self._folder = folder
        self._ending: Ending | None = None

    def end(self) -> Ending:
        """Wait for its end."""
        if self._ending is None:
            code = int(self._server.answer())
            out, err = ((self._folder / name).read_text() for name in ("stdout", "stderr"))
            self._ending = Ending(code, out, err)
        return self._ending

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process alone."""
        os.kill(self.pid, number)

    def interrupt_group(self) -> None:
        """Send what a terminal sends to its foreground processes when somebody types Ctrl-C."""
        os.killpg(self.pid, signal.SIGINT)


class Trainers:
    """Runs scripts, one at a time."""

    def __init__(self) -> None:
        import forebay

        ours = [Path(forebay.__file__).parents[1], Path(__file__).parent]  # the latter for `kit`
        found = os.pathsep.join(map(str, ours))
        self._own = {MARK: str(os.getpid())}
        self._heard = b""
        self._process: Any = subprocess.Popen(
            [sys.executable, "-W", "error", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **self._own, "OMP_NUM_THREADS": "1", "PYTHONPATH": found},
        )
        assert self.answer() == "ready"

    def start(self, source: str, folder: Path, *arguments: Any, **environment: str) -> Script:
        """Start a script; it finds `arguments`, as text, in `sys.argv[1:]`."""
        path = folder / "script.py"
        path.write_text(PRELUDE + textwrap.dedent(source))
        return self._start(path, arguments, Path.cwd(), folder, environment)

    def run(self, path: Path, *arguments: Any, cwd: Path, **environment: str) -> Ending:
        """Run a program to its end, as `python path arguments...` does in a folder."""
        with tempfile.TemporaryDirectory() as streams:
            return self._start(path, arguments, cwd, Path(streams), environment).end()

    def _start(
        self,
        path: Path,
        arguments: tuple[Any, ...],
        cwd: Path,
        streams: Path,
        environment: dict[str, str],
    ) -> Script:
        request = {
            "arguments": [str(path), *map(str, arguments)],
            "cwd": str(cwd),
            "streams": str(streams),
            "environment": {**os.environ, **self._own, **environment},
        }
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return Script(self, int(self.answer()), streams)

    def answer(self) -> str:
        """Return the server's next line."""
        while b"\n" not in self._heard:
            # Not of a buffered file: what is in its buffer already cannot be waited for.
            ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE_S)
            if not ready:
                self.kill_all()
                os.read(self._process.stdout.fileno(), 1 << 16)  # how it ended, for nobody now
                raise AssertionError("a script did not come to its end")
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            assert data, "the server of scripts has ended"
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode()

    def left(self) -> list[int]:
        """Return the processes that scripts left behind and that are alive."""
        mark, found = f"{MARK}={os.getpid()}".encode(), []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                environment = Path("/proc", name, "environ").read_bytes()
            except OSError:
                continue
            if mark in environment.split(b"\0") and int(name) != self._process.pid:
                found.append(int(name))
        return found

    def await_none_left(self) -> None:
        """Wait until no process of any script is left."""
        deadline = time.monotonic() + PATIENCE_S
        while left := self.left():
            assert time.monotonic() < deadline, f"processes left: {left}"
            time.sleep(0.02)

    def kill_all(self) -> None:
        """Kill whatever scripts left behind, so that the next test does not see it."""
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End the server."""
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(PATIENCE_S)


def become(path: str) -> None:
    """Run a file as the main program of this process."""
    sys.path[0] = os.path.dirname(path)
    code = compile(Path(path).read_text(), path, "exec")
    main = sys.modules["__main__"].__dict__
    for name in [name for name in main if not name.startswith("__")]:
        del main[name]
    main |= {"__file__": path, "__doc__": None, "__annotations__": {}}
    exec(code, main)


def serve() -> None:
    """Fork for each request that comes in; what returns from here is a script at its end."""
    import torch  # noqa: F401 - what all scripts share

    import forebay

    forebay.DataLoader  # noqa: B018 - it is imported when it is first looked at
    # A shell has what it runs in the background ignore Ctrl-C, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.collect()
    gc.freeze()  # or the end of each script would visit, and so copy, all objects of torch
    use_large_pages()
    os.write(1, b"ready\n")
    requests = b""
    while True:
        while b"\n" not in requests:
            data = os.read(0, 1 << 16)
            if not data:
                return
            requests += data
        line, _, requests = requests.partition(b"\n")
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.write(1, f"{os.getpid()}\n".encode())
            streams = request["streams"]
            for number, name in enumerate(("/dev/null", f"{streams}/stdout", f"{streams}/stderr")):
                descriptor = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
                os.dup2(descriptor, number)
                os.close(descriptor)
            sys.stdout.reconfigure(line_buffering=True)  # in order with what children print
            os.chdir(request["cwd"])
            os.environ.clear()
            os.environ.update(request["environment"])
            sys.argv = request["arguments"]
            become(os.path.abspath(sys.argv[0]))
            return
        _, status = os.waitpid(pid, 0)
        os.write(1, f"{os.waitstatus_to_exitcode(status)}\n".encode())


if __name__ == "__main__":
    serve()
