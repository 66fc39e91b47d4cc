"""What workers have of their own: how much, how fast it grows, and what is said about it."""

from __future__ import annotations

import mmap

from forebay.base import machine
from forebay.base.machine import PrivateMemory, private_bytes
from forebay.loading.held_objects import HeldObjects, note_on_memory
from forebay.observe.measurements import WorkerMemory

MIB = 1 << 20
ITEMS = HeldObjects("dataset.items", "a list of 9 dicts", 200 * MIB, 40 * MIB, "pack(items)")


def test_the_growth_is_that_since_the_last_measurement() -> None:
    """Before the second one, since the loader began; a replaced worker begins anew."""
    memory = WorkerMemory()
    assert (memory.nbytes, memory.rate, memory.is_large) == (0, 0.0, False)
    memory.add(0, 10.0, 100, began_at=0.0)
    memory.add(1, 10.0, 300, began_at=0.0)
    assert (memory.nbytes, memory.rate, memory.each) == (400, 40.0, 200.0)
    memory.add(0, 20.0, 150, began_at=0.0)
    memory.add(1, 20.0, 40, began_at=0.0)
    assert (memory.nbytes, memory.rate) == (190, 5.0 + 2.0)


def test_what_is_copied_is_said_with_numbers_and_what_helps() -> None:
    """The attribute, its size, and what it takes once it is packed."""
    memory = WorkerMemory()
    memory.add(0, 10.0, 100 * MIB, began_at=0.0)
    assert note_on_memory(memory, ITEMS) == (
        "Each worker has 105 MB of memory of its own, 10.5 MB/s more: reading a Python object "
        "writes its reference count, which copies it. dataset.items is a list of 9 dicts, about "
        "210 MB; pack(items) takes 41.9 MB, once for all workers."
    )


def test_little_memory_and_few_objects_are_not_said() -> None:
    """What a worker has of its own may be anything: libraries, caches, samples."""
    memory = WorkerMemory()
    memory.add(0, 10.0, 10 * MIB, began_at=0.0)
    assert note_on_memory(memory, ITEMS) == ""
    memory.add(0, 20.0, 900 * MIB, began_at=0.0)
    assert note_on_memory(memory, ITEMS) == note_on_memory(memory, None) == ""


def test_it_is_measured_seldom_and_only_where_there_are_new_pages(monkeypatch) -> None:
    """At most in a two-thousandth of the time, and not at all by a worker that copies nothing."""
    took = iter(range(100))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: 0.05 * next(took))
    monkeypatch.setattr(machine, "private_bytes", lambda: 7)
    memory, many = PrivateMemory(0.0), machine.LEAST_NEW_PAGES
    assert memory.measured(5.0, many) == 0
    assert memory.measured(10.0, 0) == 7
    assert memory.measured(1000.0, many - 1) == 0
    assert memory.measured(1000.0, 1) == 7
    assert memory.measured(1099.0, many) == 0
    assert memory.measured(1100.0, 0) == 7


def test_memory_that_is_written_to_is_private() -> None:
    """As the system counts it; without its file it is not known."""
    before = private_bytes()
    # Mapped anew: what malloc returns may have been written to before.
    with mmap.mmap(-1, 16 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        held.write(bytes(len(held)))
        assert private_bytes() - before >= len(held) // 2
