"""One session on one output folder: list the inputs, process the remaining ones, write the table.

    inputs ── listing ──> ledger ── pending ──> engine ── workers ──> staged files, metadata
                            ^                                                   │
                            └──── commit: flush, record, publish <──────────────┘

Inputs are listed (`inputs/listing.py`), recorded (`ledger/ledger.py`) and processed
(`runs/job.py`); outputs are staged (`outputs/staging.py`), and published with a table of them
(`runs/results.py`). preprocess, predict and cache use it.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import resource
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any

from forebay.base import process
from forebay.base.files import download, location_text
from forebay.base.formatting import counted
from forebay.base.output_names import PRIVATE, table_name
from forebay.base.process import ProcessTimes, fewer_collections
from forebay.base.randomness import ThreadTurns, generators_kept, generators_restored
from forebay.engine.commands import DeliverResult, Limits, Outcome, ReportFailure, ReportRetry
from forebay.engine.engine import Engine
from forebay.errors import (
    ChangedError,
    OptionError,
    OutputError,
    shortened,
    shown_location,
)
from forebay.failures import MAX_KEPT
from forebay.inputs.listing import Listing, check_in_reach, in_reach, local_inputs
from forebay.ledger.database import reading
from forebay.ledger.ledger import Ledger
from forebay.ledger.records import Input, Todo
from forebay.observe.progress import Progress, label_of, log, log_failed, note
from forebay.observe.record import PUBLISH_S
from forebay.options import AutoWorkers, PreprocessOptions
from forebay.outputs.places import open_place
from forebay.pools.base import InlinePool, Pool, ThreadPool
from forebay.pools.job_loading import check_not_loading
from forebay.pools.processes import ProcessPool, occupy_standard_descriptors
from forebay.runs import report
from forebay.runs.fingerprint import Fingerprint, changed_name, difference, number_bases
from forebay.runs.job import PreprocessJob, name_of_work
from forebay.runs.recorded_settings import SETTINGS
from forebay.runs.report import FailureBudget, Report
from forebay.runs.results import Commit, Commits, LedgerTable, perform_pending
from forebay.runs.same_call import call_id, take_folder
from forebay.runs.source_code import sha256_of
from forebay.show.top import LiveRun

# ---- run -----------------------------------------------------------------------------------------

# How often it is looked at what the workers did, which reads two files for each.
LOOK_S = 0.25
# Limits of uncommitted results: their number, and the bytes of metadata in them.
SLOTS = 8192
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
    from forebay.pools.ray_nodes import Hosting, NodeCheck, shipped
    from forebay.pools.ray_pool import RayPool

    work = shipped(job)
    say = note if options.progress else log.warning
    check = NodeCheck(work, shared, inputs)
    hosts = RayPool(Hosting(work), cluster, check, options.num_workers, say=say)
    return hosts, hosts.num_workers


def _payloads(
    listed: Iterable[Todo], progress: Progress, budget: FailureBudget, kind: str
) -> Iterator[tuple[int, tuple[str | None, ...]]]:
    """Yield ordinals and payloads, and raise the total if the listing turns out to be longer.

    A payload is a source, a row and, only if there are credentials, what opens the input; for a
    sample, the index of it, which is listed in the order of its Dataset.
    """
    for each in listed:
        if each.ordinal > progress.total:
            progress.total = each.ordinal
            budget.set_total(each.ordinal)
        opens = str(each.ordinal - 1) if each.opens is None and kind == "indices" else each.opens
        yield each.ordinal, each[1:3] if opens is None else (*each[1:3], opens)


def _same_contents(folder: str | None, inputs: Iterable[tuple[int, Input, str]]) -> Iterator[int]:
    """See `inputs/contents.py`, which few runs need."""
    from forebay.inputs.contents import same_contents

    return same_contents(folder, inputs)


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


# ---- session -------------------------------------------------------------------------------------

# How many inputs are listed before the first of them is worked on; the rest is listed meanwhile.
AHEAD = 16_384


class Session:
    """One run on one output folder, from locking to unlocking it."""

    def __init__(
        self,
        work: Any,
        output: str | os.PathLike[str],
        options: PreprocessOptions,
        *,
        described: Callable[[], Fingerprint],
        verb: str = "preprocess",
        inputs: str = "",
        settings: str | None = None,
    ) -> None:
        """Make a session.

        Args:
            inputs: Tells the inputs from those of other calls.
            settings: Those of the call, to be recorded; None to leave those of the earlier run.
        """
        check_not_loading(verb)
        self.options, self.starts_over = options, False
        self.accepts_changes = options.accept_changes  # or by a version that is as it was
        self.output = location_text(output)
        check_in_reach(self.output, options)
        occupy_standard_descriptors()  # or the ledger could get the descriptor of a closed stderr
        self.folder = open_place(output)
        self.ledger: Ledger
        self._work, self._described, self._inputs = work, cache(described), inputs
        self.has_waited = False  # for another process that has begun the same call
        self._began, self._changed = time.monotonic(), False
        # Recorded when the work begins.
        self._call: dict[str, str] = {} if settings is None else {SETTINGS: settings}
        self._has_table, self.verb = verb == "preprocess", verb
        self.notes, self.unseen = list[str](), tuple[str, ...]()  # for the report
        self._kind = ""  # of the inputs
        self._user = "", ""  # the user's code in messages, and the call that names its files
        self._progress: Progress | None = None  # of the work that was begun
        self._pool: Pool | None = None
        self._num_workers = 1
        self._listed = 0  # inputs of the listing, if it knows their number

    def __enter__(self) -> Session:
        with ExitStack() as stack:
            call = call_id(self.verb, self._described(), self.options, self._inputs)
            taken = take_folder(stack, self.folder, call, self.output, self.say)
            self.ledger, self.has_waited = taken.ledger, taken.is_begun
            if self.has_waited:  # what was to be done again was
                self.options = replace(self.options, resume=True, redo=None)
            self._open_table()
            self.perform_pending()
            self.starts_over = self._is_to_start_over()
            self._closing = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            given = {"resume=False": not self.options.resume, "redo=": self.options.redo}
            without = " and ".join(name for name, is_given in given.items() if is_given)
            if self._progress is None:  # nothing was done again yet
                without = ""
            again = f"the same call{' without ' * bool(without)}{without}"
            error.add_note(f"forebay: interrupted{self._what_is_done('; ')}")
            continues = "begins" if self._progress is None else "continues"
            error.add_note(f"forebay: {again} {continues}")
        elif error is not None and self._progress is not None and (done := self._what_is_done()):
            error.add_note(f"forebay: {done}")
        self._closing.__exit__(kind, error, traceback)

    def _what_is_done(self, before: str = "") -> str:
        """Return how much of the work the ledger has, with this before it; "" if it has none."""
        done = total = 0
        with suppress(Exception):  # whatever a ledger on a failing disk raises
            total, done, _ = self.ledger.counts()
        noun = report.unit_of(self.verb)
        return f"{before}{done:,} of {counted(total, noun)} are done and stay" if done else ""

    def _open_table(self) -> None:
        """Record that the table is not up to date, before anything changes."""
        if self._has_table:
            self._table = LedgerTable(self.ledger, self.folder)

    def start_workers(
        self,
        kind: str,
        inputs: Any = None,
        doing: Any = None,
        folder: str | None = None,
        save: Any = None,
        *,
        gives_out: bool = True,
        seeds_owned: bool = True,
    ) -> None:
        """Start the workers, which continue to start while the inputs are listed."""
        call = "out.file" if kind != "indices" or save is not None else "forebay.get_output().file"
        self._kind, self._user = kind, (name_of_work(self._work, kind, save), call)
        if self._has_table:
            self._table.check(self.options.metadata)
        fetch = partial(download, folder=self.folder.private / "staging" / "fetched")
        work = self._work if doing is None else doing
        turns = ThreadTurns() if self.options.backend == "thread" else None
        job = PreprocessJob(
            work,
            kind,
            self.folder.staging(),
            fetch,
            turns,
            folder,
            save,
            gives_out=gives_out,
            seeds_owned=seeds_owned,
            concurrency=self.options.at_once,
        )
        shared, needed = str(self.folder.locate(PRIVATE)), local_inputs(inputs)
        self._pool, self._num_workers = workers_for(job, self.options, shared, needed)
        self._closing.callback(self._pool.close)
        self.ledger.keep_alive()  # starts a thread, so only after the fork of the zygote

    def enrol(self, listing: Listing, *, whole: bool = False) -> None:
        """Merge the listing into the ledger."""
        ahead = None if whole else AHEAD
        self._described()  # before a Dataset's own code is called, and while workers start
        self._listed = listing.total or 0
        self._merge(listing, ahead)
        if self._has_table and not self.starts_over:
            self._find_missing()
        folder = None if listing.folder is None else shown_location(listing.folder)
        call: dict[str, object] = {"kind": listing.kind, "folder": folder}
        call["is_private"] = folder != listing.folder
        self._call["call"] = json.dumps(call)

    def _merge(self, listing: Listing, ahead: int | None) -> None:
        limit = self.options.limit
        listing = listing.through(lambda inputs: in_reach(inputs, self.options))
        enrolment = self.ledger.enrol(
            itertools.islice(listing, limit),
            listing.columns,
            complete=limit is None,
            ahead=ahead,
            is_distinct=listing.is_distinct,
            fingerprint="" if self.starts_over else listing.fingerprint,
            read_on=listing.read_on,
            same_contents=partial(_same_contents, listing.folder),
            anew=self.starts_over,
        )
        self.unseen = enrolment.unseen_names
        self._changed |= any((enrolment.new, enrolment.changed, enrolment.gone, enrolment.moved))
        if self.starts_over:
            return
        if enrolment.gone and self._has_table:
            self.say(report.note_on_gone(enrolment, listing.kind))
        kind = listing.kind if self._has_table else self.verb
        for each in report.notes_on_inputs(enrolment, kind):
            self.note(each)

    def _find_missing(self) -> None:
        """Have those inputs done again of which an output is no longer in the folder."""
        missing: dict[int, str] = {}
        for name, ordinal in self.folder.missing(self.ledger.listed_outputs()):
            missing.setdefault(ordinal, name)
        done = self.ledger.counts().done
        if missing and (again := self.ledger.mark_todo(missing)):
            self._changed = True
            self.note(report.note_on_missing(again, done, min(missing.values())))

    def note(self, text: str) -> None:
        """Say something now, and in the report."""
        self.notes.append(text)
        self.say(text)

    def process_inputs(
        self,
        *,
        failed_only: bool = False,
        todo: Iterable[Todo] | None = None,
        at_once: bool = False,
        progress: Progress | None = None,
        committed: Callable[[list[int]], None] | None = None,
    ) -> Report:
        """Process the remaining inputs, write the table, and return the report.

        Args:
            todo: The inputs to process; None for those without a result.
            progress: Updated as inputs end; None to count inputs.
            committed: Called with inputs whose results are committed and published.
        """
        ledger, options = self.ledger, self.options
        label = label_of("retry" if failed_only else "preprocess", self.output)
        ledger.free_contested()
        before = ledger.counts()
        run = {"pid": os.getpid(), "began": time.time(), **before._asdict()}
        self.remember_work(run=json.dumps(run))
        total = max(before.total, self._listed)
        total = total if options.limit is None else min(options.limit, total)
        if todo is None:  # what failed in the same call is not tried again
            has_failed = failed_only or not self.has_waited
            todo = ledger.todo(options.limit, failed_only=failed_only, has_failed=has_failed)
        progress = progress or Progress(total, before.done, options.progress, label=label)
        budget = FailureBudget(
            options.max_failures,
            total,
            watch=not before.done,
            known=ledger.failed_ordinals(),
            # Only preprocess can be told how many may fail.
            counts_rows=self.verb == "preprocess",
        )
        self._progress = progress
        self._closing.callback(LiveRun(self.verb, self.output, progress).remove)
        kept = generators_kept if options.workers == 0 else fewer_collections
        with generators_restored() if options.backend == "thread" else kept():
            times = self._run(todo, budget, progress, committed, at_once=at_once)
        self._changed |= times["committed"] > 0
        self.perform_pending()
        if self._has_table:
            with fewer_collections():
                self._table.update(options.metadata, self._kind, is_stale=self._changed)
        self._drop_replaced()
        if self._has_table and times["committed"] and (strays := self.folder.strays(ledger)):
            self.notes.append(
                report.note_on_strays(strays, shown_location(self.output), *self._user)
            )
        counts = ledger.counts()
        return Report(
            output=self.output,
            done=counts.done,
            failed=counts.failed,
            resumed=before.done,
            failures=tuple(ledger.failures(MAX_KEPT)),
            elapsed_s=time.monotonic() - self._began,
            metadata_path=self.folder.locate(table_name(options.metadata)),
            later={"diagnosis": partial(report.diagnosed, times), "details": self.details()},
            decisions=times["decisions"],
            without_rows=self._table.without_rows if self._has_table else 0,
            notes=tuple(self.notes),
            unseen=self.unseen,
        )

    def _run(
        self,
        todo: Iterable[Todo],
        budget: FailureBudget,
        progress: Progress,
        note_committed: Callable[[list[int]], None] | None,
        *,
        at_once: bool,
    ) -> dict[str, Any]:
        """Process the inputs; return what that took, as the arguments of `RunTimes`."""
        pool, options, trace = self._pool, self.options, progress.trace
        assert pool is not None, "start_workers comes first"
        living, looked_at, tuning = ProcessTimes(), -math.inf, None
        if isinstance(options.num_workers, AutoWorkers) and options.cluster is None:
            from forebay.runs.tuning import RunTuning

            times = living if isinstance(pool, ProcessPool) else None
            most = int(options.num_workers)
            tuning = RunTuning(most, times, time.monotonic(), options.at_once)
        limits = Limits(
            num_workers=self._num_workers if tuning is None else tuning.num_workers,
            slots=SLOTS if options.cluster is None else CLUSTER_SLOTS,
            at_once=options.at_once,
            max_bytes=MAX_BYTES,
            retries=options.further_tries,
            timeout_s=options.timeout,
            group_s=pool.group_s if options.workers else 0.0,
            max_group=MAX_GROUP,
            lookahead=LOOKAHEAD,
            max_suspects=1 if options.stops_at_first_failure else 64,
        )
        payloads = _payloads(todo, progress, budget, self._kind)
        engine = Engine(
            pool,
            limits,
            payloads,
            name_of=_name_of,
            advice=partial(_advice_if_stuck, pool),
            silent_s=None if progress.unit == "input" else RANGE_S,
        )
        trace.longest_task, trace.at_once = engine.longest_task, options.at_once
        commits = Commits(self.ledger, self.folder)
        committed, record_s = 0, 0.0
        began, before = time.monotonic(), _used_by_workers(pool)
        try:
            while not engine.finished or commits.waiting:
                trace.num_workers = engine.flow.limits.num_workers if options.workers else 0
                trace.publish(time.monotonic())
                due_in = commits.due_in()
                wait_s = PUBLISH_S if due_in is None else min(due_in, PUBLISH_S)
                outcomes = engine.step(wait_s, collect_s=COLLECT_S)
                others = commits.add(outcomes, trace.took)
                for outcome in others:
                    if isinstance(outcome, ReportFailure):
                        trace.spent(outcome.seconds)
                    elif isinstance(outcome, ReportRetry):
                        trace.retries += 1
                if outcomes and not others:
                    budget.succeeded()
                for outcome in outcomes if others else ():  # in their order: some are in a row
                    self._stop_if_due(outcome, budget)
                if (now := time.monotonic()) >= looked_at:
                    looked_at = now + LOOK_S
                    if isinstance(pool, ProcessPool):
                        living.add(pool.living_pids())
                    if tuning is not None and not engine.finished:
                        tuning.update(now, trace, engine.resize)
                recorded_at, flush_s = time.monotonic(), commits.flush_s
                commit = commits.advance(at_once=at_once or engine.finished)
                waited_s = commits.flush_s - flush_s
                record_s += max(time.monotonic() - recorded_at - waited_s, 0.0)
                if commit is not None:
                    engine.release(commit.delivered)
                    if note_committed is not None:
                        note_committed(commit.delivered)
                    progress.update(commit.done, commit.failed, commit.metadata)
                    committed += len(commit.delivered) + commit.failed
                    self._look_at_metadata(commit.metadata, progress.total)
                    self._stop_if_refused(commit, budget)
        finally:
            # However the run ends, including Ctrl-C: end all workers, and commit the results.
            engine.close()
            trace.longest_task = lambda: None  # or a report would keep the engine
            try:
                committed += commits.close()
            finally:
                progress.close()
        commits.finish()
        if commits.unstaged:
            folder, function = shown_location(self.output), self._user[0]
            self.notes.append(report.note_on_unstaged(*commits.unstaged, folder, function))
        after, now = _used_by_workers(pool), time.monotonic()
        system_s = after.ru_stime - before.ru_stime
        return {
            "inputs": trace.tasks,
            "committed": committed,
            "elapsed_s": now - began,
            "num_workers": self._num_workers if tuning is None else tuning.mean_workers(now),
            "busy_s": trace.busy_s,
            "at_once": options.at_once,
            "cpu_s": None if options.cluster else after.ru_utime - before.ru_utime + system_s,
            "system_s": system_s,
            "faults": after.ru_minflt - before.ru_minflt,
            "threads_s": max(living.threads_s, 0.0),
            "queued_s": living.queued_s,
            "keeps_freed": isinstance(pool, ProcessPool),
            "flush_s": commits.flush_s,
            "record_s": record_s,
            "cores": None if options.cluster else process.usable_cores(),
            "decisions": () if tuning is None else tuple(tuning.decisions),
        }

    def _stop_if_due(self, outcome: Outcome, budget: FailureBudget) -> None:
        """Raise the exception that ends the run, if this outcome requires that."""
        if isinstance(outcome, DeliverResult):
            budget.succeeded()
        if not isinstance(outcome, ReportRetry | ReportFailure):
            return
        failure = outcome.failure
        if failure.kind == "stop" and failure.exception is not None:
            raise failure.exception
        if failure.kind == "environment":
            raise report.no_more_space(failure) from failure.exception
        reason = budget.attempt_failed(outcome.task, failure.error)
        if isinstance(outcome, ReportFailure):
            if self.options.stops_at_first_failure:
                raise report.first_failure(outcome, self.ledger.name_of(outcome.task))
            reason = budget.failed(failure.error, outcome.task) or reason
        if reason is not None:
            raise report.too_many(reason, self.ledger.name_of(outcome.task), failure)

    def _stop_if_refused(self, commit: Commit, budget: FailureBudget) -> None:
        """Raise the exception that ends the run, if inputs with refused outputs require that."""
        for ordinal, failure, _ in commit.refused:
            name = self.ledger.name_of(ordinal)
            log_failed(name, failure)
            if self.options.stops_at_first_failure:
                raise OutputError(failure.message)
        refused = {each.ordinal for each in commit.refused}
        if reason := budget.refused(commit.delivered, refused):
            raise report.too_many(reason, name, failure)

    def _look_at_metadata(self, metadata: Sequence[str], total: int) -> None:
        """Say once, early, that metadata are large arrays."""
        if self._has_table and not self.notes:
            found = report.note_on_arrays(metadata, total, *self._user)
            if found is not None:
                self.note(found)

    def details(self, **others: Any) -> Callable[[], dict[str, Any]]:
        """Return what makes the part of a report besides its counts; empty if nothing was left.

        Args:
            **others: What replaces parts of it.
        """
        if self._progress is None:
            return dict
        names = {task: self.ledger.name_of(task) for _, task in self._progress.trace.slowest}
        known = self._progress, self.verb, self._described().name, names.__getitem__, self.options

        def detailed() -> dict[str, Any]:
            from forebay.show.report import run_details

            return run_details(*known) | others

        return detailed

    def say(self, text: str) -> None:
        """Say something of the output: above the progress display, or in the log without one."""
        say = note if self.options.progress else log.warning
        say(f"{shown_location(self.output)}: {text}")

    def perform_pending(self) -> None:
        """Perform the file changes that this run or an earlier one left pending."""
        perform_pending(self.ledger, self.folder)

    def _is_to_start_over(self) -> bool:
        """Return whether to discard the earlier run: on request, or after trials only."""
        ledger, options = self.ledger, self.options
        was, was_version = ledger.get_meta("work"), ledger.get_meta("version")
        verb = ledger.get_meta("verb")
        if was is not None and options.resume and verb != self.verb:
            # Whatever the version: these outputs would be those of inputs that are gone.
            raise OptionError(
                f"{self.output!r} has the outputs of {shortened(verb)}, and this is a call of "
                f"{self.verb!r}\n"
                "  Nothing was started, and nothing is lost. Use another output folder; or start "
                "over, removing those outputs: resume=False, or --restart."
            )
        is_named = None not in (options.version, was_version) and not options.accept_changes
        renamed = is_named and options.version != was_version
        self.accepts_changes |= is_named and not renamed
        if was is None or not options.resume or renamed:
            return was is not None
        with reading("the work"):
            before = Fingerprint.from_json(was)
            changes = difference(before, self._described())
        if not changes or self.accepts_changes:
            if was_version is None and options.version is not None:
                self.say(f"what is done was made without a version; it has {options.version!r} now")
            return False
        if ledger.get_meta("trial") == "yes":
            return True
        raise ChangedError(self.words_of_change(changed_name(before, self._described()), changes))

    def words_of_change(self, name: str, changes: str) -> str:
        """Return the message for a call whose outputs would not go with those of earlier ones."""
        has_samples = bool(self._described().bases)
        only = ", if every sample has the name or index that it had" if has_samples else ""
        version, first = self.options.version, ""
        if version is not None and self.ledger.get_meta("version") is None:
            first = f"  The earlier run had no version to compare with version={version!r}.\n"
        return (
            f"{name} changed since the earlier run: {self.output!r} would mix two versions\n"
            f"{textwrap.indent(changes.rstrip(), '  ')}\n"
            f"{first}  Nothing was started, and nothing is lost. Choose one:\n"
            "  - start over, removing the earlier outputs: resume=False, or --restart;\n"
            f"  - keep what is done and use the new code for the rest{only}: accept_changes=True, "
            "or --accept-changes;\n"
            "  - another output folder."
        )

    def _drop_replaced(self) -> None:
        """At the end of a run that began anew, remove what it has not replaced."""
        if self.ledger.begins_anew and self.options.limit is None:
            self.ledger.drop_replaced()
            self.perform_pending()

    def remember_work(self, **others: str) -> None:
        """Record the description of the work, for the next run to compare, and other strings."""
        others |= {"state": self.state}
        ledger, options, others = self.ledger, self.options, self._call | others
        if options.version is not None:
            others["version"] = options.version
        if options.limit is None:
            others["trial"] = "no"
        elif ledger.get_meta("trial") is None:
            others["trial"] = "yes"
        ledger.set_meta("work", self.work[0].to_json(), verb=self.verb, **others)

    @cached_property
    def state(self) -> str:
        """A hash of the description of the work; the earlier run's if that is continued."""
        was = None if self.starts_over else self.ledger.get_meta("state")
        return was or sha256_of(self.work[0].to_json().encode())

    @cached_property
    def work(self) -> tuple[Fingerprint, list[int]]:
        """The description for the ledger, with Datasets of earlier calls; where its own are."""
        was = None if self.starts_over else self.ledger.get_meta("work")
        known = () if was is None else Fingerprint.from_json(was).bases
        found, accepts = self._described().bases, self.accepts_changes
        bases, numbers = number_bases(known, found, accepts=accepts)
        return replace(self._described(), bases=bases), numbers
