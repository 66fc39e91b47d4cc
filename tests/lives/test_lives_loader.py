"""Lives of loaders in which every pair of values, and of steps in a row, occurs."""

from __future__ import annotations

import pytest

from lives import loader_lives
from lives.drawing import covering_lives
from lives.host import live_all
from lives.life import Life
from lives.loader_oracle import ROWS, STREAMS
from lives.loader_sets import STORED, is_remote

# A machine that runs the suite is busy.
PATIENCE = 4.0


def group_of(life: Life) -> str:
    """Return which of the tests below lives a life."""
    data = life.setup["data"]
    if data in STORED:
        return "buckets" if is_remote(life.setup["place"]) else "files"
    return "streams" if data in STREAMS else "rows" if data in (*ROWS, "mix", "columns") else "map"


def failed(group: str, prefix: str) -> str:
    """Live the lives of a group, two at once; return the reports of those that failed."""
    lives = [each for each in covering_lives(loader_lives, prefix) if group_of(each) == group]
    verdicts = live_all(loader_lives, lives, 2, PATIENCE)
    return "\n\n".join(each.report() for each in verdicts if each.kind != "right")


@pytest.mark.slow
def test_lives_of_map_style_datasets_are_right() -> None:
    """Whatever two things meet, batches are what the documents say, and nothing is left."""
    assert not failed("map", "p")


@pytest.mark.slow
def test_lives_of_streams_are_right() -> None:
    """The same for iterable datasets."""
    assert not failed("streams", "p")


@pytest.mark.slow
def test_lives_of_rows_and_mixtures_are_right() -> None:
    """The same for tables by column, rows packed or grouped by length, and mixtures."""
    assert not failed("rows", "p")


@pytest.mark.slow
def test_lives_of_local_caches_and_shards_are_right() -> None:
    """The same for what is read from files."""
    assert not failed("files", "p")


@pytest.mark.slow
def test_lives_of_buckets_are_right() -> None:
    """The same for what is read from a bucket, with and without blocks kept on disk."""
    assert not failed("buckets", "p")


@pytest.mark.thorough
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("group", ["map", "streams", "rows", "files", "buckets"])
def test_loader_lives_of_every_triple_are_right(group: str) -> None:
    """Whatever three things meet."""
    assert not failed(group, "t")
