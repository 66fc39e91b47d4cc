"""Commits: results are recorded and published in parts, while the loop goes on."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import forebay
from forebay.base.output_names import STAGING
from forebay.engine.commands import DeliverResult, ReportFailure, ReportRetry
from forebay.engine.engine import Engine
from forebay.errors import OutputError
from forebay.failures import Failure
from forebay.ledger.database import DONE, FAILED, TODO
from forebay.ledger.ledger import Ledger
from forebay.ledger.records import Counts, Input
from forebay.outputs import publishing
from forebay.outputs.folder import OutputFolder
from forebay.runs import commits as commits_file
from forebay.runs.commits import Commits, perform_pending

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def staged(folder: OutputFolder, ordinal: int) -> DeliverResult:
    """Stage one file, and return the result of its input."""
    path = folder.path / STAGING / "w0" / f"{ordinal}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(str(ordinal))
    written = [(f"{ordinal}.txt", 1, f"{STAGING}/w0/{ordinal}.txt")]
    return DeliverResult(ordinal, 1, 0.1, 0, (written, "[]", ""))


def published(folder: OutputFolder) -> list[str]:
    """Return the names of the published files."""
    return sorted(path.name for path in folder.path.glob("*.txt"))


def nothing(_: Any) -> None:
    """Record nothing."""


def full_disk(*_: object) -> None:
    """Fail as a rename does on a full disk."""
    raise FULL


def half_published(ledger: Ledger, place: OutputFolder) -> Commits:
    """Return commits of which one has published a part of its three files."""
    ledger.enrol([Input(str(k)) for k in range(1, 7)], (), True)
    commits = Commits(ledger, place)
    commits.add([staged(place, ordinal) for ordinal in (1, 2, 3)], nothing)
    while not published(place):
        assert commits.advance() is None
    return commits


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OutputFolder:
    """An output folder; two files are published at a time, once there are three results."""
    monkeypatch.setattr(publishing, "PUBLISHED_AT_ONCE", 2)
    monkeypatch.setattr(commits_file, "COMMIT_RESULTS", 3)
    return OutputFolder(tmp_path / "out")


def test_files_are_published_in_parts_and_results_are_collected_meanwhile(
    place: OutputFolder,
) -> None:
    """What comes while files are published is in the next commit, failures too."""
    with place.ledger() as ledger:
        commits = half_published(ledger, place)
        assert published(place) == ["1.txt", "2.txt"]
        assert commits.due_in() == 0.0
        failure = ReportFailure(5, 1, 0.1, Failure("exception", "ValueError", "no"))
        assert commits.add([staged(place, 4), failure], nothing) == [failure]
        first = commits.advance()
        while first is None:
            first = commits.advance()
        assert (first.delivered, first.done, first.failed) == ([1, 2, 3], 3, 0)
        assert commits.waiting
        assert commits.close() == 2
        assert not commits.waiting
        assert published(place) == ["1.txt", "2.txt", "3.txt", "4.txt"]
        assert ledger.counts() == Counts(6, 4, 1)


def test_an_attempt_that_failed_is_recorded_before_the_next_one_ends(place: OutputFolder) -> None:
    """A kill during the second attempt does not have the next run begin with this input again."""
    with place.ledger() as ledger:
        ledger.enrol([Input("1"), Input("2")], (), True)
        commits = Commits(ledger, place)
        commits.add([ReportRetry(1, 1, Failure("exception", "ValueError", "no"))], nothing)
        assert commits.waiting
        commit = commits.advance(at_once=True)
        assert commit is not None
        assert (commit.delivered, commit.failed) == ([], 0)
        assert not commits.waiting
        assert [each.source for each in ledger.todo()] == ["2", "1"]
        commits.add([staged(place, 1)], nothing)
        assert commits.close() == 1
        assert ledger.counts() == Counts(2, 1, 0)


def states(place: OutputFolder) -> list[int]:
    """Return the states of the inputs as the disk has them, which the next run would find."""
    with TemporaryDirectory() as copy:
        for path in place.private.glob("ledger.sqlite*"):
            shutil.copyfile(path, Path(copy, path.name))
        with closing(sqlite3.connect(Path(copy, "ledger.sqlite"))) as db:
            return [state for (state,) in db.execute("SELECT state FROM inputs ORDER BY ordinal")]


@pytest.mark.parametrize("elapsed_s", [0.1, 0.6])
def test_the_last_results_of_a_short_run_are_committed_with_its_table(
    place: OutputFolder, monkeypatch: pytest.MonkeyPatch, elapsed_s: float
) -> None:
    """One flush is enough; those of a longer run, and failed attempts, do not wait for another."""
    monkeypatch.setattr(commits_file.time, "monotonic", lambda: now)
    now = 0.0
    with Ledger.open(place.private, call="a call") as ledger:
        ledger.enrol([Input("1"), Input("2")], (), True)
        ledger.settle()
        commits = Commits(ledger, place)
        commits.add([ReportRetry(1, 1, Failure("exception", "ValueError", "no"))], nothing)
        assert commits.advance(at_once=True) is not None
        assert states(place) == [FAILED, TODO]
        now += elapsed_s
        commits.add([DeliverResult(k, 1, 0.1, 0, ((), "[{}]", "")) for k in (1, 2)], nothing)
        commit = commits.advance(at_once=True, is_last=True)
        assert commit is not None
        assert commit.done == 2
        assert ledger.counts() == Counts(2, 2, 0)
        assert states(place) == ([FAILED, TODO] if elapsed_s < 0.5 else [DONE, DONE])
        ledger.set_meta("tables", "{}")
        assert states(place) == [DONE, DONE]
        commits.close()


def test_close_ends_the_commit_whose_files_are_being_published(place: OutputFolder) -> None:
    """Ctrl-C between two parts loses neither the rest of them nor what came since."""
    with place.ledger() as ledger:
        commits = half_published(ledger, place)
        commits.add([staged(place, 4)], nothing)
        assert commits.close() == 4
        commits.finish()
        assert published(place) == ["1.txt", "2.txt", "3.txt", "4.txt"]
        assert ledger.file_changes() == []


def test_nothing_is_recorded_after_files_that_could_not_be_published(
    place: OutputFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run needs the file changes that are left, which the next record would delete."""
    with place.ledger() as ledger:
        commits = half_published(ledger, place)
        with monkeypatch.context() as full:
            full.setattr(publishing, "rename_new", full_disk)
            with pytest.raises(OutputError):
                commits.advance()
        commits.add([staged(place, 4)], nothing)
        assert commits.close() == 0
        assert ledger.counts() == Counts(6, 3, 0)
        assert len(ledger.file_changes()) == 3
        assert perform_pending(ledger, place) == []
        assert published(place) == ["1.txt", "2.txt", "3.txt"]


def test_a_run_whose_slots_all_wait_commits_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the caller's process nothing else runs, so it neither waits nor asks again and again."""
    steps, step = list[None](), Engine.step

    def counted(engine: Engine, *given: Any, **named: Any) -> Any:
        steps.append(None)
        return step(engine, *given, **named)

    monkeypatch.setattr(Engine, "step", counted)
    monkeypatch.setattr("forebay.runs.processing.SLOTS", 4)
    for number in range(40):
        (tmp_path / f"{number}.in").write_text("x")
    report = forebay.preprocess(
        lambda path: {"n": path.name},
        f"{tmp_path}/*.in",
        tmp_path / "out",
        num_workers=0,
        progress=False,
    )
    assert report.done == 40
    assert len(steps) <= 2 * 40
