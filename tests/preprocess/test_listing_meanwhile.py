"""A manifest that is longer than what is listed before the work begins."""

from __future__ import annotations

import pytest

import forebay
from forebay.errors import FailuresError, InputError
from forebay.ledger import ledger as ledgers
from forebay.ledger.snapshot import read_snapshot
from forebay.observe.progress import Progress
from forebay.runs import commits, processing
from forebay.runs import run as runs_run


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Ten inputs are listed first, then five at a time; few are sent ahead, all committed soon."""
    monkeypatch.setattr(commits, "COMMIT_S", 0.01)
    monkeypatch.setattr(runs_run, "AHEAD", 10)
    monkeypatch.setattr(ledgers, "READ_ON", 5)
    monkeypatch.setattr(processing, "LOOKAHEAD", 5)
    monkeypatch.setattr(processing, "SLOTS", 5)


@pytest.fixture
def manifest(tmp_path):
    return tmp_path / "m.csv"


def write(manifest, names):
    manifest.write_text("".join(f"{name}\n" for name in ["name", *names]))


def work(row, out):
    if row["name"].startswith("bad"):
        raise ValueError(row["name"])
    return {"length": len(row["name"])}


def run(manifest, output, **options):
    return forebay.preprocess(work, manifest, output, num_workers=0, progress=False, **options)


@pytest.mark.slow
def test_the_total_grows_while_the_inputs_are_listed(tmp_path, manifest, monkeypatch):
    """From those that are listed first to all of them."""
    write(manifest, range(40))
    totals = []
    real = Progress.update

    def watched(self, *arguments):
        real(self, *arguments)
        totals.append(self.total)

    monkeypatch.setattr(Progress, "update", watched)
    report = run(manifest, tmp_path / "out")
    assert report.done == 40
    assert report.metadata["name"].to_pylist() == [str(each) for each in range(40)]
    assert totals == sorted(totals)
    assert (totals[0] < 40, totals[-1]) == (True, 40)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([*range(30), 7], r"listed twice: at positions 8 and 31\n"),
        ([*range(30), "a,b"], "line 32: 2 fields where the header has 1"),
    ],
    ids=["twice", "damaged"],
)
def test_what_is_wrong_further_down_keeps_what_was_done(tmp_path, manifest, names, words):
    """The same call with the corrected manifest does the rest."""
    write(manifest, names)
    with pytest.raises(InputError, match=words) as caught:
        run(manifest, tmp_path / "out")
    snapshot = read_snapshot(tmp_path / "out" / ".forebay")
    done, total = snapshot.counts.done, snapshot.counts.total
    assert done > 10
    assert caught.value.__notes__ == [f"forebay: {done} of {total} inputs are done and stay"]
    assert not snapshot.is_listed
    assert "found so far" in snapshot.text(0.0)
    write(manifest, range(30))
    report = run(manifest, tmp_path / "out")
    assert (report.done, report.resumed) == (30, snapshot.counts.done)
    assert report.metadata["name"].to_pylist() == [str(each) for each in range(30)]


@pytest.mark.slow
def test_a_fraction_of_failures_is_of_those_that_are_listed(tmp_path, manifest):
    """It grows with the listing, so that few failures among many stop nothing."""
    write(manifest, [f"bad {each}" if each % 10 == 9 else each for each in range(60)])
    assert run(manifest, tmp_path / "out", max_failures=0.2, retries=0).failed == 6
    with pytest.raises(FailuresError, match="max_failures allows"):
        run(manifest, tmp_path / "other", max_failures=0.05, retries=0)
