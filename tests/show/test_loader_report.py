"""`loader.report()`: one file with all it shows, of bounded size, that replaces nothing else."""

from __future__ import annotations

import json
import re
import time

import pytest
import torch
from self_contained import HOSTILE, check_self_contained, data_of
from torch.utils.data import Dataset

import forebay
from forebay.observe import record as tracing
from forebay.observe.figures import figures_of
from forebay.observe.measurements import SlowSample
from forebay.observe.record import Trace
from forebay.show.html import embedded, first_sentence, page_of, write_report
from forebay.show.report import loader_summary
from timings import timing


class Slow(Dataset):
    """Sixty samples, one of them much slower."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        time.sleep(0.2 if index == 7 else 0.0005)  # quicker ones would not be timed one by one
        return torch.full((4,), index)


def summary_of(trace, **changed):
    """Return the summary of a trace."""
    known = {
        "title": "DataLoader(Images)",
        "settings": {"num_workers": "2"},
        "verdict": "",
        "failures": 0,
        "replays": True,
    }
    return loader_summary(trace, **{**known, **changed})


def parts_of(summary):
    """Return the arguments of the parts of a report, by title, or by the first name of a table."""
    parts = [part for _, parts in summary["sections"] for _, part in parts]
    return {part.get("title") or part.get("names", [""])[-1]: part for part in parts}


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_report_shows_what_the_loader_did(tmp_path, num_workers) -> None:
    """Counts, settings, the slowest sample with the call that makes its batch again."""
    with forebay.DataLoader(
        Slow(), batch_size=4, num_workers=num_workers, seed=0, shuffle=True
    ) as loader:
        taken = sum(1 for _ in loader)
        path = loader.report(tmp_path / "run.html")
        numbers = [[int(each[0]) for each in batch] for batch in loader]
        content = path.read_text()
        page = check_self_contained(content)
        text = "\n".join(page.text)
        summary = data_of(path)
        assert taken == 15 == summary["totals"]["taken"] == summary["totals"]["made"]
        _, index, again = parts_of(summary)["its batch again, for a debugger"]["rows"][0]
        assert index == "7"
        assert re.fullmatch(r"loader\.replay\(epoch=0, batch=\d+\)", again)
        assert 7 in eval(again, {"loader": loader})[:, 0].tolist()
        assert again in text
        assert len(numbers) == 15
    assert summary["settings"]["num_workers"] == str(num_workers)
    assert summary["environment"]["torch"] == torch.__version__
    assert repr(loader) in text
    assert "Percent of the time in which each worker made batches" in text
    assert list(tmp_path.iterdir()) == [path]


def test_a_loader_that_did_nothing_has_a_report(tmp_path) -> None:
    """There is nothing to draw, and the file says so."""
    loader = forebay.DataLoader(Slow(), batch_size=4)
    content = loader.report(tmp_path / "run.html").read_text()
    assert "No batch was made yet." in check_self_contained(content).text
    assert "No batch was taken yet." in content


def test_without_a_seed_there_is_no_call_of_replay(tmp_path) -> None:
    """`replay` needs one, so the batch is named instead."""
    loader = forebay.DataLoader(Slow(), batch_size=4)
    for _ in loader:
        pass
    content = loader.report(tmp_path / "run.html").read_text()
    assert "loader.replay(epoch" not in content
    assert "epoch 0, batch 1" in content


def filled(monkeypatch, seconds, num_workers, steps=20_000) -> Trace:
    """Return a trace of a long run, with every part of the record full."""
    monkeypatch.setattr(tracing.time, "perf_counter", lambda: 0.0)
    trace = Trace()
    trace.num_workers, trace.held_bytes = num_workers, 123_456_789_012
    for number in range(steps):
        at = (number + 1) * seconds / steps
        slow = SlowSample(1.0 + number / 7, f"{HOSTILE}{number}", number, number)
        trace.made(timing(number % num_workers, at, 1.2345 + number % 7, slowest=slow), 100)
        trace.taken(at, (number % 11) * 0.12345, ready=number % 1013)
        trace.decisions.append((at, f"{HOSTILE} num_workers={number}"))
    return trace


def test_every_figure_is_in_the_data(tmp_path) -> None:
    """A figure without a value would be shown as 0."""
    loader = forebay.DataLoader(Slow(), batch_size=4)
    totals = data_of(loader.report(tmp_path / "loader.html"))["totals"]
    assert {each.key for each in figures_of("loader")} <= set(totals)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").touch()
    report = forebay.preprocess(
        lambda source, out: None, tmp_path / "in", tmp_path / "out", num_workers=0, progress=False
    )
    totals = data_of(report.save(tmp_path / "run.html"))["totals"]
    assert {each.key for each in figures_of("run")} <= set(totals)


@pytest.mark.slow
def test_a_week_with_many_workers_stays_small(monkeypatch) -> None:
    """Under 300 KB, and 256 workers share 32 bars."""
    trace = filled(monkeypatch, 7 * 86_400, num_workers=256)
    summary = summary_of(trace, verdict="x" * 10_000)
    content, parts = page_of(summary), parts_of(summary)
    assert len(content.encode()) < 300_000
    bars = parts["Percent of the time in which each worker made batches"]["bars"]
    assert [name for name, *_ in bars][:2] == ["0-7", "8-15"] and len(bars) == 32
    assert summary["totals"]["taken"] == 20_000
    check_self_contained(content)


def test_the_share_of_a_worker_is_of_the_whole_run(monkeypatch) -> None:
    """One that made batches for a quarter of the time has 25; decisions are listed below."""
    monkeypatch.setattr(tracing.time, "perf_counter", lambda: 0.0)
    trace = Trace()
    for number in range(1, 11):
        trace.made(timing(0, number * 10.0, 5.0), 100)
        trace.made(timing(1, number * 10.0, 2.5), 100)
    trace.decisions.append((70.0, "2 workers"))
    parts = parts_of(summary_of(trace))
    shown = parts["Percent of the time in which each worker made batches"]["bars"]
    assert shown == [["0", 50, "made"], ["1", 25, "made"]]
    assert parts["decision"]["rows"] == [["1 min 10 s", "2 workers"]]


def test_hostile_names_are_text(monkeypatch, tmp_path) -> None:
    """Wherever a string comes from, it is neither markup nor the end of the data."""
    trace = filled(monkeypatch, 100, num_workers=2, steps=100)
    texts = {HOSTILE: HOSTILE}
    summary = summary_of(trace, title=HOSTILE, verdict=HOSTILE, settings=texts)
    summary["environment"] = texts
    path = write_report(summary, tmp_path / "x.html")
    page = check_self_contained(path.read_text())
    assert any("</script><script>alert(1)" in text for text in page.text)
    assert data_of(path) == json.loads(json.dumps(summary))


def test_the_verdict_is_the_first_thing_to_be_read() -> None:
    """Its first sentence is the heading."""
    verdict = "Training waits 3.5 s a step. Use 4 workers.\nThen the step is the limit."
    body = page_of(summary_of(Trace(), verdict=verdict)).partition("</header>")[2].strip()
    assert body.startswith(
        '<section class="verdict"><h2>Training waits 3.5 s a step.</h2>'
        "<p>Use 4 workers.\nThen the step is the limit.</p></section>"
    )
    assert 'class="verdict"' not in page_of(summary_of(Trace()))
    assert first_sentence("One line") == ("One line", "")


# ---- files -------------------------------------------------------------------------------------


def test_an_earlier_report_is_replaced_and_nothing_else(tmp_path) -> None:
    """Another file is left as it is; so is a folder."""
    loader = forebay.DataLoader(Slow())
    path = tmp_path / "run.html"
    path.touch()
    for _ in range(2):
        assert loader.report(path) == path
    other = tmp_path / "thesis.html"
    other.write_text("<!doctype html><p>mine</p>")
    for taken in (other, tmp_path):
        with pytest.raises(forebay.OptionError, match="is not a report made by forebay"):
            loader.report(taken)
    assert other.read_text() == "<!doctype html><p>mine</p>"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run.html", "thesis.html"]


def test_a_write_that_fails_leaves_the_earlier_report(tmp_path, monkeypatch) -> None:
    """The file is complete or not there, and no temporary file stays."""
    report = summary_of(Trace())
    path = write_report(report, tmp_path / "run.html")
    before = path.read_bytes()

    def fail(*names):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("forebay.show.html.os.replace", fail)
    with pytest.raises(OSError, match="No space left"):
        write_report(report, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_does_not_exist_is_named(tmp_path) -> None:
    """Not the temporary file that would have been written there."""
    folder = tmp_path / "missing"
    with pytest.raises(FileNotFoundError) as raised:
        write_report(summary_of(Trace()), folder / "run.html")
    assert raised.value.filename == str(folder)
    assert not folder.exists()


def test_data_cannot_end_its_element() -> None:
    """Nor is anything in it that a browser would read as markup."""
    text = embedded({"a": "</script>&<!--\u2028"})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"a": "</script>&<!--\u2028"}
