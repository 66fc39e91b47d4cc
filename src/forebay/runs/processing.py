"""Process inputs: send them to workers, commit what comes back, and stop if too many fail.

    todo ──> engine ──> pool ──> workers
               │ outcomes
               ├──> commits ──> ledger, output folder
               └──> progress, failure budget, number of workers

One loop does it all, in the calling thread.
"""

from __future__ import annotations

import math
import resource
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from forebay.base.machine import ProcessTimes, usable_cores
from forebay.engine.commands import DeliverResult, Outcome, ReportFailure, ReportRetry
from forebay.engine.engine import Engine
from forebay.engine.limits import Limits
from forebay.errors import OutputError
from forebay.ledger.ledger import Ledger
from forebay.ledger.records import Todo
from forebay.observe.measurements import RunTimes
from forebay.observe.progress import Progress, log, log_failed, note
from forebay.observe.record import PUBLISH_S
from forebay.options import AutoWorkers, PreprocessOptions
from forebay.outputs.folder import OutputFolder
from forebay.pools.base import InlinePool, Pool, ThreadPool
from forebay.pools.processes import ProcessPool
from forebay.runs.commits import Commit, Commits
from forebay.runs.job import PreprocessJob

if TYPE_CHECKING:
    from forebay.runs.tuning import RunTuning

# How often it is looked at what the workers did, which reads two files for each.
LOOK_S = 0.25
# Limits of uncommitted results: their number, and the bytes of metadata in them.
SLOTS = 16_384
# The same on a cluster, where a thousand workers may hold tasks for two seconds each.
CLUSTER_SLOTS = 65_536
MAX_BYTES = 256 * 2**20
# The most tasks sent in one message, if inputs take little time.
MAX_GROUP = 2048
LOOKAHEAD = 8192
# How long nothing may come from ranges of samples before a warning: one may take minutes.
RANGE_S = 600.0
# How long to collect answers while every worker has more to do.
COLLECT_S = 0.01


class Processing:
    """One run over inputs: it sends them to workers, commits what comes back, and counts both."""

    def __init__(
        self,
        pool: Pool,
        num_workers: int,
        options: PreprocessOptions,
        ledger: Ledger,
        folder: OutputFolder,
        progress: Progress,
        budget: FailureBudget,
    ) -> None:
        """Process with this pool of so many workers, and commit into this ledger and folder."""
        self._pool, self._num_workers, self._options = pool, num_workers, options
        self._ledger, self._progress, self._budget = ledger, progress, budget
        self.commits = Commits(ledger, folder)
        self._workers, self._looked_at = ProcessTimes(), -math.inf
        self._tuning: RunTuning | None = None
        if isinstance(options.num_workers, AutoWorkers) and options.cluster is None:
            from forebay.runs.tuning import RunTuning

            times = self._workers if isinstance(pool, ProcessPool) else None
            most = int(options.num_workers)
            self._tuning = RunTuning(most, times, time.monotonic(), options.at_once)
        self._committed, self._record_s = 0, 0.0

    def run(
        self,
        todo: Iterable[Todo],
        kind: str,
        seen: Callable[[Commit], None],
        *,
        at_once: bool,
    ) -> RunTimes:
        """Process the inputs, and return what that took.

        Args:
            kind: What the inputs are.
            seen: Called with each commit.
            at_once: Whether to commit each result as it comes.
        """
        engine, trace = self._engine_for(todo, kind), self._progress.trace
        trace.longest_task, trace.at_once = engine.longest_task, self._options.at_once
        began, before = time.monotonic(), _used_by_workers(self._pool)
        try:
            while not engine.finished or self.commits.waiting:
                # Nothing runs if all slots wait for a commit.
                is_idle = not self._take_outcomes(engine) and not engine.flow.busy_workers()
                self._look_at_workers(engine)
                commit = self._commit(at_once=at_once or is_idle, is_last=engine.finished)
                if commit is not None:
                    engine.release(commit.delivered)
                    self._progress.update(commit.done, commit.failed, commit.metadata)
                    seen(commit)
                    self._stop_if_refused(commit)
        finally:
            # However the run ends, including Ctrl-C: end all workers, and commit the results.
            engine.close()
            trace.longest_task = lambda: None  # or a report would keep the engine
            try:
                self._committed += self.commits.close()
            finally:
                self._progress.close()
        self.commits.finish()
        return self._times(began, before)

    def _engine_for(self, todo: Iterable[Todo], kind: str) -> Engine:
        pool, options, tuning = self._pool, self._options, self._tuning
        limits = Limits(
            num_workers=self._num_workers if tuning is None else tuning.num_workers,
            slots=SLOTS if options.cluster is None else CLUSTER_SLOTS,
            at_once=options.at_once * (options.batch_size or 1),
            is_batched=options.batch_size is not None,
            max_bytes=MAX_BYTES,
            retries=options.further_tries,
            timeout_s=options.timeout,
            group_s=pool.group_s if options.workers else 0.0,
            max_group=MAX_GROUP,
            lookahead=LOOKAHEAD,
            max_suspects=1 if options.stops_at_first_failure else 64,
        )
        return Engine(
            pool,
            limits,
            _payloads(todo, self._progress, self._budget, kind),
            name_of=_name_of,
            advice=partial(_advice_if_stuck, pool),
            silent_s=None if self._progress.unit == "input" else RANGE_S,
        )

    def _take_outcomes(self, engine: Engine) -> bool:
        """Wait for outcomes; count them, and have results committed; return whether any came."""
        trace, budget = self._progress.trace, self._budget
        trace.num_workers = engine.flow.limits.num_workers if self._options.workers else 0
        trace.publish(time.monotonic())
        due_in = self.commits.due_in()
        wait_s = PUBLISH_S if due_in is None else min(due_in, PUBLISH_S)
        outcomes = engine.step(wait_s, collect_s=COLLECT_S)
        others = self.commits.add(outcomes, trace.took)
        for outcome in others:
            if isinstance(outcome, ReportFailure):
                trace.spent(outcome.seconds)
            elif isinstance(outcome, ReportRetry):
                trace.retries += 1
        if outcomes and not others:
            budget.succeeded()
        for outcome in outcomes if others else ():  # in their order: some are in a row
            self._stop_if_due(outcome)
        return bool(outcomes)

    def _look_at_workers(self, engine: Engine) -> None:
        """Read what the workers did, now and then, and maybe change their number."""
        if (now := time.monotonic()) < self._looked_at:
            return
        self._looked_at = now + LOOK_S
        if isinstance(self._pool, ProcessPool):
            self._workers.add(self._pool.living_pids())
        if self._tuning is not None and not engine.finished:
            self._tuning.update(now, self._progress.trace, engine.resize)

    def _commit(self, *, at_once: bool, is_last: bool) -> Commit | None:
        """Advance the commit that is under way; return it at its end."""
        recorded_at, flush_s = time.monotonic(), self.commits.flush_s
        commit = self.commits.advance(at_once=at_once or is_last, is_last=is_last)
        waited_s = self.commits.flush_s - flush_s
        self._record_s += max(time.monotonic() - recorded_at - waited_s, 0.0)
        if commit is not None:
            self._committed += len(commit.delivered) + commit.failed
        return commit

    def _stop_if_due(self, outcome: Outcome) -> None:
        """Raise the exception that ends the run, if this outcome requires that."""
        if isinstance(outcome, DeliverResult):
            self._budget.succeeded()
        if not isinstance(outcome, ReportRetry | ReportFailure):
            return
        from forebay.runs.stopping import first_failure, no_more_space, too_many

        failure = outcome.failure
        if failure.kind == "stop" and failure.exception is not None:
            raise failure.exception
        if failure.kind == "environment":
            raise no_more_space(failure) from failure.exception
        reason = self._budget.attempt_failed(outcome.task, failure.error)
        if isinstance(outcome, ReportFailure):
            if self._options.stops_at_first_failure:
                raise first_failure(outcome, self._ledger.name_of(outcome.task))
            reason = self._budget.failed(failure.error, outcome.task) or reason
        if reason is not None:
            raise too_many(reason, self._ledger.name_of(outcome.task), failure)

    def _stop_if_refused(self, commit: Commit) -> None:
        """Raise the exception that ends the run, if inputs with refused outputs require that."""
        for ordinal, failure, _ in commit.refused:
            name = self._ledger.name_of(ordinal)
            log_failed(name, failure)
            if self._options.stops_at_first_failure:
                raise OutputError(failure.message)
        refused = {each.ordinal for each in commit.refused}
        if reason := self._budget.refused(commit.delivered, refused):
            from forebay.runs.stopping import too_many

            raise too_many(reason, name, failure)

    def _times(self, began: float, before: resource.struct_rusage) -> RunTimes:
        options, tuning, trace = self._options, self._tuning, self._progress.trace
        after, now = _used_by_workers(self._pool), time.monotonic()
        system_s = after.ru_stime - before.ru_stime
        return RunTimes(
            inputs=trace.tasks,
            committed=self._committed,
            elapsed_s=now - began,
            num_workers=self._num_workers if tuning is None else tuning.mean_workers(now),
            busy_s=trace.busy_s,
            at_once=options.at_once,
            cpu_s=None if options.cluster else after.ru_utime - before.ru_utime + system_s,
            system_s=system_s,
            faults=after.ru_minflt - before.ru_minflt,
            threads_s=max(self._workers.threads_s, 0.0),
            queued_s=self._workers.queued_s,
            keeps_freed=isinstance(self._pool, ProcessPool),
            flush_s=self.commits.flush_s,
            record_s=self._record_s,
            cores=None if options.cluster else usable_cores(),
            decisions=() if tuning is None else tuple(tuning.decisions),
        )


def _payloads(
    listed: Iterable[Todo], progress: Progress, budget: FailureBudget, kind: str
) -> Iterator[tuple[int, tuple[str | None, ...]]]:
    """Yield ordinals and payloads, and raise the total if the listing turns out to be longer.

    A payload is a source, a row and, only if there are credentials, what opens the input; for a
    sample, the index of it, which is listed in the order of its Dataset.
    """
    total, is_sample = progress.total, kind == "indices"
    for ordinal, source, row, opens in listed:
        if ordinal > total:
            total = progress.total = budget.total = ordinal
        if opens is None and is_sample:
            opens = str(ordinal - 1)
        yield ordinal, (source, row) if opens is None else (source, row, opens)


def _used_by_workers(pool: Pool) -> resource.struct_rusage:
    """Return what the workers that have ended used; threads count with this process."""
    is_child = isinstance(pool, ProcessPool)
    return resource.getrusage(resource.RUSAGE_CHILDREN if is_child else resource.RUSAGE_SELF)


def _name_of(payload: tuple[str | None, ...]) -> str:
    """Return what the log calls an input: its path, its row, or its index."""
    source, row, *_ = payload
    return source or row or ""


def _advice_if_stuck(pool: Pool, _payload: object) -> list[str]:
    """Return what to do about a worker that does not finish an input."""
    threads = (
        "Modules are imported before the workers are forked, so threads that they start at import "
        "do not run there.",
        "If that line waits for one of these, start it within the function.",
    )
    return [
        *(() if isinstance(pool, ThreadPool) else threads),
        "If it may take that long, nothing is wrong; timeout= ends an input that takes longer.",
    ]


# If the first inputs all fail with the same error, that many are enough to stop.
ALIKE = 20
# Later, that many in a row: the cause is probably not in the inputs, but some may be beside others
# that are as damaged. Outputs that are refused have names that other inputs took, which a function
# does again and again.
ALIKE_LATER = 100
REFUSED = 20


class FailureBudget:
    """Counts failures against the number that the user allows.

    Args:
        max_failures: How many inputs may fail: a count, or a fraction of all (0 < x < 1);
            None for any number that are not in a row.
        known: The inputs that failed in earlier runs, in order: they are in no row.
        counts_rows: Whether many failures in a row are enough to stop.
    """

    def __init__(
        self,
        max_failures: int | float | None,
        total: int,
        watch: bool = True,
        unit: str = "input",
        known: Sequence[int] = (),
        counts_rows: bool = True,
    ) -> None:
        self._max_failures, self._unit, self._known = max_failures, unit, known
        # Whoever says how many may fail means the first ones and those in a row, too.
        self._has_limit = max_failures is not None
        self._counts_rows = counts_rows and not self._has_limit
        self._failed = 0
        self.total = total  # of inputs, as far as they are known
        self._tried: set[int] = set()  # the first inputs, until one of them differs
        self._alike: str | None = None
        self._watching = watch and not self._has_limit
        self._row, self._row_error, self._refused = 0, "", 0

    def succeeded(self) -> None:
        """Begin a new row, and stop watching the first inputs: one of them succeeded."""
        self._watching, self._row = False, 0

    def attempt_failed(self, ordinal: int, error: str) -> str | None:
        """Return why to stop if the first inputs all failed with this `error`; else None."""
        if not self._watching:
            return None
        if self._alike not in (None, error):
            self._watching = False
            return None
        self._alike = error
        self._tried.add(ordinal)
        if len(self._tried) < ALIKE:
            return None
        return self._allowing(f"the first {ALIKE} {self._unit}s all failed alike, with {error}")

    def failed(self, error: str, ordinal: int = 0) -> str | None:
        """Count an input that failed for good; return why to stop, if it is one too many."""
        if reason := self._counted():
            return reason
        if self._is_known(ordinal):
            return None
        self._row = self._row + 1 if error == self._row_error else 1
        self._row_error = error
        if not self._counts_rows or self._row < ALIKE_LATER:
            return None
        return self._allowing(
            f"{ALIKE_LATER} {self._unit}s in a row all failed alike, with {error}"
        )

    def refused(self, published: Iterable[int], refused: Collection[int]) -> str | None:
        """Count inputs whose outputs were refused; return why to stop, if they are too many.

        Args:
            published: Inputs whose outputs were to be published, in the order in which they ended.
        """
        if not refused:  # the usual case
            self._refused = 0
            return None
        reasons = [self._counted() for _ in refused]
        for ordinal in published:
            if ordinal not in refused:
                self._refused = 0
            elif not self._is_known(ordinal):
                self._refused += 1
            if self._counts_rows and self._refused >= REFUSED:
                what = f"the outputs of {REFUSED} {self._unit}s in a row were refused"
                reasons.append(self._allowing(what))
        return next(filter(None, reasons), None)

    def _counted(self) -> str | None:
        self._failed += 1
        allowed = self._max_failures
        limit = int(allowed * self.total) if isinstance(allowed, float) else allowed
        if limit is None or self._failed <= limit:
            return None
        return (
            f"{self._failed} input{'s' * (self._failed != 1)} failed, more than "
            f"max_failures allows ({limit} of {self.total})"
        )

    def _is_known(self, ordinal: int) -> bool:
        at = bisect_left(self._known, ordinal)
        return at < len(self._known) and self._known[at] == ordinal

    def _allowing(self, what: str) -> str:
        """Return a reason to stop, with the argument that allows more failures, if there is one."""
        if not self._counts_rows:
            return what
        return (
            f"{what}\n  If more of them may fail, say how many: max_failures=, or --max-failures."
        )


def workers_for(
    job: PreprocessJob, options: PreprocessOptions, shared: str, inputs: tuple[str, ...]
) -> tuple[Pool, int]:
    """Return the pool for a run, and the number of workers."""
    cluster = options.cluster
    if cluster is None:
        if options.workers == 0:
            return InlinePool(job), 1
        if options.backend == "thread":
            return ThreadPool(job, job.abandon), options.workers
        return ProcessPool(job, options.workers), options.workers
    from forebay.pools.ray_host import Hosting
    from forebay.pools.ray_nodes import NodeCheck
    from forebay.pools.ray_pool import RayPool
    from forebay.pools.ray_shipping import shipped

    work = shipped(job)
    say = note if options.progress else log.warning
    check = NodeCheck(work, shared, inputs)
    hosts = RayPool(Hosting(work), cluster, check, options.num_workers, say=say)
    return hosts, hosts.num_workers


def job_maker(options: PreprocessOptions) -> Callable[..., PreprocessJob]:
    """Return what makes a job with these options."""
    if options.batch_size is None:
        return partial(PreprocessJob, concurrency=options.at_once)
    from forebay.runs.batched_job import BatchedJob

    return partial(BatchedJob, concurrency=options.at_once, batch_size=options.batch_size)
