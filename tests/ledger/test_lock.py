"""The lock on an output folder: one driver, and an error that names it to the second."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import forebay
from forebay.errors import BusyError, LedgerError
from forebay.ledger import lock as lock_module
from forebay.ledger.lock import FolderLock, Holder, find_holder
from forebay.outputs.folder import OutputFolder

HOLD = """
import sys, time
from pathlib import Path
from forebay.ledger.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]), "forebay preprocess a b")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def driver(tmp_path):
    """Another process that holds the lock until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def _no_flock(*_):
    raise OSError(errno.ENOLCK, "No locks available")


def _false_flock(*_):
    """Grant every lock, as file systems do that lock on one node alone."""


@pytest.fixture(params=[_no_flock, _false_flock])
def without_flock(request, monkeypatch):
    """A file system that has no locks, or whose locks mean nothing."""
    monkeypatch.setattr(fcntl, "flock", request.param)


@pytest.fixture
def impatient(monkeypatch):
    """Count a record that is not renewed as dead much sooner."""
    monkeypatch.setattr(lock_module, "STALE_S", 0.2)
    monkeypatch.setattr(lock_module, "BEAT_S", 0.02)


def test_a_second_driver_is_told_who_holds_the_folder(tmp_path, driver):
    """The error names pid, host, time and command, and says what to do."""
    with pytest.raises(BusyError) as caught:
        FolderLock(tmp_path / "lock")
    first, *rest = str(caught.value).splitlines()
    assert f"pid {driver.pid} on {os.uname().nodename}, since 20" in first
    assert "forebay preprocess a b" in rest[0]
    assert "forebay status" in rest[1]


def test_a_killed_driver_leaves_the_folder_free(tmp_path, driver):
    """No lock outlives kill -9, and its record does not mislead."""
    assert find_holder(tmp_path / "lock").pid == driver.pid
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert find_holder(tmp_path / "lock") is None
    FolderLock(tmp_path / "lock").close()


def test_the_lock_holds_within_one_process_too(tmp_path):
    """Two runs in two threads, or a forgotten one in a notebook, exclude each other."""
    lock = FolderLock(tmp_path / "lock")
    with pytest.raises(BusyError, match=f"pid {os.getpid()} "):
        FolderLock(tmp_path / "lock")
    lock.close()
    lock.close()
    FolderLock(tmp_path / "lock").close()


def test_a_closed_lock_has_no_holder(tmp_path):
    """The record goes with the lock."""
    lock = FolderLock(tmp_path / "lock", "x")
    assert find_holder(tmp_path / "lock").command == "x"
    lock.close()
    assert find_holder(tmp_path / "lock") is None
    assert (tmp_path / "lock.1").read_bytes() == b"{}"


def test_a_forked_child_does_not_keep_the_folder(tmp_path):
    """A worker that outlives its driver does not hold the driver's lock."""
    lock = FolderLock(tmp_path / "lock")
    stay, leave = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(leave)
        os.read(stay, 1)
        os._exit(0)
    try:
        lock.close()
        FolderLock(tmp_path / "lock").close()
    finally:
        os.close(leave)
        os.waitpid(child, 0)
        os.close(stay)


def test_a_forked_child_cannot_release_its_parents_lock(tmp_path):
    """Whatever a child does with its copy, the driver's stays."""
    lock = FolderLock(tmp_path / "lock")
    child = os.fork()
    if child == 0:
        lock.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert find_holder(tmp_path / "lock").pid == os.getpid()
    lock.close()


def test_without_flock_a_live_process_counts(tmp_path, without_flock):
    """Where locks cannot be relied on, the record of a live process is one."""
    lock = FolderLock(tmp_path / "lock", "a command")
    with pytest.raises(BusyError, match=f"pid {os.getpid()} ") as caught:
        FolderLock(tmp_path / "lock")
    assert "a command" in str(caught.value)
    assert find_holder(tmp_path / "lock").pid == os.getpid()
    lock.close()
    assert find_holder(tmp_path / "lock") is None
    FolderLock(tmp_path / "lock").close()


def test_whether_the_file_system_has_locks_is_known(tmp_path, monkeypatch):
    """The ledger's database must not ask for locks where there are none."""
    lock = FolderLock(tmp_path / "lock")
    assert lock.native
    lock.close()
    monkeypatch.setattr(fcntl, "flock", _no_flock)
    lock = FolderLock(tmp_path / "lock")
    assert not lock.native
    lock.close()


def _dead(tmp_path):
    """A process that has ended and was waited for."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    return replace(Holder.this_process("", tmp_path), pid=gone.pid)


def _reused(tmp_path):
    """A live process that has the number of one that started earlier."""
    return replace(Holder.this_process("", tmp_path), process_start="1")


@pytest.mark.parametrize("former", [_dead, _reused])
def test_the_record_of_a_dead_process_does_not_count(tmp_path, without_flock, former):
    """It is taken over at once, and removed."""
    _leave_record(tmp_path, 7, former(tmp_path))
    assert find_holder(tmp_path / "lock") is None
    FolderLock(tmp_path / "lock").close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "lock.8"]


def test_a_killed_process_does_not_count_before_it_is_waited_for(tmp_path, without_flock):
    """Its number still exists, as that of a zombie."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        start = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
        holder = replace(Holder.this_process("", tmp_path), pid=process.pid, process_start=start)
        _leave_record(tmp_path, 1, holder)
        assert find_holder(tmp_path / "lock") == holder
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        FolderLock(tmp_path / "lock").close()


def test_a_copy_of_a_folder_in_use_has_no_holder(tmp_path):
    """The record in it is that of the original."""
    lock = FolderLock(tmp_path / "lock")
    shutil.copytree(tmp_path, tmp_path / "copy")
    assert find_holder(tmp_path / "copy" / "lock") is None
    FolderLock(tmp_path / "copy" / "lock").close()
    lock.close()


ELSEWHERE = Holder("elsewhere", 1, "2030-01-01T00:00:00+00:00", "a command", "another kernel", "9")


def test_a_silent_record_of_another_machine_is_taken_over(
    tmp_path, without_flock, impatient, capsys
):
    """It stayed the same for so long by the clock of the one who waits, whatever its own says."""
    _leave_record(tmp_path, 3, ELSEWHERE)
    os.utime(tmp_path / "lock.3", (2e9, 2e9))  # its clock is ahead by years
    lock = FolderLock(tmp_path / "lock")
    assert find_holder(tmp_path / "lock").pid == os.getpid()
    lock.close()
    assert "was held by pid 1 on elsewhere" in capsys.readouterr().err


def test_a_record_that_another_machine_renews_counts(tmp_path, without_flock):
    """Whatever the clocks: that it changes shows, at once, that its driver lives."""
    _leave_record(tmp_path, 3, ELSEWHERE)
    over = threading.Event()

    def renew():
        at = 1e9
        while not over.wait(0.01):
            at += 1
            os.utime(tmp_path / "lock.3", (at, at))

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(BusyError, match="pid 1 on elsewhere") as caught:
            FolderLock(tmp_path / "lock")
    finally:
        over.set()
        thread.join()
    assert "a command" in str(caught.value)
    assert "60 s after that" in str(caught.value)


def test_a_look_believes_a_young_record_of_another_machine(tmp_path, without_flock):
    """It cannot wait for the next beat; an old one is of a run that is over."""
    _leave_record(tmp_path, 3, ELSEWHERE)
    assert find_holder(tmp_path / "lock") == ELSEWHERE
    os.utime(tmp_path / "lock.3", (1e9, 1e9))
    assert find_holder(tmp_path / "lock") is None


def test_a_driver_renews_its_record(tmp_path, impatient):
    """So others see that it lives."""
    lock = FolderLock(tmp_path / "lock")
    os.utime(tmp_path / "lock.1", (1e9, 1e9))
    lock.keep_alive()
    while (tmp_path / "lock.1").stat().st_mtime == 1e9:
        time.sleep(0.001)
    lock.close()


def test_a_driver_whose_folder_was_taken_over_commits_nothing(tmp_path):
    """It was stopped for so long that another machine took it for dead."""
    with OutputFolder(tmp_path / "out").ledger() as ledger:
        ledger.record([], [])
        (tmp_path / "out" / ".forebay" / "lock.1").unlink()
        _leave_record(tmp_path / "out" / ".forebay", 2, ELSEWHERE)
        with pytest.raises(BusyError, match=r"has taken over .*pid 1 on elsewhere"):
            ledger.record([], [])
    assert find_holder(tmp_path / "out" / ".forebay" / "lock") == ELSEWHERE


@pytest.mark.parametrize("way", ["removed", "renamed"])
def test_a_driver_whose_folder_is_gone_does_not_blame_another_run(tmp_path, way):
    """There is no record of one; and what is done is kept if the folder gets its name again."""
    out, there = tmp_path / "out", tmp_path / "there"
    with OutputFolder(out).ledger() as ledger:
        out.rename(there)
        if way == "removed":
            shutil.rmtree(there)
        with pytest.raises(LedgerError, match=r"out/\.forebay is gone: .*renamed") as caught:
            ledger.record([], [])
    assert not isinstance(caught.value, BusyError)
    assert "make the same call again" in str(caught.value)


def test_a_number_that_others_used_up_meanwhile_is_no_lock(tmp_path, without_flock, monkeypatch):
    """One who looked long ago makes a file that was made and removed since, and sees that."""
    newest = lock_module._newest
    _leave_record(tmp_path, 3, Holder.this_process("the third", tmp_path))
    stale = iter([lock_module._Record(1, None, True, 0)])
    monkeypatch.setattr(lock_module, "_newest", lambda path: next(stale, None) or newest(path))
    with pytest.raises(BusyError, match="the third"):
        FolderLock(tmp_path / "lock")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "lock.3"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", ["flock", "none", pytest.param("false", marks=pytest.mark.thorough)]
)
def test_of_thirty_that_start_at_once_one_runs(tmp_path, mode):
    """The others are told which; a killed one is followed by another, with or without flock."""
    starts = Path(__file__).with_name("starts.py")
    done = subprocess.run(
        [sys.executable, starts, tmp_path / "out", mode, "3"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(forebay.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    for said in json.loads(done.stdout):
        (holder,) = (pid for pid, words in said if words == "held")
        others = [words for pid, words in said if pid != holder]
        assert len(others) == 29
        assert [words for words in others if f": pid {holder} on " not in words] == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    """A lock that cannot be created is an error of the ledger's, not a bare OSError."""
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="cannot be written"):
        FolderLock(tmp_path / "file" / "lock")


def _leave_record(folder, number, holder):
    (folder / f"lock.{number}").write_text(json.dumps(asdict(holder)))
