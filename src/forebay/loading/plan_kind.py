"""Loaders whose order is a plan: no sampler is read, and no memory grows with the dataset."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch

from forebay.base.datasets import cached_samples, sequence_rows
from forebay.base.formatting import counted
from forebay.errors import OptionError, shortened
from forebay.loading.kind import LoaderKind
from forebay.loading.messages import BatchRequest
from forebay.loading.position import (
    BEFORE_CHANGE,
    Checks,
    Position,
    is_count,
    is_epoch,
    is_list_of,
    is_size,
)
from forebay.loading.samplers import SamplerStates, planned_sampler
from forebay.loading.selections import Reached, Reader, Selection, Start
from forebay.mixing import checked_weights
from forebay.mixture import Mixture
from forebay.observe.progress import log
from forebay.observe.record import Trace
from forebay.plan import Plan


def _is_sources(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(map(is_size, value.values()))


class PlanKind(LoaderKind):
    """Loaders with the order of a plan: a function of seed and epoch."""

    kind_name = "plan"
    is_arithmetic = True
    MADE_WITH: ClassVar[Checks] = {
        **LoaderKind.MADE_WITH,
        "global_batch_size": (False, is_size),
        "length": (False, is_count),
        "shuffle": (False, bool),
        "sources": (True, _is_sources),
        "windows": (True, lambda value: is_list_of(value, is_size) and len(value) == 4),
    }
    STATE: ClassVar[Checks] = {
        **LoaderKind.STATE,
        "origin": (False, is_count),
        "set_epoch": (True, is_epoch),
        "mixture": (True, Mapping),
    }

    def __post_init__(self) -> None:
        """Take batch size and mixture from the sampler, as libraries that copy loaders do."""
        super().__post_init__()
        self._planned: Any = planned_sampler(self.sampler, self.batch_sampler)
        # Libraries create a loader with a BatchSampler around the planned sampler.
        if self.auto_collation:
            self.batch_size = self.index_sampler.batch_size
            self.drop_last = self.index_sampler.drop_last
        self._lookahead: Any = None

    def follow(self, before: LoaderKind) -> Self:
        """See `LoaderKind`: the mixture and what is fetched ahead go on."""
        if isinstance(before, PlanKind):
            self.mixture, self._lookahead = before.mixture, before._lookahead
        return super().follow(before)

    @functools.cached_property
    def mixture(self) -> Mixture | None:
        """The current mixture of sources; None if there is one dataset."""
        return self._whole.mixture

    # ---- plan ----------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan of the batches."""
        return replace(self._whole, seed=self.batch_seed or 0, mixture=self.mixture)

    @functools.cached_property
    def _whole(self) -> Plan:
        """The plan as the arguments have it, without a seed that is drawn."""
        dataset, plan = self.dataset, self._planned.plan
        shared = self.shared or replace(
            plan, batch_size=self.batch_size or 1, drop_last=self.drop_last
        )
        whole = replace(
            shared,
            length=dataset.samples if plan.mixture is not None else len(dataset),
            shuffle=plan.shuffle,
            mixture=plan.mixture,
            by_epoch=plan.by_epoch,
            costs_of=plan.costs_of if self.ranks and self.ranks.world_size > 1 else None,
        )
        if plan.shuffle and (windows := self._windows(whole)) is not None:
            whole = replace(whole, order=windows.at)
        if plan.mixture is None or not dataset.schedule:
            return whole
        stages = tuple((whole.position_of(at), weights) for at, weights in dataset.schedule)
        return replace(whole, mixture=replace(plan.mixture, schedule=stages))

    def _windows(self, plan: Plan) -> Any:
        cached = cached_samples(self.dataset)
        return None if cached is None else cached.windows(plan.global_batch_size)

    def order_key(self) -> Plan:
        """See `LoaderKind`."""
        return self.plan

    @property
    def steps(self) -> int:
        """See `LoaderKind`."""
        return self._whole.steps()

    @property
    def shuffle(self) -> bool:
        """See `LoaderArguments`."""
        return bool(self._whole.shuffle)

    @property
    def _may_grow(self) -> bool:
        return True

    # ---- selections ----------------------------------------------------------------------------

    def open(self, start: Start, order: int | None) -> Reader:
        """See `LoaderKind`."""
        return Reader(self._selections(_sized(self.plan, start), start))

    def _selections(self, plan: Plan, start: Start) -> Iterator[Selection]:
        as_tensors = self.is_sliced
        for block in plan.blocks(start.epoch, start.sample, start.origin):
            rows: Any = block.indices
            if as_tensors:
                rows = torch.from_numpy(rows)
            else:
                rows = rows.tolist() if self.auto_collation else rows[:, 0].tolist()
            for index, position in zip(rows, block.positions.tolist(), strict=True):
                yield Selection(index, position, block.repeated)

    @property
    def foreseen_sampler(self) -> None:
        """See `LoaderKind`. The epoch decides the order."""
        return

    def kept(self, request: BatchRequest) -> BatchRequest:
        """See `LoaderKind`. As a list, the indices may take more memory than the batch."""
        index = request.index
        return request._replace(index=array("q", index)) if type(index) is list else request

    def samples_returned(self, start: Start, batches: int, samples: int) -> int:
        """See `LoaderKind`."""
        return min(start.sample + batches * self._whole.global_batch_size, self.end_of(start))

    def end_of(self, start: Start) -> int:
        """See `LoaderKind`."""
        return _sized(self._whole, start).end(start.sample)

    def replaying(
        self, start: Start, begun: Start, planned: Start | None, states: SamplerStates | None
    ) -> tuple[LoaderKind, Start, int]:
        """See `LoaderKind`."""
        size, mixture = self._whole.global_batch_size, self.mixture
        sample = start.batch * size
        if begun.epoch == start.epoch and (begun.by_sample or begun.length is not None):
            sample = begun.sample + (start.batch - begun.batch) * size
            start = start._replace(length=begun.length)
        is_before = begun.epoch == start.epoch and begun.by_sample and start.batch < begun.batch
        if is_before or (mixture is not None and start.origin + sample < mixture.since):
            raise OptionError(BEFORE_CHANGE.format(start.epoch, start.batch))
        return self, start._replace(sample=sample), 0

    # ---- what is fetched ahead -----------------------------------------------------------------

    def prepare(self, trace: Trace) -> None:
        """Have blocks of a bucket fetched before they are needed."""
        cached, plan = cached_samples(self.dataset), self._whole
        if cached is None or cached.remote is None:
            return
        if self.cluster is not None:
            why = "workers on a cluster do not share what this one fetches"
            log.warning("%r: its samples are fetched one by one, since %s", cached, why)
            return
        log.info("%r: %s", cached, cached.described(plan.global_batch_size, plan.shuffle))
        first = plan.rank * plan.batch_size
        own = plan.global_batch_size, first, plan.batch_size, plan.shuffle
        self._lookahead = cached.lookahead(*own, trace.fetched)

    def reached(self, start: Start, batches: int) -> None:
        """See `LoaderKind`."""
        if self._lookahead is None:
            return
        plan = self._whole
        epoch, sample = start.epoch, start.sample + batches * plan.global_batch_size
        end = self.end_of(start)
        while sample >= end > 0:
            epoch, sample, end = epoch + 1, max(sample - end, 0), plan.end()
        self._lookahead.reached(self.batch_seed or 0, epoch, sample)

    def close(self) -> None:
        """See `LoaderKind`."""
        if self._lookahead is not None:
            self._lookahead.close()

    # ---- a mixture -----------------------------------------------------------------------------

    def reweight(self, weights: tuple[float, ...], position: int | None) -> None:
        """Use other weights for sources, from a position on; None if no batch was made."""
        assert self.mixture is not None
        if position is None or self.batch_seed is None:
            self.mixture = replace(self.mixture, weights=weights)
        else:
            self.mixture = self.mixture.changed(weights, self.batch_seed, position)

    def reweighted(self, position: Position, weights: tuple[float, ...]) -> Position:
        """Return a position after which the sources of the mixture have other weights."""
        assert self.mixture is not None
        own = position.kind_state
        mixture = _continued(self.mixture, own["mixture"])
        if position.seed is None:  # no batch was made yet
            mixture = replace(mixture, weights=weights)
        else:
            reached = own["origin"] + position.sample
            mixture = mixture.changed(weights, position.seed, reached)
        return replace(position, kind_state={**own, "mixture": mixture.state()})

    def samples_by_source(
        self, names: Iterable[str], position: int
    ) -> dict[str, tuple[int, float]]:
        """See `LoaderKind`."""
        mixture = self.mixture
        if mixture is None or self.batch_seed is None:
            return {}
        drawn = mixture.drawn(self.batch_seed, position)
        known = zip(names, drawn, mixture.lengths, strict=True)
        return {name: (count, count / length) for name, count, length in known}

    def tokens_by_source(self, position: int) -> dict[str, tuple[int, float]]:
        """See `LoaderKind`."""
        counts = self.samples_by_source(getattr(self.dataset, "datasets", ()), position)
        counts = counts or {"dataset": (position, 0.0)}
        return {
            name: (round(counts[name][0] * each.tokens / len(each)), each.filled)
            for name, each in sequence_rows(self.dataset).items()
            if name in counts
        }

    # ---- state ---------------------------------------------------------------------------------

    def made_with(self) -> dict[str, Any]:
        """See `LoaderKind`."""
        plan = self._whole
        windows = self._windows(plan) if plan.order else None
        return {
            **super().made_with(),
            "length": plan.length,
            "sources": self.dataset.lengths if plan.mixture else None,
            "windows": None if windows is None else list(windows.state),
        }

    def facts_of_ranks(self) -> dict[str, Any]:
        """See `LoaderKind`."""
        weights = {} if self.mixture is None else {"weights": self.mixture.weights}
        return super().facts_of_ranks() | weights

    def state(self, reached: Reached) -> dict[str, Any]:
        """See `LoaderKind`."""
        mixture = self.mixture
        return {
            **super().state(reached),
            "origin": reached.start.origin,
            "set_epoch": self._planned.heeded if reached.is_within else self._planned.epoch,
            "mixture": None if mixture is None else mixture.state(),
        }

    def begin_at(self, position: Position) -> None:
        """See `LoaderKind`."""
        given = position.kind_state.get("mixture")
        if given is not None and self.mixture is not None:
            self.mixture = _continued(self.mixture, given)

    def may_have_returned(self, position: Position) -> bool:
        """See `LoaderKind`."""
        made, own, sample = position.made_with, position.kind_state, position.sample
        length, size = own["length"] or made["length"], made["global_batch_size"]
        whole = length - length % size if made["drop_last"] else length
        is_counted = sample == min(position.batch * size, whole)
        return bool(sample <= length and (own["counts_samples"] or is_counted))

    @property
    def may_resize(self) -> bool:
        """See `LoaderKind`."""
        return True

    def contradictions(self, position: Position) -> Mapping[str, bool]:
        """See `LoaderKind`."""
        own, sources = position.kind_state, position.made_with["sources"] or ()
        mixture = own["mixture"]
        if mixture is None:
            return {f"mixture {mixture} of {len(sources)} sources": bool(sources)}
        given = mixture["weights"], mixture["counts"], mixture["since"]
        weights, counts, since = tuple(given[0]), tuple(given[1]), given[2]
        checked_weights(dict(enumerate(weights)), range(len(weights)))
        if not all(map(is_count, (*counts, since))):
            raise ValueError(f"counts {counts} since {since!r}")
        return {
            f"mixture {shortened(mixture)} of {len(sources)} sources": (
                len(weights) != len(sources) or len(counts) not in (0, len(sources))
            ),
            f"mixture's counts {shortened(counts)} since {since}": (
                sum(counts) != since or since > own["origin"] + position.sample
            ),
        }

    def check_same(self, position: Position) -> None:
        """See `LoaderKind`."""
        was, now = position.made_with["sources"] or {}, self.made_with()["sources"] or {}
        if list(was.items()) != list(now.items()):
            raise OptionError(
                f"the state mixes {_shown(was)}, the loader mixes {_shown(now)}\n"
                "  Nothing was changed: the samples would come from other sources. Mix the same "
                "sources, in the same order."
            )

    def check_order(self, position: Position) -> None:
        """See `LoaderKind`."""
        was, now = position.made_with, self.made_with()
        before = None if was["windows"] is None else list(was["windows"])
        if position.batch and was["shuffle"] and before != now["windows"]:
            raise OptionError(
                f"the state has samples shuffled {_shown_windows(before)}, the loader has them "
                f"shuffled {_shown_windows(now['windows'])}\n"
                f"  It was taken in epoch {position.epoch} after {position.sample} samples. "
                "Nothing was changed: the rest of the epoch would lose and repeat samples. Open "
                "it with the same window= and the same shards, and use the same global batch size."
            )


def _sized(plan: Plan, start: Start) -> Plan:
    """Return the plan of an epoch, which may have another number of samples."""
    return plan if start.length is None else replace(plan, length=start.length)


def _continued(mixture: Mixture, state: Mapping[str, Any] | None) -> Mixture:
    """Return a mixture with what has changed during a run, by `Mixture.state`."""
    if state is None:
        return mixture
    weights, counts = tuple(map(float, state["weights"])), tuple(state["counts"])
    return replace(mixture, weights=weights, counts=counts, since=state["since"])


def _shown(sources: Mapping[str, int]) -> str:
    shown = ", ".join(f"{name!r} ({length:,} samples)" for name, length in sources.items())
    return shown or "no sources"


def _shown_windows(windows: list[int] | None) -> str:
    if windows is None:
        return "exactly"
    batch, lanes, blocks, total = windows
    window = counted(lanes * blocks, "block")
    return f"in windows of {window} of {total:,}, for global batches of {batch:,} samples"
