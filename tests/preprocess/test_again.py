"""The same call again, and `retry`, after runs that ended in every way short of success."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import forebay
from forebay.errors import InputError, OptionError
from forebay.ledger.snapshot import read_failures
from forebay.runs.preprocess import retry


def inputs_in(folder, good, bad=()):
    folder.mkdir(exist_ok=True)
    for name in (*good, *bad):
        (folder / name).write_text("bad" if name in bad else "good")
    return folder


def strict(source, out):
    if source.read_text() == "bad":
        raise ValueError("a bad one")
    out.file(source.name).write_text("x")


def length(row, out):
    return {"length": len(Path(row["path"]).read_text())}


def run(work, inputs, output, **options):
    return forebay.preprocess(work, inputs, output, progress=False, **{"num_workers": 0, **options})


def test_many_old_failures_do_not_keep_new_inputs_from_being_done(tmp_path):
    """That the first ones fail alike says nothing where others are done already."""
    bad = [f"{n:02d}" for n in range(25)]
    folder = inputs_in(tmp_path / "in", [f"z{n}" for n in range(5)])
    run(strict, folder, tmp_path / "out")
    inputs_in(folder, ["zz"], bad)
    report = run(strict, folder, tmp_path / "out")
    assert (report.done, report.failed) == (6, 25)
    assert retry(strict, tmp_path / "out", num_workers=0, progress=False).failed == 25


@pytest.mark.slow
def test_a_new_column_makes_each_row_another_input_and_the_user_is_told(tmp_path, capsys):
    """Otherwise finished work would be done again in silence."""
    rows = [{"path": str(path)} for path in inputs_in(tmp_path / "in", ["a", "b"]).iterdir()]

    def again(rows):
        options = {"num_workers": 0, "folder": tmp_path}
        report = forebay.preprocess(length, rows, tmp_path / "out", **options)
        return report.done, "of the 2 rows of the earlier run none" in capsys.readouterr().err

    assert again(rows) == (2, False)
    assert again(rows[:1]) == (1, False)
    assert again(rows) == (2, False)
    assert again([{**row, "label": "x"} for row in rows]) == (2, True)


def test_inputs_that_leave_the_table_are_told(tmp_path, capsys):
    """Otherwise a call with other inputs would replace the rows of the first without a word."""
    for folder in ("a", "b"):
        inputs_in(tmp_path / folder, [f"{folder}{number}" for number in range(3)])

    def said(inputs, **options):
        report = forebay.preprocess(strict, inputs, tmp_path / "out", num_workers=0, **options)
        assert report.metadata.num_rows == report.done
        return capsys.readouterr().err

    words = f"{tmp_path / 'out'}: {{}} of the earlier run {{}} not listed now, so the table is"
    assert said(tmp_path / "a") == ""
    assert words.format("3 of the 3 inputs", "are") in said(tmp_path / "b")
    assert said(tmp_path / "b") == said(tmp_path / "b", limit=1) == "", "each is told once"
    assert words.format("1 of the 3 inputs", "is") in said([*(tmp_path / "b").iterdir()][:2])
    assert (tmp_path / "out" / "a0").exists()
    assert said(tmp_path / "a", redo="*") == ""


def test_a_trial_leaves_the_record_of_other_failures_alone(tmp_path):
    """`limit` tries the first inputs; what is known of the rest stays known."""
    folder = inputs_in(tmp_path / "in", ["a"], ["b", "c"])
    run(strict, folder, tmp_path / "out")
    run(strict, folder, tmp_path / "out", limit=1)
    failures = read_failures(tmp_path / "out" / ".forebay")
    assert [Path(each.source).name for each in failures] == ["b", "c"]


def test_an_interrupted_retry_can_be_retried(tmp_path):
    """Failures that a killed `retry` did not come to are still failures."""
    folder = inputs_in(tmp_path / "in", ["a"], ["b", "c", "d"])
    run(strict, folder, tmp_path / "out")
    code = (
        "import os, signal, sys\n"
        "from forebay.runs.preprocess import retry\n"
        "from test_again import strict\n"
        "from pathlib import Path\n"
        "real = Path.read_text\n"
        "def deadly(self):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "Path.read_text = deadly\n"
        "retry(strict, sys.argv[1], num_workers=0, progress=False)\n"
    )
    killed = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=Path(__file__).parent,
    )
    assert killed.returncode == -signal.SIGKILL
    for name in ("b", "c", "d"):
        (folder / name).write_text("good")
    report = retry(strict, tmp_path / "out", num_workers=0, progress=False)
    assert (report.done, report.failed) == (4, 0)


def test_a_trial_tries_an_input_once(tmp_path):
    """With `limit`, a mistake shows at once and not after a second try."""
    folder = inputs_in(tmp_path / "in", [], ["a"])
    tries = []

    def count(source, out):
        tries.append(source)
        raise KeyError("mistake")

    with pytest.raises(KeyError, match="mistake"):
        run(count, folder, tmp_path / "out", limit=3)
    assert len(tries) == 1


def test_an_abandoned_thread_cannot_write_into_the_next_run(tmp_path):
    """What an earlier run staged and what this one stages are in different places."""
    folder = inputs_in(tmp_path / "in", ["slow", "then"])
    opened, go_on, over = threading.Event(), threading.Event(), threading.Event()

    def stall(source, out):
        if source.name == "slow":
            path = out.file("same")
            opened.set()
            go_on.wait()
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write("run 0")
            over.set()
        else:
            opened.wait()
            raise RuntimeError("stop")

    options = {"num_workers": 2, "backend": "thread"}
    with pytest.raises(RuntimeError, match="stop"):
        run(stall, folder, tmp_path / "out", max_failures=0, **options)

    def write(source, out):
        path = out.file("same") if source.name == "slow" else None
        if path is not None:
            path.write_text("run 1")
            go_on.set()
            over.wait()

    run(write, folder, tmp_path / "out", version="2", redo="*", **options)
    assert (tmp_path / "out" / "same").read_text() == "run 1"


def test_what_the_function_leaves_running_ends_with_the_run(tmp_path):
    """A program that a function started and forgot does not outlive its worker."""
    folder = inputs_in(tmp_path / "in", ["a"])

    def forget(source, out):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    assert run(forget, folder, tmp_path / "out", num_workers=1).done == 1
    # the autouse leak check fails if the program is still there


@pytest.mark.parametrize("work", ["split.py:split", ["a"], {"a": 1}])
def test_what_is_no_work_is_refused(tmp_path, work):
    """A name or a container in place of the function is a slip."""
    with pytest.raises(OptionError, match="Pass the function itself"):
        run(work, None, tmp_path / "out")


def test_a_home_folder_is_meant_by_a_tilde(tmp_path, monkeypatch):
    """`~` is expanded, for inputs and for outputs."""
    monkeypatch.setenv("HOME", str(tmp_path))
    inputs_in(tmp_path / "in", ["a"])
    assert run(strict, "~/in", "~/out").done == 1
    assert (tmp_path / "out" / "a").exists()


@pytest.mark.parametrize(("redo", "again"), [(None, ""), ("*", " without redo=")])
def test_an_interrupt_says_that_nothing_is_lost(tmp_path, redo, again):
    """Ctrl-C in a script: what the command line says, at the end of the traceback."""
    folder = inputs_in(tmp_path / "in", ["a", "b"])

    def interrupted(source, out):
        if source.name == "b":
            raise KeyboardInterrupt
        out.file(source.name).write_text("x")

    with pytest.raises(KeyboardInterrupt) as caught:
        run(interrupted, folder, tmp_path / "out", redo=redo)
    assert caught.value.__notes__ == [
        "forebay: interrupted; 1 of 2 inputs are done and stay",
        f"forebay: the same call{again} continues",
    ]
    assert run(strict, folder, tmp_path / "out", accept_changes=True).resumed == 1


# ---- redo ---------------------------------------------------------------------------------------


def told(source, out):
    """Write what `told.txt` says now."""
    name = source.name if isinstance(source, Path) else f"{source['id']}.txt"
    out.file(name).write_text(Path("told.txt").read_text())


@pytest.fixture
def told_folder(tmp_path, monkeypatch):
    """Return a function that says what is written, and an input folder."""
    monkeypatch.chdir(tmp_path)
    Path("told.txt").write_text("old")
    for name in ("a", "b"):
        (tmp_path / "in" / name).mkdir(parents=True)
        for number in range(3):
            (tmp_path / "in" / name / f"{name}{number}.txt").touch()
    return "in"


def new_outputs(output):
    return sorted(each.name for each in Path(output).glob("*.txt") if each.read_text() == "new")


class Numbers:
    """A Dataset whose samples have no names."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return {"value": index}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("redo", "names"),
    [
        ("in/a/a1.txt", ["a1"]),
        ("a1.txt", ["a1"]),
        (Path("in/a/a1.txt"), ["a1"]),
        ("a?.txt", ["a0", "a1", "a2"]),
        ("in/b/*", ["b0", "b1", "b2"]),
        (["in/a/a[01].txt", "b2.txt", "other.txt"], ["a0", "a1", "b2"]),
    ],
)
def test_selected_inputs_are_done_again(told_folder, redo, names):
    """By path, last part or pattern; the others stay as they are."""
    run(told, told_folder, "out")
    Path("told.txt").write_text("new")
    report = run(told, told_folder, "out", redo=redo)
    assert (report.done, report.failed, report.resumed) == (6, 0, 6 - len(names))
    assert new_outputs("out") == [f"{name}.txt" for name in names]
    assert report.metadata.num_rows == 6


def test_a_row_is_redone_by_its_json_and_a_sample_by_its_index(told_folder):
    """As they are called in the report of failures."""
    rows = [{"id": f"n{number}"} for number in range(12)]
    run(told, rows, "out")
    Path("told.txt").write_text("new")
    assert run(told, rows, "out", redo='*"n1"*').resumed == 11
    assert new_outputs("out") == ["n1.txt"]
    samples = Numbers()
    assert forebay.preprocess(samples, output="samples", num_workers=0, progress=False).done == 12
    again = {"redo": ["3", "11"], "num_workers": 0, "progress": False}
    assert forebay.preprocess(samples, output="samples", **again).resumed == 10


def test_a_name_that_no_input_has_is_an_error(told_folder):
    """Also one that the user mistyped; an example shows how inputs are called."""
    run(told, told_folder, "out")
    with pytest.raises(InputError, match=r"redo= names no input: 'x\*'") as caught:
        run(told, told_folder, "out", redo="x*")
    assert "The first input is called 'in/a/a0.txt'" in str(caught.value)
    for wrong in ("", [], [""], 3, ["a", 3]):
        with pytest.raises(OptionError, match="redo="):
            run(told, told_folder, "out", redo=wrong)
    assert run(told, told_folder, "out").resumed == 6


@pytest.mark.slow
def test_redone_inputs_are_not_lost_by_a_kill(told_folder):
    """The call without `redo` continues; the same call does them all again."""
    program = (
        "import forebay, os, signal, test_again\n"
        "def told(source, out):\n"
        "    if source.name == 'a1.txt': os.kill(os.getpid(), signal.SIGKILL)\n"
        "    test_again.told(source, out)\n"
        "test_again.run(told, 'in', 'out', version='1', redo='in/a/*')"
    )
    run(told, told_folder, "out", version="1")
    Path("told.txt").write_text("new")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run([sys.executable, "-c", program], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert Path("out", "a2.txt").exists()  # that of before
    report = run(told, told_folder, "out", version="1")
    assert (report.done, report.failed) == (6, 0)
    assert new_outputs("out") == ["a0.txt", "a1.txt", "a2.txt"]


def test_an_interrupted_redo_names_the_option_to_leave_out(told_folder):
    """The same call would do again what it did before."""
    run(told, told_folder, "out", version="1")

    def interrupted(source, out):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        run(interrupted, told_folder, "out", version="1", redo="*")
    assert "the same call without redo= continues" in caught.value.__notes__[-1]
