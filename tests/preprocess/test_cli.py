"""The command line: what each command says, and its exit code."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import textwrap

import pytest
from driving import WORKS, await_no_processes, call, calls, finish, make_inputs, published, start
from test_kills import Gates

from forebay.observe.progress import FIRST_LINE_S, SLOWEST_LINE_S, Progress

DONE, COULD_NOT_RUN, USAGE, FAILURES = 0, 1, 2, 3


@pytest.fixture
def inputs(tmp_path):
    return make_inputs(tmp_path / "in", 6, lines=2)


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out"


def preprocess(name, inputs, output, *options, **others):
    return call(
        "preprocess", f"{WORKS}:{name}", inputs, output, "--num-workers", 2, *options, **others
    )


# ---- exit codes ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_done_is_0(inputs, output):
    """The summary is on the standard output, and nothing on the other stream."""
    code, out, err = preprocess("copy", inputs, output)
    assert (code, err) == (DONE, "")
    assert out.splitlines()[0].startswith("6 done, 0 failed in ")
    assert out.splitlines()[1:] == [
        f"outputs   {output}",
        f"metadata  {output / 'metadata.parquet'}",
    ]


@pytest.mark.slow
def test_finished_with_failures_is_3(inputs, output):
    """They are listed, with the way on."""
    code, out, _ = preprocess("fail_odd", inputs, output)
    assert code == FAILURES
    assert out.startswith("3 done, 3 failed")
    assert f"{inputs / '0003.txt'}: ValueError: number 3 is odd" in out
    assert "forebay retry" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["preprocess"], "Missing argument"),
        (["preprocess", "a", "b", "c", "--nonsense"], "No such option"),
        (["nonsense"], "No such command"),
        (["preprocess", "works.py", "in", "out"], "names no function"),
        (["preprocess", "no.py:copy", "in", "out"], "is no file"),
        (["preprocess", "no.such.module:copy", "in", "out"], "cannot be imported"),
        (["preprocess", f"{WORKS}:no", "in", "out"], "has no 'no'; it has 'note_call', 'copy'"),
        (["preprocess", f"{WORKS}:copy", "in", "out", "--limit", "0"], "--limit"),
        (["preprocess", f"{WORKS}:copy", "in", "out", "--max-failures", "x"], "'x' is no number"),
        (["preprocess", f"{WORKS}:note_call", "in", "out"], "cannot be called as"),
    ],
)
def test_wrong_usage_is_2(arguments, words):
    """With what is wrong, and no traceback."""
    code, out, err = call(*arguments)
    assert (code, out) == (USAGE, "")
    assert words in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["status", "failures", "verify", "retry"])
def test_a_folder_without_a_run_is_1(tmp_path, command):
    """And nothing is made there."""
    code, _, err = call(command, tmp_path)
    assert code == COULD_NOT_RUN
    assert "not an output folder of forebay's" in err
    assert list(tmp_path.iterdir()) == []


def test_inputs_that_are_missing_are_1(tmp_path, output):
    """They may be there tomorrow: no wrong usage."""
    code, _, err = preprocess("copy", tmp_path / "nowhere", output)
    assert code == COULD_NOT_RUN
    assert "no such file or folder" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_changed_function_is_1_with_the_difference(inputs, output):
    """Until --restart or --version says what is meant."""
    assert preprocess("copy", inputs, output)[0] == DONE
    code, _, err = preprocess("nothing", inputs, output)
    assert code == COULD_NOT_RUN
    assert "-    note_call(source)" in err
    assert "--restart" in err
    assert preprocess("nothing", inputs, output, "--restart")[0] == DONE
    assert published(output) == {}


def test_a_script_with_an_error_is_told_with_its_reason(tmp_path, inputs, output):
    """The function's file is imported before anything starts."""
    script = tmp_path / "broken.py"
    script.write_text("import no_such_module_anywhere\n")
    code, _, err = call("preprocess", f"{script}:work", inputs, output)
    assert code == USAGE
    assert "ModuleNotFoundError: No module named 'no_such_module_anywhere'" in err


# ---- naming the function ------------------------------------------------------------------------


def test_a_function_is_named_by_file_or_by_module(tmp_path, inputs):
    """A file with neighbours, and a module below the current folder; with --help for both."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "neighbour.py").write_text("FACTOR = 3\n")
    body = textwrap.dedent(
        """
        from {0}neighbour import FACTOR

        class Works:
            @staticmethod
            def triple(source, out):
                return {{"n": FACTOR * int(source.stem)}}
        """
    )
    (tmp_path / "package" / "script.py").write_text(body.format(""))
    (tmp_path / "package" / "module.py").write_text(body.format("package."))
    for number, reference in enumerate(["package/script.py", "package.module"]):
        output = tmp_path / f"out{number}"
        command = ["preprocess", f"{reference}:Works.triple", inputs, output, "--metadata", "jsonl"]
        process = start(*command, prefix=("env", "-C", tmp_path))
        code, _, err = finish(process)
        assert code == DONE, err
        rows = [json.loads(line) for line in (output / "metadata.jsonl").read_text().splitlines()]
        assert [row["n"] for row in rows] == [0, 3, 6, 9, 12, 15]


@pytest.mark.slow
def test_a_limit_works_here_and_raises_the_functions_own_error(tmp_path, inputs, output):
    """The real traceback, down to the user's line."""
    code, out, _ = call("preprocess", f"{WORKS}:fail_odd", inputs, output, "--limit", 1)
    assert (code, out.split(" in ")[0]) == (DONE, "1 done, 0 failed")
    code, _, err = call("preprocess", f"{WORKS}:fail_odd", inputs, output, "--limit", 2)
    assert code == COULD_NOT_RUN
    assert "OSError: number 1 is odd" in err or "KeyError" in err
    assert "works.py" in err


# ---- looking on ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_status_of_a_finished_and_of_an_interrupted_run(inputs, output):
    """Counts, and whether it goes on."""
    preprocess("fail_odd", inputs, output)
    code, out, _ = call("status", output)
    assert (code, out) == (DONE, "3 of 6 done, 3 failed, 0 to do\nfinished\n")
    (inputs / "0001.txt").touch()
    code, out, _ = call("status", output)
    assert out.startswith("3 of 6 done")


@pytest.mark.slow
def test_status_and_failures_look_on_while_it_runs(tmp_path):
    """From a second shell, without disturbing the first."""
    gates = Gates(tmp_path)
    inputs = make_inputs(tmp_path / "in", 8)
    (inputs / "0000-gate.txt").write_text("waits\n")
    process = start(
        "preprocess", f"{WORKS}:wait_at_gate", inputs, tmp_path / "out", "--num-workers", 2
    )
    try:
        gates.arrivals(1)
        code, out, _ = call("status", tmp_path / "out")
        assert code == DONE
        assert " of 9 done, 0 failed" in out
        assert f"running: pid {process.pid}" in out
        assert call("failures", tmp_path / "out") == (DONE, "", "0 failed\n")
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGTERM)
        code, _, _ = finish(process)
        gates.close()
    assert code == 130
    await_no_processes()
    code, out, _ = call("status", tmp_path / "out")
    assert "not running; the same call continues it" in out


@pytest.mark.slow
def test_failures_come_one_a_line_with_tracebacks_on_request(inputs, output):
    """Fit for grep; the count goes to the other stream."""
    preprocess("fail_odd", inputs, output)
    code, out, err = call("failures", output)
    assert (code, err) == (DONE, "3 failed\n")
    assert out.splitlines()[1] == f"{inputs / '0003.txt'}: ValueError: number 3 is odd"
    _, out, _ = call("failures", output, "--traceback")
    assert "    ValueError: number 3 is odd" in out
    assert "in fail_odd" in out


# ---- retry --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_retry_redoes_the_failures_alone(tmp_path, inputs, output):
    """By the function of the earlier run, found by its name; new inputs are left for later."""
    assert preprocess("fail_once", inputs, output, "--retries", 0)[0] == FAILURES
    (inputs / "more.txt").write_text("new\n")
    code, out, err = call("retry", output, "--num-workers", 1)
    assert (code, err) == (DONE, "")
    assert out.startswith("6 done, 0 failed")
    assert len(calls(tmp_path)) == 12


@pytest.mark.slow
def test_retry_of_what_fails_again_is_3(inputs, output):
    """As for a run."""
    preprocess("fail_odd", inputs, output)
    code, out, _ = call("retry", output)
    assert code == FAILURES
    assert out.startswith("3 done (3 of them earlier), 3 failed")


# ---- verify -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_verify_of_a_sound_folder_is_0(inputs, output):
    """Every output is looked at."""
    preprocess("split", inputs, output)
    assert call("verify", output) == (
        DONE,
        "12 outputs checked: 0 missing, 0 altered, 0 orphans\n",
        "",
    )


@pytest.mark.slow
def test_verify_names_the_damage_and_the_next_run_mends_it(tmp_path, inputs, output):
    """Missing, altered and orphaned; only the damaged inputs are redone, to the same bytes."""
    preprocess("copy", inputs, output)
    before, table = published(output), (output / "metadata.parquet").read_bytes()
    (output / "0001.txt").unlink()
    (output / "0003.txt").write_text("other")
    (output / "stranger.txt").write_text("whose?")
    code, out, _ = call("verify", output)
    assert code == FAILURES
    assert out.splitlines() == [
        "missing  0001.txt",
        "altered  0003.txt: 24 bytes recorded, 5 found",
        "orphan   stranger.txt: no input is known to have made it",
        "6 outputs checked: 1 missing, 1 altered, 1 orphan",
        "2 inputs will be redone by the next run",
    ]
    code, out, err = preprocess("copy", inputs, output)
    assert code == DONE, err
    assert out.startswith("6 done (4 of them earlier)")
    assert sorted(calls(tmp_path)[6:]) == ["0001.txt", "0003.txt"]
    (output / "stranger.txt").unlink()
    assert published(output) == before
    assert (output / "metadata.parquet").read_bytes() == table
    assert call("verify", output)[0] == DONE


@pytest.mark.slow
def test_verify_twice_is_as_good_as_once(inputs, output):
    """The second look finds the altered output gone with its input's record."""
    preprocess("copy", inputs, output)
    (output / "0003.txt").write_text("other")
    assert call("verify", output)[0] == FAILURES
    assert call("verify", output)[0] == DONE
    assert preprocess("copy", inputs, output)[1].startswith("6 done (5 of them earlier)")


# ---- progress -----------------------------------------------------------------------------------


def test_progress_without_a_terminal_is_a_line_now_and_then(inputs, output, monkeypatch):
    """No bar in a log file: whole lines, and --quiet for none."""
    now = [0.0]
    lines = []
    monkeypatch.setattr("builtins.print", lambda line, **_: lines.append((now[0], line)))
    progress = Progress(1000, 100, clock=lambda: now[0])
    for second in range(1, 301):
        now[0] = float(second)
        progress.update(2, 1 if second % 100 == 0 else 0)
    progress.close()
    times = [at for at, _ in lines]
    assert times[0] == FIRST_LINE_S
    assert len(times) < 10
    assert max(b - a for a, b in itertools.pairwise(times)) <= SLOWEST_LINE_S
    assert lines[0][1] == ("forebay: 120 of 1,000 done, 0 failed, 2.0 inputs/s, 7 min 20 s left")


@pytest.mark.slow
def test_progress_on_a_terminal_is_a_bar(tmp_path):
    """Drawn on stderr, and left behind clean."""
    inputs = make_inputs(tmp_path / "in", 5)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "forebay", "preprocess", f"{WORKS}:copy", inputs, tmp_path / "out"],
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    drawn = b""
    try:
        while data := os.read(ours, 4096):
            drawn += data
    except OSError:  # how Linux says that the other end is closed
        pass
    out, _ = process.communicate()
    os.close(ours)
    assert out.startswith(b"5 done")
    assert b"5/5" in drawn
    assert drawn.endswith(b"\r\n")
