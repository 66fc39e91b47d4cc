"""A whole folder of a search that is gone may only be away: what was made of its files stays."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import forebay
from forebay.cli import cli


def copied(source: Path, out):
    """Copy a file; return two rows."""
    with Path("calls").open("a") as calls:
        calls.write(f"{source}\n")
    Path(out / source.parent.name).mkdir(parents=True, exist_ok=True)
    (out / source.parent.name / source.name).write_text(source.read_text())
    return [{"n": len(source.read_text())}, {"n": 0}]


@pytest.fixture(autouse=True)
def _folders(tmp_path, monkeypatch):
    """A current folder with three files in each of in/d1, in/d2 and in/d3."""
    monkeypatch.chdir(tmp_path)
    for folder in ("d1", "d2", "d3"):
        Path("in", folder).mkdir(parents=True)
        for number in range(3):
            Path("in", folder, f"{number}.txt").write_text(folder * (number + 1))


def run(inputs="in/*/*.txt", **options):
    return forebay.preprocess(copied, inputs, "out", num_workers=0, progress=False, **options)


def calls():
    path = Path("calls")
    names = path.read_text().split() if path.exists() else []
    path.unlink(missing_ok=True)
    return names


def outputs():
    return {str(each.relative_to("out")) for each in Path("out").glob("d*/*.txt")}


def command(*arguments):
    return CliRunner().invoke(cli, [*map(str, arguments)], catch_exceptions=False).output


def unmounted(folder, there=True):
    """Move a folder away; leave an empty one, as a mount point is, or none."""
    os.rename(folder, "away")
    if there:
        os.mkdir(folder)


def mounted(folder):
    shutil.rmtree(folder, ignore_errors=True)
    os.rename("away", folder)


@pytest.mark.slow
@pytest.mark.parametrize("there", [True, False], ids=["empty", "none"])
@pytest.mark.parametrize("inputs", ["in/*/*.txt", "in", "in/d?/*"])
def test_files_of_a_folder_that_is_away_keep_rows_and_outputs(inputs, there):
    """The report says which, also without progress; once it is back, nothing is done again."""
    table = run(inputs).metadata
    files = outputs()
    unmounted("in/d2", there)
    for _ in range(2):  # the second call compares with what the first one kept
        report = run(inputs)
        assert (report.done, report.resumed, report.failed) == (9, 9, 0)
        assert report.unseen == tuple(f"in/d2/{number}.txt" for number in range(3))
        assert "3 of 9 inputs done earlier cannot be seen now" in repr(report)
        assert "`forebay prune " in repr(report)
        assert report.metadata == table
    assert "removed 0 outputs" in command("prune", "out")
    assert outputs() == files
    mounted("in/d2")
    calls()
    report = run(inputs)
    assert (report.resumed, report.unseen, report.notes, calls()) == (9, (), (), [])
    assert report.metadata == table


def test_prune_removes_what_was_made_of_a_folder_that_is_named():
    """And leaves alone all else; files that come back are processed again."""
    run()
    unmounted("in/d2")
    run()
    assert "would remove 3 outputs" in command("prune", "out", "in/d2", "--dry-run")
    assert "removed 3 outputs" in command("prune", "out", "in/d2")
    assert {each[:2] for each in outputs()} == {"d1", "d3"}
    report = run()
    assert (report.done, report.unseen, report.metadata.num_rows) == (6, (), 12)
    mounted("in/d2")
    calls()
    assert (run().done, len(calls())) == (9, 3)


def test_new_changed_and_removed_files_beside_a_folder_that_is_away():
    """Are new, changed and removed; the table is in the order of the paths."""
    run()
    unmounted("in/d2")
    Path("in/d1/1.txt").write_text("changed")
    Path("in/d3/0.txt").unlink()
    Path("in/d2b").mkdir()
    Path("in/d2b/new.txt").write_text("new")
    calls()
    report = run()
    assert sorted(calls()) == ["in/d1/1.txt", "in/d2b/new.txt"]
    kept = [f"in/d1/{k}.txt" for k in range(3)] + [f"in/d2/{k}.txt" for k in range(3)]
    wanted = [*kept, "in/d2b/new.txt", "in/d3/1.txt", "in/d3/2.txt"]
    assert report.metadata.column("source").to_pylist()[::2] == wanted
    assert any("1 of the 9 inputs of the earlier run is not listed now" in x for x in report.notes)


def test_a_folder_that_was_renamed_is_not_away():
    """Its files are elsewhere as they were: the new ones take the place of those that are gone."""
    run()
    os.rename("in/d2", "in/d9")
    report = run()
    assert (report.done, report.failed, report.unseen) == (9, 0, ())
    assert "in/d2/0.txt" not in report.metadata.column("source").to_pylist()


def test_files_that_were_removed_one_by_one_are_gone():
    """As long as others are left in their folder."""
    run()
    Path("in/d2/0.txt").unlink()
    report = run()
    assert (report.done, report.unseen, report.metadata.num_rows) == (8, (), 16)
    assert "removed 1 output" in command("prune", "out")


def test_files_of_a_url_are_gone_one_by_one_and_away_as_a_folder(tmp_path):
    """As those of a path."""

    def length(source):
        return {"n": len(source.read_text())}

    def made():
        found = f"file://{tmp_path}/in/*/*.txt"
        report = forebay.preprocess(length, found, "out", num_workers=0, progress=False)
        return report.done, len(report.unseen), report.metadata.num_rows

    assert made() == (9, 0, 9)
    Path("in/d2/0.txt").unlink()
    assert made() == (8, 0, 8)
    unmounted("in/d1")
    assert made() == (8, 3, 8)


LISTED = [f"in/{folder}/{number}.txt" for folder in ("d1", "d2", "d3") for number in range(3)]


@pytest.mark.parametrize("inputs", [LISTED, "in"], ids=["list", "folder"])
def test_inputs_that_are_away_keep_their_rows_when_all_are_done_again(inputs):
    """What cannot be read cannot be made again; the report says so."""
    table = run(inputs).metadata
    unmounted("in/d2")
    calls()
    report = run(inputs, redo="*")
    assert sorted(calls()) == [each for each in LISTED if "d2" not in each]
    assert (report.done, report.failed, len(report.unseen)) == (9, 0, 3)
    assert report.metadata == table
    mounted("in/d2")
    report = run(inputs)
    assert (report.done, report.failed, report.metadata) == (9, 0, table)
    # What began anew has all results of the new run: those that were away are made when they can.
    assert len(calls()) == 3


@pytest.mark.parametrize("inputs", [LISTED, "in"], ids=["list", "folder"])
@pytest.mark.parametrize("redo", ["in/d2/1.txt", "1.txt"])
def test_an_input_that_is_away_keeps_its_rows_when_it_is_named(inputs, redo):
    """Others of that name are done again, and prune has nothing to remove."""
    table = run(inputs).metadata
    unmounted("in/d2")
    calls()
    report = run(inputs, redo=redo)
    assert calls() == ([] if "/" in redo else ["in/d1/1.txt", "in/d3/1.txt"])
    assert (report.done, report.failed, report.metadata) == (9, 0, table)
    assert "removed 0 outputs" in command("prune", "out")
    assert len(outputs()) == 9


@pytest.mark.parametrize("inputs", [LISTED, "in"], ids=["list", "folder"])
def test_an_output_that_was_deleted_of_an_input_that_is_away(inputs):
    """Its rows and its other outputs stay; it is made again once the input is back."""
    table = run(inputs).metadata
    unmounted("in/d2")
    Path("out/d2/1.txt").unlink()
    Path("out/d1/1.txt").unlink()
    calls()
    report = run(inputs)
    assert (report.done, report.failed, report.metadata) == (9, 0, table)
    assert calls() == ["in/d1/1.txt"]
    mounted("in/d2")
    run(inputs)
    assert (calls(), len(outputs())) == (["in/d2/1.txt"], 9)


def flat(source: Path, out):
    """Write an output whose name does not have the folder of its input."""
    out.file(source.name).write_text(source.read_text())


@pytest.mark.parametrize("inputs", [["in/d2/0.txt"], "in/d2"], ids=["list", "folder"])
def test_an_output_of_an_input_that_is_away_is_never_replaced(inputs):
    """An input that asks for its name fails alone."""
    kind = {"num_workers": 0, "progress": False}
    search = not isinstance(inputs, list)
    shutil.rmtree("in/d3")
    shutil.move("in/d1", "d1")
    forebay.preprocess(flat, "in" if search else inputs, "out", **kind)
    unmounted("in/d2")
    shutil.move("d1", "in/d1")
    report = forebay.preprocess(flat, "in" if search else ["in/d1/0.txt", *inputs], "out", **kind)
    assert report.failed == (3 if search else 1)
    assert "cannot be seen now, so its outputs stay" in report.failures[0].message
    assert Path("out/0.txt").read_text() == "d2"


@pytest.mark.slow
def test_a_kill_while_all_are_done_again_leaves_what_is_away(tmp_path):
    """And the same call continues."""
    script = tmp_path / "again.py"
    script.write_text(
        "import os, signal, sys, forebay\n"
        "def f(source, out):\n"
        "    if sys.argv[1:] and source.name == '1.txt': os.kill(os.getpid(), signal.SIGKILL)\n"
        "    (out / (source.parent.name + source.name)).write_text(source.read_text())\n"
        "    return {'n': 1}\n"
        "print(forebay.preprocess(f, 'in', 'out', num_workers=0, progress=False,"
        " redo='*' if sys.argv[1:] else None).done)\n"
    )
    subprocess.run([sys.executable, script], check=True)
    unmounted("in/d2")
    killed = subprocess.run([sys.executable, script, "anew"], check=False)
    assert killed.returncode == -signal.SIGKILL
    found = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True)
    assert found.stdout == "9\n"
    assert {each.name for each in Path("out").glob("d2*")} == {f"d2{k}.txt" for k in range(3)}
