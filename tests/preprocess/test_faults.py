"""Every way in which work can go wrong is laid to the very input that caused it."""

from __future__ import annotations

import errno
import json
import os
import re
import sqlite3
import textwrap
from functools import partial

import pytest
from driving import call, calls, here, make_inputs, published, staged
from works import copy, fail_odd, note_call

import forebay
from forebay.errors import MAX_TEXT, FailuresError, SampleTimeoutError, WorkerDiedError
from forebay.inputs.listing import local_inputs
from forebay.runs import returned as work
from forebay.runs.processing import FailureBudget
from kit.control_groups import memory_group
from kit.faults import meet_fault

# On Python 3.12 and newer, a fork beside threads is warned of.
pytestmark = [
    pytest.mark.usefixtures("forked_workers"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


# Time limit of runs in which an input hangs; no other may reach it, on a loaded machine either.
HANG_S = 3.0
# fault: kind, error, and what the message says
BLAME = {
    "raise": ("exception", "ValueError", "told to raise"),
    "sys.exit": ("exception", "SystemExit", "3"),
    "os._exit": ("crash", "WorkerDiedError", "exited with code 3"),
    "SIGSEGV": ("crash", "WorkerDiedError", "SIGSEGV"),
    "SIGKILL": ("crash", "WorkerDiedError", "SIGKILL"),
    "hang": ("timeout", "SampleTimeoutError", "timeout=3 s"),
    "hang, deaf": ("timeout", "SampleTimeoutError", "timeout=3 s"),
}


def run(work, inputs, output, **options):
    return forebay.preprocess(work, inputs, output, progress=False, **{"num_workers": 2, **options})


@pytest.fixture
def inputs(tmp_path):
    return make_inputs(tmp_path / "in", 12)


def fault_at(inputs, number, fault):
    (inputs / f"{number:04d}.txt").write_text(fault)


def fail_all(source, out):
    raise ValueError(f"no to {source.name}")


class OwnError(Exception):
    """An error of the user's own, with more than one argument."""

    def __init__(self, code, words):
        super().__init__(code, words)
        self.code = code


def raise_own(source, out):
    if source.name == "0003.txt":
        raise OwnError(7, "mine")


# ---- blame --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("fault", BLAME)
def test_a_fault_is_laid_to_its_input_and_all_others_are_done(inputs, tmp_path, fault):
    """Kind, error, message and attempts are recorded; others succeed, no partial file is left."""
    fault_at(inputs, 5, fault)
    timeout = HANG_S if "hang" in fault else None
    report = run(meet_fault, inputs, tmp_path / "out", timeout=timeout, retries=1)
    (failure,) = report.failures
    kind, error, words = BLAME[fault]
    assert (failure.source, failure.kind, failure.error) == (str(inputs / "0005.txt"), kind, error)
    assert words in failure.message
    assert failure.attempts == 2
    assert (report.done, report.failed) == (11, 1)
    found = published(tmp_path / "out")
    assert sorted(found) == [f"{number:04d}.txt" for number in range(12) if number != 5]
    assert all(body.startswith(b"whole line") for body in found.values())
    assert report.metadata.num_rows == 11
    assert not staged(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hang", "SIGSEGV"])
def test_a_hang_and_a_crash_come_with_the_python_stack(inputs, tmp_path, fault):
    """The frames are the user's, down to where it stands."""
    fault_at(inputs, 5, fault)
    (failure,) = run(meet_fault, inputs, tmp_path / "out", timeout=HANG_S, retries=0).failures
    assert "in meet_fault" in failure.traceback
    assert ("in hang" if fault == "hang" else "in segfault") in failure.traceback
    assert "worker.py" not in failure.traceback


@pytest.mark.slow
def test_many_inputs_that_kill_their_worker_do_not_sink_the_run(tmp_path):
    """Thirty of sixty die, also one after another: thirty are blamed and thirty are done."""
    inputs = make_inputs(tmp_path / "in", 60)
    for number in range(20, 50):
        fault_at(inputs, number, "os._exit")
    report = run(meet_fault, inputs, tmp_path / "out", retries=1)
    assert (report.done, report.failed) == (30, 30)
    assert {failure.kind for failure in report.failures} == {"crash"}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_traceback_holds_the_users_frames_alone(tmp_path, workers):
    """None of the loop that called them, in this process or in a worker."""
    inputs = make_inputs(tmp_path / "in", 1)
    (failure,) = run(fail_all, inputs, tmp_path / "out", num_workers=workers).failures
    assert "in fail_all" in failure.traceback
    assert "pools" not in failure.traceback


# ---- endless memory -----------------------------------------------------------------------------


@pytest.mark.slow
def test_endless_memory_is_laid_to_its_input(tmp_path):
    """The kernel kills a worker, not the driver; the input is named, all others are done."""
    inputs = make_inputs(tmp_path / "in", 12)
    fault_at(inputs, 5, "memory")
    script = tmp_path / "grow.py"
    script.write_text(
        textwrap.dedent(
            """
            def grow(source, out):
                held = []
                while source.read_text() == "memory":
                    held.append(bytearray(b"x") * (16 << 20))
                return {"ok": True}
            """
        )
    )
    output = tmp_path / "out"
    with memory_group(400 << 20) as members:
        command = ["preprocess", f"{script}:grow", inputs, output, "--num-workers", 2, "--quiet"]
        # The shell joins the group, then becomes the driver.
        joining = ("/bin/sh", "-c", f'echo $$ > {members}; exec "$@"', "sh")
        code, out, err = call(*command, prefix=joining)
    assert code == 3, err
    assert out.startswith("11 done, 1 failed")
    assert (
        f"{inputs / '0005.txt'}: WorkerDiedError: the worker was killed by signal: Killed (SIGKILL"
        in out
    )
    assert "ran out of memory" in out


# ---- odd exceptions -----------------------------------------------------------------------------


class MuteError(Exception):
    """An exception that cannot be shown."""

    def __str__(self):
        raise LookupError("no message")


def raise_mute(source, out):
    raise MuteError


def raise_much(source, out):
    raise ValueError("begin" + "x" * 10**7 + "end")


WAYS = [(2, "process"), (0, "process"), (2, "thread")]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "backend"), WAYS)
def test_an_exception_without_a_message_fails_its_input(inputs, tmp_path, workers, backend):
    """One whose __str__ raises is named by its type."""
    paths = sorted(inputs.iterdir())[:2]
    ways = {"num_workers": workers, "backend": backend}
    report = run(raise_mute, paths, tmp_path / "out", **ways)
    assert [(each.error, each.message) for each in report.failures] == [
        ("MuteError", "<its __str__ raised LookupError>")
    ] * 2
    assert "raise MuteError" in report.failures[0].traceback
    assert "MuteError: <its __str__ raised LookupError>" in repr(report)
    with pytest.raises((MuteError, FailuresError)):
        run(raise_mute, paths, tmp_path / "out2", max_failures=0, **ways)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "backend"), WAYS)
def test_of_a_long_message_both_ends_are_kept(inputs, tmp_path, workers, backend):
    """Megabytes of it would travel, and be kept, for every input."""
    paths = sorted(inputs.iterdir())[:2]
    report = run(raise_much, paths, tmp_path / "out", num_workers=workers, backend=backend)
    for failure in report.failures:
        assert failure.message.startswith("begin") and failure.message.endswith("end")
        assert "characters omitted" in failure.message
        assert len(failure.message) + len(failure.traceback) < 3 * MAX_TEXT
    assert (tmp_path / "out" / ".forebay" / "ledger.sqlite").stat().st_size < 10**6


@pytest.mark.slow
def test_an_exception_too_large_to_be_sent_is_described(inputs, tmp_path):
    """The run ends with its type and message all the same."""
    with pytest.raises(FailuresError, match=r"0000\.txt failed: ValueError: begin"):
        run(raise_much, inputs, tmp_path / "out", num_workers=1, max_failures=0)


# ---- metadata that no ledger holds --------------------------------------------------------------


def say_much(source, out):
    out.file(source.name).write_text("x")
    return {"text": "é" * (1000 if source.name == "0003.txt" else 10)}


@pytest.mark.parametrize(("workers", "backend"), [(0, "process"), (2, "thread")])
def test_metadata_that_no_ledger_holds_costs_its_input(
    inputs, tmp_path, workers, backend, monkeypatch
):
    """The size is named, nothing of that input is published, and it is tried once."""
    monkeypatch.setattr(work, "MAX_METADATA_BYTES", 1500)
    report = run(say_much, inputs, tmp_path / "out", num_workers=workers, backend=backend)
    assert (report.done, report.failed) == (11, 1)
    (failure,) = report.failures
    assert (failure.kind, failure.error, failure.attempts) == ("output", "OutputError", 1)
    assert "2,038 bytes as JSON; at most 1,500 can be recorded" in failure.message
    assert "0003.txt" not in published(tmp_path / "out")


def test_the_ledger_holds_what_is_let_through():
    """A record has other columns too; SQLite's limit is for all of them together."""
    db = sqlite3.connect(":memory:")
    limit = db.getlimit(sqlite3.SQLITE_LIMIT_LENGTH)
    db.close()
    assert limit >= 2 * work.MAX_METADATA_BYTES


# ---- retries, raising, budgets ------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("retries", [0, 1, 3])
def test_an_input_gets_as_many_more_tries_as_asked(inputs, tmp_path, retries):
    """Retries are further tries, counted per input."""
    report = run(fail_odd, inputs, tmp_path / "out", retries=retries)
    assert {failure.attempts for failure in report.failures} == {retries + 1}
    assert len(calls(tmp_path)) == 6 + 6 * (retries + 1)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "backend"), [(2, "process"), (0, "process"), (2, "thread")])
def test_max_failures_0_raises_the_users_own_exception(inputs, tmp_path, workers, backend):
    """Type and arguments are whole, a note names the input, and completed work is kept."""
    options = {"num_workers": workers, "backend": backend, "retries": 0}
    with pytest.raises(OwnError) as caught:
        run(raise_own, inputs, tmp_path / "out", max_failures=0, **options)
    assert (caught.value.code, caught.value.args) == (7, (7, "mine"))
    assert any("0003.txt, number 4" in note for note in caught.value.__notes__)
    kept = re.compile(r"forebay: \d+ of 12 inputs are done and stay").fullmatch
    assert any(map(kept, caught.value.__notes__))
    report = run(raise_own, inputs, tmp_path / "out", **options)
    assert (report.done, report.failed) == (11, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "error"), [("hang", SampleTimeoutError), ("os._exit", WorkerDiedError)]
)
def test_max_failures_0_raises_for_a_hang_and_a_death(inputs, tmp_path, fault, error):
    """There is no exception of the user's then; forebay's says what happened."""
    fault_at(inputs, 5, fault)
    with pytest.raises(error, match=r"0005\.txt"):
        run(meet_fault, inputs, tmp_path / "out", timeout=HANG_S, retries=0, max_failures=0)


def test_a_trial_raises_at_once(inputs, tmp_path):
    """With `limit`, the function's own exception comes out where it was called."""
    with pytest.raises(ValueError, match=r"no to 0000\.txt"):
        run(fail_all, inputs, tmp_path / "out", num_workers=None, limit=3)


@pytest.mark.parametrize("allowed", [2, 0.17])
def test_more_failures_than_allowed_stop_the_run(inputs, tmp_path, allowed):
    """A count or a fraction of twelve: the third failure is one too many, the rest is kept."""
    with pytest.raises(FailuresError, match=r"3 inputs failed, more than max_failures allows \(2"):
        run(fail_odd, inputs, tmp_path / "out", max_failures=allowed, retries=0, num_workers=0)
    assert len(calls(tmp_path)) < 12
    report = run(fail_odd, inputs, tmp_path / "out", max_failures=6, num_workers=0)
    assert (report.done, report.failed) == (6, 6)


def test_inputs_refused_for_their_names_count_as_failures(inputs, tmp_path):
    """Two that claim one name are two failures for `max_failures`, also if it is 0."""
    same = partial(write_as, "same")
    with pytest.raises(FailuresError, match=r"max_failures(.|\n)*last .*\.txt: OutputError"):
        run(same, inputs, tmp_path / "out", max_failures=1, num_workers=0)
    with pytest.raises(forebay.errors.OutputError, match="claimed by two inputs"):
        run(same, inputs, tmp_path / "out2", max_failures=0, num_workers=0)


def write_as(name, source, out):
    out.file(name).write_text("x")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_twenty_inputs_that_fail_alike_stop_the_run(tmp_path, workers):
    """A bug in the function is told after twenty inputs, not after a million."""
    inputs = make_inputs(tmp_path / "in", 400)
    with pytest.raises(FailuresError, match="first 20 inputs all failed alike, with ValueError"):
        run(fail_all, inputs, tmp_path / "out", num_workers=workers)
    with pytest.raises(FailuresError) as caught:
        run(fail_all, inputs, tmp_path / "out", num_workers=workers)
    assert "in fail_all" in str(caught.value)


def test_who_says_how_many_may_fail_is_not_stopped_by_the_first_twenty(tmp_path):
    """The limit counts, as a number or as a share; without one the message names it."""
    inputs = make_inputs(tmp_path / "in", 50)
    options = {"retries": 0, "num_workers": 0}
    for name, allowed in (("count", 30), ("share", 0.6)):
        report = run(fail_first_25, inputs, tmp_path / name, max_failures=allowed, **options)
        assert (report.done, report.failed) == (25, 25)
    with pytest.raises(FailuresError, match=r"first 20 inputs all failed alike.*\n.*max_failures="):
        run(fail_first_25, inputs, tmp_path / "out", **options)


def fail_first_25(source, out):
    if source.name < "0025.txt":
        raise ValueError("an annotation")


def test_a_job_that_is_killed_again_and_again_advances(tmp_path):
    """Each run begins with inputs that no run has tried."""
    inputs, done = make_inputs(tmp_path / "in", 9), []
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            run(stop_at_fourth, inputs, tmp_path / "out", num_workers=0, retries=0)
        done.append(len([*(tmp_path / "out").glob("*.txt")]))
        (tmp_path / "calls").unlink()
    assert done == [1, 4, 7]


def stop_at_fourth(source, out):
    note_call(source)
    if len(source.parent.with_name("calls").read_text().splitlines()) > 3:
        raise KeyboardInterrupt
    if source.name < "0002.txt":
        raise ValueError("bad")
    out.file(source.name).write_text("x")


@pytest.mark.slow
def test_one_success_among_the_first_lets_the_run_go_on(tmp_path):
    """Then it is the inputs, and they are listed."""
    inputs = make_inputs(tmp_path / "in", 60)
    report = run(fail_unless_third, inputs, tmp_path / "out", retries=0)
    assert (report.done, report.failed) == (1, 59)


@pytest.fixture
def two_folders(tmp_path):
    """Inputs of two folders: 100 files of the same names in each, and one more in the first."""
    make_inputs(tmp_path / "in" / "a", 101)
    make_inputs(tmp_path / "in" / "b", 100)
    return tmp_path / "in"


def test_inputs_that_take_each_others_names_stop_the_run(two_folders, tmp_path):
    """A folder that is missing in the names is told after twenty; a repeated call goes on."""
    options = {"num_workers": 0}
    with pytest.raises(FailuresError) as caught:
        run(name_alone, two_folders, tmp_path / "out", **options)
    assert str(caught.value).startswith(
        "stopped early: the outputs of 20 inputs in a row were refused\n"
        "  If more of them may fail, say how many: max_failures=, or --max-failures.\n"
    )
    assert "is claimed by two inputs, this one and" in str(caught.value)
    report = run(name_alone, two_folders, tmp_path / "out", max_failures=200, **options)
    assert (report.done, report.failed) == (1, 200)


def name_alone(source, out):
    out.file(source.name).write_text("x")


def test_a_report_groups_more_than_ten_failures(two_folders, tmp_path):
    """By error, with an example; the command shows three."""
    output = tmp_path / "out"
    shown = repr(run(name_alone, two_folders, output, max_failures=200, num_workers=0))
    found = shown.splitlines()[3:]
    assert found[:2] == [
        "failures by error, with an example of each",
        "  200  OutputError: output '…' is claimed by two inputs, this one and …",
    ]
    names = [f"{two_folders}/{name}/0000.txt" for name in ("a", "b")]
    claimed = "{}: output '0000.txt' is claimed by two inputs, this one and {}"
    assert found[2] == f"       {claimed.format(*names)}"
    code, out, err = here("failures", output, "--summary")
    assert (code, err) == (0, "200 inputs failed\n")
    lines = out.splitlines()
    assert (len(lines), lines[0]) == (4, found[1].strip())
    assert lines[1] == f"     {claimed.format(*names)}"
    code, out, _ = here("failures", output, "--summary", "--json")
    assert json.loads(out)["count"] == 200


def test_a_cause_that_appears_later_stops_the_run(tmp_path):
    """A hundred in a row; what an earlier run left failed is no news, so that goes on."""
    inputs = make_inputs(tmp_path / "in", 300)
    options = {"retries": 0, "num_workers": 0}
    with pytest.raises(
        FailuresError, match="100 inputs in a row all failed alike, with ValueError"
    ):
        run(fail_after_sixty, inputs, tmp_path / "out", **options)
    with pytest.raises(FailuresError, match="in a row"):
        run(fail_after_sixty, inputs, tmp_path / "out", **options)
    report = run(fail_after_sixty, inputs, tmp_path / "out", **options)
    assert (report.done, report.failed) == (60, 240)


def fail_after_sixty(source, out):
    if source.name >= "0060.txt":
        raise ValueError("no more")


def test_failures_between_successes_stop_nothing():
    """However many: only a row of them is a sign that the others fail, too."""
    budget = FailureBudget(None, 1000)
    budget.succeeded()
    for _ in range(10):
        assert not any(budget.failed("ValueError") for _ in range(99))
        budget.succeeded()
        assert not any(budget.refused([one], [one]) for one in range(18))
        assert budget.refused([1, 2], [1]) is None
    assert not any(budget.failed(f"Error{one}") for one in range(300))
    assert FailureBudget(20, 1000).refused(range(20), range(20)) is None
    assert FailureBudget(None, 1000).refused(range(20), range(20)) is not None
    assert FailureBudget(None, 1000, known=[7]).refused(range(20), range(20)) is None


def fail_unless_third(source, out):
    if source.name != "0003.txt":
        raise ValueError("not the third")


@pytest.mark.slow
def test_twenty_inputs_that_kill_their_worker_stop_the_run_too(tmp_path):
    """A crash is a failure like any other: the bug is told, with its kind."""
    inputs = make_inputs(tmp_path / "in", 60)
    for number in range(60):
        fault_at(inputs, number, "os._exit")
    with pytest.raises(FailuresError, match="first 20 inputs all failed alike, with WorkerDied"):
        run(meet_fault, inputs, tmp_path / "out", retries=0)


def test_a_folder_that_cannot_be_looked_into_is_left_to_the_listing(monkeypatch, tmp_path):
    """With too many open files, say: the listing's error is one of forebay's own."""

    def failing(path):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    monkeypatch.setattr(os, "scandir", failing)
    assert local_inputs(tmp_path) == (str(tmp_path),)
    with pytest.raises(
        forebay.InputError, match=r"cannot be listed: .*Too many open files(.|\n)*remove the cause"
    ):
        run(copy, tmp_path, tmp_path / "out", num_workers=0)
