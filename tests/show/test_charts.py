"""Charts and columns: what is drawn, where there are gaps, and that every label is escaped."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from self_contained import check_self_contained

from forebay.show.html import ceiling, page_of, time_ticks
from forebay.show.report import significant
from forebay.show.timeline import by_column, group_size, spread_back

HOSTILE = '<script>alert("x")</script>&\''


def paths(html: str, style: str) -> list[str]:
    """Return the paths of a class."""
    return re.findall(rf'<path class="{style}" d="([^"]*)"', html)


def drawn(*parts: tuple[str, dict[str, object]], title: str = "x") -> str:
    """Return a page with some parts."""
    report = {"title": title, "subtitle": title, "verdict": title, "figures": [[title, title]]}
    return page_of({**report, "sections": [(title, parts)], "settings": {title: title}})


def chart(*series: tuple[object, ...], **more: object) -> str:
    """Return a page with a chart whose axis ends at 10."""
    known = {"title": "Title", "unit": "batches", "seconds": 10, "limit": 10.0, "series": series}
    return drawn(("columns", {**known, **more}))


def test_a_line_follows_its_columns() -> None:
    """Four columns of 250 units each; equal neighbours are one stroke; 10 is at the top."""
    (line,) = paths(chart(("made", "made", "line", [0, 10, 10, 5])), "made line")
    assert line == "M0 100h250V0h500V50h250"


def test_a_gap_is_left_out() -> None:
    """A missing column ends the line, and the next one begins behind it."""
    (line,) = paths(chart(("made", "made", "line", [5, None, 10, None])), "made line")
    assert line == "M0 50h250M500 0h250"


def test_a_band_is_closed_along_its_lower_edge() -> None:
    """It goes right along the upper values and left along the lower ones."""
    band = "ready", "ready", "band", [10, 5], [5, 0]
    assert paths(chart(band), "ready area") == ["M0 0h500V50h500V100h-500V50h-500Z"]


def test_values_above_the_limit_are_cut_off() -> None:
    """A single high column does not flatten the others."""
    (line,) = paths(chart(("wanted", "wanted", "line", [1000.0, 5.0])), "wanted line")
    assert line == "M0 0h500V50h500"


def test_marks_and_events_are_drawn_where_they_are() -> None:
    """A limit is a horizontal line with its label; a decision a vertical one."""
    html = chart(("a", "made", "line", [1.0]), marks=[(5.0, "max=5")], events=[0.25])
    assert paths(html, "mark") == ["M0 50.0h1000"]
    assert paths(html, "event") == ["M250 0v100"]
    assert "max=5" in html


def test_every_label_is_escaped() -> None:
    """Names come from users: of datasets, workers, errors."""
    series, known = (HOSTILE, HOSTILE, "line", [1.0]), {"title": HOSTILE, "seconds": 1}
    columns = {"unit": HOSTILE, "limit": 1.0, "series": [series], "marks": [(0.5, HOSTILE)]}
    html = drawn(
        ("columns", {**known, **columns}),
        ("lanes", {**known, "lanes": {HOSTILE: [0.5]}}),
        ("bars", {"title": HOSTILE, "bars": [(HOSTILE, 3, HOSTILE)], "note": HOSTILE}),
        ("table", {"names": [HOSTILE], "rows": [[HOSTILE], [HOSTILE]], "code": [0]}),
        ("text", {"text": HOSTILE}),
        title=HOSTILE,
    )
    check_self_contained(html)
    assert html.count("<script") == 1  # the data
    assert html.count("&lt;script&gt;") >= 25


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
    assert by_column([1, 2, 3], 2) == [3, 3]
    assert by_column([None, 2, None], 2, min) == [2, None]
    assert by_column([1, 2, None], 2, max) == [2, None]
    assert significant(123456.0) == 123500
