"""`report.save()` of preprocess and predict: throughput, durations, failures by error."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from self_contained import HOSTILE, check_self_contained, data_of
from torch.utils.data import TensorDataset

import forebay
from forebay.failures import Failure
from forebay.observe import record as observe_record
from forebay.observe.progress import RunTrace
from forebay.observe.record import KEPT_SLOWEST
from forebay.show.html import page_of
from forebay.show.report import MAX_GROUPS, failure_groups, run_summary


def work(source, out):
    """Fail for each tenth input, in one of two ways."""
    number = int(source.stem)
    if number % 10 == 3:
        raise ValueError(f"cannot read '{source.name}': {number} channels")
    if number == 17:
        raise KeyError(HOSTILE)
    out.file(f"{number}.out").write_text("x")


def model(batch):
    """Refuse sample 5."""
    (numbers,) = batch
    if (numbers == 5).any():
        raise ValueError("five")
    return numbers * 2


@pytest.fixture
def inputs(tmp_path):
    """Return a folder with 40 inputs."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}.txt").write_text("x")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_report_of_preprocess(tmp_path, inputs, num_workers) -> None:
    """Failures that differ only in names and numbers are one group, before the durations."""
    report = forebay.preprocess(
        work, inputs, tmp_path / "out", num_workers=num_workers, progress=False
    )
    path = pickle.loads(pickle.dumps(report)).save(tmp_path / "run.html")
    summary, text = data_of(path), "\n".join(check_self_contained(path.read_text()).text)
    assert summary["totals"]["done"] == report.done == 35
    assert summary["totals"]["failed"] == 5
    parts = dict(summary["sections"])
    assert summary["totals"]["ended"] == 40
    bars, slowest = parts["Durations"]
    assert sum(count for _, count, _ in bars[1]["bars"]) == 35
    assert summary["totals"]["retries"] == 5
    ((_, failures),) = parts["Failures"]
    (count, error, examples), (others, other, _) = failures["rows"]
    assert (error, count) == ("ValueError: cannot read '…': … channels", "4")
    assert [Path(each.partition(": ")[0]).name for each in examples.split("\n")] == [
        f"{number:02}.txt" for number in (3, 13, 23)
    ]
    assert examples.split("\n")[0].endswith(": cannot read '03.txt': 3 channels")
    assert other.startswith("KeyError: ")
    assert others == "1"
    assert summary["kind"] == "preprocess"
    assert slowest[1]["rows"][0][1].endswith(".txt")
    assert text.index("ValueError: cannot read '…'") < text.index("How long one input took")
    rate = 40 / report.elapsed_s
    assert summary["totals"]["rate"] == pytest.approx(rate, rel=1e-4)
    assert f"{rate:,.1f} inputs/s" in repr(report)


def test_a_message_that_is_not_unicode_is_escaped(tmp_path, inputs) -> None:
    """As in the table; the bytes of a file's name, which it quotes, may be any."""

    def refuse(source, out):
        if source.stem == "07":
            raise ValueError(f"cannot read {os.fsdecode(b'odd-' + bytes([255]))}")

    report = forebay.preprocess(refuse, inputs, tmp_path / "out", num_workers=0, progress=False)
    page = check_self_contained(report.save(tmp_path / "run.html").read_text())
    assert "cannot read odd-\\udcff" in "".join(page.text)


def test_a_continued_run_counts_what_it_did_itself(tmp_path, inputs) -> None:
    """In its rate and beside its duration; all that is done is another number."""
    for _ in range(2):
        report = forebay.preprocess(
            work, inputs, tmp_path / "out", num_workers=0, retries=0, progress=False
        )
    path = report.save(tmp_path / "run.html")
    subtitle = next(line for line in check_self_contained(path.read_text()).text if "UTC" in line)
    assert "· 5 inputs in" in subtitle
    totals = data_of(path)["totals"]
    assert (totals["done"], totals["resumed"]) == (35, 35)
    assert totals["rate"] == pytest.approx(5 / report.elapsed_s, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("makes", [False, True], ids=["model", "factory"])
def test_a_report_of_predict_counts_samples(tmp_path, makes) -> None:
    """In either way of predicting."""
    report = forebay.predict(
        Factory if makes else model,
        TensorDataset(torch.arange(40)),
        tmp_path / "out",
        batch_size=4,
        num_workers=1 if makes else 0,
        part_size=16,
        progress=False,
    )
    summary = data_of(report.save(tmp_path / "run.html"))
    assert (summary["totals"]["done"], summary["totals"]["failed"]) == (39, 1)
    assert (summary["kind"], summary["unit"]) == ("predict", "sample")
    assert summary["totals"]["ended"] == 40
    parts = dict(summary["sections"])
    (_, failures), (_, bars), (_, slowest) = *parts["Failures"], *parts["Durations"]
    assert sum(count for _, count, _ in bars["bars"]) == 3  # parts
    assert failures["rows"] == [["1", "ValueError: five", "5"]]
    given = {"batch_size": "4", "num_workers": "1" if makes else "0", "part_size": "16"}
    assert given.items() <= summary["settings"].items()
    assert summary["settings"]["device"] == "None"
    assert ("worker" in check_self_contained((tmp_path / "run.html").read_text()).text) == makes
    assert "samples 0 to 15" in {name for _, name in slowest["rows"]}


class Factory:
    """Makes a model in each worker."""

    def __call__(self, batch):
        """Predict."""
        return model(batch)


def test_groups_are_bounded_and_text() -> None:
    """The most frequent first; what exceeds the bound is counted together."""
    failures = [
        Failure("exception", f"Error{number}", HOSTILE, source=number)
        for number in range(MAX_GROUPS + 10)
        for _ in range(2 if number == 35 else 1)
    ]
    groups = failure_groups(failures)
    assert len(groups) == MAX_GROUPS + 1
    assert groups[0].error.startswith("Error35: ")
    assert groups[-1].count == 10
    report = SimpleNamespace(
        output=HOSTILE,
        done=0,
        failed=9,
        resumed=0,
        elapsed_s=1.0,
        failures=failures[:4],
        diagnosis=HOSTILE,
        details={},
    )
    page = check_self_contained(page_of(run_summary(report)))
    assert "Of 9 failures, the first 4." in page.text


# ---- the record --------------------------------------------------------------------------------


def test_a_long_run_takes_no_more_memory_than_a_short_one(monkeypatch) -> None:
    """Every input is counted."""
    now = [0.0]
    monkeypatch.setattr(observe_record.time, "monotonic", lambda: now[0])
    trace = RunTrace()
    for number in range(100_000):
        now[0] = number * 7.0
        trace.took([(number, 1.0 + number)])
        trace.ended(1, number % 2)
    assert (trace.done, trace.failed) == (100_000, 50_000)
    assert sum(trace.bins) == 100_000
    assert next(iter(trace.slowest)) == (100_000.0, 99_999)
    assert len(list(trace.slowest)) == KEPT_SLOWEST
