"""A machine that refuses: full, read-only, busy, small; and a user who presses Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from driving import (
    WORKS,
    await_no_processes,
    call,
    finish,
    here,
    make_inputs,
    published,
    staged,
    start,
)
from test_kills import Gates
from works import copy

import forebay
from forebay.errors import BusyError, LedgerError, OptionError, OutputError, WorkerDiedError
from forebay.pools import processes
from forebay.runs.commits import Commits
from forebay.runs.processing import Processing

MIB = 1 << 20
ROOT = os.geteuid() == 0


def run(work, inputs, output, **options):
    return forebay.preprocess(work, inputs, output, progress=False, **{"num_workers": 2, **options})


@contextlib.contextmanager
def mounted(folder, *options):
    """A small file system of its own, in memory, at `folder`."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", folder], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def remount(folder, *options):
    subprocess.run(["mount", "-o", ",".join(["remount", *options]), folder], check=True)


# ---- a full disk --------------------------------------------------------------------------------


def write_much(source, out):
    """Write a megabyte for each input, from Python."""
    out.file(source.name).write_bytes(bytes(MIB))


def write_much_in_c(source, out):
    """Write a megabyte and more for each input, from a C library with errors of its own."""
    import numpy
    import soundfile

    noise = numpy.random.default_rng(0).integers(-30000, 30000, MIB // 2, "int16")
    soundfile.write(out.file(f"{source.stem}.wav"), noise, 16000)


@pytest.mark.slow
@pytest.mark.parametrize("work", [write_much, write_much_in_c])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_full_disk_stops_the_run_and_blames_no_input(tmp_path, work, workers):
    """Completed work is kept; with more room the same call does the rest."""
    pytest.importorskip("soundfile")
    inputs = make_inputs(tmp_path / "in", 30)
    with mounted(tmp_path / "out", "size=12m") as output:
        with pytest.raises((OutputError, LedgerError)) as caught:
            run(work, inputs, output, num_workers=workers)
        text = str(caught.value)
        assert "can no longer be written" in text or "disk is full" in text
        sizes = {name: len(body) for name, body in published(output).items()}
        assert all(size >= MIB for size in sizes.values())

        remount(output, "size=80m")
        report = run(work, inputs, output, num_workers=workers)
        assert (report.done, report.failed) == (30, 0)
        assert report.resumed == len(sizes)
        assert len(published(output)) == 30
        assert not staged(output)


@pytest.mark.slow
def test_a_disk_without_room_for_more_files_stops_the_run_too(tmp_path):
    """Out of inodes is full as well."""
    inputs = make_inputs(tmp_path / "in", 60)
    with mounted(tmp_path / "out", "size=20m", "nr_inodes=40") as output:
        with pytest.raises((OutputError, LedgerError)):
            run(copy, inputs, output)
        remount(output, "nr_inodes=500")
        assert run(copy, inputs, output).done == 60


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"num_workers": 0}, {"num_workers": 2, "backend": "thread"}, {}]
)
def test_a_staging_folder_that_cannot_be_made_is_no_fault_of_the_function(tmp_path, options):
    """As without an inode: the message says what to free, and the same call goes on later."""
    inputs, output = make_inputs(tmp_path / "in", 3), tmp_path / "out"
    blocked = output / ".forebay" / "staging"
    blocked.parent.mkdir(parents=True)
    blocked.write_text("a file where a folder is needed")
    with pytest.raises(OutputError) as caught:
        run(copy, inputs, output, **options)
    first, *_, last = str(caught.value).splitlines()
    assert first.startswith("a worker cannot make its folder for staged files: [Errno ")
    assert "Free some space and inodes (see df -h and df -i)" in last
    blocked.unlink()
    assert run(copy, inputs, output, **options).done == 3


@pytest.mark.slow
def test_whatever_inode_is_the_last_the_error_has_words(tmp_path):
    """From the first folder to the last output: no OSError, and nothing about the function."""
    inputs = make_inputs(tmp_path / "in", 3)
    for inodes in range(2, 12):
        with mounted(tmp_path / "out", "size=20m", f"nr_inodes={inodes}") as output:
            with pytest.raises((OutputError, LedgerError), match=r"space"):
                run(copy, inputs, output / "out", num_workers=0)


# ---- read-only ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("earlier", [False, True])
def test_a_read_only_output_is_refused_at_once(tmp_path, earlier):
    """No input is tried; the earlier run is as it was, and the call that made it returns it."""
    inputs = make_inputs(tmp_path / "in", 3)
    with mounted(tmp_path / "out", "size=4m") as output:
        if earlier:
            run(copy, inputs, output)
        remount(output, "ro")
        if earlier:
            assert run(copy, inputs, output).resumed == 3
            assert call("verify", output)[:2] == (
                0,
                "3 outputs checked: 0 missing, 0 altered, 0 orphans\n",
            )
            (inputs / "new.txt").write_text("new")
        with pytest.raises(OutputError, match="cannot be written to: Read-only file system"):
            run(copy, inputs, output)
        if earlier:
            assert call("status", output)[1].startswith("3 of 3 inputs done")


def test_an_output_that_is_a_file_is_refused(tmp_path):
    """A folder is wanted."""
    inputs = make_inputs(tmp_path / "in", 1)
    (tmp_path / "out").write_text("a file")
    with pytest.raises(OutputError, match="is a file, not a folder"):
        run(copy, inputs, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "a file"


@pytest.mark.skipif(not ROOT, reason="only root can make a file that no user can write")
def test_a_ledger_that_cannot_be_written_is_an_error_of_its_own(tmp_path):
    """The outputs' disk may be fine and the ledger's file not."""
    inputs = make_inputs(tmp_path / "in", 3)
    output = tmp_path / "out"
    run(copy, inputs, output)
    ledger = output / ".forebay" / "ledger.sqlite"
    subprocess.run(["mount", "--bind", ledger, ledger], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", ledger], check=True)
        (inputs / "more.txt").write_text("more")
        with pytest.raises(LedgerError, match="read-only or cannot be opened"):
            run(copy, inputs, output)
    finally:
        subprocess.run(["umount", ledger], check=True)
    assert run(copy, inputs, output).done == 4


@pytest.mark.parametrize("damage", ["text", "cut"])
def test_a_damaged_ledger_is_an_error_and_left_alone(tmp_path, damage):
    """Nothing is overwritten, and nothing is worked on."""
    inputs = make_inputs(tmp_path / "in", 3)
    output = tmp_path / "out"
    run(copy, inputs, output)
    ledger = output / ".forebay" / "ledger.sqlite"
    body = b"not a ledger" * 1000 if damage == "text" else ledger.read_bytes()[:5000]
    ledger.write_bytes(body)
    with pytest.raises(LedgerError, match="damaged"):
        run(copy, inputs, output)
    assert ledger.read_bytes() == body


# ---- two at once, and Ctrl-C --------------------------------------------------------------------


@pytest.fixture
def waiting(tmp_path):
    """A run of the command line, two of whose three workers wait while the third does the rest."""
    gates = Gates(tmp_path)
    inputs = make_inputs(tmp_path / "in", 20)
    for name in "ab":
        (inputs / f"0000-gate-{name}.txt").write_text("waits\n")
    command = [f"{WORKS}:wait_at_gate", inputs, tmp_path / "out", "--num-workers", 3]
    process = start("preprocess", *command)
    try:
        gates.arrivals(2)
        yield process, command
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
        gates.close()


@pytest.mark.slow
def test_a_second_driver_is_told_who_has_the_folder(waiting, tmp_path):
    """The process id, the machine and what to do; the first one goes on.

    The second one makes another call: one that makes the same call waits for its end.
    """
    process, command = waiting
    another = [f"{WORKS}:copy", *command[1:]]
    with pytest.raises(BusyError) as caught:
        run(copy, tmp_path / "in", tmp_path / "out")
    assert f"pid {process.pid} on {os.uname().nodename}" in str(caught.value)
    code, _, err = call("preprocess", *another)
    assert code == 1
    assert f"pid {process.pid}" in err
    assert process.poll() is None
    code, said, _ = call("status", tmp_path / "out")
    assert code == 0
    assert f"running: pid {process.pid}" in said


def test_a_second_sigterm_does_not_keep_a_run_from_committing(tmp_path, monkeypatch):
    """Schedulers send it more than once; only the first one interrupts."""
    inputs, close = make_inputs(tmp_path / "in", 3), Commits.close

    def end_with_first(self, **_):
        if self.commits.waiting:
            signal.raise_signal(signal.SIGTERM)

    def close_and_be_told(self):
        signal.raise_signal(signal.SIGTERM)
        return close(self)

    monkeypatch.setattr(Processing, "_commit", end_with_first)
    monkeypatch.setattr(Commits, "close", close_and_be_told)
    code, _, err = here("preprocess", f"{WORKS}:copy", inputs, tmp_path / "out", "--num-workers", 0)
    assert code == 130
    assert "1 of 3 inputs are done and stay" in err
    assert len(published(tmp_path / "out")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_and_the_same_command_continues(waiting, tmp_path, number):
    """Exit code 130, no process left, and nothing of it lost."""
    process, command = waiting
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does it
    else:
        process.send_signal(number)
    code, _, err = finish(process)
    assert code == 130
    done = r"(; \d+ of 22 inputs are done and stay)?"
    assert re.fullmatch(f"forebay: interrupted{done}; the same command continues", err.strip())
    await_no_processes()
    kept = published(tmp_path / "out")
    code, out, err = call("preprocess", *command)
    assert (code, err) == (0, "")
    assert f"22 done ({len(kept)} by earlier runs)" in out or not kept
    assert len(published(tmp_path / "out")) == 22
    assert not staged(tmp_path / "out")
    await_no_processes()


def test_a_run_that_loses_its_workers_says_what_is_done(monkeypatch, tmp_path):
    """As its ledger records; nothing is promised that was not counted."""
    inputs, out = make_inputs(tmp_path / "in", 3), tmp_path / "out"
    forebay.preprocess(copy, inputs, out, num_workers=0, progress=False)
    for name in ("new 1", "new 2"):
        (inputs / name).write_text("x")

    def refuse(*_, **__):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(processes, "roomy_pipe", refuse)
    with pytest.raises(WorkerDiedError, match="worker processes cannot be started") as caught:
        forebay.preprocess(copy, inputs, out, num_workers=1, progress=False)
    assert "kept" not in str(caught.value)
    (note,) = caught.value.__notes__
    done = "forebay: 3 of 5 inputs are done and stay"
    assert note == done


# ---- small limits -------------------------------------------------------------------------------


@pytest.mark.slow
def test_256_open_files_are_enough_and_too_few_are_told(tmp_path):
    """A run of the default size works; one that cannot is refused before it starts."""
    inputs = make_inputs(tmp_path / "in", 600)
    limited = ("sh", "-c", 'ulimit -n 256; exec "$@"', "sh")
    command = ["preprocess", f"{WORKS}:copy", inputs, tmp_path / "out", "--quiet"]
    code, out, err = call(*command, "--num-workers", 16, prefix=limited)
    assert code == 0, err
    assert out.startswith("600 done, 0 failed")
    code, _, err = call(*command[:3], tmp_path / "2", "--num-workers", 250, prefix=limited)
    assert code == 2
    assert "num_workers=250 needs about" in err
    assert "ulimit -n 4096" in err


@pytest.mark.slow
def test_a_small_dev_shm_is_enough(tmp_path):
    """With 64 MB of /dev/shm, as in a container, more than that goes through."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare here")
    try_it = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=64m tmpfs /dev/shm"]
    if subprocess.run(try_it, capture_output=True).returncode:
        pytest.skip("/dev/shm cannot be replaced here")
    script = tmp_path / "large.py"
    script.write_text(
        textwrap.dedent(
            """
            def large(source, out):
                out.file(source.name).write_bytes(bytes(4 << 20))
                return {"text": "x" * (4 << 20)}
            """
        )
    )
    inputs = make_inputs(tmp_path / "in", 24)
    prefix = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm; exec "$@"')
    code, out, err = call(
        *("preprocess", f"{script}:large", inputs, tmp_path / "out", "--metadata", "jsonl"),
        prefix=(*prefix, "sh"),
    )
    assert code == 0, err
    assert out.startswith("24 done, 0 failed")


# ---- folders in each other ----------------------------------------------------------------------


@pytest.mark.parametrize("inside", ["", "out", "a/b"])
def test_an_output_folder_inside_the_input_folder_is_refused(tmp_path, inside):
    """Its files would be the next run's inputs; and nothing is made there."""
    inputs = make_inputs(tmp_path / "in", 2)
    with pytest.raises(OptionError, match="lies in the input folder"):
        run(copy, inputs, inputs / inside)
    assert sorted(path.name for path in inputs.rglob("*")) == ["0000.txt", "0001.txt"]


@pytest.mark.slow
def test_a_thread_beside_the_driver_does_no_harm(tmp_path):
    """Workers are not forked from a process that has other threads; locks stay free."""
    script = tmp_path / "threaded.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys, threading
            sys.path.insert(0, {str(Path(WORKS).parent)!r})
            import forebay
            from works import copy

            lock, ready, over = threading.Lock(), threading.Event(), threading.Event()

            def hold():
                with lock:
                    ready.set()
                    over.wait()

            def locked(source, out):
                from works import copy
                return copy(source, out)

            if __name__ == "__main__":
                thread = threading.Thread(target=hold)
                thread.start()
                ready.wait()
                print(forebay.preprocess(locked, sys.argv[1], sys.argv[2], num_workers=2).done)
                over.set()
            """
        )
    )
    inputs = make_inputs(tmp_path / "in", 20)
    done = subprocess.run(
        [sys.executable, script, inputs, tmp_path / "out"],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert (done.returncode, done.stdout) == (0, "20\n"), done.stderr
