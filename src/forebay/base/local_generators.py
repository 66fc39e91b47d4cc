"""Thread-local random generators: several threads make samples, and each draws from its own seeds.

    thread 1 ── sample 7 draws ──> generators seeded for sample 7
    thread 2 ── sample 8 draws ──> generators seeded for sample 8
    another  ── draws ───────────> the generators of the process, as if nothing had been replaced

A sample draws as it always did, so each library has to be made to ask which thread it is:

    random   the class of `random.Random` objects is replaced by one whose methods ask
    numpy    takes the lock of a bit generator for each draw; the lock is replaced by one that first
             puts the state of the thread's sample there
    torch    a `TorchFunctionMode` of the thread passes `generator=`

What draws in another way changes generators that all threads share: `ThreadTurns` notices that, and
lets such samples be made one at a time.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from forebay.base.datasets import OwnedGenerators, generator_state, set_state
from forebay.base.libraries import after_import
from forebay.base.randomness import (
    TORCH_BITS,
    SetSeed,
    numpy_and_torch,
    seed_generators,
    this_thread,
)

_modules: dict[str, Any] = sys.modules


class _Stream:
    """The generators of one sample, each seeded when it is first used.

    Attributes:
        own: By the ID of a generator, or of its `_Switch`: the generator, or the state, to use.
        numbers: By the ID of a generator of torch: what its seeds are combined with.
    """

    __slots__ = ("has_ended", "numbers", "own", "seed")

    def __init__(self, seed: int, numbers: dict[int, int]) -> None:
        self.seed, self.numbers = seed, numbers
        self.own: dict[int, Any] = {}
        self.has_ended = False


def _stream() -> _Stream | None:
    """Return the stream of this thread; None if it uses the generators of the process."""
    stream: _Stream | None = this_thread.stream
    return stream


# ---- random --------------------------------------------------------------------------------------


class _LocalRandom(random.Random):
    """A `random.Random` that is another one in each thread with a stream."""

    def _own(self) -> random.Random | None:
        stream = _stream()
        if stream is None:
            return None
        own: random.Random | None = stream.own.get(id(self))
        if own is None:
            own = stream.own[id(self)] = random.Random()  # noqa: S311 - not for secrets
            own.seed(stream.seed ^ self.__dict__["number"])
        return own

    def random(self) -> float:
        own = self._own()
        return super().random() if own is None else own.random()

    def getrandbits(self, k: int, /) -> int:
        own = self._own()
        return super().getrandbits(k) if own is None else own.getrandbits(k)

    def seed(self, *args: Any, **kwargs: Any) -> None:
        own = self._own()
        return super().seed(*args, **kwargs) if own is None else own.seed(*args, **kwargs)

    def getstate(self) -> tuple[Any, ...]:
        own = self._own()
        return super().getstate() if own is None else own.getstate()

    def setstate(self, state: tuple[Any, ...]) -> None:
        own = self._own()
        return super().setstate(state) if own is None else own.setstate(state)

    @property
    def gauss_next(self) -> float | None:
        """The second of two normal numbers, which `gauss` keeps."""
        return (self._own() or self).__dict__.get("gauss_next")

    @gauss_next.setter
    def gauss_next(self, value: float | None) -> None:
        (self._own() or self).__dict__["gauss_next"] = value

    def __reduce__(self) -> tuple[Any, ...]:
        return random.Random, (), self.getstate()


def _make_random_local(generator: Any, number: int) -> None:
    generator.__class__ = _LocalRandom
    generator.__dict__["number"] = number


def _replace_bound_functions() -> None:
    """Replace the functions of `random` that are bound to methods of the former class."""
    names = ("random", "getrandbits", "seed", "getstate", "setstate")
    new = {id(getattr(random, name)): getattr(random._inst, name) for name in names}
    for module in list(_modules.values()):  # also where it says `from random import random`
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in new:
                setattr(module, name, new[id(value)])


# ---- numpy ---------------------------------------------------------------------------------------


class _Switch:
    """The lock of a bit generator, which puts the state of the thread's sample there.

    Args:
        generator: The Generator or RandomState that draws.
        bits: Its bit generator.
        seed: Seeds that for a sample, from 64 bits.
    """

    def __init__(self, generator: Any, bits: Any, seed: SetSeed) -> None:
        self.bits, self.seed, self._generator = bits, seed, generator
        self._lock, self._depth = threading.RLock(), 0
        self._holder: _Stream | None = None  # whose state is in the bit generator
        self._shared: Any = None  # the state of the process, while a stream's is there
        _switches.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        try:
            if self._depth == 1 and (stream := _stream()) is not self._holder:
                self._pass_to(stream)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self._lock.release()

    def _pass_to(self, stream: _Stream | None) -> None:
        before, self._holder = self._holder, stream
        if before is None:
            self._shared = generator_state(self._generator)
        elif not before.has_ended:
            before.own[id(self)] = generator_state(self._generator)
        if stream is None:
            set_state(self._generator, self._shared)
        elif (state := stream.own.get(id(self))) is not None:
            set_state(self._generator, state)
        else:
            self.seed(stream.seed)

    def seeding(self, set_seed: SetSeed) -> SetSeed:
        """Return a function that seeds what the thread draws from."""

        def seed(number: int) -> None:
            with self:
                set_seed(number)

        return seed

    def free(self) -> None:
        """Free the lock in a fork, which lacks the thread that may hold it."""
        self._lock, self._depth = threading.RLock(), 0


_switches: weakref.WeakSet[_Switch] = weakref.WeakSet()


def _free_locks() -> None:
    for each in _switches:
        each.free()


os.register_at_fork(after_in_child=_free_locks)


@functools.cache
def _local_class(kind: type) -> type:
    """Return a subclass of a class of bit generators, over the memory of another one."""

    def of_real(name: str) -> property:
        def get(self: Any) -> Any:
            with self.lock:
                return getattr(self.lock.bits, name)

        def set_(self: Any, value: Any) -> None:
            with self.lock:
                setattr(self.lock.bits, name, value)

        return property(get, set_)

    def calling(name: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self.lock:
                return getattr(self.lock.bits, name)(*args, **kwargs)

        return call

    attributes = ("capsule", "state", "ctypes", "cffi", "seed_seq")
    methods = ("random_raw", "_legacy_seeding", "jumped", "advance", "spawn", "__reduce__")
    body: dict[str, Any] = {"lock": None, **{name: of_real(name) for name in attributes}}
    return type(kind.__name__, (kind,), body | {name: calling(name) for name in methods})


def _make_numpy_local(generator: Any, seed: SetSeed) -> _Switch | None:
    """Let a Generator or RandomState take a `_Switch`; return that, or None if it cannot."""
    bits = getattr(generator, "_bit_generator", None)
    if bits is None:  # it is a bit generator itself
        return None
    if isinstance(switch := bits.lock, _Switch):
        switch.seed = seed
        return switch
    state = generator_state(generator)
    kind: Any = type(bits)
    local = _local_class(kind)(0)
    local.lock = _Switch(generator, bits, seed)
    generator.__init__(local)
    set_state(generator, state)
    return local.lock  # type: ignore[no-any-return]


# ---- torch ---------------------------------------------------------------------------------------

# Functions and methods of tensors that draw from `generator=`.
_DRAWS = (
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
    *("bernoulli", "multinomial", "normal", "poisson"),
)
_DRAWS_IN_PLACE = (
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_"),
    *("normal_", "random_", "uniform_"),
)


def _own_of_torch(stream: _Stream, shared: Any) -> Any:
    """Return the generator of a stream instead of one of torch."""
    own = stream.own.get(id(shared))
    if own is None:
        own = stream.own[id(shared)] = _modules["torch"].Generator()
        own.manual_seed((stream.seed ^ stream.numbers.get(id(shared), 0)) & TORCH_BITS)
    return own


@functools.cache
def _torch_mode() -> Callable[[], AbstractContextManager[Any]]:
    """Return a mode in which torch's functions draw from the thread's stream."""
    import torch
    from torch.overrides import TorchFunctionMode

    tensor = torch.Tensor
    draws = {getattr(torch, name) for name in _DRAWS}
    draws |= {getattr(tensor, name) for name in (*_DRAWS_IN_PLACE, "bernoulli", "multinomial")}

    class LocalMode(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if function in draws and (stream := _stream()) is not None:
                shared = kwargs.get("generator") or torch.default_generator
                try:
                    return function(*args, **kwargs | {"generator": _own_of_torch(stream, shared)})
                except (
                    TypeError,
                    RuntimeError,
                ):  # this torch, or this device, has no such argument
                    pass
            return function(*args, **kwargs)

    return LocalMode


def _replace_readers_of_torch(torch: Any) -> None:
    """Let functions that read torch's generator read that of the thread's stream."""

    def reading(function: Callable[[], Any], method: str) -> Callable[[], Any]:
        @functools.wraps(function)
        def read() -> Any:
            stream = _stream()
            own = None if stream is None else _own_of_torch(stream, torch.default_generator)
            return function() if own is None else getattr(own, method)()

        return read

    for name, method in (("initial_seed", "initial_seed"), ("get_rng_state", "get_state")):
        read = reading(getattr(torch, name), method)
        setattr(torch, name, read)
        setattr(torch.random, name, read)


# ---- all of them ---------------------------------------------------------------------------------


def _make_numpys_own_local(numpy: Any) -> None:
    shared = numpy.random.mtrand._rand
    _make_numpy_local(shared, lambda seed: shared.seed(seed >> 32))


@functools.cache
def _make_process_local() -> None:
    """Let the three generators of this process depend on the thread; nothing undoes it."""
    _make_random_local(random._inst, 0)
    _replace_bound_functions()
    for name, change in (("numpy", _make_numpys_own_local), ("torch", _replace_readers_of_torch)):
        if hasattr(_modules.get(name), "random"):
            change(_modules[name])
        else:  # the user's code may import it
            after_import(name, change)


class LocalGenerators:
    """Lets threads of this process draw from seeds of their own.

    Attributes:
        has_mode: Whether torch's functions are told what to draw from. Each then takes microseconds
            more.
    """

    def __init__(self) -> None:
        self.has_mode = False
        self._seeds: list[SetSeed] = []  # of the owned generators, as all threads share them
        self._watched: list[Any] = []  # of these, those that change if they draw otherwise
        self._numbers: dict[int, int] = {}
        _make_process_local()

    def own(self, owned: OwnedGenerators) -> bool:
        """Include generators that a dataset or a function owns; return whether that is possible."""
        self._seeds, self._watched, self._numbers, is_possible = [], [], {}, True
        for generator, number, set_seed in owned.parts:
            seed, switch = _combined(set_seed, number), None
            if type(generator) in (random.Random, _LocalRandom):
                _make_random_local(generator, number)
                self._watched.append(generator)
            elif hasattr(generator, "manual_seed"):
                self._numbers[id(generator)] = number
                self._watched.append(generator)
                self.has_mode = True
            else:
                switch = _make_numpy_local(generator, seed)
                is_possible &= switch is not None
            self._seeds.append(seed if switch is None else switch.seeding(seed))
        return is_possible

    def enter_mode(self) -> bool:
        """Tell torch's functions what to draw from, if torch is loaded; return whether it is."""
        self.has_mode = hasattr(_modules.get("torch"), "overrides")
        return self.has_mode

    @contextmanager
    def beside(self) -> Iterator[SetSeed]:
        """Let this thread draw, in the block, from what the function seeds that is yielded."""

        def set_seed(seed: int) -> None:
            end()
            this_thread.stream = _Stream(seed, numbers)

        def end() -> None:
            if this_thread.stream is not None:
                this_thread.stream.has_ended = True
            this_thread.stream = None

        numbers = self._numbers
        with _torch_mode()() if self.has_mode else nullcontext():
            try:
                yield set_seed
            finally:
                end()

    def seed_all(self, seed: int) -> None:
        """Seed the generators that all threads share, for a call that runs alone."""
        seed_generators(seed)
        for set_seed in self._seeds:
            set_seed(seed)

    def fingerprint(self) -> tuple[Any, ...]:
        """Return a value that changes if something draws and does not ask for the thread."""
        _, torch = numpy_and_torch()
        shared = [random._inst] if torch is None else [random._inst, torch.default_generator]
        return tuple(
            generator_state(each).numpy().tobytes()
            if hasattr(each, "manual_seed")
            else generator_state(each)
            for each in (*shared, *self._watched)
        )


def _combined(set_seed: Callable[[int], object], number: int) -> SetSeed:
    def seed(seed: int) -> None:
        set_seed(seed ^ number)

    return seed
