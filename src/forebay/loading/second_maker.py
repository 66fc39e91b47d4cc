"""Make samples a second time, in a process that has not made any, and compare them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from forebay.base import torch_internals
from forebay.base.batch_digests import differing, digested, shown_leaves
from forebay.base.process import become_worker
from forebay.errors import shortened
from forebay.loading.audit_plan import Difference
from forebay.loading.fetch import BatchFetcher
from forebay.loading.messages import AuditedSample, BatchRequest, BatchSpec

# How many parts of a sample are named.
MOST_PARTS = 32


class MadeBefore(NamedTuple):
    """Samples to make again: the request for their batch, and what they were."""

    request: BatchRequest
    audited: tuple[AuditedSample, ...]


class SecondMaker:
    """Makes samples again, in a process that has not made any.

    Its place among the workers is another one than that of the one that made them first.

    Args:
        is_thorough: Whether all samples are made twice here, and not only those that differ.
    """

    def __init__(self, spec: BatchSpec, *, is_thorough: bool = False) -> None:
        self._spec, self._is_thorough = spec, is_thorough
        count = max(int(spec.num_workers), 2)
        known = count - 1, count, spec.base_seed + count - 1, spec.dataset
        torch_internals.seed_as_worker(spec.base_seed, count - 1, with_devices=False)
        torch_internals.set_worker_info(*known, seed_is_current=True)
        self._worker_id = count - 1
        # By whether they make whole batches: the generators that collate_fn makes are found, too.
        self._made: dict[bool, BatchFetcher] = {}

    def differences(self, task: MadeBefore) -> list[Difference]:
        """Return what is not the same; raise what the user's code raises."""
        return [each for audited in reversed(task.audited) for each in self._found(task, audited)]

    def _found(self, task: MadeBefore, audited: AuditedSample) -> list[Difference]:
        made = self.made(task.request, audited)
        digest, shown, found = digested(made), shown_leaves(made), list[Difference]()
        fields = [*islice(differing(audited.digest, digest), MOST_PARTS)]
        changing: set[str] = set()
        if fields or self._is_thorough:
            changing = set(differing(digest, digested(self.made(task.request, audited))))
            fields += changing.difference(fields)
        for field in fields:
            is_stable = field not in changing
            values = audited.shown.get(field, ""), shown.get(field, "")
            is_batch = audited.offset < 0
            index: Any = list(task.request.index) if is_batch else _index_at(task.request, audited)
            if type(index) not in (int, str):
                index = _Shown(shortened(index))
            known = task.request.epoch, index, field, *values, is_stable
            found.append(Difference(*known, is_batch))
        return found

    def made(self, request: BatchRequest, audited: AuditedSample) -> Any:
        """Make a sample, or a whole batch, again."""
        is_batch = audited.offset < 0
        if is_batch not in self._made:
            if audited.others is not None and not self._made:
                become_worker()
            self._made[is_batch] = self._spec.fetcher(
                self._spec,
                self._worker_id,
                turns=None,
                seeds=None,
                later=(),
                is_process=True,
                names=audited.others,
            )
        fetcher = self._made[is_batch]
        if isinstance(request.index, array):  # as the planner keeps it
            request = request._replace(index=request.index.tolist())
        if audited.offset >= 0 and not audited.is_whole and self._spec.auto_collation:
            position = request.positions(len(request.index))[audited.offset]
            request = request._replace(index=[_index_at(request, audited)], position=position)
        fetcher.begin(request)
        samples = self._once(fetcher, request, is_batch)
        if fetcher.finds_more():
            samples = self._once(fetcher, request, is_batch)
        if is_batch or not self._spec.auto_collation:
            return samples
        return samples[audited.offset if audited.is_whole else 0]

    @staticmethod
    def _once(fetcher: BatchFetcher, request: BatchRequest, is_batch: bool) -> Any:
        samples = fetcher.fetch(request)
        return fetcher.collate(request, samples) if is_batch else samples


class _Shown(str):
    """An index as it is shown."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _index_at(request: BatchRequest, audited: AuditedSample) -> Any:
    index = request.index
    is_list = isinstance(index, Sequence) and not isinstance(index, str)
    return index[audited.offset] if is_list else index
