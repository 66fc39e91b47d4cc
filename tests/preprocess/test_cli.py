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
from pathlib import Path

import pytest
import works
from click.testing import CliRunner
from driving import (
    WORKS,
    await_no_processes,
    call,
    calls,
    finish,
    here,
    make_inputs,
    published,
    start,
)
from test_kills import Gates

import forebay
from forebay.cli import cli
from forebay.errors import LedgerError, OptionError
from forebay.failures import Failure
from forebay.ledger import database
from forebay.ledger.ledger import Ledger
from forebay.ledger.records import FailedInput, Input
from forebay.observe.progress import FIRST_LINE_S, SLOWEST_LINE_S, Progress
from forebay.options import Ray
from forebay.runs.calls import SETTINGS, recorded_settings, settings_shown, settings_to_json

# On Python 3.12 and newer, a fork beside threads is warned of.
pytestmark = [
    pytest.mark.usefixtures("forked_workers"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


DONE, COULD_NOT_RUN, USAGE, FAILURES, INTERRUPTED = 0, 1, 2, 3, 130


@pytest.fixture
def inputs(tmp_path):
    return make_inputs(tmp_path / "in", 6, lines=2)


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out"


def preprocess(name, inputs, output, *options, run=here):
    return run("preprocess", f"{WORKS}:{name}", inputs, output, "--num-workers", 2, *options)


# ---- exit codes ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_done_is_0(inputs, output):
    """The summary is on the standard output, and nothing on the other stream."""
    code, out, err = preprocess("copy", inputs, output, run=call)
    assert (code, err) == (DONE, "")
    assert out.splitlines()[0].startswith("6 done, 0 failed in ")
    assert out.splitlines()[1:] == [
        f"outputs   {output}",
        f"metadata  {output / 'metadata.parquet'}",
    ]


@pytest.mark.slow
def test_finished_with_failures_is_3(inputs, output):
    """They are listed, with the way on."""
    code, out, _ = preprocess("fail_odd", inputs, output, run=call)
    assert code == FAILURES
    assert out.startswith("3 done, 3 failed")
    assert f"{inputs / '0003.txt'}: ValueError: number 3 is odd" in out
    assert f"forebay failures {output} --traceback\n" in out
    assert "forebay retry" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["preprocess"], "Missing argument"),
        (["preprocess", "a", "b", "c", "--nonsense"], "No such option"),
        (["nonsense"], "No such command"),
        (["preprocess", "nothing.py", "in", "out"], "names no function"),
        (
            ["preprocess", str(WORKS), "in", "out"],
            "is a file; the name of a function in it is missing",
        ),
        (["preprocess", str(WORKS.parent), "in", "out"], "is a folder; a file or module"),
        (["preprocess", f"{WORKS}:copy", "out"], "a function, which needs INPUTS and OUTPUT"),
        (["preprocess", f"{WORKS}:words", "in", "out"], "a Dataset, which has its own inputs"),
        (
            ["preprocess", f"{WORKS}:Words", "out"],
            "Words is a Dataset class, not a Dataset instance",
        ),
        (["preprocess", "no.py:copy", "in", "out"], "is not a file"),
        (["preprocess", "no.such.module:copy", "in", "out"], "cannot be imported"),
        (["preprocess", f"{WORKS}:no", "in", "out"], "has no 'no'; it has 'note_call', 'copy'"),
        (["preprocess", f"{WORKS}:copy", "in", "out", "--limit", "0"], "--limit"),
        (
            ["preprocess", f"{WORKS}:copy", "in", "out", "--max-failures", "x"],
            "'x' is not a number",
        ),
        (["preprocess", f"{WORKS}:copy_to", "in", "out"], "cannot be called as"),
        (["preprocess", f"{WORKS}:copy", "in", "out", "--timeout", "inf"], "timeout=inf is not"),
        (["preprocess", f"{WORKS}:copy", "in", "out", "--timeout", "nan"], "timeout=nan is not"),
        (["preprocess", f"{WORKS}:copy", "in", "out", "--max-failures", "nan"], "max_failures=nan"),
        (["preprocess", f"{WORKS}:copy", "in", "out", "--max-failures", "inf"], "max_failures=inf"),
        (["preprocess", f"{WORKS}:copy", "in", "out", "--max-failures", "1.5"], "max_failures=1.5"),
    ],
)
def test_wrong_usage_is_2(arguments, words):
    """With what is wrong, and no traceback."""
    code, out, err = here(*arguments)
    assert (code, out) == (USAGE, "")
    assert words in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["status", "failures", "verify", "retry"])
def test_a_folder_without_a_run_is_1(tmp_path, command):
    """And nothing is made there."""
    code, _, err = here(command, tmp_path)
    assert code == COULD_NOT_RUN
    assert "not an output folder of forebay's" in err
    code, _, err = here(command, tmp_path / "typo")
    assert code == COULD_NOT_RUN
    assert f"there is no {tmp_path / 'typo'}\n" in err
    assert list(tmp_path.iterdir()) == []


def test_inputs_that_are_missing_are_1(tmp_path, output):
    """They may be there tomorrow: no wrong usage."""
    code, _, err = preprocess("copy", tmp_path / "nowhere", output)
    assert code == COULD_NOT_RUN
    assert "no such file or folder" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_changed_function_is_1_with_its_name(inputs, output):
    """Until --redo or --accept-changes says what is meant."""
    assert preprocess("copy", inputs, output)[0] == DONE
    code, _, err = preprocess("nothing", inputs, output)
    assert code == COULD_NOT_RUN
    assert "  changed: works.py:nothing, works.py:copy, " in err
    assert "--redo" in err
    assert preprocess("nothing", inputs, output, "--accept-changes")[0] == DONE
    assert len(published(output)) == 6
    assert preprocess("nothing", inputs, output, "--redo", "*")[0] == DONE
    assert published(output) == {}


def test_a_script_with_an_error_is_told_with_its_reason(tmp_path, inputs, output):
    """The function's file is imported before anything starts."""
    script = tmp_path / "broken.py"
    script.write_text("import no_such_module_anywhere\n")
    code, _, err = call("preprocess", f"{script}:work", inputs, output)
    assert code == USAGE
    assert "ModuleNotFoundError: No module named 'no_such_module_anywhere'" in err


def test_the_version_is_that_of_the_package():
    """It stands in one place."""
    assert call("--version") == (DONE, f"forebay, version {forebay.__version__}\n", "")


# ---- naming the function ------------------------------------------------------------------------


@pytest.mark.slow
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


def test_a_dataset_is_named_without_inputs(output):
    """It has its own: 0 to its length."""
    code, out, err = call("preprocess", f"{WORKS}:words", output, "--metadata", "jsonl")
    assert (code, err) == (DONE, "")
    assert out.startswith("3 done, 0 failed")
    rows = [json.loads(line) for line in (output / "metadata.jsonl").read_text().splitlines()]
    assert [row["word"] for row in rows] == ["one", "two", "three"]


@pytest.mark.slow
def test_a_file_beside_a_function_does_not_shadow_the_standard_library(tmp_path, inputs, output):
    """A `colorsys.py` in the working folder, or beside the script, is not Python's."""
    (tmp_path / "colorsys.py").write_text("raise SystemExit('shadowed')\n")
    script = "import colorsys\ndef work(source, out):\n    return {'hue': colorsys.ONE_THIRD}\n"
    (tmp_path / "script.py").write_text(script)
    main = ("-P", "-c", "from forebay.cli import main; main()")
    for number, reference in enumerate(["script.py:work", "script:work"]):
        command = ["preprocess", reference, inputs, f"{output}{number}", "--num-workers", 1]
        code, _, err = finish(start(*command, prefix=("env", "-C", tmp_path), program=main))
        assert code == DONE, err


def test_a_script_named_like_a_module_of_python_is_refused(tmp_path, inputs, output):
    """Whatever else imports that module would get the script."""
    (tmp_path / "queue.py").write_text("def work(source, out): ...\n")
    code, _, err = call("preprocess", f"{tmp_path / 'queue.py'}:work", inputs, output)
    assert code == USAGE
    assert "has the same name as a module of Python's standard library, 'queue'" in err


@pytest.mark.slow
def test_the_shell_completes_paths(tmp_path):
    """Functions by their file, inputs and outputs; as the tutorial sets it up."""
    main = ("-c", "import sys; sys.argv[0] = 'forebay'; from forebay.cli import main; main()")
    for words in ("forebay preprocess ex", "forebay preprocess a.py:f in", "forebay status pa"):
        environment = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        environment["_FOREBAY_COMPLETE"] = "bash_complete"
        code, out, err = finish(start(program=main, **environment))
        assert (code, err, out.split(",")[0]) == (0, "", "file"), words


# ---- looking on ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_status_of_a_finished_and_of_an_interrupted_run(inputs, output):
    """Counts, and whether it goes on."""
    preprocess("fail_odd", inputs, output)
    code, out, _ = here("status", output)
    assert (code, out) == (DONE, "3 of 6 inputs done, 3 failed, 0 to do\nfinished\n")
    (inputs / "0001.txt").touch()
    code, out, _ = here("status", output)
    assert out.startswith("3 of 6 inputs done")


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
        assert " of 9 inputs done, 0 failed" in out
        assert f"running: pid {process.pid}" in out
        assert call("failures", tmp_path / "out") == (DONE, "", "0 inputs failed\n")
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
    code, out, err = here("failures", output)
    assert (code, err) == (DONE, "3 inputs failed\n")
    assert out.splitlines()[1] == f"{inputs / '0003.txt'}: ValueError: number 3 is odd"
    _, out, _ = here("failures", output, "--traceback")
    assert "    ValueError: number 3 is odd" in out
    assert "in fail_odd" in out


@pytest.mark.slow
def test_failures_as_json_are_one_object_a_line(inputs, output):
    """For programs: what `Failure` has."""
    preprocess("fail_odd", inputs, output)
    code, out, err = here("failures", output, "--json")
    assert (code, err) == (DONE, "3 inputs failed\n")
    found = [json.loads(line) for line in out.splitlines()]
    assert [Path(one["source"]).name for one in found] == ["0001.txt", "0003.txt", "0005.txt"]
    assert (found[1]["kind"], found[1]["error"]) == ("exception", "ValueError")
    assert found[1]["message"] == "number 3 is odd"
    assert "in fail_odd" in found[1]["traceback"]


def test_failures_are_read_a_page_at_a_time(tmp_path, monkeypatch):
    """There may be millions; all of them are listed, in order, and few are in memory."""
    monkeypatch.setattr(database, "_FAILURES", 2)
    with Ledger.open(tmp_path / ".forebay") as ledger:
        ledger.enrol([Input(str(number)) for number in range(7)], (), True)
        failure = Failure("exception", "ValueError", "bad")
        ledger.record([], [FailedInput(ordinal, failure) for ordinal in (1, 2, 4, 5, 7)])
    result = CliRunner().invoke(cli, ["failures", str(tmp_path)], standalone_mode=False)
    assert result.stdout.splitlines() == [f"{n}: ValueError: bad" for n in (0, 1, 3, 4, 6)]
    assert result.stderr == "5 inputs failed\n"


def test_failures_are_safe_to_print_on_a_terminal(tmp_path):
    """Whatever the name of an input is, and whatever an exception says."""
    failure = Failure("exception", "ValueError", "bad\nworse \x1b[2J", "at \x1b[31m\n")
    with Ledger.open(tmp_path / ".forebay") as ledger:
        ledger.enrol([Input("new\nline \x1b]0;title\x07")], (), True)
        ledger.record([], [FailedInput(1, failure)])
    result = CliRunner().invoke(
        cli, ["failures", str(tmp_path), "--traceback"], standalone_mode=False, color=True
    )
    assert result.stdout.splitlines() == [
        "new\\nline \\x1b]0;title\\x07: ValueError: bad",
        "    worse \\x1b[2J",
        "    at \\x1b[31m",
    ]


@pytest.mark.slow
def test_status_can_be_watched_until_the_run_ends(tmp_path):
    """It ends by itself, and shows the last state last."""
    gates = Gates(tmp_path)
    inputs = make_inputs(tmp_path / "in", 3)
    (inputs / "0000-gate.txt").write_text("waits\n")
    run = start("preprocess", f"{WORKS}:wait_at_gate", inputs, tmp_path / "out", "--num-workers", 2)
    watch = None
    try:
        gates.arrivals(1)
        watch = start("status", tmp_path / "out", "--watch")
        first = watch.stdout.readline()
        assert " of 4 inputs done, 0 failed" in first
        assert watch.poll() is None
    finally:
        (tmp_path / "go").write_text("go")
        assert finish(run)[0] == DONE
        gates.close()
    code, out, err = finish(watch)
    assert (code, err) == (DONE, "")
    assert out.endswith("4 of 4 inputs done, 0 failed, 0 to do\nfinished\n")


def test_the_list_of_commands_is_not_cut_off():
    """Each command is described in one short line of its own."""
    listed = CliRunner().invoke(cli, ["--help"]).output.split("Commands:\n")[1].splitlines()
    assert {line.split()[0] for line in listed} == set(cli.commands)
    assert all(line.endswith(".") and not line.endswith("...") for line in listed)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["status", "failures", "verify", "top --once", "--help"])
def test_a_full_disk_under_stdout_is_a_message(inputs, output, command):
    """As other programs report it, without a traceback."""
    preprocess("fail_odd", inputs, output)
    name, *options = command.split()
    place = [output] if name in ("status", "failures", "verify") else []
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "forebay", name, *place, *options],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.stderr == "forebay: cannot write to stdout: No space left on device\n"
    assert done.returncode == COULD_NOT_RUN


@pytest.mark.slow
@pytest.mark.parametrize("command", ["status", "failures", "verify"])
def test_ctrl_c_in_a_command_that_only_looks_promises_nothing(tmp_path, command):
    """There is no work of its own that the same command would continue."""
    program = (
        "from forebay import cli, cli_status\n"
        "def interrupted(_): raise KeyboardInterrupt\n"
        "cli.snapshot_of = cli_status.read_run_state = interrupted\n"
        "cli.main()"
    )
    code, _, err = finish(start(command, tmp_path, program=("-c", program)))
    assert (code, err.strip()) == (INTERRUPTED, "forebay: interrupted")


@pytest.mark.slow
@pytest.mark.parametrize(("given", "named"), [("--redo=*", "--redo"), ("--quiet", None)])
@pytest.mark.parametrize("is_begun", [True, False])
def test_ctrl_c_in_a_run_that_started_over_names_the_option_to_leave_out(
    tmp_path, given, named, is_begun
):
    """The same command would start over again; if nothing was begun, that is what is meant."""
    program = (
        "from forebay import cli\n"
        "def interrupted(*_, **settings):\n"
        "    error = KeyboardInterrupt()\n"
        f"    if {is_begun}: error.__notes__ = ['forebay: interrupted', 'forebay: … continues']\n"
        "    raise error\n"
        "cli.preprocess = interrupted\n"
        "cli.main()"
    )
    arguments = ["preprocess", f"{WORKS}:copy", tmp_path, tmp_path / "out", given]
    code, _, err = finish(start(*arguments, program=("-c", program)))
    assert code == INTERRUPTED
    without = f" without {named}" if named and is_begun else ""
    verb = "continues" if is_begun else "begins"
    assert err.strip().endswith(f"the same command{without} {verb}")


@pytest.mark.slow
def test_redo_names_inputs_to_be_done_again(inputs, output):
    """Several options, each a name or a pattern; without it nothing is redone."""
    command = ["preprocess", f"{WORKS}:copy", inputs, output, "--quiet"]
    total = len(list(inputs.iterdir()))
    assert here(*command)[0] == 0
    code, out, _ = here(*command, "--redo", "0001.txt", "--redo", "*/0003.*")
    assert (code, f"{total} done ({total - 2} by earlier runs)" in out) == (0, True)
    code, _, err = here(*command, "--redo", "none")
    assert (code, "redo= names no input: 'none'\n" in err) == (1, True)


# ---- retry --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_retry_redoes_the_failures_alone(tmp_path, inputs, output):
    """By the function that is named; new inputs are left for later."""
    assert preprocess("fail_once", inputs, output, "--retries", 0)[0] == FAILURES
    (inputs / "more.txt").write_text("new\n")
    code, out, err = here("retry", output, f"{WORKS}:fail_once", "--num-workers", 1)
    assert (code, err) == (DONE, "")
    assert out.startswith("6 done, 0 failed")
    assert len(calls(tmp_path)) == 12


@pytest.mark.slow
def test_the_settings_of_a_run_hold_for_its_retry(inputs, output):
    """The command that is shown has them, too, and others replace them."""
    preprocess("fail_odd", inputs, output, "--timeout", 40, "--num-workers", 1, "--retries", 0)
    _, _, err = here("retry", output)
    shown = f"{output} {WORKS}:fail_odd --num-workers 1 --timeout 40.0 --retries 0"
    assert err.splitlines()[-1] == f"  forebay retry {shown}"
    report = forebay.runs.preprocess.retry(works.fail_odd, output, progress=False)
    assert report.failures[0].attempts == 1
    settings = report.details["settings"]
    assert (settings["timeout"], settings["num_workers"]) == ("40.0", "1")
    report = forebay.runs.preprocess.retry(works.fail_odd, output, retries=1, progress=False)
    assert report.failures[0].attempts == 2


def test_a_run_writes_its_report(inputs, output, tmp_path):
    """As the report of a call is saved; a folder that is missing is refused before the run."""
    missing = tmp_path / "none" / "run.html"
    code, _, err = preprocess("fail_odd", inputs, output, "--report", missing)
    assert code == USAGE and "does not exist" in err and not output.exists()
    first, second = tmp_path / "first.html", tmp_path / "second.html"
    code, _, _ = preprocess("fail_odd", inputs, output, "--num-workers", 0, "--report", first)
    assert code == FAILURES and "ValueError" in first.read_text()
    code, _, _ = here("retry", output, f"{WORKS}:copy", "--accept-changes", "--report", second)
    assert code == DONE and "<strong>6</strong><span>done</span>" in second.read_text()


def test_a_retry_joins_no_cluster_because_a_folder_names_it(inputs, output):
    """A ledger from someone else may name any address; a cluster of one's own has no address."""
    preprocess("fail_odd", inputs, output)
    for cluster, refused in (({"address": "there:1"}, True), ({"num_gpus": 1}, False)):
        meta = {SETTINGS: json.dumps({"backend": cluster, "timeout": 3})}
        if refused:
            with pytest.raises(OptionError, match=r"used Ray at there:1(.|\n)*backend="):
                recorded_settings(meta, {})
        else:
            assert recorded_settings(meta, {}) == {"backend": Ray(num_gpus=1), "timeout": 3}
        assert recorded_settings(meta, {"backend": "process"})["backend"] == "process"
    meta = {SETTINGS: settings_to_json({"backend": Ray(address="x:1", runtime_env={"a": "b"})})}
    assert settings_shown(meta) == {"backend": "ray", "address": "x:1"}
    assert "runtime_env" in meta[SETTINGS] and '"b"' not in meta[SETTINGS]


@pytest.mark.parametrize(
    "damage",
    ["[", "[1]", '{"timeout": "x"}', '{"num_workers": 99999}', '{"backend": {"num_cpus": "x"}}'],
)
def test_settings_that_nobody_recorded_are_a_damaged_ledger(damage):
    """They are values from a file that anyone may have written."""
    with pytest.raises(LedgerError):
        recorded_settings({SETTINGS: damage}, {})


@pytest.mark.slow
def test_retry_of_what_fails_again_is_3(inputs, output):
    """As for a run."""
    preprocess("fail_odd", inputs, output)
    code, out, _ = here("retry", output, f"{WORKS}:fail_odd")
    assert code == FAILURES
    assert out.startswith("3 done (3 by earlier runs), 3 failed")


@pytest.mark.slow
def test_retry_without_a_name_shows_the_call_to_make(inputs, output):
    """With the function that the folder names, for the user to judge."""
    preprocess("fail_odd", inputs, output)
    code, out, err = here("retry", output)
    assert (code, out) == (USAGE, "")
    assert err.startswith("forebay: retry loads no code because a folder names it: give it the ")
    assert err.splitlines()[-1] == f"  forebay retry {output} {WORKS}:fail_odd --num-workers 2"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["retry", "status", "failures", "verify"])
def test_no_command_runs_code_because_a_folder_names_it(tmp_path, inputs, output, command):
    """A ledger from someone else may name any file."""
    preprocess("fail_odd", inputs, output)
    mark, trap = tmp_path / "mark", tmp_path / "trap.py"
    trap.write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\ndef work(a, b): ...\n")
    with Ledger.open(output / ".forebay") as ledger:
        work = json.loads(ledger.get_meta("work")) | {"reference": f"{trap}:work"}
        ledger.set_meta("work", json.dumps(work))
    here(command, output)
    assert not mark.exists()
    (_, _, err), expected = here("retry", output, f"{trap}:work"), "changed since the earlier run"
    assert mark.exists() and expected in err  # the user named it; and it is another function


# ---- verify -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_verify_of_a_sound_folder_is_0(inputs, output):
    """Every output is looked at."""
    preprocess("split", inputs, output)
    assert here("verify", output) == (
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
    code, out, _ = here("verify", output)
    assert code == FAILURES
    command = f"forebay verify {output} --altered"
    assert out.splitlines() == [
        "missing  0001.txt",
        "altered  0003.txt: 24 bytes recorded, 5 found",
        "orphan   stranger.txt: no input is known to have made it",
        "6 outputs checked: 1 missing, 1 altered, 1 orphan",
        "1 input will be redone by the next run",
        f"1 altered output left as found: `{command} keep` records the new sizes, `{command} redo` "
        "has the next run make them again",
    ]
    assert here("verify", output, "--altered", "redo")[0] == FAILURES
    code, out, err = preprocess("copy", inputs, output)
    assert code == DONE, err
    assert out.startswith("6 done (4 by earlier runs)")
    assert sorted(calls(tmp_path)[6:]) == ["0001.txt", "0003.txt"]
    (output / "stranger.txt").unlink()
    assert published(output) == before
    assert (output / "metadata.parquet").read_bytes() == table
    assert here("verify", output)[0] == DONE


@pytest.mark.slow
def test_an_output_that_was_improved_in_place_is_not_lost(inputs, output):
    """It stays until the user says which of the two is meant; what is said twice counts once."""
    preprocess("copy", inputs, output)
    for name in ("0003.txt", "0004.txt"):
        (output / name).write_text("better")
    assert here("verify", output)[0] == FAILURES
    assert preprocess("copy", inputs, output)[1].startswith("6 done (6 by earlier runs)")
    assert (output / "0003.txt").read_text() == "better"
    assert here("verify", output, "--altered", "keep")[0] == FAILURES
    assert here("verify", output)[0] == DONE
    (output / "0004.txt").write_text("worse")
    assert here("verify", output, "--altered", "redo")[0] == FAILURES
    assert here("verify", output, "--altered", "redo")[0] == DONE
    assert preprocess("copy", inputs, output)[1].startswith("6 done (5 by earlier runs)")
    assert (output / "0003.txt").read_text() == "better"
    assert (output / "0004.txt").read_text() != "worse"


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
