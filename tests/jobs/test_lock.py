"""The lock on an output folder: one driver, and an error that names it to the second."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys

import pytest

from forebay.errors import BusyError, LedgerError
from forebay.jobs.lock import FolderLock, find_holder

HOLD = """
import sys, time
from pathlib import Path
from forebay.jobs.lock import FolderLock
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


def test_a_second_driver_is_told_who_holds_the_folder(tmp_path, driver):
    """The error names pid, host, time and command, and says what to do."""
    with pytest.raises(BusyError) as caught:
        FolderLock(tmp_path / "lock")
    first, *rest = str(caught.value).splitlines()
    assert f"pid {driver.pid} on {os.uname().nodename}, since 20" in first
    assert "forebay preprocess a b" in rest[0]
    assert "forebay status" in rest[1]


def test_a_killed_driver_leaves_the_folder_free(tmp_path, driver):
    """No lock outlives kill -9, and its record misleads nobody."""
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


def test_a_closed_lock_names_nobody(tmp_path):
    """The record goes with the lock."""
    lock = FolderLock(tmp_path / "lock", "x")
    assert find_holder(tmp_path / "lock").command == "x"
    lock.close()
    assert find_holder(tmp_path / "lock") is None
    assert (tmp_path / "lock").read_bytes() == b""


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


def test_without_flock_a_live_process_counts(tmp_path, monkeypatch):
    """Where the file system has no locks, the record of a live process is one."""
    monkeypatch.setattr(fcntl, "flock", _no_flock)
    lock = FolderLock(tmp_path / "lock")
    assert not lock.native
    with pytest.raises(BusyError, match="has no locks"):
        FolderLock(tmp_path / "lock")
    assert find_holder(tmp_path / "lock").pid == os.getpid()
    lock.close()
    FolderLock(tmp_path / "lock").close()


def test_without_flock_a_dead_process_does_not_count(tmp_path, monkeypatch):
    """A record of this machine is believed only while its process lives."""
    monkeypatch.setattr(fcntl, "flock", _no_flock)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    _leave_record(tmp_path, os.uname().nodename, gone.pid)
    FolderLock(tmp_path / "lock").close()


def test_without_flock_another_machine_counts_until_its_record_is_deleted(tmp_path, monkeypatch):
    """A run on another machine cannot be checked, so the error says what to delete."""
    monkeypatch.setattr(fcntl, "flock", _no_flock)
    _leave_record(tmp_path, "elsewhere", 1)
    with pytest.raises(BusyError, match=f"delete {tmp_path / 'lock'}") as caught:
        FolderLock(tmp_path / "lock")
    assert "pid 1 on elsewhere" in str(caught.value)
    (tmp_path / "lock").unlink()
    FolderLock(tmp_path / "lock").close()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    """A lock that cannot be made is an error of the ledger's, not a bare OSError."""
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="cannot be written"):
        FolderLock(tmp_path / "file" / "lock")


def _leave_record(folder, host, pid):
    record = {"host": host, "pid": pid, "started": "2030-01-01T00:00:00+00:00", "command": ""}
    (folder / "lock").write_text(json.dumps(record))
