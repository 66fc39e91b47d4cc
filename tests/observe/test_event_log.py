"""The logger "forebay": what it says, how often, and that nothing is printed unasked."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

import forebay
from forebay.failures import Failure
from forebay.observe.progress import LOG_WINDOW_S, MAX_LINES, RepeatFilter, log, log_failed

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(autouse=True)
def _fresh_filter(monkeypatch):
    """Have no test use up the lines of the next."""
    monkeypatch.setattr(log, "filters", [RepeatFilter()])


@pytest.fixture
def logged(caplog):
    """Return what is logged, as pairs of level and text."""
    caplog.set_level(logging.INFO, "forebay")
    return lambda: [
        (each.levelname, each.getMessage()) for each in caplog.records if each.name == "forebay"
    ]


def work(source, out):
    if source.name == "bad":
        raise ValueError("first line\nsecond line")
    out.file(source.name).write_text("x")


@pytest.fixture
def inputs(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("bad", "good"):
        (tmp_path / "in" / name).write_text("x")
    return tmp_path / "in"


def test_a_run_logs_its_failures(logged, inputs, tmp_path):
    """The retry, the failure, and how the run began and ended."""
    forebay.preprocess(
        work, inputs, tmp_path / "out", num_workers=0, retries=1, progress=False, max_failures=1
    )
    assert logged() == [
        ("INFO", "preprocess out: begins; 0 of 2 done"),
        (
            "INFO",
            f"{inputs}/bad failed in attempt 1 and is tried again: ValueError: first line",
        ),
        ("WARNING", f"{inputs}/bad failed: ValueError: first line"),
        ("INFO", "preprocess out: ends; 1 of 2 done, 1 failed"),
    ]


class Lethal(torch.utils.data.Dataset):
    """Kills its worker at sample 5, once."""

    def __init__(self, mark):
        self.mark = mark

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def test_a_death_and_the_replacement_are_logged(logged, tmp_path):
    """With the worker's number, the signal, and the batch that is made again."""
    dataset = Lethal(tmp_path / "mark")
    with forebay.DataLoader(dataset, batch_size=4, num_workers=1, seed=0) as loader:
        assert len(list(loader)) == 2
    lines = logged()
    assert [level for level, _ in lines] == ["WARNING", "INFO", "INFO"]
    assert lines[0][1].startswith("worker 0 died: the worker was killed by signal: Killed (SIGKILL")
    others = sorted(text for _, text in lines[1:])
    assert others[0].startswith("epoch 0, batch 1 failed in attempt 1 and is tried again: Worker")
    assert others[1] == "worker 0 is replaced"


class Hanging(torch.utils.data.Dataset):
    """Never returns a sample."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        threading.Event().wait()


@pytest.mark.slow
def test_a_worker_that_hangs_is_logged_once_for_each_kill(logged):
    """Not also as killed by a signal, which was forebay's own."""
    with forebay.DataLoader(Hanging(), num_workers=1, timeout=0.2, seed=0) as loader:
        with pytest.raises(forebay.WorkerDiedError):
            list(loader)
    texts = [text for _, text in logged()]
    assert texts.count("worker 0 is killed: its task takes longer than timeout") == 2
    assert [text for text in texts if "died" in text and "signal" in text] == []


class Broken(torch.utils.data.Dataset):
    """One sample in four raises."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2:
            raise ValueError("no picture")
        return float(index)


def test_a_sample_that_is_left_out_is_logged(logged):
    """With its place, so that it can be found again."""
    with forebay.DataLoader(Broken(), batch_size=2, on_error="skip") as loader:
        list(loader)
    assert logged() == [("WARNING", "sample 2, epoch 0, batch 1 failed: ValueError: no picture")]


@pytest.mark.parametrize("is_factory", [False, True])
def test_a_sample_without_a_prediction_is_logged(is_factory, logged, tmp_path):
    """Return whether the model is in this process or in the workers."""
    model = torch.nn.Identity if is_factory else torch.nn.Identity()
    forebay.predict(model, Broken(), tmp_path / "out", num_workers=0, progress=False)
    assert logged() == [
        ("INFO", "predict out: begins; 0 of 4 done"),
        ("WARNING", "sample 2 failed: ValueError: no picture"),
        ("INFO", "predict out: ends; 3 of 4 done, 1 failed"),
    ]


def test_a_name_is_one_line_whatever_is_in_it(logged):
    """A file's name cannot write a line of its own into a log."""
    log_failed("a\nWARNING b\x1b[2J", Failure("exception", "ValueError", "c\rd"))
    assert logged() == [("WARNING", "a\\nWARNING b\\x1b[2J failed: ValueError: c\\rd")]


# ---- how often ----------------------------------------------------------------------------------


def test_a_million_failures_are_few_lines(logged, monkeypatch):
    """A number of lines in each window; the first of the next says how many were left out."""
    now = [0.0]
    monkeypatch.setattr(log, "filters", [RepeatFilter(lambda: now[0])])
    failure = Failure("exception", "ValueError", "no")
    for _ in range(10_000):
        log_failed("a", failure)
    log.info("another kind of message")
    assert len(logged()) == MAX_LINES + 1
    now[0] = LOG_WINDOW_S
    log_failed("b", failure)
    log_failed("c", failure)
    assert [text for _, text in logged()[-2:]] == [
        f"b failed: ValueError: no ({10_000 - MAX_LINES:,} similar messages were not logged)",
        "c failed: ValueError: no",
    ]
    now[0] = 2 * LOG_WINDOW_S
    log_failed("d", failure)
    assert logged()[-1][1] == "d failed: ValueError: no", "none was left out"


# ---- nothing unasked ----------------------------------------------------------------------------

QUIET = """
import sys
import forebay
assert "logging" not in sys.modules, "import forebay is light"
import pathlib

def work(source, out):
    raise ValueError("no")

forebay.preprocess(work, sys.argv[1], sys.argv[2], num_workers=0, max_failures=9, progress=False)
import logging
logger = logging.getLogger("forebay")
print([type(each).__name__ for each in logger.handlers], logger.level, logging.getLogger().handlers)
"""


@pytest.mark.slow
def test_nothing_is_printed_and_nothing_configured(inputs, tmp_path):
    """The one handler is the one that does nothing."""
    done = subprocess.run(
        [sys.executable, "-c", QUIET, inputs, tmp_path / "out"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "['NullHandler'] 0 []\n"
