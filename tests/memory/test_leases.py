"""Memory that is let go: when a slot comes back, and what the system gets of it."""

from __future__ import annotations

import gc
import os
import subprocess

import numpy as np
import pytest
import torch
from costs import blocks, descriptors

from forebay.memory.layout import LEAST_CAPACITY
from forebay.memory.slab import FORKS, Slab

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


class Fork:
    """A fork of this process that lives until it is told to end, then with the code of a check."""

    def __init__(self, lease=None, content=b""):
        gate, self.gate = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self.gate)
            os.read(gate, 1)  # until the parent closes its end, or dies
            os._exit(bytes(lease or b"") != content)
        os.close(gate)

    def end(self):
        os.close(self.gate)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_what_is_leased_after_a_fork_comes_back_at_once(slab):
    """The fork has the mapping, but knows of no batch there."""
    held = slab.lease(slab.take(), 64)
    fork = Fork()
    slot = slab.take()
    lease = slab.lease(slot, 64)
    del lease
    assert slab.take() == slot
    fork.end()
    del held


def test_a_retired_slab_keeps_what_a_fork_has(slab):
    """Its memory goes back to the system when the fork has ended, not before."""
    slot = slab.take()
    lease = slab.lease(slot, 64)
    lease[:] = bytes([7]) * 64
    fork = Fork(lease, bytes([7]) * 64)
    slab.retire()
    del lease
    FORKS.settle()
    assert blocks(slab) > 0
    assert fork.end() == 0
    FORKS.settle()
    assert blocks(slab) == 0


def test_forks_that_have_ended_leave_nothing(slab):
    """One batch is kept for the whole program, which forks again and again."""
    kept, before = slab.lease(slab.take(), 64), descriptors()
    for _ in range(20):
        Fork().end()
    assert descriptors() <= before + 1
    slot = slab.take()
    kept = slab.lease(slot, 64)
    fork = Fork()
    del kept
    fork.end()
    assert slab.take() == slot
    assert descriptors() == before


def test_a_program_that_a_fork_executes_has_nothing(slab):
    """It has none of its memory: the slot comes back while it runs."""
    slot = slab.take()
    lease = slab.lease(slot, 64)
    program = subprocess.Popen(["cat"], stdin=subprocess.PIPE, preexec_fn=int)  # noqa: PLW1509
    del lease
    assert slab.take() == slot
    program.communicate()


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
