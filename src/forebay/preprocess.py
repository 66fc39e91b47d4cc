"""preprocess(): InputFile -> (OutputFiles, Metadata) for every input, on every core, resumably.

See `session.py` for how.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from forebay.errors import LedgerError, OptionError
from forebay.jobs.database import reading
from forebay.jobs.listing import listing_for
from forebay.jobs.own_outputs import keep_apart, without_outputs
from forebay.jobs.report import Report
from forebay.options import PreprocessOptions, Ray
from forebay.session import Session


def preprocess(
    work: Any,
    inputs: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
    output: str | os.PathLike[str] | None = None,
    *,
    num_workers: int | None = None,
    backend: str | Ray = "process",
    timeout: float | None = None,
    retries: int | None = None,
    on_error: str | None = None,
    max_failures: int | float | None = None,
    limit: int | None = None,
    resume: bool = True,
    metadata: str = "parquet",
    version: str | None = None,
    progress: bool = True,
) -> Report:
    """Work on every input once, keep what comes out, and write one table of metadata.

    The function is called as `work(source, out)`: `source` is a `pathlib.Path`, or a dict when
    the inputs are a manifest's rows; `out.file(name)` gives a path to write an output to. It
    returns or yields its metadata: None, a dict, or any iterable of dicts, one for each row it
    adds to the table. A map-style Dataset in place of the function needs no inputs:
    `dataset[i]` does the work and returns any metadata that can be JSON.

    The same call again continues: what is done stays, what failed is tried again, a changed input
    is redone and its old outputs go.

    Args:
        work: The function, or the Dataset.
        inputs: A list of paths, a folder (searched recursively, hidden files left out), a glob,
            a manifest (.csv, .jsonl, .parquet), or an fsspec URL of any of these.
        output: Folder for the outputs, the table and forebay's own `.forebay`, made if missing;
            or the fsspec URL of one, such as "s3://bucket/pieces". It is never part of the
            inputs, and files in it that forebay did not make are left as they are.
        num_workers: Workers; None for one a core, or for as many as a cluster has room for, also
            on nodes that join later; 0 to work in this very process.
        backend: "process", or "thread" for work that releases the interpreter lock; "ray", or a
            `forebay.Ray`, for the nodes of a cluster.
        timeout: Seconds one input may take; then its worker is killed and its stack recorded.
        retries: Further tries for an input that failed, alone; None for 1, or for 0 where the
            first failure ends the run.
        on_error: "skip" records failures and goes on; "raise" stops at the first and raises the
            function's own exception. None means "skip", with `limit` "raise".
        max_failures: Stop once more inputs failed: a count, or a fraction such as 0.01.
        limit: Work on the first so many inputs only, in this process unless `num_workers` is set:
            the way to try a function.
        resume: False forgets the earlier run and removes its outputs first.
        metadata: Format of the table: "parquet", "csv" or "jsonl".
        version: Your own name for the state of `work`. While it stays the same, changes of the
            code are accepted; a new one redoes every input.
        progress: Show progress on stderr.

    Returns:
        The report. The table has the manifest's columns, `source`, `destination` (relative to
        `output`) and what the function returned, one row an output, in input order: the same
        bytes for any number of workers, and however often the run was interrupted.

    Raises:
        OptionError: A setting is impossible, or `work` cannot be used as it is.
        InputError: The inputs are missing, empty or torn.
        OutputError: The output folder cannot be written to, is full, or is not the same folder
            on every node.
        ChangedError: `work` is not what the earlier run worked with.
        BusyError: Another run is working on this output folder.
        FailuresError: More failed than `max_failures`, or the first inputs all failed alike.
        WorkerDiedError: Workers cannot be kept alive.
    """
    options = PreprocessOptions(
        num_workers=num_workers,
        backend=backend,
        timeout=timeout,
        retries=retries,
        on_error=on_error,
        max_failures=max_failures,
        limit=limit,
        resume=resume,
        metadata=metadata,
        version=version,
        progress=progress,
    )
    if output is None:
        raise OptionError("preprocess needs an output folder: preprocess(work, inputs, output=...)")
    listing = listing_for(work, inputs)
    keep_apart(inputs, output)
    listing = without_outputs(listing, output)
    with Session(work, output, options) as session:
        session.hire(listing.kind, inputs)
        session.enrol(listing)
        return session.work_off(listing.kind)


def retry(
    work: Any,
    output: str | os.PathLike[str],
    *,
    num_workers: int | None = None,
    backend: str | Ray = "process",
    timeout: float | None = None,
    retries: int | None = None,
    version: str | None = None,
    progress: bool = True,
) -> Report:
    """Try the failed inputs of an earlier run again, and nothing else.

    Args:
        work: The function of that run.
        output: The folder of that run.
        num_workers: As in `preprocess`, like all that follow.
        backend: See `preprocess`.
        timeout: See `preprocess`.
        retries: See `preprocess`.
        version: See `preprocess`.
        progress: See `preprocess`.

    Returns:
        The report over all inputs.

    Raises:
        LedgerError: The folder holds no run.
        ChangedError: `work` is not what the earlier run worked with.
    """
    options = PreprocessOptions(
        num_workers=num_workers,
        backend=backend,
        timeout=timeout,
        retries=retries,
        on_error="skip",
        version=version,
        progress=progress,
    )
    with Session(work, output, options) as session:
        # A new version accepts the new code for what failed; what is done stays done.
        recorded = session.ledger.get_meta("call")
        if recorded is None:
            raise LedgerError(f"{os.fspath(output)!r} holds no run whose failures could be retried")
        with reading("the call"):
            call = json.loads(recorded)
            kind = {"paths": "paths", "rows": "rows", "indices": "indices"}[call["kind"]]
            session.options = replace(options, metadata=call["metadata"])
        session.hire(kind)
        return session.work_off(kind, failed_only=True)
