"""One session on one output folder: list the inputs, process the remaining ones, write the table.

    inputs ── listing ──> ledger ── pending ──> engine ── workers ──> staged files, metadata
                            ^                                                   │
                            └──── commit: flush, record, publish <──────────────┘

Inputs are listed (`inputs/listing.py`), recorded (`ledger/ledger.py`) and processed
(`runs/job.py`); outputs are staged (`outputs/staging.py`), and published with a table of them
(`runs/commits.py`). preprocess, predict and cache use it.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any

from forebay.base.draw_detection import ThreadTurns
from forebay.base.files import download, location_text
from forebay.base.formatting import counted
from forebay.base.output_names import PRIVATE, table_name
from forebay.base.process import check_not_loading, fewer_collections, join_thread
from forebay.base.randomness import generators_kept, generators_restored
from forebay.errors import (
    ChangedError,
    OptionError,
    shortened,
    shown_location,
)
from forebay.failures import MAX_KEPT
from forebay.inputs.listing import Listing, check_in_reach, in_reach, local_inputs
from forebay.inputs.row_paths import NO_FILES, RowFiles
from forebay.inputs.search import away_folders
from forebay.ledger.database import reading
from forebay.ledger.ledger import Ledger
from forebay.ledger.records import Input, Todo
from forebay.observe.progress import Progress, log, note, run_label
from forebay.observe.record import PUBLISH_S
from forebay.options import PreprocessOptions
from forebay.pools.base import Pool
from forebay.pools.processes import ProcessPool, occupy_standard_descriptors
from forebay.runs import notes
from forebay.runs.calls import SETTINGS, call_id, open_place, take_folder
from forebay.runs.commits import Commit, perform_pending
from forebay.runs.fingerprint import Base, Fingerprint
from forebay.runs.job import name_of_work
from forebay.runs.metadata_table import LedgerTable, import_for_table
from forebay.runs.processing import FailureBudget, Processing, job_maker, workers_for
from forebay.runs.report import Report, run_diagnosis
from forebay.runs.source_code import sha256_of
from forebay.runs.user_call import USUAL, Call
from forebay.show.live_page import LiveRun


def _same_contents(folder: str | None, inputs: Iterable[tuple[int, Input, str]]) -> Iterator[int]:
    """See `inputs/contents.py`, which few runs need."""
    from forebay.inputs.contents import same_contents

    return same_contents(folder, inputs)


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
        self.folder.overwrites = options.overwrite
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
                self.options = replace(self.options, redo=None)
            if self._has_table:  # it is recorded as not up to date, before anything changes
                self._table = LedgerTable(self.ledger, self.folder)
            self.perform_pending()
            self.starts_over = self._is_to_start_over()
            self._settle()
            self._closing = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            is_begun = self._progress is not None  # otherwise nothing was done again yet
            again = "the same call" + (" without redo=" if is_begun and self.options.redo else "")
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
        noun = notes.unit_of(self.verb)
        return f"{before}{done:,} of {counted(total, noun)} are done and stay" if done else ""

    def _settle(self) -> None:
        """Commit now, since others read the ledger, if the next commit may be long away.

        Nodes of a cluster start first, or samples are read to find their structure.
        """
        if self.options.cluster or not self._has_table:
            self.ledger.settle()

    def start_workers(
        self,
        kind: str,
        inputs: Any = None,
        doing: Any = None,
        files: RowFiles = NO_FILES,
        save: Any = None,
        *,
        call: Call = USUAL,
        seeds_owned: bool = True,
    ) -> None:
        """Start the workers, which continue to start while the inputs are listed."""
        asks = "out.file" if kind != "indices" or save is not None else "forebay.get_output().file"
        self._kind, self._user = kind, (name_of_work(self._work, kind, save), asks)
        if self._has_table:
            self._table.check(self.options.metadata)
        fetch = partial(download, folder=self.folder.private / "staging" / "fetched")
        work = self._work if doing is None else doing
        turns = ThreadTurns() if self.options.backend == "thread" else None
        staging, make = self.folder.staging(), job_maker(self.options)
        how = {"call": call, "seeds_owned": seeds_owned}
        job = make(work, kind, staging, fetch, turns, files, save, **how)
        shared, needed = str(self.folder.locate(PRIVATE)), local_inputs(inputs)
        self._pool, self._num_workers = workers_for(job, self.options, shared, needed)
        self._closing.callback(self._pool.close)
        self.ledger.keep_alive()  # starts a thread, so only after the fork of the zygote
        if self._has_table and isinstance(self._pool, ProcessPool):
            self._closing.callback(join_thread, import_for_table(self.options.metadata))

    def enrol(self, listing: Listing, *, whole: bool = False) -> None:
        """Merge the listing into the ledger."""
        ahead = None if whole else AHEAD
        self._described()  # before a Dataset's own code is called, and while workers start
        self._listed = listing.total or 0
        self._merge(listing, ahead)
        self._settle()
        if self._has_table and not self.starts_over:
            self._find_missing()
        where, watched = listing.files
        folder = None if where is None else shown_location(where)
        known: dict[str, Any] = {"kind": listing.kind, "folder": folder, "watched": watched}
        known |= {"is_private": folder != where, "as_text": listing.as_text}
        self._call["call"] = json.dumps(known)

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
            is_away=away_folders() if listing.is_search else None,
            anew=self.starts_over,
        )
        self.unseen = enrolment.unseen_names
        self._changed |= any((enrolment.new, enrolment.changed, enrolment.gone, enrolment.moved))
        kind = listing.kind if self._has_table else self.verb
        if enrolment.unseen:
            self.note(notes.note_on_unseen(enrolment, kind, listing.is_search, self.output))
        if enrolment.gone and self._has_table and not self.starts_over:
            self.note(notes.note_on_gone(enrolment, listing.kind))
        for each in () if self.starts_over else notes.notes_on_inputs(enrolment, kind):
            self.note(each)

    def _find_missing(self) -> None:
        """Have those inputs done again of which an output is no longer in the folder."""
        if self.ledger.counts().done > AHEAD:  # it takes a while, and others read the ledger
            self.ledger.settle()
        missing: dict[int, str] = {}
        for name, ordinal in self.folder.missing(self.ledger.listed_outputs()):
            if ordinal not in self.ledger.away:
                missing.setdefault(ordinal, name)
        done = self.ledger.counts().done
        if missing and (again := self.ledger.mark_todo(missing)):
            self._changed = True
            self.note(notes.note_on_missing(again, done, min(missing.values())))

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
        label = run_label("retry" if failed_only else "preprocess", self.output)
        ledger.free_contested()
        before = ledger.counts()
        run = {"pid": os.getpid(), "began": time.time(), **before._asdict()}
        self.remember_work(run=json.dumps(run))
        total = max(before.total, self._listed)
        total = total if options.limit is None else min(options.limit, total)
        if self.folder.refusal is not None and before.done < total:
            raise self.folder.refusal
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
        page = partial(LiveRun, self.verb, self.output, progress)
        progress.trace.publish_from(time.monotonic() + PUBLISH_S, page)
        self._closing.callback(progress.trace.hide)
        assert self._pool is not None, "start_workers comes first"
        processing = Processing(
            self._pool, self._num_workers, options, ledger, self.folder, progress, budget
        )

        def seen(commit: Commit) -> None:
            if committed is not None:
                committed(commit.delivered)
            self._saw(commit, progress.total)

        kept = generators_kept if options.workers == 0 else fewer_collections
        with generators_restored() if options.backend == "thread" else kept():
            times = processing.run(todo, self._kind, seen, at_once=at_once)
        where = shown_location(self.output), self._user[0]
        self.notes += notes.notes_on_results(processing.commits.unstaged, ledger.rewritten, *where)
        self._changed |= times.committed > 0
        self.perform_pending()
        if self._has_table:
            with fewer_collections():
                self._table.update(options.metadata, self._kind, is_stale=self._changed)
        self._drop_replaced()
        if self._has_table and times.committed and (strays := self.folder.strays(ledger)):
            self.notes.append(
                notes.note_on_strays(strays, shown_location(self.output), *self._user)
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
            later={"diagnosis": partial(run_diagnosis, times), "details": self.details()},
            decisions=times.decisions,
            without_rows=self._table.without_rows if self._has_table else 0,
            notes=tuple(self.notes),
            unseen=self.unseen,
        )

    def _saw(self, commit: Commit, total: int) -> None:
        """Say once, early, that the metadata of a commit are large arrays."""
        largest = max(commit.metadata, key=len, default="")
        if self._has_table and not self.notes and len(largest) >= notes.LARGE_METADATA:
            found = notes.note_on_arrays(largest, total, *self._user)
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
        if was is not None and not options.redoes_all and verb != self.verb:
            # Whatever the version: these outputs would be those of inputs that are gone.
            raise OptionError(
                f"{self.output!r} has the outputs of {shortened(verb)}, and this is a call of "
                f"{self.verb!r}\n"
                "  Nothing was started, and nothing is lost. Use another output folder; or start "
                "over, removing those outputs: redo='*', or --redo '*'."
            )
        is_named = None not in (options.version, was_version) and not options.accept_changes
        renamed = is_named and options.version != was_version
        self.accepts_changes |= is_named and not renamed
        if was is None or options.redoes_all or renamed:
            return was is not None
        from forebay.runs.differences import changed_name, difference

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
        from forebay.runs.differences import words_of_change

        was = self.ledger.get_meta("version")
        new_version = self.options.version if was is None else None
        has_samples = bool(self._described().bases)
        return words_of_change(name, changes, self.output, new_version, has_samples=has_samples)

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
        ledger.set_meta("work", self.work.to_json(), verb=self.verb, **others)

    @cached_property
    def state(self) -> str:
        """A hash of the description of the work; the earlier run's if that is continued."""
        was = None if self.starts_over else self.ledger.get_meta("state")
        return was or sha256_of(self.work.to_json().encode())

    @cached_property
    def work(self) -> Fingerprint:
        """The description for the ledger, with the Datasets of earlier calls."""
        return replace(self._described(), bases=self.bases[0])

    @cached_property
    def bases(self) -> tuple[tuple[Base, ...], list[int]]:
        """The Datasets of this call and of earlier ones, and where those of this call are."""
        was = None if self.starts_over else self.ledger.get_meta("work")
        known = () if was is None else Fingerprint.from_json(was).bases
        found, accepts = self._described().bases, self.accepts_changes
        if not (known or found):  # the usual case: inputs are no samples of Datasets
            return (), []
        from forebay.runs.samples import number_bases

        return number_bases(known, found, accepts=accepts)
