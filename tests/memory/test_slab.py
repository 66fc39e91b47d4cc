"""The slab: real shared memory, who has it mapped, and a file on a disk in its place."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from costs import blocks, descriptors

from forebay.errors import OptionError
from forebay.memory.layout import LEAST_CAPACITY, Slot
from forebay.memory.slab import EXTENT, LEAST, Slab

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


@pytest.mark.slow
def test_300_mb_are_written_through_a_slot_which_is_then_used_again(slab):
    """They are no part of /dev/shm, whatever its size, and the second lap finds the same memory."""
    nbytes = 300 << 20
    for lap in (1, 2):
        slot = slab.take()
        np.frombuffer(slab.view(slot), np.uint8)[:nbytes] = lap
        assert (slot.offset, blocks(slab)) == (0, nbytes // 512)
        slab.give_back(slot)
    assert slab.view(slot)[nbytes - 1] == 2


def test_a_crash_of_the_process_does_not_write_the_slab_to_a_core_file(slab):
    """Its address space would fill a disk."""
    with open("/proc/self/smaps") as smaps:
        mapped = smaps.read().partition("/memfd:forebay")[2]
    flags = re.search(r"^VmFlags:(.*)$", mapped, re.MULTILINE)[1].split()
    assert "dd" in flags
    assert "dc" not in flags, "a forked worker must inherit it"


def test_a_forked_worker_writes_where_the_owner_reads(slab):
    """It inherits the mapping."""
    slot = slab.take()
    child = os.fork()
    if not child:
        slab.view(slot)[:5] = b"hello"
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert bytes(slab.view(slot)[:5]) == b"hello"


@pytest.mark.slow
def test_another_program_attaches_by_the_descriptor(slab):
    """It maps the same memory, and has one descriptor of it as well."""
    slot = slab.take()
    code = """if True:
        import os, sys
        from forebay.memory.layout import Slot
        from forebay.memory.slab import Slab
        descriptor, extent, offset, capacity = map(int, sys.argv[1:])
        before = len(os.listdir("/proc/self/fd"))
        slab = Slab.attach(descriptor, extent)
        assert len(os.listdir("/proc/self/fd")) == before
        slab.view(Slot(offset, capacity))[:5] = b"hello"
    """
    numbers = [slab.fileno(), slab.extent, *slot]
    subprocess.run(
        [sys.executable, "-c", code, *map(str, numbers)], pass_fds=[slab.fileno()], check=True
    )
    assert bytes(slab.view(slot)[:5]) == b"hello"


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


@pytest.mark.slow
def test_too_little_address_space_is_an_error_in_words():
    """It says what is needed, what was done and what to do."""
    limited = [sys.executable, "-c", LIMITED, str(LEAST // 2)]
    run = subprocess.run(limited, capture_output=True, text=True)
    assert "OptionError: shared memory for batches could not be mapped: " in run.stderr
    assert "At least 64 MiB of address space are needed" in run.stderr
    assert "No worker was started" in run.stderr and "num_workers=0" in run.stderr


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


def test_a_slab_in_a_folder_lies_on_its_disk_and_has_no_name_there(slab, tmp_path):
    """Its blocks are the disk's; only there is room reserved."""
    with slab_in(tmp_path) as other:
        assert os.fstat(other.fileno()).st_dev == os.stat(tmp_path).st_dev
        assert os.listdir(tmp_path) == []
        assert (other.is_bounded, slab.is_bounded) == (True, False)
        assert not os.get_inheritable(other.fileno())
        slot = other.take()
        assert other.reserve(slot, 0, MIB) is None
        assert blocks(other) >= MIB // 512
        other.view(slot)[: len(b"hello")] = b"hello"
        twin = Slab.attach(os.dup(other.fileno()), other.extent)
        assert twin.is_bounded
        assert bytes(twin.view(slot)[:5]) == b"hello"
        twin.close()


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


def test_a_folder_that_takes_no_file_is_an_error_in_words(tmp_path):
    """It names the folder and the reason."""
    gone = tmp_path / "gone"
    with pytest.raises(OptionError) as caught:
        Slab(gone)
    assert str(caught.value).splitlines()[0] == (
        f"no file for batches can be made in directory={str(gone)!r}: No such file or directory"
    )
    assert "No worker was started" in str(caught.value)
