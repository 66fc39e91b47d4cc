"""Charts and columns: what is drawn, where there are gaps, and that every label is escaped."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.show.html import (
    Mark,
    Series,
    bars_chart,
    ceiling,
    columns_chart,
    lanes_chart,
    time_ticks,
)
from forebay.show.report import group_size, joined, significant, spread_back, summed

HOSTILE = '<script>alert("x")</script>&\''


def paths(html: str, style: str) -> list[str]:
    """Return the paths of a class."""
    return re.findall(rf'<path class="{style}" d="([^"]*)"', html)


def chart(*series: Series, limit: float = 10.0, **more: object) -> str:
    return columns_chart("Title", series, time_ticks(10), unit="batches", limit=limit, **more)


def test_a_line_follows_its_columns() -> None:
    """Four columns of 250 units each; equal neighbours are one stroke; 10 is at the top."""
    (line,) = paths(chart(Series("made", "made", [0, 10, 10, 5])), "made line")
    assert line == "M0 100h250V0h500V50h250"


def test_a_gap_is_left_out() -> None:
    """A missing column ends the line, and the next one begins behind it."""
    (line,) = paths(chart(Series("made", "made", [5, None, 10, None])), "made line")
    assert line == "M0 50h250M500 0h250"


def test_a_band_is_closed_along_its_lower_edge() -> None:
    """It goes right along the upper values and left along the lower ones."""
    band = Series("ready", "ready", [10, 5], "band", [5, 0])
    assert paths(chart(band), "ready area") == ["M0 0h500V50h500V100h-500V50h-500Z"]


def test_values_above_the_limit_are_cut_off() -> None:
    """A single high column does not flatten the others."""
    (line,) = paths(chart(Series("wanted", "wanted", [1000.0, 5.0])), "wanted line")
    assert line == "M0 0h500V50h500"


def test_marks_and_events_are_drawn_where_they_are() -> None:
    """A limit is a horizontal line with its label; a decision a vertical one."""
    html = chart(Series("a", "made", [1.0]), marks=[Mark(5.0, "max=5")], events=[0.25])
    assert paths(html, "mark") == ["M0 50.0h1000"]
    assert paths(html, "event") == ["M250 0v100"]
    assert "max=5" in html


def test_every_label_is_escaped() -> None:
    """Names come from users: of datasets, workers, errors."""
    html = columns_chart(
        HOSTILE,
        [Series(HOSTILE, "made", [1.0])],
        [(0.0, HOSTILE)],
        unit=HOSTILE,
        limit=1.0,
        marks=[Mark(0.5, HOSTILE)],
    )
    html += lanes_chart(HOSTILE, [(HOSTILE, [0.5], HOSTILE)], [(0.0, HOSTILE)])
    html += bars_chart(HOSTILE, [(HOSTILE, 3, "wait")], HOSTILE)
    assert "<script" not in html
    assert html.count("&lt;script&gt;") >= 10


@pytest.mark.parametrize(
    ("value", "top"), [(0, 1), (0.7, 0.8), (1, 1), (3, 4), (41, 50), (99, 100), (float("inf"), 1)]
)
def test_an_axis_ends_at_a_round_number(value: float, top: float) -> None:
    """Never below what is drawn."""
    assert ceiling(value) == pytest.approx(top)


@pytest.mark.parametrize(
    ("seconds", "last"),
    [
        (0.0, "0 s"),
        (1.0, "1 s"),
        (10.0, "10 s"),
        (90.0, "1 min 30 s"),
        (4000.0, "1 h"),
        (604_800, "6 d"),
    ],
)
def test_times_are_labelled_in_the_unit_of_their_size(seconds: float, last: str) -> None:
    """A second, a week: about five labels, none behind the end."""
    ticks = time_ticks(seconds)
    assert ticks[-1][1] == last
    assert 1 <= len(ticks) <= 8
    assert all(0 <= at <= 1 for at, _ in ticks)


# ---- columns -----------------------------------------------------------------------------------


def test_long_work_is_spread_over_the_spans_before() -> None:
    """A batch of 5 s that ended in the last of eight spans of 1 s was being made in five."""
    assert spread_back([0, 0, 0, 0, 0, 0, 0, 5.0], [1.0] * 8) == [0, 0, 0, 1, 1, 1, 1, 1]


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 2)), max_size=30),
)
def test_spreading_neither_adds_nor_exceeds(spans: list[tuple[float, float]]) -> None:
    """No span has more than its length, and nothing is added."""
    seconds, lengths = [each for each, _ in spans], [length for _, length in spans]
    spread = spread_back(seconds, lengths)
    assert all(each <= length for each, length in zip(spread, lengths, strict=True))
    assert sum(spread) <= sum(seconds) + 1e-6
    if sum(seconds[:1]) <= sum(lengths[:1]) and all(map(float.__le__, seconds, lengths)):
        assert sum(spread) == pytest.approx(sum(seconds))


def test_spans_are_joined() -> None:
    """Sums, and extremes that skip what is not known."""
    assert group_size(512, 160) == 4
    assert group_size(0, 160) == 1
    assert summed([1, 2, 3], 2) == [3, 3]
    assert joined([None, 2, None], 2, min) == [2, None]
    assert joined([1, 2, None], 2) == [2, None]
    assert significant(123456.0) == 123500
