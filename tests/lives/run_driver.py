"""The process that makes a call, as a user's program does: it imports a script, and calls forebay.

It is forked, so that what is heavy is imported once for all lives.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import pickle
import resource
import runpy
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet
from torch.utils.data import Subset

import forebay

from . import left, run_functions

# Of a driver that was killed or interrupted, others see at once that it has ended.
_ANSWER = "answer"
# What a call has started ends within this time after it, on a loaded machine.
_ENDING_S = 3.0


@dataclass
class Call:
    """What a driver does.

    Attributes:
        name: Of a public function; "" to run a command.
        inputs: Of what kind the inputs are.
        given: The inputs, as plain data.
        saves: Whether a Dataset's samples are saved by the script's function.
        command: What follows `forebay` in a shell.
        limit: Most bytes of a file; 0 for no limit.
    """

    name: str = ""
    inputs: str = ""
    given: Any = None
    output: str = ""
    saves: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    limit: int = 0


@dataclass
class Outcome:
    """How a call ended.

    Attributes:
        kind: "report", "error", "command", "killed".
        error: The class of the exception.
        failures: Source, error and message of each failed input.
        rows: The table, or what was predicted, or the samples of a cache.
        code: What a command exited with.
        text: What a command printed, or what an exception says.
        left: Threads and descriptors that the call has left in its process.
        seconds: How long it took.
    """

    kind: str
    error: str = ""
    done: int = 0
    failed: int = 0
    resumed: int = 0
    unseen: tuple[str, ...] = ()
    failures: tuple[tuple[str, str, str], ...] = ()
    rows: list[Any] = field(default_factory=list)
    code: int = 0
    text: str = ""
    left: str = ""
    seconds: float = 0.0


class Driver:
    """A driver under way."""

    def __init__(self, call: Call) -> None:
        self.began = time.monotonic()
        Path(_ANSWER).unlink(missing_ok=True)
        sys.stdout.flush()
        self.answer = Path(f"{_ANSWER}.{time.monotonic_ns()}")
        self.process = os.fork()
        if not self.process:
            _drive(call, self.answer)
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(self.process, self.process)  # as it does itself: whoever is first
        self.watched = os.pidfd_open(self.process)

    def wait(self) -> Outcome:
        """Wait for its end; return how it ended."""
        status = os.waitpid(self.process, 0)[1]
        os.close(self.watched)
        if os.WIFSIGNALED(status) or not self.answer.exists():
            outcome = Outcome("killed", text=f"status {status}")
        else:
            outcome = pickle.loads(self.answer.read_bytes())
        self.answer.unlink(missing_ok=True)
        outcome.seconds = time.monotonic() - self.began
        return outcome

    def send(self, number: int, *, group: bool = False) -> None:
        """Send it a signal, or all that it started, too, as a terminal does."""
        (os.killpg if group else os.kill)(self.process, number)


def run(call: Call) -> Outcome:
    """Make a call in a process of its own."""
    return Driver(call).wait()


def rehearse(call: Call) -> None:
    """Make a call in this process, and run a command, so that all that they need is imported."""
    sys.path.insert(0, os.getcwd())
    try:
        outcome = _made(call)
    finally:
        sys.path.remove(os.getcwd())
        del sys.modules["jobs"]
    assert outcome.kind == "report", outcome
    handler = signal.getsignal(signal.SIGTERM)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        sys.argv[1:], words = ["--version"], sys.argv[1:]
        try:
            runpy.run_module("forebay", run_name="__main__", alter_sys=True)
        finally:
            sys.argv[1:] = words
            signal.signal(signal.SIGTERM, handler)


def _drive(call: Call, answer: Path) -> None:
    """Make the call in this process, which ends."""
    status = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if call.limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (call.limit, resource.RLIM_INFINITY))
        sys.path.insert(0, os.getcwd())
        sys.dont_write_bytecode = True
        outcome = _command(call.command) if call.command else _made(call)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        part = answer.with_suffix(".part")
        part.write_bytes(pickle.dumps(outcome))
        part.rename(answer)
        status = 0
    except BaseException:  # noqa: BLE001 it is shown, and the process ends
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _made(call: Call) -> Outcome:
    script = importlib.import_module("jobs")
    descriptors, threads = left.descriptors(), {*threading.enumerate()}
    try:
        outcome = _CALLS[call.name](call, script)
    except (forebay.ForebayError, KeyboardInterrupt, OSError) as error:
        outcome = Outcome("error", error=type(error).__name__, text=str(error))
        error.__traceback__ = None
    if call.options["backend"] != "ray":  # which keeps threads and connections of its own
        outcome.left = _left(descriptors, threads)
    return outcome


def _left(descriptors: dict[int, str], threads: set[threading.Thread]) -> str:
    """Return what a call has left in this process, after a moment in which threads may end."""
    gc.collect()  # an exception refers to what it has passed through
    end = time.monotonic() + _ENDING_S
    while True:
        more = [what for fd, what in left.descriptors().items() if descriptors.get(fd) != what]
        more += [each.name for each in threading.enumerate() if each not in threads]
        more += [left.command(each) for each in left.descendants(os.getpid())]
        if not more or time.monotonic() > end:
            return ", ".join(more)
        time.sleep(0.005)


def _dataset(call: Call, script: Any) -> Any:
    """Return the inputs as a Dataset, whose samples are what the function makes of them."""
    transform = None if call.saves else script.work
    match call.inputs:
        case "folder":
            return forebay.from_folder(call.given, script.work)
        case "rows" | "rows2" | "csv":
            return forebay.from_table(call.given, script.work)
        case "dataset":
            return script.Data(call.given)
        case "subset":
            return Subset(script.All(), call.given)
        case "shards":
            return forebay.open_shards(call.given, transform=transform, progress=False)
    raise ValueError(call.inputs)


def _preprocess(call: Call, script: Any) -> Outcome:
    settings = {"output": call.output, "progress": False, **call.options}
    if call.inputs in ("dataset", "subset", "shards"):
        more = {"save": script.work} if call.saves else {}
        report = forebay.preprocess(_dataset(call, script), **more, **settings)
    else:
        report = forebay.preprocess(script.work, _given(call), **settings)
    return _outcome(report, report.metadata.to_pylist())


def _given(call: Call) -> Any:
    return [*map(Path, call.given)] if call.inputs == "path" else call.given


def _predict(call: Call, script: Any) -> Outcome:
    settings = {"collate_fn": list, "progress": False, **call.options}
    if call.inputs in ("dataset", "subset", "shards"):
        report = forebay.predict(script.model, _dataset(call, script), call.output, **settings)
    else:
        report = forebay.predict(
            script.model, _given(call), call.output, load=script.work, **settings
        )
    parts = sorted(Path(call.output).glob("*.parquet"))
    tables = [parquet.read_table(io.BytesIO(part.read_bytes())) for part in parts]
    return _outcome(report, pyarrow.concat_tables(tables).to_pylist() if tables else [])


def _cache(call: Call, script: Any) -> Outcome:
    cached = forebay.cache(_dataset(call, script), call.output, progress=False, **call.options)
    return Outcome("report", rows=[run_functions.plain(each) for each in cached])


def _index_shards(call: Call, script: Any) -> Outcome:
    report = forebay.index_shards(call.given, call.output, progress=False, **call.options)
    samples = forebay.open_shards(call.given, index=call.output, progress=False)
    return _outcome(report, [*samples])


def _outcome(report: Any, rows: list[Any]) -> Outcome:
    failures = tuple((each.source, each.error, each.message) for each in report.failures)
    counts = {name: getattr(report, name) for name in ("done", "failed", "resumed", "unseen")}
    return Outcome("report", failures=failures, rows=rows, **counts)


_CALLS = {
    "preprocess": _preprocess,
    "predict": _predict,
    "cache": _cache,
    "index_shards": _index_shards,
}


def _command(words: list[str]) -> Outcome:
    """Run `forebay` with these arguments."""
    output = os.open("printed", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.argv = ["forebay", *words]
    code = 0
    try:
        runpy.run_module("forebay", run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(bool(error.code))
    sys.stdout.flush()
    sys.stderr.flush()
    return Outcome("command", code=code, text=Path("printed").read_text())
