"""`no_leaks` finds each kind of thing that can be left behind, and nothing else."""

from __future__ import annotations

import mmap
import os
import secrets
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kit.leaks import let_go, no_leaks

# Says on stdout who it is, then waits until its stdin is closed.
_WAITER = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
# Starts a waiter of its own, says who that is, and leaves it an orphan.
_PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {_WAITER!r}], start_new_session=True)
"""


def _start(script):
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, text=True)


def test_what_is_given_back_in_time_is_no_leak(tmp_path):
    """A thread, a child, a file and a memfd that end with the block are fine."""
    with no_leaks():
        thread = threading.Thread(target=print)
        thread.start()
        thread.join()
        subprocess.run([sys.executable, "-c", ""], check=True)
        (tmp_path / "a").write_text("a")
        memory = os.memfd_create("gone")
        os.ftruncate(memory, mmap.PAGESIZE)
        mmap.mmap(memory, 0).close()
        os.close(memory)


def test_a_child_that_lives_on_is_named():
    """The message holds the pid and the command, and the pipes to it."""
    child = None
    with pytest.raises(AssertionError, match=r"3 left behind.*\n  process \d+ .*sys.stdin.read"):
        with no_leaks(wait_s=0):
            child = _start(_WAITER)
            child.stdout.readline()  # until it runs, its command may be unknown
    child.communicate()


def test_a_child_that_was_not_waited_for_is_named():
    """A zombie is a leak, and the message says what it is."""
    with pytest.raises(AssertionError, match="ended but never waited for"):
        with no_leaks(wait_s=0):
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    os.waitpid(child, 0)


def test_an_orphaned_grandchild_is_found():
    """A grandchild in a session of its own is found after its parent has died."""
    parent = None
    with pytest.raises(AssertionError, match=r"process \d+ \(parent \d+\)") as caught:
        with no_leaks(wait_s=0):
            ours, theirs = os.pipe()
            parent = subprocess.Popen(
                [sys.executable, "-c", _PARENT], stdin=ours, stdout=subprocess.PIPE, text=True
            )
            os.close(ours)
            grandchild = int(parent.stdout.readline())
            parent.wait()
    assert f"process {grandchild} " in str(caught.value)
    os.close(theirs)  # the end of its stdin ends it
    parent.stdout.read()  # which this waits for
    parent.stdout.close()


def test_a_thread_that_lives_on_is_named():
    """The message holds the thread's name and whether it is a daemon."""
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait, name="pump", daemon=True)
    with pytest.raises(AssertionError, match=r"thread 'pump' \(daemon\)"):
        with no_leaks(wait_s=0):
            thread.start()
    gate.set()
    thread.join()


def test_an_open_descriptor_is_named(tmp_path):
    """The message holds its number and where it leads."""
    path = tmp_path / "open"
    with pytest.raises(AssertionError, match=r"descriptor \d+: .*/open"):
        with no_leaks(wait_s=0):
            descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
    os.close(descriptor)


def test_a_name_in_shared_memory_is_named():
    """A file in /dev/shm that is named after this process is a leak though none has it open."""
    path = Path(f"/dev/shm/forebay-{os.getpid()}-test")
    try:
        with pytest.raises(AssertionError, match=f"shared memory {path}"):
            with no_leaks(wait_s=0):
                path.write_bytes(b"left")
    finally:
        path.unlink()


# Started in the background by a shell that ends: no descendant of this process.
_STRANGER = f'exec 3<&0; "{sys.executable}" -c "$SCRIPT" <&3 & exit 0'


@contextmanager
def _stranger(script, **options):
    """A process that is not traced to this one, until its stdin is closed."""
    environment = {k: v for k, v in os.environ.items() if k != "FOREBAY_NO_LEAKS"}
    pipe = subprocess.PIPE
    shell = subprocess.Popen(
        ["sh", "-c", _STRANGER],
        stdin=pipe,
        stdout=pipe,
        text=True,
        env={**environment, "SCRIPT": script},
        **options,
    )
    shell.wait()
    try:
        yield shell
    finally:
        with suppress(BrokenPipeError):
            shell.stdin.close()
        shell.stdout.read()
        shell.stdout.close()


# Makes a file in /dev/shm when it is told to.
_MAKER = "import os; input(); f = open({path!r}, 'w'); print(os.getpid(), flush=True); input()"


@pytest.mark.parametrize("is_killed", [False, True], ids=["lives", "is killed"])
def test_shared_memory_of_a_foreign_process_is_not_ours(is_killed):
    """Another program's new file in /dev/shm is let be, also when that program was killed."""
    path = f"/dev/shm/forebay-foreign-{secrets.token_hex(8)}x"
    try:
        with _stranger(_MAKER.format(path=path), start_new_session=True) as stranger:
            with no_leaks(wait_s=0):
                stranger.stdin.write("\n")
                stranger.stdin.flush()
                pid = int(stranger.stdout.readline())
                if is_killed:
                    os.kill(pid, signal.SIGKILL)
                    assert stranger.stdout.read() == ""  # its end
                assert Path(path).exists()
    finally:
        Path(path).unlink(missing_ok=True)


def test_shared_memory_that_this_process_has_open_is_ours():
    """A file of /dev/shm whose name says nothing is traced by who has it open."""
    path = Path(f"/dev/shm/forebay-{secrets.token_hex(8)}x")
    file = None
    try:
        with pytest.raises(AssertionError, match=f"shared memory {path}"):
            with no_leaks(wait_s=0):
                file = path.open("wb")
    finally:
        file.close()
        path.unlink()


# Forks when it is told to, says of which number the other is, and leaves it an orphan.
_FORKER = """
import os, sys
input()
if (pid := os.fork()) == 0:
    sys.stdin.read()
else:
    print(pid, flush=True)
"""


def test_an_orphan_of_a_foreign_process_is_not_ours():
    """What runs beside this process in one shell, as parts of a suite do, may leave orphans."""
    with _stranger(_FORKER) as stranger, no_leaks(wait_s=0):
        stranger.stdin.write("\n")
        stranger.stdin.flush()
        orphan = int(stranger.stdout.readline())
        assert os.getpgid(orphan) == os.getpgid(0)


def test_a_forked_orphan_is_found():
    """A process that was forked and never started a program is found, in a session of its own."""
    ours, theirs = os.pipe()
    ready, says = os.pipe()
    orphan = None
    with pytest.raises(AssertionError, match=r"1 left behind.*\n  process \d+ ") as caught:
        with no_leaks(wait_s=0):
            child = os.fork()
            if child == 0:
                if os.fork() == 0:
                    os.setsid()
                    os.close(theirs)
                    os.write(says, str(os.getpid()).encode())
                    os.read(ours, 1)  # returns when the last of the other ends is closed
                os._exit(0)
            os.waitpid(child, 0)
            orphan = os.read(ready, 20).decode()
    assert f"process {orphan} " in str(caught.value)
    os.close(theirs)
    os.close(says)
    assert os.read(ready, 1) == b""  # its end
    os.close(ours)
    os.close(ready)


def test_a_mapping_of_a_memfd_is_named():
    """The mapping counts even when its descriptor is closed."""
    with pytest.raises(AssertionError, match="mapping of /memfd:slab"):
        with no_leaks(wait_s=0):
            memory = os.memfd_create("slab")
            os.ftruncate(memory, mmap.PAGESIZE)
            kept = mmap.mmap(memory, 0)
            os.close(memory)
    kept.close()


def test_what_is_just_ending_is_waited_for():
    """A child that ends after the block, but soon, is no leak."""
    with no_leaks():
        ours, theirs = os.pipe()
        late = os.fork()
        if late == 0:
            os.close(theirs)
            os.read(ours, 1)  # returns when the parent's end is closed
            os._exit(0)
        os.close(ours)
        reaper = threading.Thread(target=os.waitpid, args=(late, 0))
        reaper.start()
        os.close(theirs)


def test_an_error_in_the_block_passes_through():
    """What went wrong in the block is not hidden by what it left."""
    descriptor = None
    with pytest.raises(KeyError, match="mine"):
        with no_leaks(wait_s=0):
            descriptor = os.open(os.devnull, os.O_RDONLY)
            raise KeyError("mine")
    os.close(descriptor)


def test_what_an_error_holds_is_let_go():
    """The variables of its functions, and of those whose errors it is from."""
    held = []

    def fail():
        mine = {object()}
        held.append(weakref.ref(mine))
        raise KeyError

    def fail_in_turn():
        mine = {object()}
        held.append(weakref.ref(mine))
        try:
            fail()
        except KeyError as error:
            raise ExceptionGroup("both", [ValueError()]) from error

    with pytest.raises(ExceptionGroup) as caught:
        fail_in_turn()
    traceback.TracebackException.from_exception(caught.value, capture_locals=True)  # a report
    assert [each() is None for each in held] == [False, False]
    let_go(caught.value)
    assert [each() is None for each in held] == [True, True]


def test_the_environment_is_as_before():
    """The mark that finds orphans does not outlive the block."""
    before = dict(os.environ)
    with no_leaks():
        pass
    assert dict(os.environ) == before
