"""The stream of batches of a map-style dataset: epoch after epoch, each batch with its own seeds.

    sampler ──> plan (the trainer's thread) ──> feed ──> batches, in the order of the plan

A batch is a function of (seed, epoch, number), whoever makes it and when. With a buffer the plan
runs ahead of the trainer, into epochs that have not begun. Samplers are read in the trainer's
thread alone: they are the user's code, and draw from the generators of the trainer.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

from forebay.engine.engine import NewTask
from forebay.errors import OptionError
from forebay.loading.epochs import Said, Watches
from forebay.loading.feed import Feed, Taken
from forebay.loading.recipe import Order
from forebay.loading.seeding import PrivateGenerators
from forebay.loading.shuffle import SeededShuffle
from forebay.loading.state import Carried, batches_of, begun, carried_by, give_back, holds_position
from forebay.plan.seeds import SAMPLER, seed_of

# Orders to have planned beyond those made, so that workers go on while the trainer is away.
LOOKAHEAD = 256
# Batches to read from a sampler at a time: each reading changes the generators and back.
CHUNK = 32
# Samplers whose code draws from no generator of the process.
_SELF_CONTAINED = (SeededShuffle, SequentialSampler, DistributedSampler)


@dataclass(slots=True)
class Epoch:
    """One epoch of the plan.

    Attributes:
        number: From 0.
        said: What its order rests on.
        first_task: The number of its first task.
        carried: What the sampler carried before the epoch was read.
        first_batch: The first that is planned; others were handed out before a resume.
        batches: The number of the next batch to be planned.
        is_whole: Whether the sampler came to its end.
        error: What the sampler raised instead.
    """

    number: int
    said: Said
    first_task: int
    carried: Carried | None
    first_batch: int
    batches: int
    is_whole: bool = False
    error: Exception | None = None


class Stream:
    """The plan and the feed of one loader.

    Args:
        sampler: Gives the index, or the list of indices, of each batch; read anew every epoch.
        dataset: The dataset.
        watches: On what `set_epoch` may be called.
        seed: Of everything.
        ahead: Whether to plan epochs before they begin.
        depth: Orders to have out at a time where nothing is planned ahead.
        shares_dataset: Whether batches are made of the trainer's own copy of the dataset, so that
            no order may set its epoch.
    """

    def __init__(
        self,
        sampler: Any,
        dataset: Any,
        watches: Watches,
        seed: int,
        *,
        ahead: bool = False,
        depth: int = 1,
        shares_dataset: bool = False,
    ) -> None:
        """Plan nothing yet."""
        self.seed = seed
        self.epoch = -1
        self.batch = 0
        self.orders: deque[tuple[int, Order]] = deque()
        self._sampler = sampler
        self._dataset = dataset
        self._inner = getattr(sampler, "sampler", sampler)
        self._watches = watches
        self._said: dict[int, Said] = {}  # before each epoch that has begun
        self._ahead = ahead
        self._depth = depth
        self._shares_dataset = shares_dataset
        self._feed: Feed | None = None
        self._next_task = 0
        self._epochs: deque[Epoch] = deque()
        self._indices: Iterator[tuple[Any, Carried | None]] = iter(())
        self._carried: dict[int, Carried] = {}  # after the batch of each task
        self._carried_now: Carried | None = None  # after the last batch that was handed out
        # The sampler's own generators.
        self._generators: Callable[[], AbstractContextManager[None]] = nullcontext

    # ---- epochs --------------------------------------------------------------------------------

    def begin(self, feed: Feed, epoch: int, skip: int = 0) -> None:
        """Begin an epoch, keeping what was made for it already.

        Args:
            feed: Where orders go; what another one made is lost.
            epoch: Its number.
            skip: Leave out so many batches: they were handed out before a resume.
        """
        is_new, self._feed = feed is not self._feed, feed
        while self._epochs and self._epochs[0].number < epoch:
            self._leave(self._epochs.popleft())
        said = self._said[epoch] = self._watches.said()
        planned = self._epochs[0] if self._epochs else None
        if planned is not None and planned.said == said and not is_new:
            first = planned.first_task
        else:
            if planned is not None:
                give_back(self._sampler, planned.carried)
            first, planned = self._next_task, None
            self._epochs.clear()
        feed.forget(first)
        self.orders = deque(each for each in self.orders if each[0] >= first)
        self._carried = {task: each for task, each in self._carried.items() if task >= first}
        self.epoch, self.batch, self._carried_now = epoch, skip, None
        if planned is None:
            self._open(epoch, said, skip, 0 if holds_position(self._sampler) else skip)
        self.plan()

    def take(self) -> tuple[Taken, Order] | None:
        """Return the next result of this epoch and its order; None at the epoch's end."""
        if not self.orders or self.orders[0][1].epoch != self.epoch:
            error, self._epochs[0].error = self._epochs[0].error, None
            if error is not None:
                raise error
            return None
        assert self._feed is not None, "begin comes first"
        taken = self._feed.take()
        assert taken is not None
        task, order = self.orders.popleft()
        assert task == taken.task, "results come in the order of the plan"
        self.batch += 1
        self._carried_now = self._carried.pop(task, None)
        self.plan()
        return taken, order

    def state(self, *, ended: bool) -> dict[str, Any]:
        """Return where the stream stands; if this epoch has ended, that is before the next."""
        state: dict[str, Any] = {"seed": self.seed}
        if ended:
            following = next((each for each in self._epochs if each.number > self.epoch), None)
            carried = following.carried if following is not None else carried_by(self._sampler)
            place = {"epoch": self.epoch + 1, "batch": 0, "sampler": carried}
            return {**state, **place, "said": list(self._watches.said().values)}
        carried = self._carried_now or self._epochs[0].carried
        place = {"epoch": self.epoch, "batch": self.batch, "sampler": carried}
        return {**state, **place, "said": list(self._said[self.epoch].values)}

    # ---- one batch again -----------------------------------------------------------------------

    def order_of(self, epoch: int, batch: int) -> tuple[Order, Said]:
        """Return the order of one batch, planned anew, and what was said before its epoch.

        Raises:
            IndexError: The epoch has no such batch.
            OptionError: The sampler carries something, and what it was before is not known.
        """
        if epoch < 0 or batch < 0:
            raise IndexError(f"epoch {epoch}, batch {batch}: both count from 0")
        sampler, said, start = self._sampler, self._said_of(epoch), 0
        if carried_by(sampler) is not None:
            planned = next((each for each in self._epochs if each.number == epoch), None)
            start = planned.first_batch if planned and holds_position(sampler) else 0
            if planned is None or batch < start:
                raise OptionError(
                    f"the sampler has a state of its own, and that before epoch {epoch}, batch "
                    f"{batch} is not known\n"
                    "  Load a state that was taken in this epoch and begin to iterate, or have "
                    "shuffle=True, whose order is a matter of seed and epoch."
                )
            # Its own one is being read, and must not be disturbed.
            sampler = copy.deepcopy(sampler, {id(self._dataset): self._dataset})
            give_back(sampler, planned.carried)
        again = Stream(sampler, None, Watches(sampler, None), self.seed)
        again._open(epoch, said, batch, batch - start)
        found = again._read()
        if not found:
            raise IndexError(f"epoch {epoch} has no batch {batch}")
        order: Order = found[0].payload
        return order, said

    def _said_of(self, epoch: int) -> Said:
        if epoch in self._said:
            return self._said[epoch]
        said = self._watches.said()
        if not self._said:
            return said
        last = max(self._said)
        steps = [step * (epoch - last) for step in self._steps()]
        return self._said[last].after(steps)

    def _steps(self) -> tuple[int, ...]:
        """Return how far `set_epoch` went from the last epoch but one to the last."""
        last = max(self._said)
        return self._said[last].steps_from(self._said.get(last - 1))

    # ---- the plan ------------------------------------------------------------------------------

    def plan(self) -> None:
        """Read on in the sampler until enough is planned, and hand that to the feed."""
        assert self._feed is not None
        tasks: list[NewTask] = []
        while self._is_short():
            chunk = self._read()
            tasks += chunk
            if not chunk and not self._open_next():
                break
        if tasks:
            self._feed.put(tasks)

    def _is_short(self) -> bool:
        assert self._feed is not None
        if self._ahead:
            return len(self.orders) - self._feed.ready() < LOOKAHEAD
        return len(self.orders) < self._depth

    def _read(self) -> list[NewTask]:
        epoch = self._epochs[-1]
        if epoch.is_whole:
            return []
        count = CHUNK if self._ahead else 1
        indices = []
        with self._generators():
            try:
                for each in itertools.islice(self._indices, count):
                    indices.append(each)
            except Exception as error:  # noqa: BLE001 - it is raised when its turn comes
                epoch.error = error
        epoch.is_whole = len(indices) < count
        dataset_epoch = None if self._shares_dataset else epoch.said.values[-1]
        tasks = []
        for index, carried in indices:
            if carried is not None:
                self._carried[self._next_task] = carried
            order = Order(index, epoch.number, epoch.batches, dataset_epoch)
            tasks.append(NewTask(self._next_task, order))
            self.orders.append((self._next_task, order))
            self._next_task += 1
            epoch.batches += 1
        return tasks

    def _open_next(self) -> bool:
        """Begin to plan the epoch after the last; return False if that is not to be done."""
        last = self._epochs[-1]
        if not (self._ahead and last.is_whole and last.batches) or last.error is not None:
            return False
        if self._shares_dataset and last.said.values[-1] is not None:
            return False  # the one dataset that there is still stands at this epoch
        self._open(last.number + 1, last.said.after(self._steps()), 0, 0)
        return True

    def _open(self, number: int, said: Said, batch: int, skip: int) -> None:
        """Begin to read an epoch from `batch` on, leaving out the sampler's first `skip`."""
        carried = carried_by(self._sampler)
        self._epochs.append(Epoch(number, said, self._next_task, carried, batch, batch))
        is_pure = type(self._inner) in _SELF_CONTAINED and type(self._sampler) in (
            BatchSampler,
            type(self._inner),
        )
        seed = seed_of(self.seed, SAMPLER, number)
        self._generators = nullcontext if is_pure else PrivateGenerators(seed)
        if isinstance(self._inner, SeededShuffle):
            self._inner.epoch = number
        self._watches.set_samplers(said)
        try:
            with self._generators():
                # Samplers look at their epoch when they are asked for the first time.
                self._indices = begun(batches_of(self._sampler, skip, is_whole=batch == skip))
        finally:
            self._watches.set_samplers(self._watches.said())

    def _leave(self, epoch: Epoch) -> None:
        """Leave an epoch behind.

        If it was cut short and the sampler carries something, it is read to its end: what is
        carried on must not depend on how far the plan had come.
        """
        if epoch.is_whole or self._epochs or epoch.carried is None:
            return
        with suppress(TypeError), self._generators():  # one without a length may have no end
            left = len(self._sampler) - epoch.batches
            for _ in itertools.islice(self._indices, max(left, 0) + 1):
                pass
