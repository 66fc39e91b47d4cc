"""What a notebook shows: small pieces of HTML in which no name can do anything."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import forebay
from forebay.base.formatting import MAX_LENGTH, summary
from forebay.failures import Failure
from forebay.observe.diagnosis import Diagnosis
from forebay.runs.report import PredictionReport, Report

HOSTILE = "<script>alert('1')</script>\"&amp;\x1b[2J\u202e\udcff\n$x$"
TAGS = {"pre", "div", "strong", "table", "tr", "th", "td", "details", "summary", "ul", "li"}

UNKNOWN = Diagnosis("unknown", 0.0, {}, 0.0, None, {}, "There is too little to judge by.")


class Reader(HTMLParser):
    """Collects tags, attributes and text."""

    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.open = set(), set(), []
        self.words = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data + "\n"


def read(shown):
    """Return what a browser makes of an object, and check that it is harmless."""
    source = shown._repr_html_()
    reader = Reader(source)
    assert reader.tags <= TAGS
    assert reader.attributes <= {"style", "class"}
    assert reader.open == []
    source.encode()  # no lone surrogate
    assert "\x1b" not in source and "\u202e" not in source
    assert len(source) < 8000
    return reader.words


def failures(count):
    return tuple(Failure("exception", "ValueError", HOSTILE, source=HOSTILE) for _ in range(count))


def test_a_report_is_shown_with_its_failures():
    """Counts, places, and the first ten failures."""
    report = Report(
        f"out{HOSTILE}",
        *(1234, 12, 34),
        failures(12),
        2.0,
        {"diagnosis": lambda: UNKNOWN, "details": dict},
        metadata_path=Path("out/metadata.parquet"),
    )
    words = read(report)
    assert "1,234" in words
    assert "12 failures" in words
    assert words.count("<script>alert('1')</script>") == 21, "as text, in the output and ten lines"
    assert "… and 2 more" in words


def test_a_report_of_predict_is_shown():
    """Likewise; without failures there is no list."""
    later = {"diagnosis": lambda: UNKNOWN}
    words = read(PredictionReport(Path("out"), 5, 0, 0, (), 100.0, later))
    assert "1 min 40 s" in words
    assert "failure" not in words


@pytest.fixture
def dataset():
    return forebay.from_ids([HOSTILE, "b", "c"], str)


def test_datasets_are_shown(dataset, tmp_path):
    """Their sizes, and the first and the last of their items."""
    assert "3" in read(dataset).splitlines()
    assert "<script>" in read(dataset)
    packed = forebay.PackedSequence([1, 2, 345])
    assert {"int", "24 B", "345"} <= set(read(packed).splitlines())
    assert "0" in read(forebay.PackedSequence([])).splitlines()
    mixed = forebay.mix({HOSTILE: (dataset, 1.0), "b": (dataset, 3.0)})
    assert "3 samples, weight 3: 75.0% of an epoch" in read(mixed)
    cached = forebay.cache(range(7), tmp_path / HOSTILE.replace("/", ""), num_workers=0)
    assert "7" in read(cached).splitlines()


def test_statistics_are_shown():
    """The summary that `print` shows, line by line."""
    loader = forebay.DataLoader(torch.arange(4), batch_size=2)
    list(loader)
    title, *lines = read(loader.statistics()).splitlines()
    assert title == "Statistics"
    assert lines == str(loader.statistics()).splitlines()


def test_a_long_value_is_cut():
    """A row of a manifest may be megabytes."""
    shown = summary("t", {"name": "x" * 10_000})
    assert len(shown) < MAX_LENGTH + 300
    assert "…" in shown


def test_a_diagnosis_is_shown_with_its_sentences_and_attributes() -> None:
    """All of its sentences, and its attributes by name."""
    verdict = f"Training waits 72% of the time. {HOSTILE} {'It takes long. ' * 30}Use 4."
    found = Diagnosis("workers", 0.72, {"num_workers": 4}, 40.7, 95.2, {}, verdict)
    shown = read(found)
    assert "Use 4." in shown
    for value in ("workers", "72%", "num_workers=4", "40.7", "95.2"):
        assert value in shown.split("\n")
    assert "-" in read(UNKNOWN).split("\n")
