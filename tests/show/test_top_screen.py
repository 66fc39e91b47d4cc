"""The text of `forebay top`: what is shown in which width, and that hostile pages are harmless."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.observe import record as tracing
from forebay.observe.record import Trace
from forebay.show.live_page import SECONDS, RecentWork, add_seconds
from forebay.show.top import ASCII, UNICODE, View, screen, signs_for
from timings import timing

LOADER = {
    "kind": "loader",
    "pid": 4711,
    "program": "train.py",
    "title": "DataLoader(Images(50,000), batch_size=64, num_workers=2)",
    "began": 0.0,
    "at": 100.0,
    "rate": 41.2,
    "num_workers": 2,
    "restarts": 0,
    "verdict": "Training waits 38% of the time. 2 workers are too few. Use 4.",
    "epoch": 3,
    "batch": 1204,
    "ready": 12,
    "held_bytes": 500_000_000,
    "max_bytes": 1_000_000_000,
    "max_batches": None,
    "refill_below": 0.8,
    "wait_share": 0.38,
    "waits": "0" * 20 + "9" * 10,
    "lanes": ["9" * 30, "0" * 15 + "9" * 15],
}
RUN = {
    "kind": "preprocess",
    "pid": 12,
    "program": "prepare.py",
    "title": "/data/out",
    "began": 40.0,
    "at": 100.0,
    "rate": 10.0,
    "num_workers": 8,
    "unit": "input",
    "done": 1000,
    "failed": 10,
    "total": 2010,
}


def shown(*pages, columns=100, signs=UNICODE, now=100.0, rows=None):
    return screen([View.of(each) for each in pages], now, columns, signs, rows)


def test_a_loader_is_shown_with_its_buffer_waits_and_workers() -> None:
    """Who, what, why; the buffer with its low mark; waits and workers of the last seconds."""
    assert shown(LOADER, now=101.0) == [
        "train.py · pid 4711 · 1 min 41 s",
        "DataLoader(Images(50,000), batch_size=64, num_workers=2)",
        "Training waits 38% of the time. 2 workers are too few. Use 4.",
        "epoch 3, batch 1,204 · last 30 s: 41.2 batches/s, training waited 38%",
        "buffer   " + "█" * 15 + "░" * 9 + "│" + "░" * 5 + " 500 MB of 1 GB, 12 ready",
        "waits    " + " " * 20 + "█" * 10 + "  38%",
        "worker 0 " + "█" * 30 + " 100%",
        "worker 1 " + " " * 15 + "█" * 15 + "  50%",
    ]


def test_a_run_is_shown_with_its_counts_and_workers() -> None:
    """What `forebay status` tells, and the workers."""
    assert shown(RUN) == [
        "prepare.py · pid 12 · 1 min",
        "preprocess /data/out",
        "1,000 of 2,010 inputs done · 10 failed · 10 inputs/s · 1 min 40 s left · 8 workers",
    ]


def test_plain_characters_where_the_terminal_has_no_others() -> None:
    """The same in ASCII."""
    text = "\n".join(shown(LOADER, RUN, signs=ASCII))
    assert text.isascii()
    assert "buffer   " + "#" * 15 + "-" * 9 + "|" + "-" * 5 in text
    assert signs_for("ascii") is signs_for(None) is signs_for("latin-1") is ASCII
    assert signs_for("utf-8") is UNICODE


def test_a_loader_that_is_quiet() -> None:
    """Nothing was made or taken for a while: the training may validate, or hang."""
    assert "nothing new for 40 s" in shown(LOADER, now=140.0)[0]
    assert "nothing new" not in shown(LOADER, now=103.0)[0]


@pytest.mark.parametrize("columns", [1, 20, 40, 60, 80, 300])
def test_no_line_is_longer_than_the_terminal(columns) -> None:
    """However narrow it is."""
    for signs in (UNICODE, ASCII):
        assert all(
            len(line) <= columns for line in shown(LOADER, RUN, columns=columns, signs=signs)
        )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.slow
@given(st.sampled_from([LOADER, RUN]), st.data())
def test_a_hostile_page_is_only_text(page, data) -> None:
    """Any value in any place: no error, no control character, nothing longer than the terminal."""
    changed = dict(page)
    for name in data.draw(st.sets(st.sampled_from(sorted(page)))):
        changed[name] = data.draw(JSON)
    if changed["kind"] != page["kind"]:
        assert View.of(changed) is None or isinstance(changed["kind"], str)
        return
    for line in shown(changed, columns=80):
        assert line.isprintable()
        assert len(line) <= 80


def test_terminal_escapes_are_removed() -> None:
    """A name cannot move the cursor, nor change the direction of the text."""
    (_, title, *_) = shown(LOADER | {"title": "a\x1b[2J\x07b\u202ec\nd\x9b1m"})
    assert title == r"a\x1b[2J\x07b\u202ec d\x9b1m"


# ---- the last seconds --------------------------------------------------------------------------


@pytest.fixture
def trace(monkeypatch):
    """A trace that began at 0, with two workers."""
    monkeypatch.setattr(tracing.time, "perf_counter", lambda: 0.0)
    trace = Trace()
    trace.num_workers = 2
    return trace


def test_only_the_last_seconds_are_kept(trace) -> None:
    """For a week, the digits stay `SECONDS` long, and what is old is forgotten."""
    recent = RecentWork()
    for second in range(1, 200):
        trace.made(timing(0, second - 0.01, 0.5), 10)
        trace.taken(second - 0.5, 0.25, ready=0)
        found = recent.update(trace, float(second))
    assert found["lanes"] == ["4" * SECONDS, "0" * SECONDS]
    assert found["wait_share"] == pytest.approx(0.25)
    assert found["rate"] == pytest.approx(1.0)
    assert len(recent._waits) <= SECONDS + 1


@given(
    st.floats(0, 40),
    st.floats(0, 100),
    st.floats(0.1, 40),
    st.dictionaries(st.integers(0, 60), st.floats(0, 1), max_size=5),
)
def test_no_second_has_more_than_a_second(seconds, begin, length, row) -> None:
    """What was there stays below one second a second, and no more is added than there was."""
    end = begin + length
    row = {second: share for second, share in row.items() if second < int(begin)}
    before, oldest = dict(row), int(end) - SECONDS
    add_seconds(row, seconds, begin, end, oldest)
    assert all(oldest <= second <= end and share <= 1 + 1e-6 for second, share in row.items())
    kept = sum(share for second, share in before.items() if second >= oldest)
    assert sum(row.values()) <= kept + seconds + 1e-6
