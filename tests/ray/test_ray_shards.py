"""index_shards on a cluster: the index of a local run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# Shards are written as for the tests of their formats.
sys.path[:0] = [str(Path(__file__).parents[1] / "shards")]
from written import sample, write_tars  # noqa: E402

import forebay  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]


def test_shards_are_indexed_by_all_nodes(tmp_path):
    """One that is damaged fails alone; the same call again reads only what is new."""
    tars = tmp_path / "tars"
    tars.mkdir()
    write_tars(tars, 90, 3)
    (tars / "train-001.tar").write_bytes(b"x" * 2000)
    for backend, index in ("process", "local"), ("ray", "ray"):
        report = forebay.index_shards(
            tars, tmp_path / index, backend=backend, retries=0, progress=False
        )
        assert (report.done, report.failed) == (2, 1)
        assert "is no number" in str(report.failures[0])
    written = [tmp_path / each / "shards.index" for each in ("local", "ray")]
    assert written[0].read_bytes() == written[1].read_bytes()
    (tars / "train-001.tar").unlink()
    write_tars(tars, 90, 3)
    report = forebay.index_shards(tars, tmp_path / "ray", backend="ray", progress=False)
    assert (report.done, report.failed) == (3, 0)
    samples = forebay.open_shards(tars, index=tmp_path / "ray", progress=False)
    assert [*samples] == [sample(at) for at in range(90)]
