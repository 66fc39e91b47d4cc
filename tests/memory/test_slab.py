"""The slab: real shared memory, who has it mapped, and a file on a disk in its place."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import subprocess
import sys

import pytest
from costs import blocks, descriptors

from forebay.memory.layout import LEAST_CAPACITY, Slot
from forebay.memory.slab import EXTENT, Slab

# Newer Pythons warn of a fork beside threads, of which torch has some; the children here only exit.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def test_a_slab_is_one_descriptor_and_no_name(slab):
    """Wide as it is, it costs neither memory nor descriptors, and lies in no file system."""
    before = descriptors()
    other = Slab()
    assert descriptors() == before + 1
    assert other.extent == EXTENT
    assert blocks(other) == 0
    assert os.readlink(f"/proc/self/fd/{other.fileno()}") == "/memfd:forebay (deleted)"
    assert os.fstat(other.fileno()).st_dev != os.stat("/dev/shm").st_dev
    assert not os.get_inheritable(other.fileno())
    other.close()
    assert descriptors() == before


def test_a_crash_of_the_process_does_not_write_the_slab_to_a_core_file(slab):
    """Its address space would fill a disk."""
    with open("/proc/self/smaps") as smaps:
        mapped = smaps.read().partition("/memfd:forebay")[2]
    flags = re.search(r"^VmFlags:(.*)$", mapped, re.MULTILINE)[1].split()
    assert "dd" in flags
    assert "dc" not in flags, "a forked worker must inherit it"


def test_a_slab_attached_beside_its_owner_has_its_own_descriptor(slab):
    """Closing one of them leaves the other."""
    twin = Slab.attach(os.dup(slab.fileno()), slab.extent)
    assert twin.fileno() != slab.fileno()
    slot = slab.take()
    twin.view(slot)[0] = 7
    twin.close()
    assert slab.view(slot)[0] == 7
    assert blocks(slab) == 8


LIMITED = """if True:
    import resource, sys
    from forebay.memory.slab import Slab
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    limit = used + int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    slab = Slab()
    slot = slab.take()
    slab.view(slot)[:] = bytes(len(slab.view(slot)))
    print(slab.extent)
"""


@pytest.mark.slow
def test_little_address_space_makes_a_smaller_slab():
    """Under `ulimit -v` it is halved until it fits."""
    limited = [sys.executable, "-c", LIMITED, str(400 << 20)]
    run = subprocess.run(limited, capture_output=True, text=True)
    assert (run.stderr, run.stdout.strip()) == ("", str(256 << 20))


# ---- on a disk ----------------------------------------------------------------------------------

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path):
    """A file system of four megabytes."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


@contextlib.contextmanager
def slab_in(folder):
    slab = Slab(folder)
    try:
        yield slab
    finally:
        slab.close()


def test_what_a_slot_on_a_disk_no_longer_needs_is_punched_out(tmp_path):
    """The file keeps its length, and the disk gets the blocks."""
    with slab_in(tmp_path) as slab:
        slot = slab.take()
        slab.reserve(slot, 0, MIB)
        slab.view(slot)[:MIB] = b"x" * MIB
        slab.free(slot)
        assert blocks(slab) == 0
        assert bytes(slab.view(slot)[:2]) == b"\0\0"


def test_a_full_disk_refuses_and_gets_back_what_it_had_given(small_disk):
    """The bytes before stay, and what fits is had again."""
    with slab_in(small_disk) as slab:
        slot = slab.take()
        assert slab.reserve(slot, 0, MIB + 1) is None
        slab.view(slot)[: MIB + 1] = b"x" * (MIB + 1)
        assert slab.reserve(slot, MIB + 64, 4 * MIB) == os.strerror(errno.ENOSPC)
        assert bytes(slab.view(slot)[: MIB + 1]) == b"x" * (MIB + 1)
        assert blocks(slab) <= (MIB + mmap.PAGESIZE) // 512
        assert slab.reserve(slot, MIB + 64, 2 * MIB) is None
        slab.view(slot)[MIB + 64 : 3 * MIB + 64] = b"y" * (2 * MIB)


def test_a_refusal_does_not_touch_the_next_slot(small_disk):
    """Only what is left of the slot itself is punched out."""
    with slab_in(small_disk) as slab:
        slab.record_size(LEAST_CAPACITY // 4)
        slots = sorted((slab.take(), slab.take()))
        assert slots[0].offset + slots[0].capacity == slots[1].offset
        slab.view(slots[1])[:1] = b"x"
        assert slab.reserve(slots[0], 0, 8 * MIB)
        assert slab.view(slots[1])[0] == ord("x")


def test_nothing_needs_no_room(tmp_path):
    """The system would take none at all for a mistake."""
    with slab_in(tmp_path) as slab:
        assert slab.reserve(Slot(0, LEAST_CAPACITY), 0, 0) is None
