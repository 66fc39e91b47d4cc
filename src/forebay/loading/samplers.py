"""The samplers of a loader whose order is planned; the states and changes of samplers in general.

A loader with a plan does not read its sampler: the plan decides the order. The sampler exists for
code that reads `loader.sampler`, and for libraries that create another loader from it.

`set_epoch` of such a sampler names the loader's next epoch. With a buffer, batches are made for
epochs that have not begun: those that follow. Of torch's DistributedSampler the argument of the
next `set_epoch` is predicted: the last one plus the last step, or plus one. If that was wrong, the
batches are dropped and made again. What has another `set_epoch` is read when its epoch begins.
"""

from __future__ import annotations

import copy
import operator
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, KeysView, Sized, ValuesView
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from forebay.base.datasets import defines, sequence_rows
from forebay.base.torch_internals import refuse_stock_loader
from forebay.loading.snapshots import UnknownState
from forebay.loading.user_states import (
    generators_of,
    has_state,
    parts_of,
    restore_generators,
    saved_generators,
    saved_state,
)
from forebay.mixing import MixedDataset
from forebay.plan import BLOCK, Plan, share_of
from forebay.ranks import Ranks, ranks_of

# ---- samplers ------------------------------------------------------------------------------------

# The state of each sampler in a chain (see `chain_of`), JSON-serializable; None for no state.
SamplerStates = list[dict[str, Any] | None]


# More epochs than a loader has: orders of one epoch after another are so far apart.
MOST_EPOCHS = 1 << 32


class _Planned:
    """Yields the order of epoch after epoch, from the last argument of `set_epoch` on.

    Attributes:
        epoch: The last argument of `set_epoch`; None before the first call.
        asked: The same, until the loader begins an epoch; None afterwards.
        heeded: The last argument that the loader began an epoch for; None if there was none.
    """

    def __init__(self, dataset: Any, plan: Plan, seed: int | None, **options: Any) -> None:
        super().__init__(dataset, **options)  # type: ignore[call-arg]
        self.plan = plan
        self.epoch: Any = None
        self.asked: int | None = None
        self.heeded: int | None = None
        self._seed = seed  # the user's; None: drawn in each iteration
        self._next, self._step = 0, 1  # the epoch of the next iteration, if none is given

    def begin(self, epoch: int) -> None:
        """Use the order of a loader's epoch next; if that iterates it again, orders of its own."""
        self._next, self._step = epoch, MOST_EPOCHS

    def set_epoch(self, epoch: int) -> None:
        """Make this the epoch of the next iteration; the loader counts on from there."""
        self.epoch = self.asked = self._next = operator.index(epoch)

    @property
    def own_plan(self) -> Plan:
        """The plan of what it yields."""
        return self.plan

    def __len__(self) -> int:
        return self.plan.length

    def __iter__(self) -> Iterator[int]:
        refuse_stock_loader()
        seed = draw_seed(getattr(self, "generator", None)) if self._seed is None else self._seed
        epoch, self._next = self._next, self._next + self._step
        for block in replace(self.own_plan, seed=seed).blocks(epoch):
            yield from block.indices.ravel().tolist()


class PlannedShuffle(_Planned, RandomSampler):
    """A random order that is a function of seed and epoch."""


class PlannedOrder(_Planned, SequentialSampler):
    """The order of the dataset, or of a mixture that is not shuffled."""


class _OfRank(_Planned, DistributedSampler[Any]):
    """Yields the samples of this rank, none twice.

    It is a DistributedSampler, so that libraries add none of theirs to a loader with `world_size=`.
    """

    world_size: Any = None
    given_rank: int | None = None
    batch_size = 1

    @property
    def ranks(self) -> Ranks:
        """The ranks that share its samples, as they are now."""
        return ranks_of(self.world_size, self.given_rank) or Ranks(1, 0)

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """See torch's class."""
        return self.ranks.world_size

    @property
    def rank(self) -> int:  # type: ignore[override]
        """See torch's class."""
        return self.ranks.rank

    @property
    def own_plan(self) -> Plan:
        """See `_Planned`."""
        return replace(self.plan, **self.ranks._asdict(), batch_size=self.batch_size, tail="uneven")

    def __len__(self) -> int:
        plan = self.own_plan
        full, tail = divmod(plan.end(), plan.global_batch_size)
        return full * plan.batch_size + share_of(tail, plan).samples


class _ShuffleOfRank(PlannedShuffle, _OfRank):  # type: ignore[override]
    pass


class _OrderOfRank(PlannedOrder, _OfRank):
    pass


def sampler_for_plan(
    dataset: Any,
    shuffle: bool,
    seed: int | None,
    generator: torch.Generator | None,
    share: tuple[int | str | None, int | None, int],
) -> PlannedShuffle | PlannedOrder:
    """Return a sampler with the order of a dataset's plan.

    Args:
        share: The loader's world size, rank and batch size.
    """
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
    options = {"generator": generator} if shuffle else {}
    if share[0] is None:
        return (PlannedShuffle if shuffle else PlannedOrder)(dataset, plan, seed, **options)
    divided = (_ShuffleOfRank if shuffle else _OrderOfRank)(dataset, plan, seed, **options)
    divided.world_size, divided.given_rank, divided.batch_size = share
    return divided


def planned_within(sampler: Any) -> PlannedShuffle | PlannedOrder | None:
    """Return the planned sampler that a user's sampler reads; None if there is none."""
    for _ in range(8):  # one that refers to itself has no other
        if sampler is None or isinstance(sampler, PlannedShuffle | PlannedOrder):
            return sampler
        sampler = _attribute(sampler, "sampler")
    return None


def draw_seed(generator: torch.Generator | None) -> int:
    """Draw a seed as torch's samplers do."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def planned_sampler(sampler: Any, batch_sampler: Any) -> PlannedShuffle | PlannedOrder | None:
    """Return the planned sampler among a loader's samplers; None if there is none."""
    if batch_sampler is not None:
        sampler = batch_sampler.sampler if type(batch_sampler) is BatchSampler else None
    return sampler if isinstance(sampler, PlannedShuffle | PlannedOrder) else None


def ranks_sharing(
    world_size: Any, rank: int | None, sampler: Any, batch_sampler: Any
) -> Ranks | None:
    """Return the ranks that share a loader's batches now; None if none do, or its sampler divides.

    Args:
        world_size: The loader's argument, and its rank.
    """
    planned: Any = planned_sampler(sampler, batch_sampler)
    if world_size is None:
        return planned.ranks if isinstance(planned, _OfRank) else None
    outer = sampler if batch_sampler is None else batch_sampler
    if planned is None:  # a library has put something around the plan, or another sampler there
        is_auto = world_size == "auto"
        is_divided = is_auto and isinstance(chain_of(outer)[-1], DistributedSampler)
        if is_divided or isinstance(planned_within(outer), _OfRank):
            return None
    return ranks_of(world_size, rank)


# ---- states of samplers ------------------------------------------------------------------------


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

    It is what `state_dict` returns, or else the states of the generators that it owns.

    Args:
        keep: Makes what is kept of what `state_dict` returns.
    """
    states: SamplerStates = []
    chain = chain_of(sampler)
    for at, each in enumerate(chain):
        if has_state(each):
            states.append({"state": keep(saved_state(each))})
        elif isinstance(each, PlannedShuffle) or type(each) is BatchSampler:
            states.append(None)
        else:
            inner = (generators_of(other).values() for other in chain[at + 1 :])
            saved = saved_generators(each, {id(own) for owned in inner for own in owned})
            states.append({"generators": saved} if saved else None)
    return states if any(each is not None for each in states) else None


def set_states(sampler: Any, states: SamplerStates | None) -> None:
    """Restore the states that `sampler_states` returned, in a sampler and its inner sampler."""
    for each, state in zip(chain_of(sampler), states or (), strict=False):
        if state is not None and "generators" in state:
            restore_generators(each, state["generators"])
        elif state is not None and not isinstance(state["state"], UnknownState):
            each.load_state_dict(copy.deepcopy(state["state"]))


def holds_position(sampler: Any) -> bool:
    """Return whether a sampler or its inner sampler can itself resume within an epoch."""
    return any(map(has_state, chain_of(sampler)))


def asked_epoch(sampler: Any, last: int | None) -> tuple[int | None, int | None]:
    """Return the argument of a `set_epoch` that no epoch has begun with, and the one before it.

    Args:
        last: `epoch_of` the sampler in the last epoch that has begun; None if there is none.
    """
    planned = planned_within(sampler)
    if planned is not None:
        return planned.asked, planned.heeded
    now = epoch_of(sampler)
    return None if now == last else now, last


def heed_epoch(sampler: Any) -> None:
    """Note that an epoch begins with what `set_epoch` asked for."""
    planned = planned_within(sampler)
    if planned is not None and planned.asked is not None:
        planned.heeded, planned.asked = planned.asked, None


def heed_same_epoch(sampler: Any) -> None:
    """Note that `set_epoch` asked for the epoch that has begun, after its first batch."""
    planned = planned_within(sampler)
    if planned is not None and planned.asked == planned.heeded:
        planned.asked = None


def restore_epoch(sampler: Any, epoch: int | None) -> None:
    """Restore the argument of `set_epoch` that the epoch of a state had."""
    planned = planned_within(sampler)
    if planned is not None:
        planned.heeded, planned.asked = epoch, None
    elif epoch is not None and is_foreseen(sampler):
        chain_of(sampler)[-1].set_epoch(epoch)


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
    parts = () if is_foreseen(thing) else parts_of(thing)
    return any(defines(each, "set_epoch") for _, each in parts)


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
