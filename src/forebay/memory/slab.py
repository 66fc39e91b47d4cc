"""The slab: one unnamed file, mapped in every process that works on batches.

It is mapped one extent at a time, as slots are needed: 64 GiB of addresses, so that a process has
room for a thousand loaders. Pages are allocated when they are first written, and stay until they
are freed. The file is in memory and not in a mounted file system, so the size of /dev/shm does not
matter; it has no name, so nothing is left when its processes are killed. It may be on a disk
instead; the system then caches what fits into memory, and the disk can be full.

One process owns the slab and assigns slots to writers. A forked worker has the mapping already;
another attaches by the descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import select
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial

import numpy as np

from forebay.base.process import descriptors, memory_file
from forebay.errors import OptionError
from forebay.memory.layout import Slot, Space

# Addresses to map at a time; halved until the system grants them.
EXTENT = 1 << 36
LEAST = 1 << 26


class Slab:
    """Shared memory, cut into slots that are used again and again.

    **Threads.** `give_back`, and the end of a lease, may happen in any thread and at any point of a
    program; everything else belongs to one thread of the process that owns the slab.

    Attributes:
        before_free: Called with address and size of a slot that is not leased before its pages are
            given back to the system; None for no call.
    """

    before_free: Callable[[int, int], None] | None = None
    _keeps_pages = True  # of slots that were given back

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        """Create a slab on the disk of a folder; None keeps it in memory."""
        self._map(memory_file("forebay") if directory is None else _file_in(directory), None)

    @classmethod
    def attach(cls, descriptor: int, extent: int) -> Slab:
        """Map a slab that another process owns."""
        slab = cls.__new__(cls)
        slab._map(descriptor, extent)
        return slab

    def _map(self, descriptor: int, extent: int | None) -> None:
        try:
            # Only files in memory are in a file system without a size. They need no reservation,
            # which would cost 1.1 ms for 38 MB of warm pages that take 1.6 ms to write. On a
            # disk it costs 2 us.
            blocks = os.fstatvfs(descriptor).f_blocks
            self.is_bounded = blocks > 0 and hasattr(os, "posix_fallocate")
            earlier = _descriptors_of(descriptor)
            mapping = _widest(descriptor) if extent is None else mmap.mmap(descriptor, extent)
            # Each mapping opens a descriptor and does not expose it. Keep only this one.
            (self._descriptor,) = _descriptors_of(descriptor) - earlier
        finally:
            os.close(descriptor)
        self.extent = len(mapping)
        self._space = Space(self.extent)
        # The only references to mappings: when one and its last lease are gone, it is unmapped.
        self._extents: dict[int, memoryview] = {}
        self._returned = _Returned(self.extent)
        self._add(0, mapping)

    def _add(self, number: int, mapping: mmap.mmap) -> None:
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_DONTDUMP)
        self._extents[number] = memoryview(mapping)
        self._returned.mappings[number] = weakref.ref(mapping)

    def fileno(self) -> int:
        """Return the slab's only descriptor, for workers; valid as long as the mapping."""
        return self._descriptor

    @property
    def out(self) -> int:
        """Number of slots in use: being written, waiting or being read."""
        self._drain()
        return self._space.out

    def take(self) -> Slot | None:
        """Return an unused slot, or None if the system grants no more addresses."""
        if self._returned.slots or FORKS.late:
            self._drain()
        space = self._space
        slot = space.take()
        if slot is None and space.capacity <= self.extent and self._grow():
            slot = space.take()
        return slot

    def _grow(self) -> bool:
        """Map one more extent; return False if the system does not grant it."""
        number = self._space.extents
        try:
            os.ftruncate(self._descriptor, (number + 1) * self.extent)
            self._extent(number)
        except (OSError, OverflowError):
            return False
        self._space.grow()
        return True

    def _extent(self, number: int) -> memoryview:
        """Return an extent, mapping it if necessary; the owner has made the file long enough."""
        view = self._extents.get(number)
        if view is None:
            start = number * self.extent
            self._add(number, mmap.mmap(self._descriptor, self.extent, offset=start))
            view = self._extents[number]
        return view

    @property
    def largest(self) -> int:
        """Bytes of the largest batch seen; -1 before the first."""
        return -1 if self._space.largest is None else self._space.largest

    def record_size(self, nbytes: int) -> None:
        """Record a batch's size: slots are sized for the largest."""
        for slot in self._space.record_size(nbytes):
            self.free(slot)

    def give_back(self, slot: Slot, refused: str | None = None) -> None:
        """Make a slot available again.

        Args:
            refused: Why the disk had no room for its bytes. Then it is taken after all slots that
                may have pages, and only the owner's thread may give it back.
        """
        if refused is None:
            self._returned.add(slot, os.getpid())
            return
        if not self._returned.is_retired:
            self._space.give_back(slot, is_last=True)
        self.free(slot)  # the disk may have had room for a part

    def _drain(self) -> None:
        FORKS.settle()
        slots = self._returned.slots
        while slots:
            slot = slots.popleft()
            if not self._space.give_back(slot) or not self._keeps_pages:
                self.free(slot)

    def keep_no_pages(self) -> None:
        """Free the memory of unused slots, now and whenever one is given back."""
        self._keeps_pages = False
        # What is done before a slot is freed belongs to the owner's thread.
        self._returned.frees_at_once = self.before_free is None
        self._drain()
        for slot in self._space.trim():
            self.free(slot)

    def retire(self) -> None:
        """Free all memory except that of leases, whose memory is freed as they end.

        `take` returns None from now on.
        """
        self._returned.is_retired = True
        self._drain()  # of workers, which have ended: they are forks too
        for slot in self._space.trim():
            self.free(slot)

    def free(self, slot: Slot) -> None:
        """Give a slot's pages back to the system; the slot then reads as zeros."""
        if self.before_free is not None:
            self.before_free(self.address(slot), slot.capacity)
        self._returned.free(slot)

    def reserve(self, slot: Slot, start: int, nbytes: int) -> str | None:
        """Reserve space for bytes of a slot before they are written, if the slab `is_bounded`.

        Args:
            start: The first of the bytes, counted from the slot's first.
        """
        if not nbytes:
            return None
        try:
            os.posix_fallocate(self._descriptor, slot.offset + start, nbytes)
        except OSError as error:
            # The part that was reserved is useless, and other slots may need the space.
            kept = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            self.free(Slot(slot.offset + kept, slot.capacity - kept))
            return error.strerror or str(error)
        return None

    def view(self, slot: Slot) -> memoryview:
        """Return the bytes of a slot, writable."""
        number, start = divmod(slot.offset, self.extent)
        return self._extent(number)[start : start + slot.capacity]

    def write(self, slot: Slot, data: memoryview) -> None:
        """Write the first bytes of a slot.

        Other threads go on meanwhile, and the pages need not be mapped in this process.
        """
        at = slot.offset
        while data:
            written = os.pwrite(self._descriptor, data, at)
            data, at = data[written:], at + written

    def address(self, slot: Slot) -> int:
        """Return the address of a slot's first byte, which is the start of a page."""
        number, start = divmod(slot.offset, self.extent)
        return np.frombuffer(self._extents[number], np.uint8, 1, start).ctypes.data

    def lease(self, slot: Slot, nbytes: int) -> memoryview:
        """Return the first bytes of a slot, which is given back when nothing views them any more.

        Args:
            nbytes: How many bytes are wanted, at least 1.
        """
        number, start = divmod(slot.offset, self.extent)
        owner = np.frombuffer(self._extents[number], np.uint8, nbytes, start)
        FORKS.hold((id(self._returned), slot.offset))
        back = weakref.finalize(owner, self._returned.end_lease, slot, os.getpid())
        back.atexit = False
        return owner.data

    def close(self) -> None:
        """Unmap the slab, now or when the last lease ends; `take` must not be called any more."""
        for view in self._extents.values():
            view.release()


class _Returned:
    """Returned slots. Finalizers add to it at any point, even within `take`, so it has no lock."""

    def __init__(self, extent: int) -> None:
        self.is_retired = False
        self.frees_at_once = False
        self.mappings: dict[int, weakref.ref[mmap.mmap]] = {}  # leases keep them
        self._extent = extent
        self.slots: deque[Slot] = deque()

    def add(self, slot: Slot, owner: int) -> None:
        # A fork of the owner drops its copies of the arrays, which the owner may still read.
        if os.getpid() == owner:
            self._add(slot)

    def end_lease(self, slot: Slot, owner: int) -> None:
        if os.getpid() == owner:
            FORKS.let_go((id(self), slot.offset), partial(self._add, slot))

    def _add(self, slot: Slot) -> None:
        if self.is_retired or self.frees_at_once:  # retired: the slab was closed
            self.free(slot)
        if not self.is_retired:
            self.slots.append(slot)

    def free(self, slot: Slot) -> None:
        number, start = divmod(slot.offset, self._extent)
        mapping = self.mappings[number]() if number in self.mappings else None
        if mapping is not None:
            # Some file systems cannot punch holes; there, the pages stay until the slab is closed.
            with contextlib.suppress(OSError):
                mapping.madvise(mmap.MADV_REMOVE, start, slot.capacity)


class _Forks:
    """Keeps memory that this process shares with its forks until those that may read it have ended.

    A fork has the batches that its parent held, in the same memory, and no way to give them back.
    Each fork has an end of a pipe, which the system closes with it; memory that was held when it
    was forked is not used again while the other end says that the fork lives. Finalizers let go at
    any point of a program, so that takes no lock.
    """

    def __init__(self) -> None:
        self.late: deque[tuple[int, int, Callable[[], object]]] = deque()  # let go, but shared
        self._held: dict[Hashable, int] = {}  # what is held -> the last fork that has not got it
        self._count, self._under_way = 0, set[int]()
        self._ends: dict[int, int] = {}  # forks that may live -> descriptor, -1 for none
        self._settling = threading.Lock()
        self._own = threading.local()  # of the fork that a thread is about to make

    def hold(self, key: Hashable) -> None:
        """Record that this process begins to hold some memory."""
        self._held[key] = min(self._under_way, default=self._count + 1) - 1

    def let_go(self, key: Hashable, give_back: Callable[[], object]) -> None:
        """Call `give_back`, now or once the forks that may read the memory have ended."""
        since, until = self._held.pop(key, self._count), self._count
        if self._may_read(since, until):
            self.late.append((since, until, give_back))
            self.settle()
        else:
            give_back()

    def settle(self) -> None:
        """Give back what had to wait for forks that have ended."""
        if not (self._ends or self.late) or not self._settling.acquire(blocking=False):
            return
        try:
            self._forget_ended()
            for _ in range(len(self.late)):
                since, until, give_back = self.late.popleft()
                if self._may_read(since, until):
                    self.late.append((since, until, give_back))
                else:
                    give_back()
        finally:
            self._settling.release()

    def _may_read(self, since: int, until: int) -> bool:
        return any(since < fork <= until for fork in [*self._ends])

    def _forget_ended(self) -> None:
        ended = select.poll()
        for descriptor in self._ends.values():
            if descriptor >= 0:
                ended.register(descriptor, 0)  # that the other end was closed is always reported
        closed = {descriptor for descriptor, _ in ended.poll(0)}
        for fork in [fork for fork, descriptor in self._ends.items() if descriptor in closed]:
            os.close(self._ends.pop(fork))

    def before(self) -> None:
        """Prepare for a fork by this thread."""
        self._own.fork, self._own.theirs = 0, -1
        self.settle()
        if not self._held:
            return
        self._own.fork = fork = self._count = self._count + 1
        self._under_way.add(fork)
        self._ends[fork] = -1
        with contextlib.suppress(OSError):  # without a pipe, it counts as alive
            self._ends[fork], self._own.theirs = os.pipe()

    def after_in_parent(self) -> None:
        """Keep this process's end of the pipe."""
        self._under_way.discard(self._own.fork)
        if self._own.theirs >= 0:
            os.close(self._own.theirs)

    def after_in_child(self) -> None:
        """Keep the child's end, until it ends or executes another program; begin anew."""
        for descriptor in self._ends.values():
            if descriptor >= 0:
                os.close(descriptor)
        for each in (self.late, self._held, self._under_way, self._ends):
            each.clear()
        self._settling = threading.Lock()


FORKS = _Forks()
os.register_at_fork(
    before=FORKS.before,
    after_in_parent=FORKS.after_in_parent,
    after_in_child=FORKS.after_in_child,
)


def _file_in(directory: str | os.PathLike[str]) -> int:
    try:
        # O_TMPFILE never gives the file a name; without it, the file has one for a moment.
        with tempfile.TemporaryFile(dir=directory, prefix="forebay-", buffering=0) as file:
            return os.dup(file.fileno())
    except OSError as error:
        raise OptionError(
            f"no file for batches can be made in directory={os.fspath(directory)!r}: "
            f"{error.strerror}\n"
            "  The buffer is one file there, without a name, as large as the batches that are "
            "ready.\n"
            "  No worker was started. Name a folder that you can write to, on a disk with free "
            "space, or leave directory= out to keep the buffer in memory."
        ) from error


def _widest(descriptor: int) -> mmap.mmap:
    """Map an extent as large as the system allows; a shared file mapping reserves nothing."""
    size = EXTENT
    while True:
        try:
            os.ftruncate(descriptor, size)
            return mmap.mmap(descriptor, size)
        except (OSError, OverflowError) as error:
            if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
                raise  # mmap duplicates the descriptor
            size //= 2
            if size < LEAST:
                raise OptionError(
                    f"shared memory for batches could not be mapped: {error}\n"
                    f"  At least {LEAST >> 20} MiB of address space are needed, and the system "
                    "granted less; see `ulimit -v` and `ulimit -f`.\n"
                    "  No worker was started. Raise the limit, or use num_workers=0 or "
                    "backend='thread', which share no memory."
                ) from error


def _descriptors_of(descriptor: int) -> set[int]:
    """Return every descriptor that this process has of the same file."""
    ours, found = os.fstat(descriptor), set()
    for other in descriptors():
        # The descriptor of the listing itself is already closed.
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(other), ours):
                found.add(other)
    return found
