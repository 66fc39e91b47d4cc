"""`forebay top` beside real processes: it sees those that work, and forgets those that were killed.

Each test has a runtime folder of its own, so that it sees its own processes alone.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import time
from contextlib import contextmanager, suppress

import pytest

from forebay.base import machine
from forebay.show import top as show_top
from forebay.show.live_page import LivePage, read_page
from forebay.show.top import live_views

PATIENCE_S = 60.0

TRAINER = """
    import time
    import torch
    from torch.utils.data import Dataset
    import forebay

    class Endless(Dataset):
        def __len__(self):
            return 1_000_000

        def __getitem__(self, index):
            time.sleep(0.001)
            return torch.zeros(100)

    if __name__ == "__main__":
        with forebay.DataLoader(Endless(), batch_size=4, num_workers=2, buffer="1MB") as loader:
            for batch in loader:
                pass
"""

# After the first inputs, within a second, nothing ends for as long as input 2 takes.
RUN = """
    import sys, time
    import forebay

    def work(source, out):
        while source.stem == "2":
            time.sleep(0.01)
        if source.stem == "1":
            raise ValueError

    if __name__ == "__main__":
        forebay.preprocess(
            work, sys.argv[1], sys.argv[2], num_workers=2, retries=0, progress=False
        )
"""

# One worker begins, and there are more once the gate is open and inputs are waited for.
AUTO_RUN = """
    import os, sys, time
    import forebay
    from forebay.runs import tuning

    tuning.whole_cores = lambda: 1

    def work(source, out):
        while not os.path.exists(sys.argv[1] + ".gate"):
            time.sleep(0.01)
        time.sleep(0.1)

    if __name__ == "__main__":
        workers = forebay.AutoWorkers(max=3)
        forebay.preprocess(work, sys.argv[1], sys.argv[2], num_workers=workers, progress=False)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Return the folder of this test's pages."""
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8")
    found = str(runtime / "forebay")
    for module in (machine, show_top):  # others may run on this machine
        monkeypatch.setattr(module, "private_folders", lambda: [found])
    return runtime / "forebay"


@pytest.fixture
def running(script):
    """Runs a program, yields its process once it shows itself, and kills it at the end."""

    @contextmanager
    def running(code, *arguments):
        process = script(code, *arguments)
        try:
            until(lambda: process.pid in pids())
            yield process
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            process.end()

    return running


def until(holds) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


def pids() -> list[int]:
    return [view.pid for view in live_views()]


def top(*arguments) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "forebay", "top", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.mark.slow
def test_a_loader_is_seen_until_it_is_killed(running, folder) -> None:
    """With its buffer and its workers; after `kill -9` neither shown nor left behind."""
    with running(TRAINER) as process:
        for arguments in ((), ("--once",), (process.pid,)):
            done = top(*arguments)
            assert done.returncode == 0, done.stderr
            assert f"script.py · pid {process.pid} · " in done.stdout
            assert "DataLoader(Endless(1,000,000), batch_size=4, num_workers=2" in done.stdout
            assert re.search(r"^buffer .* of 1 MB, \d+ ready$", done.stdout, re.M)
            assert re.search(r"^worker 1 ", done.stdout, re.M)
            assert "\x1b" not in done.stdout
        process.kill()
        process.end()
    # Beside the page may be a part of the next one: it was killed at any moment.
    assert len(list(folder.glob("*.page"))) == 1
    assert f"pid {process.pid}" not in top("--once").stdout
    assert list(folder.glob("*.page")) == []
    gone = top(process.pid)
    assert gone.returncode == 2
    assert f"'{process.pid}' is neither the output folder" in gone.stderr


@pytest.mark.slow
def test_a_loader_that_ends_leaves_no_page(running, folder) -> None:
    """Ctrl-C is an end as any other."""
    with running(TRAINER) as process:
        process.kill(signal.SIGINT)
        process.end()
        assert list(folder.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("target", ["gone", "\u00b2", "4194305"])
def test_a_target_that_is_nothing_is_named(folder, tmp_path, monkeypatch, target) -> None:
    """Return whether it looks like a folder or like a number."""
    monkeypatch.chdir(tmp_path)
    LivePage()({"kind": "preprocess", "title": "/else"})  # by this process
    done = top(target)
    assert done.returncode == 2
    assert f"{target!r} is neither the output folder of a run nor the PID of one" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_closed_stdout_is_no_error(folder) -> None:
    """As for other commands: there is nobody to read it."""
    command = f"{shlex.quote(sys.executable)} -m forebay top >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.slow
def test_a_run_is_seen_by_its_output(running, tmp_path) -> None:
    """What `forebay status` tells and how many workers; after its end, what the ledger says."""
    inputs, output = tmp_path / "in", tmp_path / "out"
    inputs.mkdir()
    for number in range(5):
        (inputs / f"{number}.txt").touch()
    with running(RUN, inputs, output) as process:
        until(lambda: "3 of 5 inputs done" in top(output).stdout)
        text = top("--once").stdout
        assert f"pid {process.pid}" in text
        assert f"preprocess {output}" in text
        assert "3 of 5 inputs done · 1 failed" in text
        assert "2 workers" in text
        until(lambda: re.search(r"longest-running input \(\d.*\): .*\.txt", top(output).stdout))
        other = top(tmp_path)
        assert other.returncode == 1
        assert "holds no ledger" in other.stderr
    assert "3 of 5 inputs done, 1 failed, 1 to do" in top(output).stdout


@pytest.mark.slow
def test_a_run_shows_the_present_number_of_workers(running, tmp_path) -> None:
    """Of `num_workers="auto"`: the first, and the one after a decision."""
    inputs, output = tmp_path / "in", tmp_path / "out"
    inputs.mkdir()
    for number in range(1000):
        (inputs / f"{number}.txt").touch()
    with running(AUTO_RUN, inputs, output):
        until(lambda: [view.num_workers for view in live_views()] == [1])
        (tmp_path / "in.gate").touch()
        until(lambda: [view.num_workers for view in live_views()] == [3])


@pytest.mark.slow
def test_it_follows_the_size_of_its_terminal(running) -> None:
    """On a terminal it draws again when that is resized, and restores it at Ctrl-C."""
    with running(TRAINER) as trainer:
        terminal, other = pty.openpty()
        try:
            resize(terminal, 24, 100)
            with displayed(other, trainer.pid) as process:
                wide = read_until(terminal, lambda text: "worker 1" in text)
                assert wide.startswith("\x1b[?1049h")
                assert max(map(len, rows(wide))) > 60
                resize(terminal, 6, 40)
                process.send_signal(signal.SIGWINCH)
                # Frames of the old size may still be on their way.
                read_until(terminal, lambda text: is_small(text.split("\x1b[H")[-1]))
                process.send_signal(signal.SIGINT)
                end = read_until(terminal, lambda text: "\x1b[?1049l" in text)
                assert end.endswith("\x1b[?25h\x1b[?1049l")
                assert process.wait(PATIENCE_S) == 0
        finally:
            os.close(terminal)
            os.close(other)


@pytest.mark.slow
def test_q_ends_it(running) -> None:
    """At once, without Return; the terminal echoes again afterwards."""
    terminal, other = pty.openpty()
    try:
        resize(terminal, 24, 100)
        before = termios.tcgetattr(other)
        with displayed(other) as process:
            read_until(terminal, lambda text: "forebay top" in text)
            os.write(terminal, b"xq")
            read_until(terminal, lambda text: "\x1b[?1049l" in text)
            assert process.wait(PATIENCE_S) == 0
        assert termios.tcgetattr(other) == before
    finally:
        os.close(terminal)
        os.close(other)


@contextmanager
def displayed(terminal: int, *arguments: object):
    """Yield `forebay top` on a terminal; kill it at the end."""
    command = [sys.executable, "-m", "forebay", "top", *map(str, arguments)]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal) as process:
        try:
            yield process
        finally:
            process.kill()


def is_small(frame: str) -> bool:
    """Return whether a complete frame fits into six rows of 40 columns."""
    if not frame.endswith("\x1b[J"):
        return False
    lines = rows(frame)
    return 0 < len(lines) <= 5 and max(map(len, lines)) <= 40


def rows(text: str) -> list[str]:
    """Return the lines of a frame without escape codes."""
    return re.sub(r"\x1b\[[?\d]*[A-Za-z]", "", text).rstrip().splitlines()


def resize(terminal: int, lines: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


def read_until(terminal: int, holds) -> str:
    """Read from a terminal until what was read is as it is to be."""
    text, end = b"", time.monotonic() + PATIENCE_S
    while not holds(text.decode(errors="replace").replace("\r", "")):
        assert time.monotonic() < end, text[-2000:]
        if select.select([terminal], [], [], 0.1)[0]:
            text += os.read(terminal, 65_536)
    return text.decode(errors="replace").replace("\r", "")


@pytest.mark.slow
def test_a_loader_that_cannot_show_itself_trains_on(script, monkeypatch) -> None:
    """Without a folder to write to, there is nothing to see, and no error."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/proc/none")
    code = f"""
        from forebay.base import machine
        from forebay.observe import record as observe_record
        tried = []
        machine.private_folders = lambda: tried.append(1) or ["/proc/none/forebay"]
        {textwrap.indent(textwrap.dedent(TRAINER), "        ").strip()}
                    if tried:
                        break
    """
    done = script(code).end()
    assert (done.code, done.err) == (0, "")


def test_a_page_that_is_no_page_is_not_shown(folder) -> None:
    """Whatever lies in the folder."""
    folder.mkdir(mode=0o700)
    (folder / "1-x.page").write_text("{}")
    (folder / "2-x.page").symlink_to("/dev/zero")
    (folder / "3-x.page").mkdir()
    assert live_views() == []
    assert read_page(str(folder / "3-x.page")) is None
