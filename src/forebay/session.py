"""One session on one output folder: list the inputs, process the remaining ones, write the table.

    inputs ── listing ──> ledger ── pending ──> engine ── workers ──> staged files, metadata
                            ^                                                   │
                            └──── commit: flush, record, publish <──────────────┘

Inputs are listed (`jobs/inputs/listing.py`), recorded (`jobs/ledger/ledger.py`) and processed
(`jobs/preprocess_job.py`); outputs are staged (`jobs/outputs/staged_output.py`), and the table is
written at the end (`jobs/table/ledger_table.py`). preprocess, predict and cache use it.
"""

from __future__ import annotations

import itertools
import json
import os
import textwrap
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cached_property
from typing import Any

from forebay.engine.pools.base import Pool
from forebay.engine.pools.launch import occupy_standard_descriptors
from forebay.errors import ChangedError, OptionError, shortened
from forebay.failures import MAX_KEPT
from forebay.gc_threshold import collecting_seldom
from forebay.jobs.failure_budget import FailureBudget
from forebay.jobs.inputs.download import Download
from forebay.jobs.inputs.listing import Listing
from forebay.jobs.inputs.reach import check_in_reach, in_reach, local_inputs
from forebay.jobs.ledger.database import reading
from forebay.jobs.ledger.ledger import Ledger
from forebay.jobs.ledger.records import Counts, Todo
from forebay.jobs.outputs.commits import perform_pending
from forebay.jobs.outputs.output_names import PRIVATE, table_name
from forebay.jobs.outputs.output_places import open_place, path_text
from forebay.jobs.preprocess_job import PreprocessJob
from forebay.jobs.report import Report
from forebay.jobs.table.ledger_table import LedgerTable
from forebay.jobs.user_code.fingerprint import Fingerprint, difference
from forebay.live.live_run import LiveRun
from forebay.observe.event_log import log
from forebay.observe.progress import Progress, label_of, note
from forebay.observe.run_diagnosis import diagnose_run
from forebay.options import PreprocessOptions
from forebay.randomness import ThreadTurns, generators_kept, generators_restored
from forebay.reports.run_summary import run_details
from forebay.run import run, run_here, workers_for

# How many inputs are listed before the first of them is worked on; the rest is listed meanwhile.
AHEAD = 16_384


class Session:
    """One run on one output folder, from locking to unlocking it.

    Args:
        work: What the workers do.
        output: The folder, or its URL.
        options: The settings.
        described: Returns the description of the work; called once.
        verb: The entry point: "preprocess", whose output has a table, "predict" or "cache".

    Attributes:
        output: The folder, or its URL.
        starts_over: Whether the results of an earlier run are discarded; set by `__enter__`.
    """

    def __init__(
        self,
        work: Any,
        output: str | os.PathLike[str],
        options: PreprocessOptions,
        *,
        described: Callable[[], Fingerprint],
        verb: str = "preprocess",
    ) -> None:
        self.options, self.starts_over = options, False
        self.output = path_text(output)
        check_in_reach(self.output, options)
        occupy_standard_descriptors()  # or the ledger could get the descriptor of a closed stderr
        self.folder = open_place(output)
        self.ledger: Ledger
        self._work, self._describe = work, described
        self._began, self._changed = time.monotonic(), False
        self._call: dict[str, str] = {}  # recorded when the work begins
        self._has_table, self._verb = verb == "preprocess", verb
        self._kind = ""  # what the inputs are; set by `start_workers`
        self._progress: Progress | None = None  # of the work that was begun
        self._pool: Pool | None = None
        self._num_workers = 1
        self._listed = 0  # inputs of the listing, if it knows their number

    def __enter__(self) -> Session:
        with ExitStack() as stack:
            self.ledger = stack.enter_context(self.folder.ledger())
            self._table = LedgerTable(self.ledger, self.folder)
            self.perform_pending()
            self.starts_over = self._is_to_start_over()
            self._closing = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            again = "the same call" + ("" if self.options.resume else " without resume=False")
            error.add_note(f"forebay: interrupted; completed work is kept, {again} continues")
        self._closing.__exit__(kind, error, traceback)

    def start_workers(
        self,
        kind: str,
        inputs: Any = None,
        doing: Any = None,
        folder: str | None = None,
        save: Any = None,
        *,
        seeds_owned: bool = True,
    ) -> None:
        """Start the workers, which continue to start while the inputs are listed.

        Args:
            kind: What the inputs are.
            inputs: What the user named, if anything.
            doing: What the workers call, if it is not the work itself.
            folder: Where a row's relative `destination` starts.
            save: Called with each sample of a Dataset; see `preprocess`.
            seeds_owned: See `PreprocessJob`.

        Raises:
            OutputError: There is a file with the table's name that no run wrote.
        """
        self._kind = kind
        if self._has_table:
            self._table.check(self.options.metadata)
        fetch = Download(self.folder.private / "staging" / "fetched")
        work = self._work if doing is None else doing
        turns = ThreadTurns() if self.options.backend == "thread" else None
        job = PreprocessJob(
            work,
            kind,
            self.folder.staging(self.options.shard_bytes),
            fetch,
            turns,
            folder,
            save,
            seeds_owned=seeds_owned,
        )
        shared, needed = str(self.folder.locate(PRIVATE)), local_inputs(inputs)
        self._pool, self._num_workers = workers_for(job, self.options, shared, needed)
        self._closing.callback(self._pool.close)
        self.ledger.keep_alive()  # starts a thread, so only after the fork of the zygote

    def enrol(self, listing: Listing, *, whole: bool = False) -> None:
        """Merge the listing into the ledger.

        Args:
            listing: The inputs.
            whole: List all of them before the work begins, however many there are.
        """
        ahead = None if whole else AHEAD
        _ = self._described  # before a Dataset's own code is called, and while workers start
        self._listed = listing.total or 0
        self._merge(listing, None if self.starts_over else ahead)
        if self.starts_over:  # only after the listing succeeded, since this removes the outputs
            self.ledger.restart()
            self._table = LedgerTable(self.ledger, self.folder)
            self._merge(listing, ahead)
        self.perform_pending()
        rows = listing.in_place
        call = {
            "kind": listing.kind,
            "folder": listing.folder,
            "metadata": self.options.metadata,
            "manifest": None if rows is None else rows.name,
        }
        self._call = {"call": json.dumps(call)}

    def _merge(self, listing: Listing, ahead: int | None) -> None:
        limit = self.options.limit
        listing = listing.through(lambda inputs: in_reach(inputs, self.options))
        enrolment = self.ledger.enrol(
            itertools.islice(listing, limit),
            listing.columns,
            complete=limit is None,
            ahead=ahead,
            is_distinct=listing.is_distinct,
            in_place=listing.in_place,
        )
        self._changed |= any((enrolment.new, enrolment.changed, enrolment.gone, enrolment.moved))
        others = enrolment.gone and enrolment.new and not enrolment.same + enrolment.changed
        if others and listing.kind == "rows" and not self.starts_over:
            say = note if self.options.progress else log.warning
            say(
                f"{self.output}: of the {enrolment.gone:,} rows of the earlier run none is in the "
                "manifest now, so each of its rows is processed. A row with another value, or with "
                "other columns, is another input."
            )

    def process_inputs(
        self,
        *,
        failed_only: bool = False,
        todo: Iterable[Todo] | None = None,
        at_once: bool = False,
        progress: Progress | None = None,
    ) -> Report:
        """Process the remaining inputs, write the table, and return the report.

        Args:
            failed_only: Leave out inputs that were not tried yet.
            todo: The inputs to process; None for those without a result.
            at_once: Commit each result immediately: for few and large ones.
            progress: Updated as inputs end; None to count inputs.
        """
        ledger, options = self.ledger, self.options
        label = label_of("retry" if failed_only else "preprocess", self.output)
        before = self._begin_work()
        total = max(before.total, self._listed)
        total = total if options.limit is None else min(options.limit, total)
        listed = ledger.todo(options.limit, failed_only=failed_only) if todo is None else todo
        assert self._pool is not None, "start_workers comes first"
        progress = progress or Progress(total, before.done, options.progress, label=label)
        budget = FailureBudget(options.max_failures, total, watch=not before.done)
        self._show(progress)
        kept = generators_kept if options.workers == 0 else collecting_seldom
        with generators_restored() if options.backend == "thread" else kept():
            times = run(
                self._pool,
                self._num_workers,
                listed,
                ledger,
                self.folder,
                options,
                budget,
                progress,
                at_once=at_once,
            )
        self._changed |= times.committed > 0
        self.perform_pending()
        if self._has_table:
            with collecting_seldom():
                self._table.update(options.metadata, self._kind, is_stale=self._changed)
        counts = ledger.counts()
        return Report(
            output=self.output,
            done=counts.done,
            failed=counts.failed,
            resumed=before.done,
            failures=tuple(ledger.failures(MAX_KEPT)),
            elapsed_s=time.monotonic() - self._began,
            metadata_path=self.folder.locate(table_name(options.metadata)),
            diagnosis=diagnose_run(times),
            decisions=times.decisions,
            details=self.details(),
        )

    def process_inputs_here(self, work: Any, todo: Iterable[Todo], progress: Progress) -> None:
        """Call the work for each row in this thread, and commit each result immediately.

        Args:
            work: The function; an exception ends the run.
            todo: The rows to process.
            progress: Updated as inputs end.
        """
        self.ledger.keep_alive()
        self._begin_work()
        self._show(progress)
        job = PreprocessJob(work, "rows", self.folder.staging())
        with generators_kept():
            run_here(job, todo, self.ledger, self.folder, progress)
        self.perform_pending()

    def _begin_work(self) -> Counts:
        """Record that this process runs now; return the counts before it."""
        self.ledger.free_contested()
        before = self.ledger.counts()
        run = {"pid": os.getpid(), "began": time.time(), **before._asdict()}
        self.remember_work(**self._call, run=json.dumps(run))
        return before

    def _show(self, progress: Progress) -> None:
        self._progress = progress
        self._closing.callback(LiveRun(self._verb, self.output, progress).remove)

    def details(self) -> dict[str, Any]:
        """Return what the report shows besides its counts; empty if nothing was left to be done."""
        if self._progress is None:
            return {}
        name, names = self._described.name, self.ledger.name_of
        return run_details(self._progress, self._verb, name, self._num_workers, names, self.options)

    def perform_pending(self) -> None:
        """Perform the file changes that this run or an earlier one left pending."""
        perform_pending(self.ledger, self.folder)

    def _is_to_start_over(self) -> bool:
        """Tell whether to discard the earlier run: on request, or after trials only.

        Raises:
            ChangedError: The work has changed, and the user gave no `version` or `resume=False`.
            OptionError: The earlier run was of another entry point, and resume is not False.
        """
        ledger, options = self.ledger, self.options
        was, was_version = ledger.get_meta("work"), ledger.get_meta("version")
        verb = ledger.get_meta("verb")
        if was is not None and options.resume and verb != self._verb:
            # Whatever the version: these outputs would be those of inputs that are gone.
            raise OptionError(
                f"{self.output!r} has the outputs of {shortened(verb)}, and this is a call of "
                f"{self._verb!r}\n"
                "  Nothing was started, and nothing is lost. Use another output folder; or start "
                "over, removing those outputs: resume=False, or --restart."
            )
        renamed = None not in (options.version, was_version) and options.version != was_version
        if was is None or not options.resume or renamed:
            return was is not None
        with reading("the work"):
            changes = difference(Fingerprint.from_json(was), self._described)
        if not changes or options.version is not None:
            return False
        if ledger.get_meta("trial") == "yes":
            return True
        keep = was_version or "2"
        # A range of samples is known by its indices alone.
        only = "" if self._verb == "preprocess" else ", if every sample has the index that it had"
        raise ChangedError(
            f"{self._described.name} changed since the earlier run: {self.output!r} would mix "
            f"two versions\n{textwrap.indent(changes.rstrip(), '  ')}\n"
            "  Nothing was started, and nothing is lost. Choose one:\n"
            "  - start over, removing the earlier outputs: resume=False, or --restart;\n"
            f"  - keep what is done and use the new code for the rest{only}: version={keep!r}, or "
            f"--version {keep};\n"
            "  - another output folder."
        )

    def remember_work(self, **others: str) -> None:
        """Record the description of the work, for the next run to compare, and other strings."""
        ledger, options = self.ledger, self.options
        if options.version is not None:
            others["version"] = options.version
        if options.limit is None:
            others["trial"] = "no"
        elif ledger.get_meta("trial") is None:
            others["trial"] = "yes"
        ledger.set_meta("work", self._described.to_json(), verb=self._verb, **others)

    @cached_property
    def _described(self) -> Fingerprint:
        return self._describe()
