"""Blocks that stay on disk: within the limit, adopted by whoever locks their file, never torn."""

from __future__ import annotations

import os
from contextlib import closing, contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import forebay
from forebay.caching.lane_files import PAGE, Extents, LaneFiles, rounded, shares_of

LENGTHS = np.array([PAGE * 3, 100, PAGE + 1, PAGE, 5000, 70_000], np.int64)
LIMIT = 1 << 20


@contextmanager
def opened(folder, nbytes=LIMIT, identity="a", lanes=(0,), each=None):
    """Open the files of a folder, and lock those of some lanes."""
    with closing(LaneFiles(folder, identity, nbytes, LENGTHS)) as files:
        shares = dict.fromkeys(lanes, each or nbytes // len(lanes))
        files.missing = files.claim(shares, len(LENGTHS))
        yield files


def kept(folder, **arguments):
    """Return the blocks that are there, and where each begins in its file."""
    with opened(folder, **arguments) as files:
        return {block: file.blocks[block][0] for block, file in files.on_disk.items()}


def put(files, block, lane=0):
    """Write a block."""
    file = files.by_lane[lane]
    place = file.take(block)
    file.write(place, memoryview(bytes([block + 1]) * int(LENGTHS[block])))
    files.add(block, file, place, 7 + block)


def content(files, block):
    """Return what is read of a block, or None."""
    file, view = files.on_disk[block], memoryview(bytearray(int(LENGTHS[block])))
    return bytes(view) if file.read(file.blocks[block][0], view) else None


def used(folder):
    """Return what files take on disk."""
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


def test_blocks_are_there_for_the_next_job(tmp_path):
    """Also those of a job that was killed, except one whose record was not written yet."""
    with opened(tmp_path) as files:
        put(files, 5)
        put(files, 1)
        torn = files.by_lane[0]
        torn.write(torn.take(0), memoryview(b"torn"))
    with opened(tmp_path) as again:
        assert again.on_disk.keys() == {1, 5}
        assert content(again, 1) == b"\2" * 100
        put(again, 0)
    assert kept(tmp_path).keys() == {0, 1, 5}


def test_a_lane_that_another_process_has_is_left_alone(tmp_path):
    """The others are locked; when it has ended, whoever asks next adopts its blocks."""
    with opened(tmp_path, lanes=(0, 1)) as one:
        put(one, 3, lane=1)
        with opened(tmp_path, lanes=(1, 2), each=PAGE * 4) as other:
            assert other.missing == 1 and other.by_lane.keys() == {2}
            assert other.on_disk == {}
            other.find()
            assert content(other, 3) == b"\4" * PAGE and not other.on_disk[3].is_locked
            other.remove(3)
    assert kept(tmp_path, lanes=(1,)).keys() == {3}


def test_the_files_of_all_lanes_never_take_more_than_the_limit(tmp_path):
    """The space is taken at once; files of other lanes make room, unless they are locked."""
    limit = 160 * PAGE
    with opened(tmp_path, limit, lanes=range(4)) as files:
        assert limit / 2 < used(tmp_path) <= limit
        put(files, 5, lane=3)
        with opened(tmp_path, limit, lanes=(7,), each=limit) as late:
            assert late.missing == 0 and used(tmp_path) <= limit
            assert late.by_lane[7].take(0) is None
    assert kept(tmp_path, nbytes=limit, lanes=(2, 3), each=limit // 2).keys() == {5}
    assert used(tmp_path) <= limit
    assert sorted(path.name for path in tmp_path.glob("*.blocks")) == [
        "lane-002.blocks",
        "lane-003.blocks",
    ]


def test_a_block_makes_place_for_others(tmp_path):
    """Its bytes are free, and the next job knows that it is gone."""
    limit = 32 * PAGE
    with opened(tmp_path, limit) as files:
        put(files, 5)
        assert files.by_lane[0].take(5) is None
        files.remove(5)
        put(files, 5)
        files.remove(5)
        put(files, 0)
    assert kept(tmp_path, nbytes=limit).keys() == {0}


@pytest.mark.parametrize(
    ("other", "blocks"), [({"identity": "b"}, set()), ({"nbytes": 2 * LIMIT}, {3})]
)
def test_blocks_of_another_cache_or_beyond_the_size_do_not_count(tmp_path, other, blocks):
    """The cache was made anew, or the limit changed: what still fits stays."""
    with opened(tmp_path) as files:
        put(files, 3)
    assert kept(tmp_path, **other).keys() == blocks


@given(st.binary(min_size=0, max_size=6 * 24), st.integers(0, PAGE + 6 * 24))
def test_any_records_are_read(tmp_path_factory, data, at):
    """Somebody else may have written them: each block lies within the file, and no two overlap."""
    folder = tmp_path_factory.mktemp("lanes")
    with opened(folder) as files:
        put(files, 0)
        put(files, 4)
    with (folder / "lane-000.blocks").open("r+b") as file:
        file.seek(at)
        file.write(data)
    with closing(LaneFiles(folder, "a", LIMIT, LENGTHS)) as others:
        others.find()
    end = 0
    for block, place in sorted(kept(folder).items(), key=lambda each: each[1]):
        assert end <= place <= LIMIT - rounded(int(LENGTHS[block]))
        end = place + rounded(int(LENGTHS[block]))


@pytest.mark.parametrize("rows", [[30] * 8, [31, 30, 30, 31, 30, 30, 29, 30]])
def test_a_disk_for_nearly_all_blocks_lacks_one_and_not_one_of_each_lane(rows):
    """The blocks of the lanes, 4 MiB each, have a head in each file beside them."""
    block = 4 << 20
    needs = {lane: block * count for lane, count in enumerate(rows)}
    for room, missing in ((sum(needs.values()), 1), (sum(needs.values()) * 2, 0)):
        shares = shares_of(needs, room, 31, block)
        assert sum(shares.values()) <= room
        kept = {lane: (share - PAGE * 2) // block for lane, share in shares.items()}
        assert sum(rows) - sum(kept.values()) == missing
    half = shares_of(needs, sum(needs.values()) // 2, 31, block)
    assert sum(half.values()) <= sum(needs.values()) // 2
    assert max(half.values()) - min(half.values()) <= 3 * block


def test_no_space_is_an_error_at_the_start(tmp_path):
    """With the numbers, and what to do."""
    with pytest.raises(forebay.OutputError, match=r"cannot keep .* bytes are free") as raised:
        kept(tmp_path, nbytes=1 << 60)
    assert "smaller disk=" in str(raised.value)


@pytest.mark.parametrize("name", ["lane-000.blocks", "lock"])
def test_a_link_in_place_of_a_file_is_not_followed(tmp_path, name):
    """It would be cut to the size of the lane."""
    (tmp_path / "precious").write_bytes(b"x" * 100)
    (tmp_path / "lanes").mkdir()
    (tmp_path / "lanes" / name).symlink_to(tmp_path / "precious")
    with pytest.raises((forebay.OutputError, OSError)):
        kept(tmp_path / "lanes")
    assert (tmp_path / "precious").read_bytes() == b"x" * 100


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path):
    """Whoever owns it could change the blocks."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    with pytest.raises(forebay.OutputError, match="another user owns it"):
        kept(folder)


@given(st.lists(st.integers(1, 20), max_size=30), st.data())
def test_extents_are_given_once_and_become_one_again(sizes, data):
    """No byte has two owners; when all are back, the whole is free."""
    extents, taken = Extents(100), {}
    for size in sizes:
        if taken and data.draw(st.booleans()):
            place = data.draw(st.sampled_from(sorted(taken)))
            extents.give_back(place, taken.pop(place))
        if (place := extents.take(size)) is not None:
            spans = [(begin, begin + length) for begin, length in taken.items()]
            assert all(place + size <= begin or end <= place for begin, end in spans)
            assert 0 <= place <= 100 - size
            taken[place] = size
    for place, size in taken.items():
        extents.give_back(place, size)
    assert extents.take(100) == 0
