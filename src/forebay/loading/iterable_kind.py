"""Loaders of an iterable dataset, of which each worker reads a part."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from torch.utils.data import IterDataPipe

from forebay.base.draw_detection import BatchSeeds
from forebay.base.randomness import PrivateGenerators
from forebay.base.torch_internals import seed_as_worker
from forebay.buffer import low_mark_of
from forebay.engine.limits import Limits
from forebay.loading.fetch import BatchFetcher
from forebay.loading.messages import BatchRequest, BatchSpec, WorkerState
from forebay.loading.position import Checks, Position, is_size
from forebay.loading.samplers import takes_set_epoch
from forebay.loading.selections import (
    Generators,
    Reached,
    Reader,
    Selection,
    Start,
    one,
)
from forebay.loading.torch_kind import TorchKind
from forebay.loading.user_states import has_shuffle_buffer
from forebay.loading.worker_turns import WorkerTurns
from forebay.observe.measurements import Setup
from forebay.options import AutoWorkers
from forebay.seeds import worker_seed_of


class IterableKind(TorchKind):
    """Loaders of an iterable dataset, by torch's rules, with a buffer and a seed if wanted."""

    kind_name = "iterable"
    is_arithmetic = True
    MADE_WITH: ClassVar[Checks] = {
        **{name: TorchKind.MADE_WITH[name] for name in ("kind", "drop_last", "num_workers")},
        "global_batch_size": (False, is_size),
    }
    STATE: ClassVar[Checks] = {
        name: check
        for name, check in TorchKind.STATE.items()
        if name not in ("length", "sampler", "drawn", "set_epoch")
    }

    # ---- where batches are made, and how many --------------------------------------------------

    @property
    def one_at_a_time(self) -> str:
        """See `LoaderArguments`."""
        return "an iterable dataset yields one sample after the other"

    @property
    def runs_ahead(self) -> bool:
        """See `LoaderKind`.

        Not for a datapipe, which is seeded when its epoch begins, and not with `in_order=False`,
        where batches of two epochs would mix.
        """
        is_seeded_late = isinstance(self.dataset, IterDataPipe)
        return self.returns_in_order and not is_seeded_late and super().runs_ahead

    def turns(self) -> WorkerTurns:
        """See `LoaderKind`."""
        return self._turns(failure_ends=True)

    def _prefetching(self) -> dict[str, Any]:
        """See `LoaderKind`. Of a number of batches, the workers' turns decide whose they are."""
        if self.is_local:
            return {"requests": 1}
        if self.buffer is None or self.buffer.max_batches is None:
            return super()._prefetching()
        low, most = low_mark_of(self.buffer), self.buffer.max_batches
        low = low if isinstance(low, int) else math.ceil(low * most)
        counts = {"requests": most, "tiny_requests": most, "buffer_batches": most}
        return {**counts, "refill_below": low}

    @functools.cached_property
    def setup(self) -> Setup:
        """See `LoaderKind`. The number of workers decides which samples there are."""
        return replace(super().setup, may_adjust=False)

    def limits(self) -> Limits:
        """See `LoaderKind`."""
        return replace(super().limits(), failure_ends_worker=True)

    @property
    def fetcher(self) -> type[BatchFetcher]:
        """See `LoaderKind`."""
        from forebay.loading.stream_fetch import StreamFetcher

        return StreamFetcher

    def refused_combinations(self) -> list[tuple[bool, str]]:
        """See `LoaderKind`."""
        return [
            (
                self.cluster is not None,
                "an iterable dataset cannot have backend='ray': only a map-style dataset can be "
                "divided among nodes\n"
                "  Nothing was started. Use a map-style dataset (__getitem__ and __len__), or "
                "backend='process', whose workers are on this machine.",
            ),
            (
                self.backend != "process" or self.on_error == "skip",
                f"an iterable dataset cannot have backend={self.backend!r} with "
                f"on_error={self.on_error!r}: its iterator ends where it raises, and threads "
                "cannot share it\n"
                "  Use a map-style dataset, or backend='process' and on_error='raise'.",
            ),
            (
                isinstance(self.num_workers, AutoWorkers),
                'an iterable dataset cannot have num_workers="auto": each worker reads a part of '
                "it, so their number decides which samples there are\n"
                "  Nothing was started. Set the number of workers, or use a map-style dataset "
                "(__getitem__ and __len__).",
            ),
            (
                self.ranks is not None,
                "an iterable dataset cannot have world_size=: only a map-style dataset can be "
                "divided among ranks\n"
                "  Nothing was started. Use a map-style dataset, or give each rank its part in the "
                "dataset's __iter__.",
            ),
        ]

    @property
    def renews_workers(self) -> bool:
        """See `LoaderKind`. With a seed, `worker_init_fn` may seed generators for an epoch."""
        may_seed = self.seed is not None and self.worker_init_fn is not None
        return not self.is_local and (may_seed or takes_set_epoch(self.dataset))

    # ---- seeds ---------------------------------------------------------------------------------

    @property
    def is_checked(self) -> bool:
        """See `TorchKind`. Without a seed, samples may draw other random numbers."""
        return self.seed is not None or has_shuffle_buffer(self.dataset)

    @property
    def replays(self) -> bool:
        """Return False: a batch is what comes next."""
        return False

    def seeds(self, base_seed: int, shared_seed: int | None, epoch: int) -> tuple[int, int | None]:
        """See `LoaderKind`. With a seed, also that of the shuffle of a datapipe."""
        own = self.worker_seed(epoch)
        return (base_seed, shared_seed) if own is None else (own, own)

    def worker_seed(self, epoch: int) -> int | None:
        """See `LoaderKind`."""
        return None if self.seed is None else worker_seed_of(self.seed, epoch)

    def local_generators(self, spec: BatchSpec, seeds: BatchSeeds | None) -> Generators | None:
        """Return generators seeded as those of a worker, if there is a seed."""
        if self.seed is None:
            return None
        begin = partial(seed_as_worker, worker_id=0, with_devices=False)
        return PrivateGenerators(spec.base_seed, begin)

    # ---- selections ----------------------------------------------------------------------------

    def open(self, start: Start, order: int | None) -> Reader:
        """See `LoaderKind`. The selections never end; the workers report the end of the data."""
        index = [None] * (self.batch_size or 0) if self.auto_collation else None
        return Reader(itertools.repeat(Selection(index)))

    def moved(self, position: Position, batches: int) -> Position:
        """See `LoaderKind`. No sampler decides what is read, as in torch."""
        return position

    @functools.cached_property
    def count(self) -> Callable[[Any], int]:
        """See `LoaderKind`."""
        return len if self.auto_collation else one

    def samples_returned(self, start: Start, batches: int, samples: int) -> int:
        """See `LoaderKind`."""
        return start.sample + samples

    def peeks_from(self) -> float:
        """See `LoaderKind`."""
        return math.inf

    @property
    def follows(self) -> bool:
        """Return False: there is no sampler."""
        return False

    def sampler_states(self, *, if_cheap: bool = False) -> None:
        """Return None: there is no sampler."""
        return

    def may_have_ended(self, batches: int) -> bool:
        """Return False: there is no sampler."""
        return False

    # ---- state ---------------------------------------------------------------------------------

    @property
    def tracks_state(self) -> bool:
        """Return True: how far each worker is in its part."""
        return True

    @property
    def orders_by_draws(self) -> bool:
        """Return True: the dataset may draw."""
        return True

    @property
    def may_resize(self) -> bool:
        """Return False: it has no length."""
        return False

    def state(self, reached: Reached) -> dict[str, Any]:
        """See `LoaderKind`."""
        known = super().state(reached)
        if self.is_local and reached.worker_states:
            known["dataset"] = None  # the state of the worker is that of the same object
        return {name: known[name] for name in self.STATE}

    def left(self, position: Position, epoch: int) -> Position:
        """Return the beginning of an epoch, before which another is left at a position.

        Workers that live on keep their copies of the dataset.
        """
        if not position.batch and position.epoch == epoch:
            return position
        known = position.kind_state["worker_states"] if self.keeps_workers or self.is_local else ()
        own = {
            "worker_states": [list(WorkerState(*each).before_epoch()) for each in known],
            "next_worker": 0,
            "generator": None,
            "draws_base_seed": not self.persistent_workers,
        }
        own = {**position.kind_state, **own}
        return replace(position, epoch=epoch, batch=0, sample=0, kind_state=own)

    def may_have_returned(self, position: Position) -> bool:
        """See `LoaderKind`."""
        whole = position.batch * int(position.made_with["global_batch_size"])
        return position.kind_state["counts_samples"] or position.sample == whole

    def may_have_seed(self, seed: int | None, *, has_begun: bool) -> bool:
        """See `LoaderKind`."""
        return True

    def may_have_read(self, since: int | list[Any]) -> bool:
        """See `TorchKind`. Of a stream, samples are counted."""
        return isinstance(since, int) or not since

    def read_since(self, state: WorkerState, request: BatchRequest) -> WorkerState:
        """See `TorchKind`."""
        assert isinstance(state.since, int)
        return state._replace(since=state.since + self.count(request.index))

    def _is_split(self, position: Position) -> bool:
        return True

    def contradictions(self, position: Position) -> Mapping[str, bool]:
        """See `LoaderKind`."""
        own = {**position.kind_state, "drawn": None}
        is_lost = position.batch > 0 and not own["worker_states"]
        found = super().contradictions(replace(position, kind_state=own))
        return {**found, "no states of workers within an epoch": is_lost}

    def has_already(self, state: Any) -> bool:
        """See `LoaderKind`.

        Then it must not be loaded: the dataset may keep a loaded state as the position where
        iteration begins, and its copies in workers, which read other parts, would begin there.
        """
        try:
            return bool(state == self.dataset.state_dict())
        except Exception:  # noqa: BLE001 - from the comparison of arrays, for example
            return False
