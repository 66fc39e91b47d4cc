"""One run on an engine: start workers, send tasks, and commit results in batches."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from forebay.engine.commands import DeliverResult, Outcome, ReportFailure, ReportRetry
from forebay.engine.engine import Engine
from forebay.engine.job import Assignment, Refusal
from forebay.engine.limits import Limits
from forebay.engine.pools.base import Pool
from forebay.engine.pools.inline import InlinePool
from forebay.engine.pools.processes import ProcessPool
from forebay.engine.pools.threads import ThreadPool
from forebay.engine.pools.worker import SealedError
from forebay.errors import FailuresError, OutputError, SampleTimeoutError, WorkerDiedError
from forebay.failures import Failure
from forebay.jobs.failure_budget import FailureBudget
from forebay.jobs.ledger.ledger import Ledger
from forebay.jobs.ledger.records import FailedInput, Todo
from forebay.jobs.outputs.commits import Commits
from forebay.jobs.outputs.output_places import OutputPlace
from forebay.jobs.preprocess_job import PreprocessJob
from forebay.observe import machine
from forebay.observe.event_log import log, log_failed
from forebay.observe.process_times import ProcessTimes
from forebay.observe.progress import Progress, note
from forebay.observe.publication import PUBLISH_S
from forebay.observe.run_diagnosis import RunTimes
from forebay.observe.run_trace import RunTrace
from forebay.options import AutoWorkers, PreprocessOptions
from forebay.run_tuning import EVERY_S, RunTuning

# Limits of uncommitted results: their number, and the bytes of metadata in them.
SLOTS = 8192
# The same on a cluster, where a thousand workers may hold tasks for two seconds each.
CLUSTER_SLOTS = 65_536
MAX_BYTES = 256 * 2**20
# The most tasks sent in one message, if inputs take little time.
MAX_GROUP = 2048
LOOKAHEAD = 8192
# How long to collect answers while every worker has more to do.
COLLECT_S = 0.01


def workers_for(
    job: PreprocessJob, options: PreprocessOptions, shared: str, inputs: tuple[str, ...]
) -> tuple[Pool, int]:
    """Return the pool for a run, and the number of workers.

    Args:
        job: What the workers do.
        options: Backend and number of workers.
        shared: The folder or URL that every worker must see as this process does.
        inputs: Local paths that every worker must see.

    Raises:
        OptionError: The work cannot be sent, or a cluster cannot do it.
        OutputError: A node of the cluster has another output folder.
    """
    cluster = options.cluster
    if cluster is None:
        if options.workers == 0:
            return InlinePool(job), 1
        if options.backend == "thread":
            return ThreadPool(job, job.abandon), options.workers
        return ProcessPool(job, options.workers), options.workers
    from forebay.engine.pools.ray.host import PlainHosting
    from forebay.engine.pools.ray.node_checks import NodeCheck
    from forebay.engine.pools.ray.pool import RayPool
    from forebay.engine.pools.ray.shipping import shipped

    work = shipped(job)
    say = note if options.progress else log.warning
    check = NodeCheck(work, shared, inputs)
    hosts = RayPool(PlainHosting(work), cluster, check, options.num_workers, say=say)
    return hosts, hosts.num_workers


def _tuning_for(pool: Pool, options: PreprocessOptions) -> RunTuning | None:
    """Return what changes the number of workers; None unless it is "auto" on this machine."""
    if not isinstance(options.num_workers, AutoWorkers) or options.cluster is not None:
        return None
    pids = pool.living_pids if isinstance(pool, ProcessPool) else None
    return RunTuning(int(options.num_workers), pids, time.monotonic())


def run(
    pool: Pool,
    num_workers: int,
    todo: Iterable[Todo],
    ledger: Ledger,
    folder: OutputPlace,
    options: PreprocessOptions,
    budget: FailureBudget,
    progress: Progress,
    *,
    at_once: bool = False,
) -> RunTimes:
    """Process the inputs; return what that took.

    Args:
        pool: The workers.
        num_workers: Their number.
        todo: The inputs; more of them may be listed meanwhile.
        ledger: Where results are recorded.
        folder: Where outputs are published.
        options: The settings of the run.
        budget: How many inputs may fail.
        progress: Updated as inputs end.
        at_once: Commit each result immediately: for few and large ones.

    Raises:
        FailuresError: Too many inputs failed.
        OutputError: The output's disk is full or became read-only.
        Exception: With `on_error="raise"`, the exception of the function, with notes.
    """
    tuning = _tuning_for(pool, options)
    limits = Limits(
        num_workers=num_workers if tuning is None else tuning.num_workers,
        slots=SLOTS if options.cluster is None else CLUSTER_SLOTS,
        max_bytes=MAX_BYTES,
        retries=options.further_tries,
        timeout_s=options.timeout,
        group_s=pool.group_s if options.workers else 0.0,
        max_group=MAX_GROUP,
        lookahead=LOOKAHEAD,
        max_suspects=1 if options.stops_at_first_failure else 64,
    )
    engine = Engine(pool, limits, _payloads(todo, progress, budget), name_of=_name_of)
    progress.trace.longest_task = engine.longest_task
    commits = Commits(ledger, folder)
    committed, record_s = 0, 0.0
    began, before = time.monotonic(), _used_by_workers(pool)
    living, looked_at = ProcessTimes(), began
    try:
        while not engine.finished or commits.waiting:
            progress.trace.num_workers = engine.num_workers if options.workers else 0
            progress.trace.publish(time.monotonic())
            due_in = commits.due_in()
            wait_s = PUBLISH_S if due_in is None else min(due_in, PUBLISH_S)
            outcomes = engine.step(wait_s, collect_s=COLLECT_S)
            others = commits.add(outcomes, progress.trace.took)
            if len(others) < len(outcomes):
                budget.succeeded()
            for outcome in others:
                _record(outcome, progress.trace)
            for outcome in others:
                _stop_if_due(outcome, budget, options, ledger)
            if tuning is not None and not engine.finished:
                tuning.update(time.monotonic(), progress.trace, engine.resize)
            if isinstance(pool, ProcessPool) and time.monotonic() >= looked_at:
                living.add(pool.living_pids())
                looked_at = time.monotonic() + EVERY_S / 4
            recorded_at, flush_s = time.monotonic(), commits.flush_s
            commit = commits.advance(at_once=at_once or engine.finished)
            waited_s = commits.flush_s - flush_s
            record_s += max(time.monotonic() - recorded_at - waited_s, 0.0)
            if commit is not None:
                engine.release(commit.delivered)
                progress.update(commit.done, commit.failed, commit.metadata)
                committed += len(commit.delivered) + commit.failed
                _stop_if_refused(commit.refused, budget, options, ledger)
    finally:
        # However the run ends, including Ctrl-C: end all workers, and commit the results.
        engine.close()
        try:
            committed += commits.close()
        finally:
            progress.close()
    commits.finish()
    after = _used_by_workers(pool)
    return RunTimes(
        inputs=progress.trace.tasks,
        committed=committed,
        elapsed_s=time.monotonic() - began,
        num_workers=num_workers if tuning is None else tuning.mean_workers(time.monotonic()),
        busy_s=progress.trace.busy_s,
        cpu_s=None if options.cluster else after.cpu_s - before.cpu_s,
        system_s=after.system_s - before.system_s,
        faults=after.faults - before.faults,
        threads_s=max(living.threads_s, 0.0),
        queued_s=living.queued_s,
        keeps_freed=isinstance(pool, ProcessPool),
        flush_s=commits.flush_s,
        record_s=record_s,
        cores=None if options.cluster else machine.usable_cores(),
        decisions=() if tuning is None else tuple(tuning.decisions),
    )


def _payloads(
    listed: Iterable[Todo], progress: Progress, budget: FailureBudget
) -> Iterator[tuple[int, tuple[str, str | None]]]:
    """Yield ordinals and payloads, and raise the total if the listing turns out to be longer."""
    for each in listed:
        if each.ordinal > progress.total:
            progress.total = each.ordinal
            budget.set_total(each.ordinal)
        yield each.ordinal, each[1:]


class _Used(NamedTuple):
    """Processor time, the part of it in the system, and page faults."""

    cpu_s: float
    system_s: float
    faults: int


def _used_by_workers(pool: Pool) -> _Used:
    """Return what the workers that have ended used; threads count with this process."""
    is_child = isinstance(pool, ProcessPool)
    used = resource.getrusage(resource.RUSAGE_CHILDREN if is_child else resource.RUSAGE_SELF)
    return _Used(used.ru_utime + used.ru_stime, used.ru_stime, used.ru_minflt)


def _name_of(payload: tuple[str, str | None]) -> str:
    """Return what the log calls an input: its path, its row, or its index."""
    source, row = payload
    return source or row or ""


def run_here(
    job: PreprocessJob,
    todo: Iterable[Todo],
    ledger: Ledger,
    folder: OutputPlace,
    progress: Progress,
) -> None:
    """Process the inputs one by one in this thread, without an engine; commit each immediately.

    Args:
        job: Processes one input.
        todo: The inputs.
        ledger: Where results are recorded.
        folder: Where outputs are published.
        progress: Updated as inputs end.

    Raises:
        OutputError: The output's disk is full or became read-only, or an output's name is taken.
        Exception: An exception of the job.
    """
    commits = Commits(ledger, folder)
    job.open(0, 0)
    try:
        for each in todo:
            began = time.monotonic()
            progress.trace.publish(began)
            try:
                answer = job.run(Assignment(each.ordinal, 1, each[1:]))
            except Refusal as refusal:
                cause = refusal.__cause__ or refusal
                raise (
                    _full(Failure.of(cause)) if refusal.kind == "environment" else cause
                ) from None
            seconds = time.monotonic() - began
            result = DeliverResult(each.ordinal, 1, seconds, answer.nbytes, answer.result)
            commits.add([result], progress.trace.took)
            commit = commits.advance(at_once=True)
            assert commit is not None
            progress.update(commit.done, commit.failed, commit.metadata)
            for _, failure in commit.refused:
                raise OutputError(failure.message)
    finally:
        job.close()
        try:
            commits.close()
        finally:
            progress.close()


def _record(outcome: Outcome, trace: RunTrace) -> None:
    if isinstance(outcome, ReportFailure):
        trace.spent(outcome.seconds)
    elif isinstance(outcome, ReportRetry):
        trace.retries += 1


def _stop_if_due(
    outcome: Outcome, budget: FailureBudget, options: PreprocessOptions, ledger: Ledger
) -> None:
    """Raise the exception that ends the run, if this outcome requires that."""
    if not isinstance(outcome, ReportRetry | ReportFailure):
        return
    failure = outcome.failure
    if failure.kind == "environment":
        raise _full(failure) from failure.exception
    reason = budget.attempt_failed(outcome.task, failure.error)
    if isinstance(outcome, ReportFailure):
        if options.stops_at_first_failure:
            raise _as_exception(outcome, ledger.name_of(outcome.task))
        reason = budget.failed() or reason
    if reason is not None:
        raise _too_many(reason, ledger.name_of(outcome.task), failure)


def _too_many(reason: str, name: str, failure: Failure) -> FailuresError:
    return FailuresError(
        f"stopped early: {reason}\n"
        f"  The last of them, {name}: {failure.error}: {failure.message}\n"
        "  Completed work is kept. See `forebay failures`, fix the cause, and make the same call "
        f"again.\n{failure.traceback}"
    )


def _full(failure: Failure) -> OutputError:
    return OutputError(
        f"the outputs can no longer be written: {failure.error}: {failure.message}\n"
        "  The run was stopped; completed work is kept, and no input counts as failed.\n"
        "  Free some space (or make the folder writable), then make the same call again."
    )


def _stop_if_refused(
    refused: list[FailedInput], budget: FailureBudget, options: PreprocessOptions, ledger: Ledger
) -> None:
    """Raise the exception that ends the run, if inputs whose outputs were refused require that."""
    for ordinal, failure in refused:
        name = ledger.name_of(ordinal)
        log_failed(name, failure)
        if options.stops_at_first_failure:
            raise OutputError(failure.message)
        reason = budget.failed()
        if reason is not None:
            raise _too_many(reason, name, failure)


def _as_exception(outcome: ReportFailure, name: str) -> BaseException:
    """Return the exception to raise for a failure: the user's, if it could be sent."""
    failure = outcome.failure
    own = failure.exception
    if isinstance(own, SealedError):
        own = own.opened()
    error: BaseException
    if isinstance(own, Exception):
        error = own
    elif failure.kind == "timeout":
        error = SampleTimeoutError(f"{name} {failure.message}")
    elif failure.kind == "crash":
        error = WorkerDiedError(f"{name}: {failure.message}")
    else:
        error = FailuresError(f"{name} failed: {failure.error}: {failure.message}")
    if failure.traceback and error.__traceback__ is None:  # it was raised in another process
        error.add_note(f"In the worker:\n{failure.traceback.rstrip()}")
    error.add_note(
        f"forebay: the input was {name}, number {outcome.task}, attempt {outcome.attempt}; "
        "completed work is kept."
    )
    return error
