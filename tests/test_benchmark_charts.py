"""Stored results are what was printed, and their pictures can be read on light and dark pages."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from benchmarks.charts import charts, number, page
from benchmarks.results import parse
from benchmarks.svg import COLOURS
from benchmarks.timeline import DATA, draw

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[1]
STORED = ROOT / "docs" / "benchmarks" / "results.json"

PRINTED = """\
machine    A processor, 2 cores; load before: 0.57, 0.43, 0.18
kernel     6.18; file system ext4
python     3.11.7
versions   forebay 0.1.0, torch 2.13.0

tuples of five Python numbers, batch 1024; 2 workers
|                    | k samples/s | x torch | runs |
| ------------------ | ----------- | ------- | ---- |
| torch DataLoader   |       200   |    1.00 |    3 |
| forebay.DataLoader |     1,400   |    7.00 |    3 |
| Grain              | not installed |       |      |

epochs of 10 batches; batch 8
|                  | waits | in all |
| ---------------- | ----- | ------ |
| ideal schedule   |  0.5% |        |
| torch DataLoader | 21.0% | 12.0 s |

waits: in iter() and next(),
of all the time.

first letters & <others>
|       | killed | then      |
| ----- | ------ | --------- |
| torch | worker | loses all |

57 s in all
"""
RESULTS = parse(PRINTED, "2026-11-22")


def test_results_are_what_was_printed():
    """Titles, cells and notes, with the machine and the day."""
    assert RESULTS["date"] == "2026-11-22"
    assert RESULTS["machine"]["versions"] == "forebay 0.1.0, torch 2.13.0"
    first, second, third = RESULTS["tables"]
    assert first["title"] == "tuples of five Python numbers, batch 1024; 2 workers"
    assert first["columns"] == ["", "k samples/s", "x torch", "runs"]
    assert first["rows"][1] == ["forebay.DataLoader", "1,400", "7.00", "3"]
    assert first["note"] == ""
    assert second["note"] == "waits: in iter() and next(), of all the time."
    assert third["note"] == ""


def test_a_chart_shows_each_row_in_proportion():
    """Seven times the rate is seven times the length; a row without a number has none."""
    drawn = charts(RESULTS)
    assert list(drawn) == [
        "01-tuples-of-five-python-numbers-batch.svg",
        "02-epochs-of-10-batches-batch-8.svg",
    ]
    chart = ET.fromstring(drawn["01-tuples-of-five-python-numbers-batch.svg"])
    bars = [each for each in chart.iter() if each.tag.endswith("rect")][1:]
    lengths = [float(bar.attrib["width"]) for bar in bars]
    assert lengths[1] == pytest.approx(7 * lengths[0], rel=0.01)
    assert lengths[2] == 0
    assert [bar.attrib["class"] for bar in bars] == ["other", "main", "other"]
    words = [each.text for each in chart.iter() if each.tag.endswith("text")]
    assert "k samples/s: more is better" in words
    assert "not installed" in words


def test_a_chart_of_times_or_shares_says_that_less_is_better():
    """The direction stands on the chart."""
    assert "waits: less is better" in charts(RESULTS)["02-epochs-of-10-batches-batch-8.svg"]


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("1,400", 1400),
        ("17.1 k", 17100),
        ("21.0%", 21),
        ("0.24 s", 0.24),
        ("fails", None),
        ("", None),
    ],
)
def test_the_number_of_a_cell(cell: str, value: float | None):
    """Units are left out, thousands counted, words no number."""
    assert number(cell) == value


def test_the_page_keeps_its_own_text_and_takes_the_results_once():
    """Drawing twice gives the same page."""
    text = "before\n<!-- charts: begin -->\nold\n<!-- charts: end -->\nafter\n"
    drawn = page(text, RESULTS)
    assert drawn.startswith("before\n")
    assert drawn.endswith("\nafter\n")
    assert "old" not in drawn
    assert "| forebay.DataLoader | 1,400 | 7.00 | 3 |" in drawn
    assert "](02-epochs-of-10-batches-batch-8.svg)" in drawn
    assert page(drawn, RESULTS) == drawn


def test_the_stored_charts_are_drawn_from_the_stored_results():
    """No chart shows anything else than the file beside it."""
    found = {path.name: path.read_text() for path in STORED.parent.glob("*.svg")}
    if not STORED.exists():
        assert found == {}
        return
    results = json.loads(STORED.read_text())
    assert found == charts(results), "run python -m benchmarks.charts"
    text = (STORED.parent / "index.md").read_text()
    assert text == page(text, results)


def test_the_readmes_picture_is_drawn_from_its_recording():
    """No figure of it was written by hand."""
    drawn = draw(json.loads((ROOT / DATA).read_text()))
    assert (ROOT / DATA).with_suffix(".svg").read_text() == drawn


def test_a_wait_is_what_lies_between_steps():
    """Steps of 0.5 s, of which each begins 0.5 s after the one before has ended."""
    steps = [[at + 0.5, at + 1.0] for at in range(5)]
    recorded = {
        "steps": {"torch": steps, "forebay": [[0.0, 2.0], [2.0, 4.0]]},
        "training": "some training",
        "cores": 2,
        "versions": {"torch": "2.13"},
    }
    drawn = draw(recorded, seconds=4.0)
    ET.fromstring(drawn)
    assert "waits 50% of the time, 4 steps" in drawn
    assert "waits 0% of the time, 2 steps" in drawn


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_all_colours_can_be_told_from_the_background(scheme: int):
    """Text has the contrast that WCAG asks of text, bars that of graphics."""
    page = _luminance(COLOURS["page"][scheme])
    for kind, fills in COLOURS.items():
        if kind != "page":
            darker, lighter = sorted((page, _luminance(fills[scheme])))
            least = 4.5 if kind in ("ink", "note") else 3.0
            assert (lighter + 0.05) / (darker + 0.05) >= least, (kind, fills[scheme])


def _luminance(colour: str) -> float:
    assert re.fullmatch("#[0-9a-f]{6}", colour)
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
