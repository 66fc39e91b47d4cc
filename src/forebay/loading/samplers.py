"""The samplers of a loader whose order is planned; the states and changes of samplers in general.

A loader with a plan does not read its sampler: the plan decides the order. The sampler exists for
code that reads `loader.sampler`, and for libraries that create another loader from it.

    sampler.set_epoch(3)  ──>  SetEpochRecorder.value = 3  ──>  values of the next planned epoch

With a buffer, batches are made for epochs that have not begun, so the argument of the next call of
`set_epoch` is predicted: the last one plus the last step, or plus one. If the prediction was wrong,
the batches are dropped and made again.
"""

from __future__ import annotations

import base64
import copy
import operator
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from forebay.base.datasets import sequence_rows
from forebay.base.randomness import seeded_generator
from forebay.base.torch_internals import version_of
from forebay.mixing import MixedDataset
from forebay.plan import BLOCK, Plan

# ---- frameworks ----------------------------------------------------------------------------------
# Workarounds for what other libraries do to loaders.


def torch_init() -> Any:
    """Return the original `torch.utils.data.DataLoader.__init__`.

    While Lightning calls a hook, it replaces the `__init__` of every loader class with one that
    records the arguments, to create the loader again. If forebay is first imported in that hook,
    the replacement of torch's `__init__` would record the arguments that forebay passes to torch.
    """
    init: Any = DataLoader.__init__
    while "lightning" in getattr(init, "__globals__", {}).get("__name__", ""):
        init = init.__wrapped__
    return init


def warn_if_stock_loader() -> None:
    """Warn if a plain torch DataLoader iterates a sampler of forebay; called by the sampler."""
    frame = sys._getframe(2)
    for _ in range(6):
        if frame.f_back is None:
            return
        frame = frame.f_back
        owner = frame.f_locals.get("self")
        if frame.f_globals.get("__name__") == "torch.utils.data.dataloader":
            if owner is not None and type(owner).__module__.startswith("forebay."):
                return
            warnings.warn(
                "a plain torch DataLoader was made with the sampler of a forebay.DataLoader, so "
                "buffer=, seed=, world_size= and the state are lost; to keep them, pass "
                "world_size='auto' and do not hand the loader to the library's prepare() "
                "(docs/how-to/frameworks.md)",
                stacklevel=2,
            )
            return


# ---- samplers ------------------------------------------------------------------------------------

# The state of each sampler in a chain (see `chain_of`), JSON-serializable; None for no state.
SamplerStates = list[dict[str, Any] | None]


class _Planned:
    """Yields the order of the epoch given to `set_epoch`; without a call, of epoch after epoch.

    Attributes:
        epoch: The last argument of `set_epoch`; None before the first call.
    """

    def __init__(self, dataset: Any, plan: Plan, seed: int | None, **options: Any) -> None:
        super().__init__(dataset, **options)  # type: ignore[call-arg]
        self.plan = plan
        self.epoch: int | None = None
        self._seed, self._epochs = seed, 0  # the user's seed; None: drawn in each iteration

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch from the next iteration on."""
        self.epoch = operator.index(epoch)

    def __len__(self) -> int:
        return self.plan.length

    def __iter__(self) -> Iterator[int]:
        warn_if_stock_loader()
        seed = draw_seed(getattr(self, "generator", None)) if self._seed is None else self._seed
        epoch, self._epochs = self._epochs, self._epochs + 1
        plan = replace(self.plan, seed=seed)
        for block in plan.blocks(epoch if self.epoch is None else self.epoch):
            yield from block.indices.ravel().tolist()


class PlannedShuffle(_Planned, RandomSampler):
    """A random order that is a function of seed and epoch."""


class PlannedOrder(_Planned, SequentialSampler):
    """The order of the dataset, or of a mixture that is not shuffled."""


def sampler_for_plan(
    dataset: Any, shuffle: bool, seed: int | None, generator: torch.Generator | None
) -> PlannedShuffle | PlannedOrder:
    """Return a sampler with the order of a dataset's plan."""
    is_mix, is_rows = isinstance(dataset, MixedDataset), bool(sequence_rows(dataset))
    plan = Plan(
        length=dataset.samples if is_mix else len(dataset),
        batch_size=BLOCK,
        seed=seed or 0,
        shuffle=shuffle,
        mixture=dataset.mixture if is_mix else None,
        by_epoch=is_rows and not is_mix,
        costs_of=dataset.costs_of if is_rows else None,
    )
    if shuffle:
        return PlannedShuffle(dataset, plan, seed, generator=generator)
    return PlannedOrder(dataset, plan, seed)


class UnreadSampler:
    """Has the length of an epoch but yields nothing, because the planner reads the sampler."""

    def __init__(self, steps: Callable[[], int]) -> None:
        self._steps = steps

    def __len__(self) -> int:
        return self._steps()

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def draw_seed(generator: torch.Generator | None) -> int:
    """Draw a seed as torch's samplers do."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def planned_sampler(sampler: Any, batch_sampler: Any) -> PlannedShuffle | PlannedOrder | None:
    """Return the planned sampler among a loader's samplers; None if there is none."""
    if batch_sampler is not None:
        sampler = batch_sampler.sampler if type(batch_sampler) is BatchSampler else None
    return sampler if isinstance(sampler, PlannedShuffle | PlannedOrder) else None


# ---- states of samplers ------------------------------------------------------------------------


def state_of_generator(generator: torch.Generator) -> str:
    """Return the state of a generator as a string."""
    return base64.b64encode(generator.get_state().numpy().tobytes()).decode("ascii")


def set_generator(generator: torch.Generator, state: str) -> None:
    """Set a generator to a state that `state_of_generator` returned."""
    numbers = np.frombuffer(base64.b64decode(state), dtype=np.uint8)
    generator.set_state(torch.from_numpy(numbers.copy()))


def has_state(thing: Any) -> bool:
    """Return whether an object has both `state_dict` and `load_state_dict`."""
    has_both = hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")
    return has_both and not isinstance(thing, type)


# What was saved, and the type of the object that is to be restored.
NO_STATE = (
    "the state includes that of a {0}, but {1} has no load_state_dict\n"
    "  Nothing was changed. Make the loader with the {0} that it was saved with."
)


def chain_of(sampler: Any) -> list[Any]:
    """Return a sampler and, if it has one, its inner sampler, as in a BatchSampler."""
    inner = getattr(sampler, "sampler", None)
    return [sampler] if inner is None else [sampler, inner]


def is_self_contained(sampler: Any) -> bool:
    """Return whether a sampler's code draws from no generator of the process."""
    *outer, inner = map(type, chain_of(sampler))
    return inner in (SequentialSampler, DistributedSampler) and outer in ([], [BatchSampler])


def states_of(sampler: Any) -> SamplerStates | None:
    """Return what a sampler and its inner one keep from epoch to epoch; None if neither does.

    It is what `state_dict` returns, or else the state of the sampler's generator.
    """
    states = [_state_of(each) for each in chain_of(sampler)]
    return states if any(each is not None for each in states) else None


def set_states(sampler: Any, states: SamplerStates | None) -> None:
    """Restore the states that `states_of` returned, in a sampler and its inner sampler."""
    for each, state in zip(chain_of(sampler), states or (), strict=False):
        if state is not None and "generator" in state:
            set_generator(each.generator, state["generator"])
        elif state is not None:
            each.load_state_dict(copy.deepcopy(state["state"]))


def holds_position(sampler: Any) -> bool:
    """Return whether a sampler or its inner sampler can itself resume within an epoch."""
    return any(map(has_state, chain_of(sampler)))


def _state_of(sampler: Any) -> dict[str, Any] | None:
    if has_state(sampler):
        return {"state": copy.deepcopy(sampler.state_dict())}
    generator = getattr(sampler, "generator", None)
    if isinstance(generator, torch.Generator) and not isinstance(sampler, PlannedShuffle):
        return {"generator": state_of_generator(generator)}
    return None


def rank_of(sampler: Any) -> tuple[int, int]:
    """Return rank and number of ranks of a DistributedSampler; (0, 1) for any other sampler."""
    inner = chain_of(sampler)[-1]
    if not isinstance(inner, DistributedSampler):
        return 0, 1
    return inner.rank, inner.num_replicas


def resized(sampler: Any, length: int) -> Any:
    """Return one of torch's samplers for a dataset of another length; None for other samplers."""
    if type(sampler) is BatchSampler:
        inner = resized(sampler.sampler, length)
        return inner and BatchSampler(inner, sampler.batch_size, sampler.drop_last)
    if type(sampler) not in (RandomSampler, SequentialSampler):
        return None
    other: Any = copy.copy(sampler)
    other.data_source = range(length)
    is_whole = type(other) is SequentialSampler or other.num_samples == length
    return other if is_whole and not getattr(other, "replacement", False) else None


def rows_of(sampler: Any) -> Iterator[torch.Tensor] | None:
    """Return the batches of torch's samplers as tensors, drawn as they do; None for others."""
    inner: Any = getattr(sampler, "sampler", None)
    if type(sampler) is not BatchSampler or type(inner) not in (RandomSampler, SequentialSampler):
        return None
    length = len(inner.data_source)
    if type(inner) is RandomSampler and (inner.replacement or inner.num_samples != length):
        return None
    return _rows(inner, length, sampler.batch_size, sampler.drop_last)


def _rows(sampler: Any, length: int, size: int, drop_last: bool) -> Iterator[torch.Tensor]:
    if type(sampler) is SequentialSampler:
        order = torch.arange(length)
    else:
        generator = sampler.generator
        if generator is None:
            generator = seeded_generator(draw_seed(None), "cpu")
        order = torch.randperm(length, generator=generator)
    end = length - length % size if drop_last else length
    for start in range(0, end, size):
        yield order[start : min(start + size, end)]
    if type(sampler) is RandomSampler:
        torch.randperm(length, generator=generator)  # torch draws once more at the end


# ---- changes -------------------------------------------------------------------------------------
# Detect changes made to a sampler or dataset after batches were planned.
#
# With a buffer, epochs are planned before they begin. Such a plan depends on a sampler's weights
# or the length of a dataset, and is dropped when those change. The comparison is shallow:
# attributes by value or identity, tensors also by their version, built-in containers also by
# their length. No code of an attribute's own class runs: a `__len__` may have side effects. After
# a change that it cannot detect (an array modified in place, an attribute of an attribute), the
# user calls `DataLoader.refresh`.

_BY_VALUE = (bool, int, float, complex, str, bytes, type(None))


def attributes(thing: Any) -> dict[str, Any]:
    """Return a comparable value for each attribute by name, without generators: those change."""
    known = getattr(thing, "__dict__", {})
    return {
        name: _token(value)
        for name, value in list(known.items())
        if not isinstance(value, torch.Generator)
    }


def fingerprint(thing: Any, ignored: frozenset[str] = frozenset()) -> Any:
    """Return a value that differs once the object has changed."""
    known = {name: token for name, token in attributes(thing).items() if name not in ignored}
    return id(thing), length_of(thing), known


def _token(value: Any) -> Any:
    if isinstance(value, _BY_VALUE):
        return value
    if isinstance(value, torch.Tensor):
        return id(value), version_of(value), None if value.is_nested else tuple(value.shape)
    if isinstance(value, np.ndarray):
        return id(value), value.shape
    # MONAI's `Compose.__len__` seeds all random transforms.
    is_built_in = not isinstance(getattr(type(value), "__len__", None), FunctionType)
    return id(value), length_of(value) if is_built_in else None


def length_of(thing: Any) -> int | None:
    """Return the length of an object; None if it has none."""
    if not isinstance(thing, Sized):
        return None
    try:
        return len(thing)
    except Exception:  # noqa: BLE001 - the user's class may raise anything; it has no length then
        return None


# ---- set epoch -----------------------------------------------------------------------------------

# Last arguments of `set_epoch` on: the outer sampler, the inner sampler, the dataset. None if it
# was never called, or does not exist.
Values = tuple[int | None, ...]


class SetEpochRecorder:
    """Replaces the `set_epoch` of one object and records the argument of each call.

    It is an attribute of that object, and is copied and pickled with it.

    Attributes:
        value: The last argument; None before the first call.
    """

    def __init__(self, target: Any) -> None:
        """Record the calls on `target`."""
        self.value: int | None = None
        self.writes: frozenset[str] = frozenset({"set_epoch"})
        self._target = target
        self._own = getattr(target, "__dict__", {}).get("set_epoch")

    @classmethod
    def on(cls, target: Any) -> SetEpochRecorder | None:
        """Return the recorder of an object, after installing it; None if that is not possible."""
        if not hasattr(target, "set_epoch"):
            return None
        installed = getattr(target, "__dict__", {}).get("set_epoch")
        if isinstance(installed, SetEpochRecorder):
            return installed
        recorder = cls(target)
        try:
            target.set_epoch = recorder
        except AttributeError:  # it has __slots__
            return None
        return recorder

    def __call__(self, epoch: int) -> Any:
        """Record the argument and call the object's own `set_epoch`."""
        with suppress(TypeError):  # the user's `set_epoch` may take something else
            epoch = operator.index(epoch)  # also for tensors and NumPy integers
        self.value = epoch
        return self.apply(epoch)

    def apply(self, epoch: int) -> Any:
        """Call the object's own `set_epoch` without recording it as the user's call."""
        before = attributes(self._target)
        returned = self._call(epoch)
        after = attributes(self._target)
        self.writes |= {name for name in after if before.get(name, self) != after[name]}
        return returned

    def _call(self, epoch: int) -> Any:
        target, kind = self._target, type(self._target)
        if self._own is not None:
            return self._own(epoch)
        if hasattr(kind, "set_epoch"):
            return kind.set_epoch(target, epoch)
        return target.__getattr__("set_epoch")(epoch)  # a wrapper that forwards attributes


class SetEpochRecorders:
    """The recorders on the samplers and the dataset of a loader.

    Args:
        sampler: The outer sampler; None to leave samplers without recorders.
        dataset: The dataset, or a subset of one that has `set_epoch`; None for no recorder.
    """

    def __init__(self, sampler: Any, dataset: Any) -> None:
        """Install the recorders."""
        inner = getattr(sampler, "sampler", None)
        self._targets = (sampler, inner, owner_of_set_epoch(dataset))
        self._all = [SetEpochRecorder.on(each) for each in self._targets]

    def fingerprint(self) -> Any:
        """Return a value that differs once a sampler was changed, except by `set_epoch`."""
        return [
            fingerprint(thing, frozenset() if recorder is None else recorder.writes)
            for thing, recorder in zip(self._targets[:2], self._all, strict=False)
        ]

    def dataset_fingerprint(self, dataset: Any) -> Any:
        """Return a value that differs once a dataset was changed, except by `set_epoch`."""
        recorder = self._all[2]
        owner, writes = self._targets[2], frozenset() if recorder is None else recorder.writes
        own = fingerprint(dataset, writes if owner is dataset else frozenset())
        return own if owner in (None, dataset) else (own, fingerprint(owner, writes))

    def values(self) -> Values:
        """Return the last argument of `set_epoch` on each object."""
        return tuple(None if each is None else each.value for each in self._all)

    def restore(self, values: Sequence[int | None]) -> None:
        """Call `set_epoch` with the arguments recorded in a saved state."""
        for recorder, value in zip(self._all, values, strict=False):
            if recorder is not None and value is not None:
                recorder(value)

    def call_on_dataset(self, values: Values) -> None:
        """Call the dataset's `set_epoch` with its value, without recording the call."""
        self._call((None, None, *values[-1:]))

    @contextmanager
    def on_samplers(self, values: Values) -> Iterator[None]:
        """Call `set_epoch` of the samplers with these values for the duration of the block."""
        self._call((*values[:2], None))
        try:
            yield
        finally:
            self._call((*self.values()[:2], None))

    def _call(self, values: Sequence[int | None]) -> None:
        users = self.values()
        for recorder, value in zip(self._all, values, strict=False):
            if recorder is not None and value is not None:
                recorder.apply(value)
        # A `set_epoch` may call that of another object, which then recorded this call.
        for recorder, value in zip(self._all, users, strict=True):
            if recorder is not None:
                recorder.value = value


def next_values(last: Values, before: Values | None) -> Values:
    """Return the expected arguments of the next `set_epoch`.

    Args:
        before: The arguments for the epoch before that one; None if they are not known.
    """
    if before is None:
        before = (None,) * len(last)
    return tuple(
        None if new is None else new + (1 if old is None else new - old)
        for old, new in zip(before, last, strict=True)
    )


def owner_of_set_epoch(dataset: Any) -> Any:
    """Return the dataset that has a `set_epoch`, looking into subsets; None if there is none."""
    while dataset is not None and not hasattr(dataset, "set_epoch"):
        dataset = getattr(dataset, "dataset", None)
    return dataset
