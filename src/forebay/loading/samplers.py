"""The samplers of a loader whose order is planned; the states and changes of samplers in general.

A loader with a plan does not read its sampler: the plan decides the order. The sampler exists for
code that reads `loader.sampler`, and for libraries that create another loader from it.

With a buffer, batches are made for epochs that have not begun. Of forebay's own samplers, and of
torch's DistributedSampler, the argument of the next `set_epoch` is predicted: the last one plus the
last step, or plus one. If the prediction was wrong, the batches are dropped and made again. What
has another `set_epoch` is read when its epoch begins.
"""

from __future__ import annotations

import base64
import copy
import operator
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, KeysView, Sized, ValuesView
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

from forebay.base.datasets import defines, sequence_rows
from forebay.base.randomness import seeded_generator
from forebay.base.torch_internals import version_of
from forebay.errors import OptionError
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


def refuse_stock_loader() -> None:
    """Raise an error if a plain torch DataLoader iterates a sampler of forebay, which calls it."""
    frame = sys._getframe(2)
    for _ in range(6):
        if frame.f_back is None:
            return
        frame = frame.f_back
        owner = frame.f_locals.get("self")
        if frame.f_globals.get("__name__") == "torch.utils.data.dataloader":
            if owner is not None and type(owner).__module__.startswith("forebay."):
                return
            raise OptionError(
                "a plain torch DataLoader was made with the sampler of a forebay.DataLoader, so "
                "buffer=, seed=, world_size= and the state would be lost\n"
                "  No batch was returned. With transformers, call forebay.use(trainer); with "
                "Accelerate, pass the loader to accelerator.prepare() and no other function; "
                "otherwise use world_size='auto' and do not hand the loader to the library's "
                "prepare() (docs/how-to/frameworks.md)."
            )


# ---- samplers ------------------------------------------------------------------------------------

# The state of each sampler in a chain (see `chain_of`), JSON-serializable; None for no state.
SamplerStates = list[dict[str, Any] | None]


# More epochs than a loader has: orders of one epoch after another are so far apart.
MOST_EPOCHS = 1 << 32


class _Planned:
    """Yields the order of the epoch given to `set_epoch`; without a call, of epoch after epoch.

    Attributes:
        epoch: The last argument of `set_epoch`; None before the first call.
    """

    def __init__(self, dataset: Any, plan: Plan, seed: int | None, **options: Any) -> None:
        super().__init__(dataset, **options)  # type: ignore[call-arg]
        self.plan = plan
        self.epoch: int | None = None
        self._seed = seed  # the user's; None: drawn in each iteration
        self._next, self._step = 0, 1  # the epoch of the next iteration, if none is given

    def begin(self, epoch: int) -> None:
        """Use the order of a loader's epoch next; if that iterates it again, orders of its own."""
        self._next, self._step = epoch, MOST_EPOCHS

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch from the next iteration on."""
        self.epoch = operator.index(epoch)

    def __len__(self) -> int:
        return self.plan.length

    def __iter__(self) -> Iterator[int]:
        refuse_stock_loader()
        seed = draw_seed(getattr(self, "generator", None)) if self._seed is None else self._seed
        epoch, self._next = self._next, self._next + self._step
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


def planned_within(sampler: Any) -> PlannedShuffle | PlannedOrder | None:
    """Return the planned sampler that a user's sampler reads; None if there is none."""
    for _ in range(8):  # one that refers to itself has no other
        if sampler is None or isinstance(sampler, PlannedShuffle | PlannedOrder):
            return sampler
        sampler = _attribute(sampler, "sampler")
    return None


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
    return all(defines(thing, name) for name in ("state_dict", "load_state_dict"))


# What was saved, and the type of the object that is to be restored.
NO_STATE = (
    "the state includes that of a {0}, but {1} has no load_state_dict\n"
    "  Nothing was changed. Make the loader with the {0} that it was saved with."
)


def chain_of(sampler: Any) -> list[Any]:
    """Return a sampler and, if it has one, its inner sampler, as in a BatchSampler."""
    inner = _attribute(sampler, "sampler")
    return [sampler, inner] if isinstance(inner, Iterable) else [sampler]


def _attribute(thing: Any, name: str) -> Any:
    """Return an attribute of a user's object; None if it has none, or raises anything else."""
    try:
        return getattr(thing, name, None)
    except Exception:  # noqa: BLE001 - `__getattr__` is the user's
        return None


def copied(index: Any, *, is_batch: bool = True) -> Any:
    """Return a copy of what a sampler yielded, which it may use again for the next batch.

    Args:
        is_batch: Whether it has the indices of a batch; then it may be a generator of them.
    """
    if isinstance(index, list):
        return index[:]
    if isinstance(index, torch.Tensor):
        return index.clone() if index.dim() else index
    if isinstance(index, np.ndarray | array | set | dict | deque):
        return copy.copy(index)
    is_view = isinstance(index, Iterator | KeysView | ValuesView)
    return list(index) if is_batch and is_view else index


def plain_index(index: Any) -> Any:
    """Return an index, or those of a batch, with Python's numbers instead of numpy's."""
    if isinstance(index, list):
        return [plain_index(each) for each in index]
    return index.item() if isinstance(index, np.generic) else index


def is_self_contained(sampler: Any) -> bool:
    """Return whether a sampler's code draws from no generator of the process."""
    *outer, inner = map(type, chain_of(sampler))
    return inner in (SequentialSampler, DistributedSampler) and outer in ([], [BatchSampler])


def sampler_states(
    sampler: Any, keep: Callable[[Any], Any] = copy.deepcopy
) -> SamplerStates | None:
    """Return what a sampler and its inner one keep from epoch to epoch; None if neither does.

    It is what `state_dict` returns, or else the state of the sampler's generator.

    Args:
        keep: Makes what is kept of what `state_dict` returns.
    """
    states = [_state_of(each, keep) for each in chain_of(sampler)]
    return states if any(each is not None for each in states) else None


def set_states(sampler: Any, states: SamplerStates | None) -> None:
    """Restore the states that `sampler_states` returned, in a sampler and its inner sampler."""
    for each, state in zip(chain_of(sampler), states or (), strict=False):
        if state is not None and "generator" in state:
            set_generator(each.generator, state["generator"])
        elif state is not None:
            each.load_state_dict(copy.deepcopy(state["state"]))


def holds_position(sampler: Any) -> bool:
    """Return whether a sampler or its inner sampler can itself resume within an epoch."""
    return any(map(has_state, chain_of(sampler)))


def _state_of(sampler: Any, keep: Callable[[Any], Any]) -> dict[str, Any] | None:
    if has_state(sampler):
        return {"state": keep(sampler.state_dict())}
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


def batches_as_tensors(sampler: Any) -> Iterator[torch.Tensor] | None:
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


def takes_set_epoch(thing: Any) -> bool:
    """Return whether a user's sampler or dataset, or one within it, has a `set_epoch`.

    Then what it yields is known only when its epoch begins. Nothing is called, or written into it.
    """
    return not is_foreseen(thing) and any(
        callable(_attribute(each, "set_epoch"))
        for each in [*chain_of(thing), *nested_datasets(thing)]
    )


def nested_datasets(dataset: Any) -> Iterator[Any]:
    """Yield a dataset and those within it, as in a Subset, each once."""
    seen: set[int] = set()
    while dataset is not None and id(dataset) not in seen:
        seen.add(id(dataset))
        yield dataset
        # Not by `getattr`: a class that answers to any name may do so without an end.
        own = getattr(dataset, "__dict__", None)
        dataset = own.get("dataset") if type(own) is dict else None


def is_foreseen(sampler: Any) -> bool:
    """Return whether `set_epoch` of a sampler does what is known: forebay's own, and torch's."""
    *outer, inner = chain_of(sampler)
    is_known = type(inner) is DistributedSampler or isinstance(inner, _Planned)
    return is_known and [*map(type, outer)] in ([], [BatchSampler])


def epoch_of(sampler: Any) -> int | None:
    """Return the argument of the last `set_epoch` if that is foreseen; None for others.

    The argument is expected to grow by one, or as it did before.
    """
    return chain_of(sampler)[-1].epoch if is_foreseen(sampler) else None


def at_epoch(sampler: Any, epoch: int | None) -> Any:
    """Return a sampler with an `epoch_of` of its own; the sampler itself if that is the same."""
    if epoch == epoch_of(sampler):
        return sampler
    sampler = copy.copy(sampler)
    if type(sampler) is BatchSampler:
        sampler.sampler = copy.copy(sampler.sampler)
    chain_of(sampler)[-1].set_epoch(epoch)
    return sampler


def next_epoch(last: int | None, before: int | None) -> int | None:
    """Return the expected argument of the next `set_epoch`.

    Args:
        before: The argument for the epoch before that one; None if it is not known.
    """
    return None if last is None else last + (1 if before is None else last - before)
