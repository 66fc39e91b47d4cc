"""Seed and restore the three global generators: those of `random`, numpy and torch.

    seeded        seed_generators(seed)         one sample, one input
    restored      with generators_kept(): …     the caller's generators are unchanged afterwards
    private       PrivateGenerators(seed)       a separate stream, for a sampler
    in threads    ThreadTurns                   inputs that several threads process
    in a worker   SeedsIfDrawn                  samples, most of which may draw nothing

Long because all code that seeds the generators takes turns with all code that draws from them. A
process has one set of generators for all its threads, so threads that seed them, or that draw while
another thread may seed them, take turns under one lock. numpy and torch are seeded if they are
loaded: this module imports neither, since a worker may need neither.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from forebay.base.libraries import after_import, not_after_import
from forebay.base.process import wait_until

if TYPE_CHECKING:
    from forebay.base.local_generators import LocalGenerators

_T = TypeVar("_T")
# The states of `random`, numpy and torch; None for a library that is not loaded.
States = tuple[Any, Any, Any]

_modules: dict[str, Any] = sys.modules
# numpy's MT19937: 624 words and a position.
_MT19937_BYTES = 625 * 4
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
    if this_thread.stream is None:
        numpy.random.seed(_current.seed >> 32)


def _seed_torch(torch: Any) -> None:
    if this_thread.stream is None:
        torch.default_generator.manual_seed(_current.seed & TORCH_BITS)


def seed_on_import(is_on: bool) -> None:
    """Start or stop seeding numpy and torch when user code imports them."""
    change = after_import if is_on else not_after_import
    change("numpy", _seed_numpy)
    change("torch", _seed_torch)


# ---- turns -------------------------------------------------------------------------------------


class _Turns:
    """Tracks which threads use the generators: many threads side by side, or one thread alone."""

    def __init__(self) -> None:
        self.disturbed: set[int] = set()
        self.running: WeakKeyDictionary[ThreadTurns, set[int]] = WeakKeyDictionary()
        self.looking = threading.Lock()
        self.is_dirty = False
        self._beside: set[int] = set()  # those in _together, and those that lend their turn
        self._found: States | None = None
        self._changed = threading.Condition()
        self._together: set[int] = set()
        self._alone: int | None = None  # the thread that runs alone, or is the next to do so
        self._depth = 0  # its nested blocks; 0 while it waits for the others to end

    def join(self, thread: int, is_refused: Callable[[], bool]) -> States | None:
        """Wait until no thread runs alone, then run side by side with others, unless refused."""
        with self._changed:
            self._wait_for(lambda: self._alone is None or is_refused())
            if is_refused():
                return None
            if not self._together and not self.is_dirty:
                self._found = _states()
            self._together.add(thread)
            self._beside.add(thread)
            return self._found

    def take(self, thread: int) -> None:
        """Begin to run alone. A thread that already runs side by side does not wait for others."""
        with self._changed:
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
        with self._changed:
            depth, is_beside = self._depth, thread in self._together
            is_alone = self._alone == thread
            self._together.discard(thread)
            if is_alone:
                self._depth, self._alone = 0, None
            self._changed.notify_all()

        def take_back() -> None:
            if is_alone:
                self.take(thread)
            with self._changed:
                if is_alone:
                    self._depth = depth
                if is_beside:
                    self._wait_for(lambda: self._alone in (None, thread))
                    self._together.add(thread)

        return take_back

    def give(self, thread: int) -> None:
        """End a block alone."""
        with self._changed:
            if self._alone == thread:
                self._depth -= 1
                if not self._depth:
                    self._alone = None
                    self._changed.notify_all()

    def set_back(self, thread: int) -> None:
        """Record that a thread sets the generators to an earlier state."""
        self.disturbed |= self._beside - {thread}

    def _wait_for(self, is_true: Callable[[], bool]) -> None:
        wait_until(lambda seconds: self._changed.wait_for(is_true, seconds))

    def is_taken_by(self, thread: int) -> bool:
        return self._alone == thread

    def leave(self, thread: int) -> bool:
        """End all turns of a thread; return whether it ran, and did not only wait."""
        with self._changed:
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


class _ThisThread(threading.local):
    """What threads draw from: the generators of the process if `stream` is None."""

    stream: Any = None  # of `local_generators`


this_thread = _ThisThread()
_turns = _Turns()


def _reset_after_fork() -> None:
    global _turns  # noqa: PLW0603 - one for all loaders of the process
    _turns = _Turns()


os.register_at_fork(after_in_child=_reset_after_fork)


@contextmanager
def generators_locked() -> Iterator[None]:
    """Keep other threads from using the generators in the block, which may draw from them."""
    turns, thread, stream = _turns, threading.get_ident(), this_thread.stream
    turns.take(thread)
    this_thread.stream = None
    try:
        yield
    finally:
        turns.give(thread)
        this_thread.stream = stream


@contextmanager
def generators_kept() -> Iterator[SimpleNamespace]:
    """Use the generators in the block, and restore them at its end."""
    with generators_locked():
        turns, kept = _turns, SimpleNamespace(states=_states())
        try:
            yield kept
        finally:
            # Otherwise this thread was abandoned, and another one uses them.
            if turns.is_taken_by(threading.get_ident()):
                _set_states(kept.states)


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
    turns, thread = _turns, threading.get_ident()
    states = _states() if turns.is_taken_by(thread) else None
    take_back = turns.lend(thread)
    try:
        yield
    finally:
        take_back()
        if states is not None:
            _set_states(states)


@contextmanager
def generators_restored() -> Iterator[None]:
    """Restore the generators at the end of the block, without excluding other threads."""
    states = _states()
    try:
        yield
    finally:
        _set_states(states)


def _states() -> States:
    numpy_random, torch = numpy_and_torch()
    return (
        random.getstate(),
        None if numpy_random is None else numpy_random.get_state(),
        None if torch is None else torch.default_generator.get_state(),
    )


def _set_states(states: States) -> None:
    _turns.set_back(threading.get_ident())
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
                _set_states(self._own)
            try:
                yield
            finally:
                self._own = _states()


# A function that seeds the generators from 64 bits; see `ThreadTurns.run`.
SetSeed = Callable[[int], None]


def seed_nothing(seed: int) -> None:
    """Do not seed: nothing draws, or what does is found afterwards."""


class SeedsIfDrawn:
    """Runs calls in a worker process with the results of seeded ones, but seeds only if they draw.

    Seeding takes 7 us, longer than many a sample. The first call is seeded. If it does not draw,
    later ones are not seeded. The first one that draws is repeated with seeds, and all after it are
    seeded. A call that reads the state of a generator, or torch's seed, counts as one that draws.
    """

    def __init__(self) -> None:
        """Begin with a call that is seeded."""
        self._draws: bool | None = None
        self._reads = 0

    def open(self) -> None:
        """Watch this process, which must be a worker, for functions that read the generators."""
        for module, name in (
            *((random, "getstate"), (_modules["numpy"].random, "get_state")),
            *((_modules[name], "initial_seed") for name in ("torch", "torch.random")),
            *((_modules[name], "get_rng_state") for name in ("torch", "torch.random")),
        ):
            setattr(module, name, self._counting(getattr(module, name)))

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def read(*args: Any, **kwargs: Any) -> Any:
            self._reads += 1
            return function(*args, **kwargs)

        return read

    def run(self, call: Callable[[SetSeed], _T]) -> _T:
        """Make a call; return its result, or raise its exception."""
        if self._draws:
            return call(seed_generators)
        reads = self._reads
        if self._draws is None:
            detector = _DrawDetector()
            try:
                return call(detector.seed)
            finally:
                self._draws = detector.has_drawn() or self._reads > reads
        _modules["numpy"].random.seed(0)  # see `_numpy_state`
        before = _fingerprint()
        try:
            returned, error = call(seed_nothing), None
        except Exception as raised:  # noqa: BLE001 - it may depend on random numbers
            returned, error = None, raised
        if self._reads == reads and _fingerprint() == before:
            if error is not None:
                raise error
            return returned  # type: ignore[return-value]
        self._draws = True
        return call(seed_generators)


class ThreadTurns:
    """Runs calls of several threads so that each draws from its own seeds, as if it were alone.

    Calls run side by side until a change of the generators is detected. Then that call is repeated
    alone; if it does draw, all later calls run alone.

    Args:
        local: Lets calls draw from generators of their own side by side; None if those that draw
            run alone.
    """

    def __init__(self, local: LocalGenerators | None = None) -> None:
        """Begin with calls side by side."""
        self._draws, self.local = False, local
        # By thread, the `SampleThreads` that make samples for it.
        self.helpers: WeakKeyDictionary[threading.Thread, Any] = WeakKeyDictionary()
        self._beside: Callable[[], AbstractContextManager[SetSeed]] = (
            (lambda: nullcontext(seed_nothing)) if local is None else local.beside
        )
        self._fingerprint = _whole_fingerprint if local is None else local.fingerprint
        self._seed: SetSeed = seed_generators if local is None else local.seed_all
        self._before: tuple[Any, ...] = ()  # the fingerprint when the first of those running began

    def run(self, call: Callable[[SetSeed], _T], undo: Callable[[], None] = lambda: None) -> _T:
        """Make a call; return its result, or raise its exception."""
        thread, local = threading.get_ident(), self.local
        found = _turns.join(thread, lambda: self._draws)
        if found is not None:
            has_mode = local is None or local.has_mode
            with _turns.looking:
                running = _turns.running.setdefault(self, set())
                if not running:
                    self._before = self._fingerprint()
                running.add(thread)
            try:
                with self._beside() as set_seed:
                    returned, error = call(set_seed), None
            except Exception as raised:  # noqa: BLE001 - it may depend on random numbers
                returned, error = None, raised
            finally:
                has_changed = self._fingerprint() != self._before
                has_drawn = has_changed or thread in _turns.disturbed
                _turns.is_dirty |= has_changed
                _turns.leave(thread)
            if not has_drawn:
                if error is not None:
                    raise error
                return returned  # type: ignore[return-value]
            undo()
            if local is not None and not has_mode and local.enter_mode():
                with generators_kept() as kept:
                    kept.states, _turns.is_dirty = found, False
                return self.run(call, undo)
        with generators_kept() as kept:
            if found is None:
                return call(self._seed)
            if self._draws:
                if _turns.is_dirty:
                    kept.states, _turns.is_dirty = found, False
                return call(self._seed)
            detector = _DrawDetector(self._seed)
            try:
                return call(detector.seed)
            finally:
                # If not, the trainer itself drew, and its draws are kept.
                if detector.has_drawn():
                    self._draws, kept.states = True, found
                _turns.is_dirty = False

    def run_alone(self) -> None:
        """Run all calls alone from now on: they draw."""
        self._draws = True

    def abandon(self, thread: threading.Thread) -> bool:
        """End all turns of an abandoned thread and its helpers; return whether all only waited."""
        helpers = self.helpers.pop(thread, None)
        if helpers is not None:
            helpers.end()
        return self.leave([thread, *(() if helpers is None else helpers.threads)])

    def leave(self, threads: Iterable[threading.Thread]) -> bool:
        """End all turns of threads that hang; return whether all only waited for one."""
        ran = [_turns.leave(each.ident or 0) for each in threads]
        return not any(ran)


class _DrawDetector:
    """Seeds the generators, and detects whether anything draws from them afterwards."""

    def __init__(self, set_seed: SetSeed = seed_generators) -> None:
        self._has_drawn, self._set_seed = False, set_seed
        self._seeded: tuple[Any, ...] | None = None

    def seed(self, seed: int) -> None:
        self._has_drawn = self.has_drawn()
        self._set_seed(seed)
        self._seeded = _fingerprint()

    def has_drawn(self) -> bool:
        return self._has_drawn or (self._seeded is not None and self._seeded != _fingerprint())


def _whole_fingerprint() -> tuple[Any, ...]:
    """Return a value that changes whenever random numbers are drawn."""
    state, array_state, tensor_state = _states()
    return (
        hash(state),
        None if array_state is None else (array_state[1].tobytes(), *array_state[2:]),
        None if tensor_state is None else tensor_state.numpy().tobytes(),
    )


def _fingerprint() -> tuple[Any, ...]:
    """Return the same in a third of the time, if numpy was seeded before, and drew nothing."""
    numpy_random, torch = numpy_and_torch()
    return (
        _random_state(),
        None if numpy_random is None else _numpy_state(numpy_random),
        None if torch is None else torch.default_generator.get_state().numpy().tobytes(),
    )


# As it is here, and not what a worker replaces it with; see `SeedsIfDrawn.open`.
_random_state = random.getstate


def _numpy_state(numpy_random: Any) -> Any:
    """Return the state of numpy's global generator, in a twentieth of the time of `get_state`.

    Normal numbers come in pairs. The second is not in this state; seeding discards it.
    """
    generator = numpy_random.get_bit_generator()
    if type(generator) is numpy_random.MT19937:
        return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    return pickle.dumps(generator.state)  # the user's own
