"""Charts and columns: what is drawn, where there are gaps, and that every label is escaped."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from self_contained import check_self_contained

from forebay.show.html import page_of
from forebay.show.timeline import spread_back

HOSTILE = '<script>alert("x")</script>&\''


def drawn(*parts: tuple[str, dict[str, object]], title: str = "x") -> str:
    """Return a page with some parts."""
    report = {"title": title, "subtitle": title, "verdict": title, "figures": [[title, title]]}
    return page_of({**report, "sections": [(title, parts)], "settings": {title: title}})


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


# ---- columns -----------------------------------------------------------------------------------


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
