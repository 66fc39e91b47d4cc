"""The index of shards as a run: continued, extended, and one bad shard fails alone."""

from __future__ import annotations

import os
import time

import pytest
from click.testing import CliRunner
from written import sample, write_tar, write_tars

import forebay
from forebay.cli import cli
from forebay.runs import index_shards

SAME_CALL = """
    import logging

    logging.basicConfig(level=logging.INFO, force=True)
    report = forebay.index_shards(*sys.argv[1:], num_workers=0, progress=False)
    print(report.done, report.resumed)
"""


@pytest.fixture
def tars(tmp_path):
    """Return a folder of three tars."""
    (tmp_path / "tars").mkdir()
    write_tars(tmp_path / "tars", 60, 3)
    return tmp_path / "tars"


def indexed(tars, **options):
    """Index tars in this process."""
    options = {"num_workers": 0, "progress": False} | options
    return forebay.index_shards(tars, tars.parent / "index", **options)


def opened(tars):
    """Open them by their index."""
    return forebay.open_shards(tars, index=tars.parent / "index", progress=False)


def test_an_index_serves_until_shards_change(tars, capfd):
    """New ones are left out, changed and missing ones an error; another call reads only these."""
    assert indexed(tars).done == 3 and [*opened(tars)] == [sample(at) for at in range(60)]
    write_tar(tars / "train-003.tar", range(60, 70))
    before = opened(tars)
    assert len(before) == 60  # the others are known
    capfd.readouterr()
    forebay.open_shards(tars, index=tars.parent / "index")
    assert "train-003.tar is not in the index" in capfd.readouterr().err
    report = indexed(tars)
    assert (report.done, report.resumed) == (4, 3)
    assert [*opened(tars)] == [sample(at) for at in range(70)]
    os.utime(tars / "train-001.tar", ns=(1, 1))
    with pytest.raises(forebay.ChangedError, match=r"train-001\.tar changed after it was indexed"):
        opened(tars)
    assert indexed(tars).resumed == 3 and len(opened(tars)) == 70
    (tars / "train-000.tar").unlink()
    with pytest.raises(forebay.InputError, match=r"train-000\.tar is in the index.*not there"):
        opened(tars)
    capfd.readouterr()
    assert indexed(tars).resumed == 3 and len(opened(tars)) == 50
    assert "gone from the index: 'train-000.tar';" in capfd.readouterr().err


def test_where_there_is_no_index_the_error_says_how_to_make_one(tars):
    """And one that is damaged is never used."""
    with pytest.raises(forebay.InputError, match=r"there is no index"):
        opened(tars)
    indexed(tars)
    path = tars.parent / "index" / "shards.index"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(forebay.InputError, match=r"shards\.index' is damaged"):
        opened(tars)


def test_an_index_is_verified_and_not_retried(tars):
    """Its own file is no orphan; a shard that failed is tried again by the same command."""
    (tars / "train-003.tar").write_bytes(b"not a tar")
    assert indexed(tars).failed == 1
    index = str(tars.parent / "index")
    verified = CliRunner().invoke(cli, ["verify", index], standalone_mode=False)
    assert verified.return_value == 0 and " 0 orphans" in verified.output, verified.output
    (tars.parent / "index" / "mine.txt").write_text("of somebody else")
    verified = CliRunner().invoke(cli, ["verify", index], standalone_mode=False)
    assert "orphan   mine.txt" in verified.output and "shards.index" not in verified.output
    retried = CliRunner().invoke(cli, ["retry", index], standalone_mode=False)
    assert "Repeat forebay index" in str(retried.exception)


@pytest.mark.slow
def test_the_command_indexes_shards_with_workers(tars):
    """With the exit code of other runs."""
    call = [str(tars / "train-{000..002}.tar"), str(tars.parent / "index"), "--num-workers", "1"]
    result = CliRunner().invoke(cli, ["index", *call, "--quiet"], standalone_mode=False)
    assert result.return_value == 0, result.output
    assert opened(tars)[59] == sample(59)


@pytest.mark.slow
def test_the_same_call_waits_for_one_under_way(tars, tmp_path, script, monkeypatch):
    """Ranks that index together: one does it, and the others find it done."""
    work, others = index_shards.index_shard, []

    def meanwhile(*given):
        if not others:
            others.append(script(SAME_CALL, tars, tmp_path / "index"))
            said = tmp_path / "stderr"
            while not (said.exists() and said.read_text()):
                time.sleep(0.01)
        return work(*given)

    monkeypatch.setattr(index_shards, "index_shard", meanwhile)
    assert indexed(tars).resumed == 0
    code, out, err = others[0].end()
    assert (code, out) == (0, "3 3\n") and "the same call is running" in err
    assert [*opened(tars)] == [sample(at) for at in range(60)]
