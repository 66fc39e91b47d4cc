"""Run calls with the results of seeded ones, and seed the generators only for those that draw.

    in a worker      SeedsIfDrawn   samples, most of which may draw nothing
    in the trainer   BatchSeeds     the same; its generators are as before after each batch
    in threads       ThreadTurns    inputs or samples that several threads process side by side

A call that changed the generators, without having been seeded, is repeated with its seeds. To seed
them takes 7 us, and to save and restore all states 100 us: longer than many a sample takes.
"""

from __future__ import annotations

import functools
import pickle
import random
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from forebay.base import randomness
from forebay.base.generators import OwnedGenerators
from forebay.base.randomness import (
    SetSeed,
    States,
    generator_states,
    generators_kept,
    generators_locked,
    numpy_and_torch,
    seed_generators,
    set_generator_states,
)

_T = TypeVar("_T")
# The Mersenne Twisters of `random` and numpy: 624 words, and a position before or after them.
_WORDS = 624
_STATE_BYTES = (_WORDS + 1) * 4


def seed_nothing(seed: int) -> None:
    """Do not seed: nothing draws, or what does is found afterwards."""


class _Reads:
    """Counts the calls of functions that read the states of the generators.

    Attributes:
        count: The calls so far, while it watches.
    """

    def __init__(self) -> None:
        self.count = 0
        self._replaced: list[tuple[Any, str, Any]] = []

    def watch(self) -> None:
        """Replace these functions with ones that count."""
        numpy_random, torch = numpy_and_torch()
        modules: list[tuple[Any, str]] = [(random, "getstate")]
        if numpy_random is not None:
            modules.append((numpy_random, "get_state"))
        if torch is not None:
            of_torch = "initial_seed", "get_rng_state"
            modules += [(module, name) for module in (torch, torch.random) for name in of_torch]
        for module, name in modules:
            function = getattr(module, name)
            self._replaced.append((module, name, function))
            setattr(module, name, self._counting(function))

    def unwatch(self) -> None:
        """Put the functions back."""
        while self._replaced:
            setattr(*self._replaced.pop())

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def read(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return function(*args, **kwargs)

        return read


class SeedsIfDrawn:
    """Runs calls in a worker process with the results of seeded ones, but seeds only if they draw.

    The first call is seeded. If it does not draw, later ones are not seeded. The first one that
    draws is repeated with seeds, and all after it are seeded. A call that reads the state of a
    generator, or torch's seed, counts as one that draws.
    """

    def __init__(self) -> None:
        """Begin with a call that is seeded."""
        self._draws: bool | None = None
        self._reads = _Reads()

    def open(self) -> None:
        """Watch this process, which must be a worker, for functions that read the generators."""
        self._reads.watch()

    def always(self) -> None:
        """Seed all calls from now on: they draw."""
        self._draws = True

    def run(self, call: Callable[[SetSeed], _T]) -> _T:
        """Make a call; return its result, or raise its exception."""
        if self._draws:
            return call(seed_generators)
        if self._draws is None:
            return self._first(call)
        numpy_random, _ = numpy_and_torch()
        if numpy_random is not None:
            numpy_random.seed(0)  # see `generators_fingerprint`
        return self._unseeded(call, generators_fingerprint())

    def _first(self, call: Callable[[SetSeed], _T]) -> _T:
        reads, detector = self._reads.count, _DrawDetector(seed_generators)
        try:
            return call(detector.seed)
        finally:
            self._draws = detector.has_drawn() or self._reads.count > reads

    def _unseeded(self, call: Callable[[SetSeed], _T], before: tuple[Any, ...]) -> _T:
        """Make a call without seeds; again with them if it draws."""
        reads = self._reads.count
        try:
            returned, error = call(seed_nothing), None
        except Exception as raised:  # noqa: BLE001 - it may depend on random numbers
            returned, error = None, raised
        if self._reads.count == reads and generators_fingerprint() == before:
            if error is not None:
                raise error
            return returned  # type: ignore[return-value]
        self._draws = True
        return call(seed_generators)


class BatchSeeds:
    """Does the same in the trainer's process, whose generators are as before after each batch.

    Their states are saved and restored only where something draws.

    Attributes:
        samples: Runs the calls that fetch samples, within `batch`.
        collation: Runs the calls that collate them, within `batch`.
    """

    def __init__(self) -> None:
        """Begin with a batch that is seeded."""
        self.samples, self.collation = _CallsOfBatch(self), _CallsOfBatch(self)
        self._kept: Any = None  # as before the batch, if anything in it may draw
        # Numpy's state when all of it was last read: the part in a fingerprint, and all of it.
        self._array_state: Any = None
        self._full_array_state: Any = None

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Keep other threads from using the generators in the block; restore them at its end."""
        with generators_locked():
            self._kept = None
            try:
                yield
            finally:
                # Otherwise this thread was abandoned, and another one uses them.
                if self._kept is not None and randomness.is_taken_alone():
                    set_generator_states(self._kept)

    def always(self) -> None:
        """Seed all calls from now on: they draw."""
        self.samples.always()
        self.collation.always()

    def keep(self) -> None:
        """Save the states, to be restored at the end of the batch."""
        if self._kept is None:
            self._kept = generator_states()

    def keep_earlier(self, fingerprint: tuple[Any, ...] | None) -> None:
        """Restore the states at the end of the batch that they had at `unchanged`, if it knew."""
        if fingerprint is not None:
            self._kept = states_of_fingerprint(fingerprint, self._full_array_state)

    def unchanged(self) -> tuple[Any, ...] | None:
        """Return the fingerprint of the generators, if all draws change it; None if not.

        A number that numpy has left of a pair of normal ones is not in it. Whether there is one
        takes 20 us to find, so that is done only when the rest of the state differs.
        """
        if self._kept is not None:
            return None
        fingerprint, (numpy_random, _) = generators_fingerprint(), numpy_and_torch()
        if numpy_random is None:
            self._array_state = self._full_array_state = None
            return fingerprint
        if fingerprint[1] != self._array_state:
            self._array_state = fingerprint[1]
            self._full_array_state = numpy_random.get_state()
        full = self._full_array_state
        is_known = isinstance(full, tuple) and not full[3]  # a dict is that of the user's own kind
        return fingerprint if is_known else None


class _CallsOfBatch(SeedsIfDrawn):
    """Runs calls within a batch; see `BatchSeeds`."""

    def __init__(self, batch: BatchSeeds) -> None:
        super().__init__()
        self._batch = batch

    def run(self, call: Callable[[SetSeed], _T]) -> _T:
        """Make a call; return its result, or raise its exception."""
        draws = self._draws
        if draws:
            self._batch.keep()
            return call(seed_generators)
        before = self._batch.unchanged() if draws is False else None
        if before is None:
            self._batch.keep()
        self._reads.watch()
        try:
            returned = super().run(call) if before is None else self._unseeded(call, before)
        except BaseException:
            self._batch.keep_earlier(before)
            raise
        finally:
            self._reads.unwatch()
        if self._draws:
            self._batch.keep_earlier(before)
        return returned


class ThreadTurns:
    """Runs calls of several threads so that each draws from its own seeds, as if it were alone.

    Calls run side by side until a change of the generators is detected. Then that call is repeated
    alone; if it does draw, all later calls run alone.

    Attributes:
        owned: Other generators that these calls draw from.
    """

    def __init__(self) -> None:
        """Begin with calls side by side."""
        self._draws, self.owned = False, OwnedGenerators()
        # By thread, the `SampleThreads` that make samples for it.
        self.helpers: WeakKeyDictionary[threading.Thread, Any] = WeakKeyDictionary()
        # The fingerprint when the first of those running began, and of which generators it is.
        self._before, self._compared = tuple[Any, ...](), self.owned

    def run(self, call: Callable[[SetSeed], _T], undo: Callable[[], None] = lambda: None) -> _T:
        """Make a call; return its result, or raise its exception."""
        turns, thread = randomness.process_turns, threading.get_ident()
        found = turns.join(thread, lambda: self._draws)
        if found is not None:
            with turns.looking:
                running = turns.running.setdefault(self, set())
                if not running:
                    self._compared = self.owned
                    self._before = self._fingerprint(self._compared)
                running.add(thread)
            try:
                returned, error = call(seed_nothing), None
            except Exception as raised:  # noqa: BLE001 - it may depend on random numbers
                returned, error = None, raised
            finally:
                has_changed = self._fingerprint(self._compared) != self._before
                has_drawn = has_changed or thread in turns.disturbed
                turns.is_dirty |= has_changed
                turns.leave(thread)
            if not has_drawn:
                if error is not None:
                    raise error
                return returned  # type: ignore[return-value]
            undo()
        with generators_kept() as kept:
            if found is None:
                return call(self._seed)
            if self._draws:
                if turns.is_dirty:
                    kept.states, turns.is_dirty = found, False
                return call(self._seed)
            detector = _DrawDetector(self._seed, self._fingerprint)
            try:
                return call(detector.seed)
            finally:
                # If not, the trainer itself drew, and its draws are kept.
                if detector.has_drawn():
                    self._draws, kept.states = True, found
                turns.is_dirty = False

    def _seed(self, seed: int) -> None:
        seed_generators(seed)
        self.owned.seed(seed)

    def _fingerprint(self, owned: OwnedGenerators | None = None) -> tuple[Any, ...]:
        owned = self.owned if owned is None else owned
        return (*_whole_fingerprint(), *map(_bytes_of_state, owned.states()))

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


# ---- what draws change ---------------------------------------------------------------------------


class _DrawDetector:
    """Seeds the generators, and detects whether anything draws from them afterwards."""

    def __init__(
        self,
        set_seed: Callable[[int], None],
        fingerprint: Callable[[], tuple[Any, ...]] | None = None,
    ) -> None:
        """Have `set_seed` seed them."""
        self._has_drawn, self._set_seed = False, set_seed
        self._fingerprint = fingerprint or generators_fingerprint
        self._seeded: tuple[Any, ...] | None = None

    def seed(self, seed: int) -> None:
        """Seed the generators."""
        self._has_drawn = self.has_drawn()
        self._set_seed(seed)
        self._seeded = self._fingerprint()

    def has_drawn(self) -> bool:
        """Return whether anything drew after one of the seeds."""
        return self._has_drawn or (self._seeded is not None and self._seeded != self._fingerprint())


# As it is here, and not what counts its calls.
_random_state = random.getstate


def generators_fingerprint() -> tuple[Any, ...]:
    """Return a value that changes if something draws, and numpy had no normal number left.

    Normal numbers come in pairs. The second of numpy's is not in this state; seeding discards it.
    """
    numpy_random, torch = numpy_and_torch()
    return (
        _random_memory(),
        None if numpy_random is None else _numpy_memory(numpy_random),
        None if torch is None else torch.default_generator.get_state().numpy().tobytes(),
    )


def states_of_fingerprint(fingerprint: tuple[Any, ...], array_state: Any) -> States:
    """Return the states that the generators had when a fingerprint was taken.

    Args:
        array_state: numpy's, which is not all in the fingerprint.
    """
    (memory, left), _, tensor_bytes = fingerprint
    if isinstance(memory, bytes):
        position, *words = struct.unpack(f"{_WORDS + 1}I", memory)
        state = random.Random.VERSION, (*words, position), left
    else:
        state = memory
    _, torch = numpy_and_torch()
    if torch is None or tensor_bytes is None:
        return state, array_state, None
    return state, array_state, torch.frombuffer(bytearray(tensor_bytes), dtype=torch.uint8)


def _whole_fingerprint() -> tuple[Any, ...]:
    """Return a value that changes whenever random numbers are drawn."""
    state, array_state, tensor_state = generator_states()
    return (
        hash(state),
        None if array_state is None else (array_state[1].tobytes(), *array_state[2:]),
        None if tensor_state is None else tensor_state.numpy().tobytes(),
    )


def _bytes_of_state(state: Any) -> bytes:
    """Return the state of a generator as bytes: a pickled tensor has an address in it."""
    return state.numpy().tobytes() if hasattr(state, "numpy") else pickle.dumps(state)


def _random_memory() -> tuple[Any, Any]:
    """Return the state of `random`'s generator, and its second normal number, if one is left.

    `getstate` makes 625 integers of it.
    """
    words = _random_words()
    if words is None:
        return _random_state(), None
    return words.tobytes(), random._inst.gauss_next  # type: ignore[attr-defined]


@functools.cache
def _random_words() -> Any:
    """Return a view of the position and words of `random`'s generator; None if not found."""
    if sys.implementation.name != "cpython":
        return None
    generator: Any = random._inst
    begin = object.__basicsize__
    if random.Random.__basicsize__ < begin + _STATE_BYTES:
        return None
    *words, position = random.Random.getstate(generator)[1]
    known = struct.pack(f"{_WORDS + 1}I", position, *words)
    view = _view(id(generator) + begin)
    return view if view.tobytes() == known else None


def _view(address: int) -> Any:
    """Return a view of the memory of a Mersenne Twister, as an array."""
    known = {"data": (address, True), "shape": (_WORDS + 1,), "typestr": "=u4", "version": 3}
    return sys.modules["numpy"].asarray(SimpleNamespace(__array_interface__=known))


# Views of the memory of numpy's own generators, with these; the user may set another one.
_views: list[tuple[Any, Any]] = []


def _numpy_memory(numpy_random: Any) -> Any:
    """Return the state of numpy's global generator, in a hundredth of the time of `get_state`."""
    generator = numpy_random.get_bit_generator()
    if type(generator) is not numpy_random.MT19937:
        return pickle.dumps(generator.state)  # the user's own
    if not _views or _views[0][0] is not generator:
        _views[:] = [(generator, _view(generator.ctypes.state_address))]
    return _views[0][1].tobytes()
