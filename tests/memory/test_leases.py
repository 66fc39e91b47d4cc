"""Memory that is let go: when a slot comes back, and what the system gets of it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from costs import blocks, descriptors

from forebay.memory.layout import LEAST_CAPACITY
from forebay.memory.slab import Slab

# Newer Pythons warn of a fork beside threads, of which torch has some; the children here only exit.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def test_memory_of_outdated_slots_goes_back_to_the_system(slab):
    """Slots of the old size, idle or away, keep no pages."""
    slab._space.large_left = 0
    idle, away = slab.take(), slab.take()
    for slot in (idle, away):
        slab.view(slot)[:LEAST_CAPACITY] = bytes(LEAST_CAPACITY)
    slab.give_back(idle)
    assert slab.out == 1
    assert blocks(slab) == 2 * LEAST_CAPACITY // 512
    slab.record_size(1000)
    assert blocks(slab) == LEAST_CAPACITY // 512
    slab.give_back(away)
    assert slab.out == 0
    assert blocks(slab) == 0


def test_a_retired_slab_keeps_only_what_is_leased(slab):
    """Idle memory goes back to the system at once, that of a lease when it ends."""
    slab.record_size(LEAST_CAPACITY // 4)
    idle, away = slab.take(), slab.take()
    for slot in (idle, away):
        slab.view(slot)[:1] = b"x"
    slab.give_back(idle)
    kept = slab.lease(away, 1)
    slab.retire()
    assert blocks(slab) == os.sysconf("SC_PAGE_SIZE") // 512
    assert bytes(kept) == b"x"
    del kept
    assert blocks(slab) == 0


# What a user may keep of a batch; each takes the leased bytes.
KEPT = {
    "a view of a part": lambda view: view[100:200],
    "a tensor": lambda view: torch.frombuffer(view[64:128], dtype=torch.float32),
    "a part of a tensor": lambda view: torch.frombuffer(view, dtype=torch.float32)[1:],
    "one number of a tensor": lambda view: torch.frombuffer(view, dtype=torch.float32)[3],
    "a tensor's array": lambda view: torch.frombuffer(view, dtype=torch.float32)[1:].numpy(),
    "a tensor's storage": lambda view: torch.frombuffer(view, dtype=torch.int8).untyped_storage(),
    "a detached alias": lambda view: torch.frombuffer(view, dtype=torch.float32).detach(),
    "an array": lambda view: np.frombuffer(view[64:128], np.float32),
    "a part of an array": lambda view: np.frombuffer(view, np.float32)[::2][1:],
    "an array's tensor": lambda view: torch.from_numpy(np.frombuffer(view, np.float32))[2:],
}


@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_a_slot_comes_back_when_the_last_view_is_gone(slab, keep):
    """Not before, and without anybody's doing."""
    slot = slab.take()
    kept = keep(slab.lease(slot, 4096))
    assert slab.out == 1
    assert slab.take() != slot
    del kept
    assert slab.out == 1
    assert slab.take() == slot


def test_a_tensor_in_a_cycle_gives_its_slot_back_when_it_is_collected(slab):
    """The collector may run it anywhere, so giving back takes no lock."""
    gc.disable()
    try:
        cycle = [torch.frombuffer(slab.lease(slab.take(), 64), dtype=torch.uint8)]
        cycle.append(cycle)
        del cycle
        assert slab.out == 1
        gc.collect()
        assert slab.out == 0
    finally:
        gc.enable()


def test_a_lease_may_end_in_any_thread(slab):
    """Each comes back once."""
    leases = [slab.lease(slab.take(), 64) for _ in range(64)]
    threads = [threading.Thread(target=leases.pop) for _ in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert slab.out == 0
    assert len({slab.take() for _ in range(64)}) == 64


def test_a_fork_that_drops_a_lease_gives_nothing_back(slab):
    """Its copy of the slab must not think that the slot is free; the owner still reads it."""
    lease = slab.lease(slab.take(), 64)
    child = os.fork()
    if not child:
        del lease
        os._exit(slab.out)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert slab.out == 1
    del lease
    assert slab.out == 0


def test_a_lease_outlives_a_closed_slab():
    """The mapping goes with the last of its batches, and its descriptor with it."""
    before = descriptors()
    slab = Slab()
    tensor = torch.frombuffer(slab.lease(slab.take(), 64), dtype=torch.uint8).fill_(7)
    slab.close()
    slab.close()
    assert tensor.sum() == 7 * 64
    with pytest.raises(ValueError, match="released"):
        slab.view(slab.take())
    del slab
    tensor += 1
    assert tensor.sum() == 8 * 64
    del tensor
    assert descriptors() == before


@pytest.mark.slow
def test_a_lease_that_lives_to_the_end_of_the_program_is_quiet():
    """The interpreter goes down without a word."""
    code = """if True:
        import numpy
        from forebay.memory.slab import Slab
        slab = Slab()
        lease = slab.lease(slab.take(), 64)
        cycle = [slab.lease(slab.take(), 64)]
        cycle.append(cycle)
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
