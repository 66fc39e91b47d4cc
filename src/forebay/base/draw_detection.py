"""Run calls with the results of seeded ones, and seed the generators only for those that draw.

    in a worker   SeedsIfDrawn   samples, most of which may draw nothing
    in threads    ThreadTurns    inputs or samples that several threads process side by side

A call that changed the generators, without having been seeded, is repeated with its seeds.
"""

from __future__ import annotations

import ctypes
import functools
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from forebay.base import randomness
from forebay.base.randomness import (
    SetSeed,
    generator_states,
    generators_kept,
    numpy_and_torch,
    seed_generators,
)

if TYPE_CHECKING:
    from forebay.base.local_generators import LocalGenerators

_T = TypeVar("_T")
_modules: dict[str, Any] = sys.modules
# numpy's MT19937: 624 words and a position.
_MT19937_BYTES = 625 * 4


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
        turns, thread, local = randomness.process_turns, threading.get_ident(), self.local
        found = turns.join(thread, lambda: self._draws)
        if found is not None:
            has_mode = local is None or local.has_mode
            with turns.looking:
                running = turns.running.setdefault(self, set())
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
                has_drawn = has_changed or thread in turns.disturbed
                turns.is_dirty |= has_changed
                turns.leave(thread)
            if not has_drawn:
                if error is not None:
                    raise error
                return returned  # type: ignore[return-value]
            undo()
            if local is not None and not has_mode and local.enter_mode():
                with generators_kept() as kept:
                    kept.states, turns.is_dirty = found, False
                return self.run(call, undo)
        with generators_kept() as kept:
            if found is None:
                return call(self._seed)
            if self._draws:
                if turns.is_dirty:
                    kept.states, turns.is_dirty = found, False
                return call(self._seed)
            detector = _DrawDetector(self._seed)
            try:
                return call(detector.seed)
            finally:
                # If not, the trainer itself drew, and its draws are kept.
                if detector.has_drawn():
                    self._draws, kept.states = True, found
                turns.is_dirty = False

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
        ran = [randomness.process_turns.leave(each.ident or 0) for each in threads]
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
    state, array_state, tensor_state = generator_states()
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
