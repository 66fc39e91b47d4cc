"""Parts of a page: every label is escaped."""

from __future__ import annotations

from self_contained import check_self_contained

from forebay.show.html import page_of

HOSTILE = '<script>alert("x")</script>&\''


def drawn(*parts: tuple[str, dict[str, object]], title: str = "x") -> str:
    """Return a page with some parts."""
    report = {"title": title, "subtitle": title, "verdict": title, "figures": [[title, title]]}
    return page_of({**report, "sections": [(title, parts)], "settings": {title: title}})


def test_every_label_is_escaped() -> None:
    """Names come from users: of datasets, workers, errors."""
    html = drawn(
        ("bars", {"title": HOSTILE, "bars": [(HOSTILE, 3, HOSTILE)], "note": HOSTILE}),
        ("table", {"names": [HOSTILE], "rows": [[HOSTILE], [HOSTILE]], "code": [0]}),
        ("text", {"text": HOSTILE}),
        title=HOSTILE,
    )
    check_self_contained(html)
    assert html.count("<script") == 1  # the data
    assert html.count("&lt;script&gt;") == 17  # each once, the title in two places
