"""Blocks that stay on disk: within the limit, adopted by the next job, and never torn."""

from __future__ import annotations

import os
from contextlib import closing, contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import forebay
from forebay.caching import stores as module
from forebay.caching.stores import PAGE, Extents, Pins, rounded

LENGTHS = np.array([PAGE * 3, 100, PAGE + 1, PAGE, 5000, 70_000], np.int64)


@contextmanager
def opened(folder, nbytes=1 << 20, identity="a"):
    """Open the pins of a folder."""
    with closing(Pins(folder, identity, nbytes, LENGTHS)) as pins:
        yield pins


def kept(folder, **arguments):
    """Return the blocks that are there, and those that have to be verified."""
    with opened(folder, **arguments) as pins:
        return dict(pins.blocks), pins.unverified


def put(pins, block):
    """Write a block."""
    place = pins.take(block)
    os.pwrite(pins.descriptor, bytes([block + 1]) * int(LENGTHS[block]), place)
    pins.add(block, place)


def test_blocks_are_there_for_the_next_job(tmp_path):
    """Also those of a job that was killed, except one whose entry was not written yet."""
    with opened(tmp_path) as pins:
        put(pins, 5)
        put(pins, 1)
        os.pwrite(pins.descriptor, b"torn", pins.take(0))
    with opened(tmp_path) as again:
        assert again.blocks == pins.blocks
        assert again.unverified == set()
        assert os.pread(again.descriptor, 100, again.blocks[1]) == b"\2" * 100
        put(again, 0)
    assert kept(tmp_path)[0] == again.blocks


def test_the_files_never_take_more_than_the_limit(tmp_path):
    """The space is taken at once, so the disk cannot be full later."""
    limit = 40 * PAGE
    with opened(tmp_path, limit) as pins:
        used = sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir())
        assert limit / 2 < used <= limit
        while (place := pins.take(0)) is not None:
            pins.add(0, place)
        assert sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir()) <= limit


def test_a_block_makes_place_for_others(tmp_path):
    """Its bytes are free, and the next job knows that it is gone."""
    limit = 30 * PAGE
    with opened(tmp_path, limit) as pins:
        put(pins, 5)
        assert pins.take(5) is None
        pins.remove(5)
        put(pins, 5)
        pins.remove(5)
        put(pins, 0)
    assert kept(tmp_path, nbytes=limit)[0].keys() == {0}


@pytest.mark.parametrize("other", [{"identity": "b"}, {"nbytes": 2 << 20}])
def test_blocks_of_another_cache_or_size_do_not_count(tmp_path, other):
    """The cache was made anew, or the limit changed."""
    with opened(tmp_path) as pins:
        put(pins, 3)
    assert kept(tmp_path, **other)[0] == {}


def test_after_a_restart_of_the_machine_blocks_are_verified_first(tmp_path, monkeypatch):
    """The system may have written entries before the blocks."""
    with opened(tmp_path) as pins:
        put(pins, 3)
    monkeypatch.setattr(module, "kernel", lambda: "another boot")
    assert kept(tmp_path)[1] == {3}


@given(st.binary(min_size=0, max_size=6 * 16), st.integers(0, 5 * 16))
def test_any_entries_are_read(tmp_path_factory, data, at):
    """Somebody else may have written them: each block lies within the file, and no two overlap."""
    folder = tmp_path_factory.mktemp("pins")
    with opened(folder) as pins:
        put(pins, 0)
        put(pins, 4)
    with (folder / "blocks.pins").open("r+b") as file:
        file.seek(at)
        file.write(data)
    end = 0
    for block, place in sorted(kept(folder)[0].items(), key=lambda each: each[1]):
        assert end <= place <= (1 << 20) - rounded(int(LENGTHS[block]))
        end = place + rounded(int(LENGTHS[block]))


def test_no_space_is_an_error_at_the_start(tmp_path):
    """With the numbers, and what to do."""
    with pytest.raises(forebay.OutputError, match=r"cannot keep .* bytes are free") as raised:
        kept(tmp_path, nbytes=1 << 60)
    assert "smaller disk=" in str(raised.value)


def test_a_link_in_place_of_a_file_is_not_followed(tmp_path):
    """It would be cut to the size of the pins."""
    (tmp_path / "precious").write_bytes(b"x" * 100)
    (tmp_path / "pins").mkdir()
    (tmp_path / "pins" / "blocks.data").symlink_to(tmp_path / "precious")
    with pytest.raises(forebay.OutputError):
        kept(tmp_path / "pins")
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
