"""Runs of the command line in processes of their own, to be watched and killed."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import forebay
from forebay.cli import main

WORKS = Path(__file__).with_name("works.py")
# The very package that is under test, wherever a run is started.
SOURCE = str(Path(forebay.__file__).parents[1])
# Longest wait for something that is sure to happen, on a loaded machine.
PATIENCE_S = 180.0
# In the environment of every run: finds its processes whatever became of their parents.
MARK = "FOREBAY_TEST_RUN"


def make_inputs(folder: Path, count: int, lines: int = 1) -> Path:
    """Make a folder of numbered text files and return it."""
    folder.mkdir(parents=True)
    for number in range(count):
        text = "".join(f"line {line} of {number}\n" for line in range(lines))
        (folder / f"{number:04d}.txt").write_text(text)
    return folder


def table(output: Path) -> bytes:
    """Return the table of an output folder."""
    return (output / "metadata.parquet").read_bytes()


def undisturbed_run(
    folder: Path,
    count: int,
    arguments: Callable[[Path, Path], Sequence[Any]],
    found: Callable[[Path], dict[str, bytes]],
) -> tuple[Path, dict[str, bytes], bytes, float]:
    """Return inputs, outputs, table and seconds of a run over so many inputs, not killed.

    `arguments` are those of the run, given inputs and output; `found` reads the outputs.
    """
    inputs, output = make_inputs(folder / "in", count, lines=2), folder / "out"
    began = time.monotonic()
    code, _, err = call(*arguments(inputs, output))
    assert code == 0, err
    took = time.monotonic() - began
    return inputs, found(output), table(output), took


def start(
    *arguments: Any,
    prefix: tuple[Any, ...] = (),
    program: tuple[Any, ...] = ("-m", "forebay"),
    **environment: str,
) -> Any:
    """Start `forebay ARGUMENTS` in a process group of its own; with `prefix` before the command."""
    return subprocess.Popen(
        [str(word) for word in (*prefix, sys.executable, *program, *arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, MARK: str(os.getpid()), "PYTHONPATH": SOURCE, **environment},
    )


def finish(process: Any) -> tuple[int, str, str]:
    """Wait for a started command; return its exit code and what it printed on both streams."""
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


def call(*arguments: Any, **others: Any) -> tuple[int, str, str]:
    """Run `forebay ARGUMENTS` to its end."""
    return finish(start(*arguments, **others))


def here(*arguments: Any) -> tuple[int, str, str]:
    """Run `forebay ARGUMENTS` to its end in this process, which takes a fraction of the time."""
    out, err = io.StringIO(), io.StringIO()
    argv, handler = sys.argv, signal.getsignal(signal.SIGTERM)
    sys.argv = ["forebay", *map(str, arguments)]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = argv
        signal.signal(signal.SIGTERM, handler)
    assert isinstance(code, int)
    return code, out.getvalue(), err.getvalue()


def marked_processes() -> list[int]:
    """Return the process ids of every run started from here that lives, workers included."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                environment = Path("/proc", name, "environ").read_bytes()
            except OSError:
                continue
            if f"{MARK}={os.getpid()}".encode() in environment.split(b"\0"):
                found.append(int(name))
    return found


def await_no_processes() -> None:
    """Wait until no process of any run is left."""
    deadline = time.monotonic() + PATIENCE_S
    while left := marked_processes():
        assert time.monotonic() < deadline, f"processes left: {left}"
        time.sleep(0.02)


def published(output: Path) -> dict[str, bytes]:
    """Return everything visible in an output folder but the tables: name and contents."""
    return {
        str(path.relative_to(output)): path.read_bytes()
        for path in sorted(output.rglob("*"))
        if path.is_file() and ".forebay" not in path.parts and "metadata." not in path.name
    }


def staged(output: Path) -> list[Path]:
    """Return the files that wait in the staging folder."""
    return [path for path in (output / ".forebay" / "staging").rglob("*") if path.is_file()]


def calls(folder: Path) -> list[str]:
    """Return the names of the inputs that functions were called with, in order."""
    path = folder / "calls"
    return path.read_text().split() if path.exists() else []
