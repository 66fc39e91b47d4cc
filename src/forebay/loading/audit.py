"""Make a few samples of a running loader a second time, and compare them.

    iter(loader) ── fork ──────────────────────────> child: the dataset as the trainer has it now
    worker ── batch, digests of marked samples ──> next(loader) ── digests ──> child ── differences

With `seed=` each sample is a function of seed, epoch and index, if what it draws from and depends
on is known. The child checks that, of this very run: it makes samples that workers have made, in
another order, as another worker, and compares them bit for bit. No batch depends on it: it has a
copy of everything.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from forebay.base.formatting import counted
from forebay.base.process import is_worker
from forebay.loading.audit_plan import Difference, is_due, words_of
from forebay.loading.kind import LoaderKind
from forebay.loading.messages import AuditedSample, BatchRequest
from forebay.options import depth_in_forebay

if TYPE_CHECKING:  # imported where a loader needs it
    from forebay.loading.audit_process import AuditProcess
    from forebay.loading.second_maker import MadeBefore, SecondMaker

# How long the end of the first epoch waits for the answer; tiny samples take a few milliseconds.
WAIT_S = 2.0


class LoaderAudit:
    """The audit of one loader, over all its epochs.

    Attributes:
        samples: How many were compared.
        differences: What was not the same.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.differences: list[Difference] = []
        self._child: AuditProcess | None = None
        self._has_begun = self._has_warned = False
        self._made_s, self._cost_s = 0.0, 0.0
        self._seed: int | None = None
        self._left = 0  # answers that the child owes
        self._is_hopeless = False  # it did not end by itself
        self._lock = threading.RLock()  # threads may share an iterator

    def begin(self, kind: LoaderKind, made_s: float) -> None:
        """Begin an epoch, before any of its samples is made: fork what makes some again.

        Args:
            made_s: What workers have taken for batches so far.
        """
        self.end()
        since_s, is_first = made_s - self._made_s, not self._has_begun
        is_wanted = kind.is_audited and not is_worker() and not self._is_hopeless
        if not is_wanted or not (is_first or is_due(since_s, self._cost_s)):
            return
        from forebay.loading.audit_process import AuditProcess
        from forebay.loading.fetch import MapFetcher
        from forebay.loading.second_maker import SecondMaker

        began = time.perf_counter()
        self._has_begun, self._made_s, self._seed = True, made_s, kind.seed
        spec = replace(kind.spec(), fetcher=MapFetcher, concurrency=1, worker_init_fn=None)
        with suppress(OSError):  # the system refuses another process
            self._child = AuditProcess(partial(_answering, partial(SecondMaker, spec)))
        self._cost_s = time.perf_counter() - began

    def add(self, request: BatchRequest, audited: tuple[AuditedSample, ...]) -> None:
        """Have samples of a batch made again."""
        from forebay.loading.second_maker import MadeBefore

        with self._lock:
            if self._child is not None:
                self._left += self._child.send(MadeBefore(request._replace(slot=None), audited))

    @property
    def is_pending(self) -> bool:
        """Whether answers are owed."""
        return self._left > 0

    def poll(self, seconds: float = 0.0) -> None:
        """Take the answers that come within some time; warn once of the first difference."""
        with self._lock:
            child, until = self._child, time.monotonic() + seconds
            while child is not None and self._left:
                answers = child.received(max(until - time.monotonic(), 0.0))
                if answers is None:  # it has ended
                    self._left = 0
                    break
                if not answers:
                    break
                for samples, found in answers:
                    self._left -= 1
                    self.samples += samples
                    self.differences.extend(found)
            if self.differences and not self._has_warned:
                self._has_warned = True
                warnings.warn(words_of(self.differences, self._seed), stacklevel=depth_in_forebay())

    def end(self, wait_s: float = 0.0) -> None:
        """End the child, after the answers that come within some time."""
        with self._lock:
            if self._child is not None:
                self.poll(wait_s)
                self._is_hopeless = wait_s > 0 and self._left > 0
                self._cost_s += self._child.close()
                self._child, self._left = None, 0

    def described(self) -> tuple[str, ...]:
        """Return what was not the same, in words."""
        return tuple(map(str, self.differences))

    def note(self) -> str:
        """Return a sentence on what was not the same; "" if nothing was."""
        self.poll()
        if not self.differences:
            return ""
        made = counted(self.samples, "sample")
        return f"Of {made} made a second time, not all were the same: {self.differences[0]}."


def _answering(
    make: Callable[[], SecondMaker],
) -> Callable[[MadeBefore], tuple[int, list[Difference]]]:
    """Return what makes samples again, in the fork: how many, and what differs."""
    second = make()

    def answer(before: MadeBefore) -> tuple[int, list[Difference]]:
        try:
            return len(before.audited), second.differences(before)
        except Exception:  # noqa: BLE001 - it cannot be made in a fork, which says nothing
            return 0, []

    return answer
