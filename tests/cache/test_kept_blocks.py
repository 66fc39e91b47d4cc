"""Blocks that stay on disk: a file for each, shared by sets and jobs, never taken for another."""

from __future__ import annotations

import os
import threading
from itertools import count
from zlib import crc32

import numpy as np
import pytest

import forebay
from forebay.caching import kept_blocks
from forebay.caching.kept_blocks import KeptBlocks

PAGE = 4096
LENGTHS = np.array([PAGE] * 40 + [100], np.int64)
LIMIT = 20 * PAGE


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Make each file newer than those before it, by a clock of the test."""
    ticks = count(1_000_000)
    monkeypatch.setattr(kept_blocks.time, "time", lambda: float(next(ticks)))
    utime, replace = os.utime, os.replace
    monkeypatch.setattr(
        kept_blocks.os, "utime", lambda file, at=None: utime(file, at or (next(ticks),) * 2)
    )

    def replaced(old, new):
        utime(old, (next(ticks),) * 2)
        replace(old, new)

    monkeypatch.setattr(kept_blocks.os, "replace", replaced)


def opened(folder, identity="a", limit=LIMIT):
    """Open the blocks of a set in a directory."""
    return KeptBlocks(folder, identity, limit, LENGTHS)


def data_of(block, byte=0):
    return memoryview(bytes([block + byte]) * int(LENGTHS[block]))


def content(blocks, block, checksum=None):
    """Return what is read of a block, or None."""
    view = memoryview(bytearray(int(LENGTHS[block])))
    return bytes(view) if blocks.read(block, view, checksum) else None


def fill(blocks, numbers, byte=0):
    """Write blocks; return which are there."""
    for number in numbers:
        blocks.add(number, data_of(number, byte))
    return {*blocks.on_disk}


def used(folder):
    return sum(-(-path.stat().st_size // PAGE) * PAGE for path in folder.iterdir())


def test_blocks_are_there_for_the_next_job(tmp_path):
    """As many as fit: the first stay; a file that a kill left has no name of a block."""
    assert fill(opened(tmp_path), range(30)) == {*range(20)}
    assert used(tmp_path) == LIMIT
    again = opened(tmp_path)
    assert {*again.on_disk} == {*range(20)}
    assert all(content(again, each) == data_of(each) for each in range(20))
    assert content(again, 25) is None


@pytest.mark.parametrize("damage", ["cut", "scribbled", "longer", "gone", "link"])
def test_a_damaged_block_is_forgotten_and_written_again(tmp_path, damage):
    """Whoever wrote it; it costs a request."""
    blocks = opened(tmp_path)
    fill(blocks, [3])
    (path,) = tmp_path.iterdir()
    if damage == "scribbled":
        path.write_bytes(b"x" * PAGE)
    elif damage in ("gone", "link"):
        path.rename(tmp_path / "elsewhere")
        if damage == "link":
            path.symlink_to(tmp_path / "elsewhere")
    else:
        os.truncate(path, {"cut": 100, "longer": 2 * PAGE}[damage])
    assert content(opened(tmp_path), 3) is None
    assert content(blocks, 3) is None and not blocks.on_disk
    assert fill(blocks, [3]) == {3}
    assert content(opened(tmp_path), 3) == data_of(3)


def test_sets_and_their_successors_share_a_directory_without_seeing_each_others_blocks(tmp_path):
    """Also where a block of both has the same number, length and bytes."""
    one, other = opened(tmp_path), opened(tmp_path, "b")
    fill(one, range(5))
    fill(other, range(5), byte=100)
    assert [content(one, each) for each in range(5)] == [data_of(each) for each in range(5)]
    assert [content(other, each) for each in range(5)] == [data_of(each, 100) for each in range(5)]
    assert not opened(tmp_path, "c").on_disk
    assert content(one, 2, crc32(data_of(2))) == data_of(2)
    assert content(one, 2, 7) is None  # the index has another checksum


def test_the_oldest_files_that_nobody_uses_make_room(tmp_path):
    """Those of other sets at once, its own after two epochs without use."""
    fill(opened(tmp_path, "before"), range(20))
    now = opened(tmp_path)
    assert fill(now, range(8)) == {*range(8)}
    assert {*opened(tmp_path, "before").on_disk} == {*range(8, 20)}
    assert fill(now, range(30)) == {*range(20)}
    for _ in range(3):
        now.begin_epoch()
        assert all(content(now, each) for each in range(10))
    assert fill(now, range(20, 30)) == {*range(10), *range(20, 30)}
    assert used(tmp_path) == LIMIT


def test_two_jobs_at_once_stay_within_the_limit_and_share_what_each_writes(tmp_path, monkeypatch):
    """The ranks of a node, which look less often than they write."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    jobs = [opened(tmp_path) for _ in range(4)]
    for block in range(40):
        jobs[block % 4].add(block, data_of(block))
        assert used(tmp_path) <= LIMIT
    assert used(tmp_path) > LIMIT / 2
    assert len(opened(tmp_path).on_disk) == len([*tmp_path.iterdir()])
    threads = [threading.Thread(target=fill, args=(job, range(40))) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert used(tmp_path) <= LIMIT


def test_what_else_is_in_the_directory_stays(tmp_path):
    """Only names of blocks are looked at, and files that a kill left are deleted in time."""
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "0123456789abcdef-1-00000000.block.x").write_text("mine")
    left = tmp_path / "0123456789abcdef-1-00000000.block.0123456789abcdef"
    left.write_bytes(bytes(PAGE))
    os.utime(left, (0, 0))
    fill(opened(tmp_path), range(20))
    there = {path.name for path in tmp_path.iterdir()}
    assert {"mine.txt", "0123456789abcdef-1-00000000.block.x"} < there and len(there) == 22


def test_a_disk_that_cannot_be_written_keeps_nothing_and_says_why(tmp_path, monkeypatch):
    """Such as one that is full; reading goes on."""

    def full(*_):
        raise OSError(28, "No space left on device")

    blocks = opened(tmp_path)
    monkeypatch.setattr(kept_blocks.os, "replace", full)
    assert fill(blocks, [1]) == set() and [*tmp_path.iterdir()] == []
    assert blocks.why == "No space left on device"


def test_no_space_is_an_error_at_the_start(tmp_path):
    """It names the directory, and what to do."""
    with pytest.raises(forebay.OutputError, match="bytes are free") as raised:
        opened(tmp_path / "new", limit=1 << 60)
    assert "smaller disk=" in str(raised.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path):
    """Whose owner could put anything there."""
    (tmp_path / "other").mkdir()
    os.chown(tmp_path / "other", 12345, 12345)
    with pytest.raises(forebay.OutputError, match="another user owns it"):
        opened(tmp_path / "other")
