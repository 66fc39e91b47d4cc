"""Workers from which nothing comes for long: what is said of them, and that it is said once."""

from __future__ import annotations

import signal
import threading
import warnings
from pathlib import Path

import pytest
import torch.utils.data

import forebay
from forebay.engine import engine as loop
from forebay.engine.engine import Engine
from forebay.engine.limits import Limits
from forebay.engine.notices import StuckWorker, warn_of_stuck_worker
from forebay.pools.base import Pool
from forebay.pools.events import Event, StacksTaken, TaskFinished, WorkerStarted
from kit import faults
from kit.faults import Gate

# On Python 3.12 and newer, a fork beside threads is warned of.
pytestmark = [
    pytest.mark.usefixtures("forked_workers"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


STACKS = """\
Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Current thread 0x00007f02 (most recent call first):
  File "/venv/lib/python3.11/site-packages/PIL/Image.py", line 500 in load
  File "/home/me/data.py", line 12 in read
"""


class SilentPool(Pool):
    """Returns what is in `events`, else nothing for as long as it may wait, by a fake clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.events, self.asked = 1000.0, list[list[Event]](), list[int]()
        monkeypatch.setattr(loop.time, "monotonic", lambda: self.now)

    def wait(self, timeout: float | None) -> list[Event]:
        if self.events:
            return self.events.pop(0)
        self.now += timeout or 0.01
        return []

    def take_stacks(self, incarnation: int) -> None:
        self.asked.append(incarnation)

    def _ignore(self, *_: object) -> None: ...

    start = send_to_all = kill = stop = wake = close = _ignore


def an_engine(pool: Pool) -> Engine:
    """Return one of two tasks for two workers, both of which are running."""
    tasks = iter([(0, "a.png"), (1, "b.png")])
    limits = Limits(num_workers=2, slots=4, lookahead=9)
    return Engine(pool, limits, tasks, advice=lambda payload: [f"Look at {payload}."])


def warned_in(engine: Engine, pool: SilentPool, seconds: float) -> list[str]:
    """Return the warnings of so many seconds."""
    end = pool.now + seconds
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        while pool.now < end:
            engine.step()
    return [str(each.message) for each in caught]


def test_after_a_minute_of_silence_the_longest_task_is_named_once(monkeypatch) -> None:
    """With the line of the user's code, and what to do; the worker runs on."""
    pool = SilentPool(monkeypatch)
    engine = an_engine(pool)
    pool.events = [[WorkerStarted(0), WorkerStarted(1)]]
    assert warned_in(engine, pool, 59) == [] == pool.asked
    assert warned_in(engine, pool, 2) == []
    pool.events = [[StacksTaken(0, STACKS)]]
    (message,) = warned_in(engine, pool, 2)
    assert message.splitlines() == [
        "no result has come for 1 min 1 s: worker 0 has been running a.png for 1 min 1 s; it is at "
        '"/home/me/data.py", line 12, in read',
        "  1 other worker is busy. forebay goes on waiting, and does not repeat this.",
        "  Look at a.png.",
        "  Its calls, the innermost first:",
        '    File "/venv/lib/python3.11/site-packages/PIL/Image.py", line 500 in load',
        '    File "/home/me/data.py", line 12 in read',
    ]
    assert (warned_in(engine, pool, 1000), pool.asked) == ([], [0])


def test_an_answer_ends_the_silence(monkeypatch) -> None:
    """Also one that comes while the stacks are on their way; then the next one is named."""
    pool = SilentPool(monkeypatch)
    engine = an_engine(pool)
    pool.events = [[WorkerStarted(0), WorkerStarted(1)]]
    assert warned_in(engine, pool, 61) == []
    pool.events = [[StacksTaken(0, STACKS), TaskFinished(0, 0, 1, "r", 1, 61.0)]]
    assert warned_in(engine, pool, 58) == []
    assert warned_in(engine, pool, 4) == []
    assert pool.asked == [0, 1]
    (message,) = warned_in(engine, pool, 6)
    assert "worker 1 has been running b.png for 2 min 6 s; it did not say where it is" in message
    assert "No other worker is busy." in message


def test_a_worker_that_does_not_start_is_named_too(monkeypatch) -> None:
    """It may hang in `worker_init_fn`, or wait for room on a cluster."""
    pool = SilentPool(monkeypatch)
    engine = an_engine(pool)
    assert warned_in(engine, pool, 61) == []
    pool.events = [[StacksTaken(0, "2 workers wait for room\n  node: 2 of 2 CPU free")]]
    (message,) = warned_in(engine, pool, 2)
    assert message.splitlines() == [
        "no result has come for 1 min 1 s: worker 0 has not started for 1 min 1 s; 2 workers wait "
        "for room",
        "  node: 2 of 2 CPU free",
        "  1 other worker is busy. forebay goes on waiting, and does not repeat this.",
    ]


def test_idle_workers_are_not_silent(monkeypatch) -> None:
    """A trainer may take hours for a step."""
    pool = SilentPool(monkeypatch)
    engine = Engine(pool, Limits(num_workers=2, slots=4, lookahead=0))
    assert warned_in(engine, pool, 10_000) == [] == pool.asked


def test_of_several_threads_the_one_with_code_of_the_user_is_shown() -> None:
    """A worker may run several inputs at once, each in a thread."""
    stacks = (
        'Thread 0x01 (most recent call first):\n  File "/me/a.py", line 3 in f\n\n'
        "Current thread 0x02 (most recent call first):\n"
        f'  File "{threading.__file__}", line 9 in join\n'
    )
    with pytest.warns(RuntimeWarning, match=r'it is at "/me/a.py", line 3, in f\n'):
        warn_of_stuck_worker(StuckWorker(0, "a", 61.0, 60.0, 0, stacks), [])


# ---- real workers --------------------------------------------------------------------------------


@pytest.fixture
def caught(monkeypatch, tmp_path):
    """Return a list for the warnings that a stuck worker causes; the first one opens its gate."""
    gate, messages = Gate(tmp_path), list[str]()
    monkeypatch.setattr(loop, "SILENT_S", 1e9)

    def be_impatient() -> None:
        gate.wait_reached()
        monkeypatch.setattr(loop, "SILENT_S", 0.0)

    def warn(message: str, *_: object, **__: object) -> None:
        messages.append(message)
        gate.open()

    monkeypatch.setattr(warnings, "warn", warn)
    thread = threading.Thread(target=be_impatient, daemon=True)
    thread.start()
    yield messages
    thread.join()


@pytest.fixture
def one_input(tmp_path):
    """Return a folder with one file, beside the gate."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_text("a")
    return tmp_path / "in"


def waits(source: Path, out: forebay.Output) -> dict[str, int]:
    """Wait at a gate that lies beside the input."""
    Gate(source.parent.parent).wait()
    return {"x": 1}


def waits_deaf(source: Path, out: forebay.Output) -> dict[str, int]:
    """Likewise, without a handler for the signal that asks for the stacks."""
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    return waits(source, out)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["process", "thread"])
def test_a_run_says_where_a_stuck_function_is(caught, one_input, tmp_path, backend) -> None:
    """The input, file and line; then the run ends as if nothing had been said."""
    out = tmp_path / "out"
    report = forebay.preprocess(
        waits, one_input, out, num_workers=1, backend=backend, progress=False
    )
    assert (report.done, report.failed) == (1, 0)
    (message,) = caught
    first, *others = message.splitlines()
    assert f"worker 0 has been running {one_input}/a for" in first
    assert f'it is at "{faults.__file__}", line ' in first
    assert first.endswith(", in wait")
    assert any("start it within the function" in each for each in others) == (backend == "process")


@pytest.mark.slow
def test_a_worker_that_the_question_would_end_is_not_asked(caught, one_input, tmp_path) -> None:
    """Its function removed the handler: the stuck input is still named, and ends well."""
    out = tmp_path / "out"
    report = forebay.preprocess(
        waits_deaf, one_input, out, num_workers=1, progress=False, retries=0
    )
    assert (report.done, report.failed) == (1, 0)
    (message,) = caught
    assert f"running {one_input}/a for" in message
    assert "it did not say where it is" in message


class Waiting(torch.utils.data.Dataset):
    """Samples of which one waits at a gate."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 2:
            self.gate.wait()
        return index


@pytest.mark.parametrize("options", [{}, {"buffer": "1MB"}], ids=str)
def test_a_loader_says_which_samples_are_stuck_and_where(caught, tmp_path, options) -> None:
    """Within `next()`, and in the thread that fills a buffer; every batch comes in the end."""
    dataset = Waiting(Gate(tmp_path))
    with forebay.DataLoader(dataset, batch_size=2, num_workers=1, **options) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    (message,) = caught
    assert "worker 0 has been running epoch 0, batch 1 for" in message
    assert f'it is at "{faults.__file__}", line ' in message
    assert "The batch is samples [2, 3]." in message
    assert "multiprocessing_context='forkserver'" in message
