"""Seed and restore the three global generators: those of `random`, numpy and torch.

    seeded        seed_generators(seed)         one sample, one input
    restored      with generators_kept(): …     the caller's generators are unchanged afterwards
    private       PrivateGenerators(seed)       a separate stream, for a sampler

A process has one set of generators for all its threads, so threads that seed them, or that draw
while another thread may seed them, take turns under one lock. `draw_detection.py` makes calls that
take no turn unless they draw. numpy and torch are seeded if they are loaded: this module imports
neither, since a worker may need neither.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from forebay.base.libraries import after_import, not_after_import
from forebay.base.process import wait_until

# The states of `random`, numpy and torch; None for a library that is not loaded.
States = tuple[Any, Any, Any]
# A function that seeds the generators from 64 bits.
SetSeed = Callable[[int], None]

_modules: dict[str, Any] = sys.modules
# torch's own seeds have 63 bits: `torch.initial_seed()` may be in a sample, as an int64.
TORCH_BITS = (1 << 63) - 1


def numpy_and_torch() -> tuple[Any, Any]:
    """Return `numpy.random` and torch; None for one that is not loaded.

    Its import may be incomplete: in another thread, or by a circular import.
    """
    torch = _modules.get("torch")
    return (
        getattr(_modules.get("numpy"), "random", None),
        torch if hasattr(torch, "default_generator") else None,
    )


def seed_generators(seed: int) -> None:
    """Seed every generator from 64 bits."""
    random.seed(seed)
    _current.seed = seed
    numpy_random, torch = numpy_and_torch()
    if numpy_random is not None:
        # The upper bits: numpy's generator is the same as torch's, which only uses the lower 32
        # bits, so with the same seed both would draw the same numbers.
        numpy_random.seed(seed >> 32)
    if torch is not None:
        # torch.manual_seed also seeds devices, at a hundred times the cost.
        torch.default_generator.manual_seed(seed & TORCH_BITS)


def seeded_generator(seed: int, device: Any) -> Any:
    """Return a new `torch.Generator` on a device, seeded from 64 bits."""
    import torch

    return torch.Generator(device).manual_seed(seed & TORCH_BITS)


def seed_of_text(text: str) -> int:
    """Return 64 bits that depend on a string, the same on every machine."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


# ---- a library that user code imports ----------------------------------------------------------


# Any input may be the first one in its worker that imports a library, depending on the number of
# workers; then the library is seeded for that input.
_current = SimpleNamespace(seed=0)


def _seed_numpy(numpy: Any) -> None:
    numpy.random.seed(_current.seed >> 32)


def _seed_torch(torch: Any) -> None:
    torch.default_generator.manual_seed(_current.seed & TORCH_BITS)


def seed_on_import(is_on: bool) -> None:
    """Start or stop seeding numpy and torch when user code imports them."""
    change = after_import if is_on else not_after_import
    change("numpy", _seed_numpy)
    change("torch", _seed_torch)


# ---- turns -------------------------------------------------------------------------------------


class Turns:
    """Tracks which threads use the generators: many threads side by side, or one thread alone."""

    def __init__(self) -> None:
        self.disturbed: set[int] = set()
        # The threads that make calls side by side, of each `draw_detection.ThreadTurns`.
        self.running: WeakKeyDictionary[object, set[int]] = WeakKeyDictionary()
        self.looking = threading.Lock()
        self.is_dirty = False
        self._beside: set[int] = set()  # those in _together, and those that lend their turn
        self._found: States | None = None
        # Taken as itself: a Condition is written in Python, and would stay locked if a signal's
        # handler raised an exception while it is taken.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._together: set[int] = set()
        self._alone: int | None = None  # the thread that runs alone, or is the next to do so
        self._depth = 0  # its nested blocks; 0 while it waits for the others to end

    def join(self, thread: int, is_refused: Callable[[], bool]) -> States | None:
        """Wait until no thread runs alone, then run side by side with others, unless refused."""
        with self._lock:
            self._wait_for(lambda: self._alone is None or is_refused())
            if is_refused():
                return None
            if not self._together and not self.is_dirty:
                self._found = generator_states()
            self._together.add(thread)
            self._beside.add(thread)
            return self._found

    def take(self, thread: int) -> None:
        """Begin to run alone. A thread that already runs side by side does not wait for others."""
        with self._lock:
            while self._alone != thread:  # again, if another thread was faster
                # The thread that is next waits for those in _together, so they must not wait for
                # it.
                self._wait_for(
                    lambda: self._alone is None or (thread in self._together and not self._depth)
                )
                self._alone = thread
                try:
                    self._wait_for(
                        lambda: (
                            self._alone != thread or thread in self._together or not self._together
                        )
                    )
                except BaseException:  # Ctrl-C: no thread may wait for this one
                    if self._alone == thread:
                        self._alone = None
                        self._changed.notify_all()
                    raise
            self._depth += 1

    def lend(self, thread: int) -> Callable[[], None]:
        """Let others run while a thread waits for them; return a function that undoes it."""
        with self._lock:
            depth, is_beside = self._depth, thread in self._together
            is_alone = self._alone == thread
            self._together.discard(thread)
            if is_alone:
                self._depth, self._alone = 0, None
            self._changed.notify_all()

        def take_back() -> None:
            if is_alone:
                self.take(thread)
            with self._lock:
                if is_alone:
                    self._depth = depth
                if is_beside:
                    self._wait_for(lambda: self._alone in (None, thread))
                    self._together.add(thread)

        return take_back

    def give(self, thread: int) -> None:
        """End a block alone."""
        with self._lock:
            if self._alone == thread:
                self._depth -= 1
                if not self._depth:
                    self._alone = None
                    self._changed.notify_all()

    def set_back(self, thread: int) -> None:
        """Record that a thread sets the generators to an earlier state."""
        self.disturbed |= self._beside - {thread}

    def _wait_for(self, is_true: Callable[[], bool]) -> None:
        if not is_true():
            wait_until(lambda seconds: self._changed.wait_for(is_true, seconds))

    def is_taken_by(self, thread: int) -> bool:
        """Return whether a thread runs alone, or is the next to do so."""
        return self._alone == thread

    def leave(self, thread: int) -> bool:
        """End all turns of a thread; return whether it ran, and did not only wait."""
        with self._lock:
            ran = thread in self._together or (self._alone == thread and self._depth > 0)
            for threads in (
                *(self._together, self._beside, self.disturbed),
                *self.running.values(),
            ):
                threads.discard(thread)
            if self._alone == thread:
                self._alone, self._depth = None, 0
            self._changed.notify_all()
            return ran


process_turns = Turns()


def _reset_after_fork() -> None:
    global process_turns  # noqa: PLW0603 - one for all loaders of the process
    process_turns = Turns()


os.register_at_fork(after_in_child=_reset_after_fork)


def end_turns() -> None:
    """End what an exception from a signal's handler may have left open, in the main thread."""
    if threading.current_thread() is threading.main_thread():
        process_turns.leave(threading.get_ident())


@contextmanager
def generators_locked() -> Iterator[None]:
    """Keep other threads from using the generators in the block, which may draw from them."""
    turns, thread = process_turns, threading.get_ident()
    turns.take(thread)
    try:
        yield
    finally:
        turns.give(thread)


def is_taken_alone() -> bool:
    """Return whether this thread is the one in `generators_locked`."""
    return process_turns.is_taken_by(threading.get_ident())


@contextmanager
def generators_kept() -> Iterator[SimpleNamespace]:
    """Use the generators in the block, and restore them at its end."""
    with generators_locked():
        turns, kept = process_turns, SimpleNamespace(states=generator_states())
        try:
            yield kept
        finally:
            # Otherwise this thread was abandoned, and another one uses them.
            if turns.is_taken_by(threading.get_ident()):
                set_generator_states(kept.states)


@contextmanager
def generators_seeded(seed: int, *others: Any) -> Iterator[None]:
    """Seed the generators for the block, and restore them at its end."""
    with generators_kept():
        states = [each.get_state() for each in others]
        seed_generators(seed)
        for each in others:
            each.manual_seed(seed & TORCH_BITS)
        try:
            yield
        finally:
            for each, state in zip(others, states, strict=True):
                each.set_state(state)


@contextmanager
def generators_lent() -> Iterator[None]:
    """Let other threads use the generators in the block, in which this thread only waits.

    The code of a sample may iterate another loader, whose threads need the generators.
    """
    turns, thread = process_turns, threading.get_ident()
    states = generator_states() if turns.is_taken_by(thread) else None
    take_back = turns.lend(thread)
    try:
        yield
    finally:
        take_back()
        if states is not None:
            set_generator_states(states)


@contextmanager
def generators_restored() -> Iterator[None]:
    """Restore the generators at the end of the block, without excluding other threads."""
    states = generator_states()
    try:
        yield
    finally:
        set_generator_states(states)


def generator_states() -> States:
    """Return the states of the generators."""
    numpy_random, torch = numpy_and_torch()
    return (
        random.getstate(),
        None if numpy_random is None else numpy_random.get_state(),
        None if torch is None else torch.default_generator.get_state(),
    )


def set_generator_states(states: States) -> None:
    """Set the generators to states that `generator_states` returned."""
    process_turns.set_back(threading.get_ident())
    state, array_state, tensor_state = states
    random.setstate(state)
    if array_state is not None:
        _modules["numpy"].random.set_state(array_state)
    if tensor_state is not None:
        _modules["torch"].default_generator.set_state(tensor_state)


class PrivateGenerators:
    """Provides a private stream of random numbers: each block continues where the last one ended.

    The process's generators are restored after each block.
    """

    def __init__(self, seed: int, begin: Callable[[int], object] = seed_generators) -> None:
        """Begin with `seed`, which `begin` gives to the generators."""
        self._seed, self._begin = seed, begin
        self._own: States | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Use the private stream in the block."""
        with generators_kept():
            if self._own is None:
                self._begin(self._seed)
            else:
                set_generator_states(self._own)
            try:
                yield
            finally:
                self._own = generator_states()
