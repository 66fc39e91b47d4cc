"""preprocess(): call a function for every input, on every core, resumably; see `runs/run.py`."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from fnmatch import translate
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from forebay.base.datasets import is_map_style
from forebay.errors import InputError, LedgerError, OptionError, short_tracebacks, shortened
from forebay.inputs.listing import KINDS, Listing, list_inputs
from forebay.inputs.other_inputs import is_table
from forebay.inputs.own_outputs import keep_apart, without_outputs
from forebay.inputs.row_paths import RowFiles
from forebay.ledger.database import DONE, reading
from forebay.ledger.records import Todo, key_of
from forebay.options import PreprocessOptions, Ray
from forebay.outputs.places import snapshot_of
from forebay.runs.calls import (
    earlier_watched,
    inputs_text,
    recorded_settings,
    saying_what_stays,
    settings_to_json,
)
from forebay.runs.fingerprint import Fingerprint, describe, describe_parts
from forebay.runs.report import Report
from forebay.runs.run import Session
from forebay.runs.user_call import USUAL, call_of

if TYPE_CHECKING:
    from forebay.runs.samples import Samples


@short_tracebacks
def preprocess(
    work: Any,
    inputs: Any = None,
    output: str | os.PathLike[str] | None = None,
    *,
    save: Callable[[Any, Any], Any] | None = None,
    folder: str | os.PathLike[str] | None = None,
    num_workers: int | Literal["auto"] | None = None,
    backend: str | Ray = "process",
    concurrency: int | None = None,
    batch_size: int | None = None,
    timeout: float | None = None,
    retries: int | None = None,
    max_failures: int | float | None = None,
    limit: int | None = None,
    redo: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
    metadata: str = "parquet",
    version: str | None = None,
    accept_changes: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> Report:
    """Process every input once, keep the files it writes, and write a table of metadata.

    The function is called as `work(source)` or `work(source, out)`, whichever it takes: `source` is
    a `pathlib.Path`, a string if strings were listed or the parameter is annotated as one, or a
    dict when the inputs are a table's rows; `out` is an empty folder of this
    input, used like a path (`out / "a.wav"`), and what the function leaves in it is published under
    the same names in the output folder once the whole input has succeeded: files and folders, but
    no links. `out.file(name)` gives a path in it to a file that has to be there at the end,
    `out.tar()` makes a tar file of many small ones, and `out.source` is the input's name.
    `out.final(name)` is where an output will be. Two
    inputs that use the same name both fail. A second parameter with a default gets `out` only if it
    is called `out...`.

    The function returns or yields its metadata: None, a dict, or any iterable of dicts, one for
    each row it adds to the table; or files with their metadata, `(files, metadata)`: one path or
    several, and a dict for all or one for each; or paths (`os.PathLike`) alone. Files that it wrote
    by itself, wherever that is, are outputs, too: they are in the table and checked by `forebay
    verify`, but a kill can leave them incomplete, and those outside of the output folder are never
    removed. Without metadata each of its files has a row; an input without both has none. It may
    change the working directory, which is restored after each input.

    A map-style Dataset in place of the function needs no inputs. `save(dataset[i], out)` writes
    the files of a sample and returns its metadata, as a function does; without `save`, `dataset[i]`
    is the metadata, in any JSON-serializable form. The table's `source` is
    `dataset.source_of(i)`, the path or ID of a sample, if the Dataset has this method, as those of
    `from_folder`, `from_table` and `from_ids` do, also within a `Subset`, a `ConcatDataset` or a
    mixture; `train-00003.tar#17` of shards; otherwise it is the index. A sample is processed again
    if its name changes, or a file that it is made of.

    The same call again continues: inputs that are done are skipped, those that failed are tried
    again after all others, and a changed input is processed again; its old outputs stay until the
    new ones replace them. If an input cannot be seen, as when its folder is not mounted, all that
    was made of it stays. An input is its path as written, so `a.wav` and `./a.wav` are two. An
    input that is no longer listed leaves the table, with a note on stderr, and its outputs stay
    until `forebay prune`. Outputs that are no longer in the folder are made again.

    Args:
        work: The function, or the Dataset.
        inputs: A list of paths, of files or of folders that are one input each; a folder, which
            stands for the files in it and its subfolders; a glob, which stands for folders if it
            ends with a slash (neither finds hidden files, and a subfolder that cannot be read is an
            error); a manifest (.csv, .tsv, .jsonl, .ndjson or .parquet; text also compressed, as
            .csv.gz); or an fsspec URL of any of these. An output folder of `preprocess` stands for
            its table: a manifest in which `destination` is a path that can be opened from any
            working directory. Or a table in memory: a DataFrame of pandas or polars, a
            `pyarrow.Table`, or a list of dicts. The same rows again are the same inputs, whichever
            of these they come from. All values of a .csv are strings. A URL may have a password or
            a signature: neither is written or shown, and
            with a renewed one it is still the same input.
        output: Folder for the outputs, the table and forebay's own `.forebay`, created if missing;
            or the fsspec URL of one, such as "s3://bucket/pieces". It is never part of the
            inputs, and files in it that forebay did not make are left as they are.
        save: For a Dataset: called with a sample and `out`.
        folder: Where the relative `destination` of a table in memory starts; None for the working
            folder. A table in a file is in its own folder.
        num_workers: Number of workers; None for one per core, or for as many as a cluster has room
            for, also on nodes that join later; 0 to work in this process. "auto", or a
            `forebay.AutoWorkers`, starts with one per core and adds workers while that makes the
            run faster, because the function waits for storage or a network; on a cluster "auto"
            is the same as None.
        backend: "process", or "thread" for work that releases the interpreter lock; "ray", or a
            `forebay.Ray`, for the nodes of a cluster.
        concurrency: How many inputs each worker process works on at once, in threads: for a
            function that waits for a network or a disk, and can be called by several threads; it
            must not change the working directory. The outputs are the same. None is 1. Not with
            `num_workers=0` or `backend="thread"`.
        batch_size: For a function of many inputs at once, as tokenizers and models are faster with:
            it is called with a list of at most so many rows, or paths, and returns a list with
            the result of each, in their order: a dict, a list of dicts for several rows, None or []
            for none; or a dict of columns. A batch that fails is halved, down to the input that
            fails alone. The function gets no `out`, and its result for an input must not depend on
            the others: then the table is the same for any batch size.
        timeout: Seconds one input may take; then its worker is killed and its stack recorded. With
            or without it, a warning says once where a worker is if nothing comes for a minute.
        retries: How often an input that failed is tried again; None for 1, or for 0 where the
            first failure ends the run.
        max_failures: Stop once more inputs failed: a count, or a fraction such as 0.01 of those
            that are listed by then. 0 stops at the first and raises the function's own exception,
            as None does if `limit` is set. Otherwise None records failures, and stops only if the
            first 20 inputs fail alike, 100 in a row do, or the outputs of 20 in a row have names
            that other inputs took.
        limit: Process only that many of the first inputs, in this process unless `num_workers` is
            set: for trying a function.
        redo: "*" processes every input again: the outputs of the earlier run stay until they are
            replaced, and what is left of them is removed when the run ends. Or inputs that are
            processed again, although they are done: a name, a pattern in which `*`, `?` and `[...]`
            stand for any characters, or a list of these. An input's name is its path, as written,
            or the last part of it; a table's row that names no path is known by its JSON. If the
            run is interrupted, the same call without `redo` does the rest.
        metadata: Format of the table: "parquet", "csv" or "jsonl".
        version: Your own name for the state of `work`. While it stays the same, changes of the
            code are accepted; with a new one every input is processed again.
        accept_changes: Keep what is done although `work` changed, and use the new code for the
            rest: for a change that does not affect outputs, or only those of inputs that failed.
        overwrite: Replace files in the output folder that forebay did not make, but that have the
            name of an output or of the table, such as those of an earlier program. One that has
            the same content as the output is taken over in any case. Any other is an error of its
            input, and stays. A function keeps what an earlier program made by using it:
            `shutil.copy(out.final(name), out / name)`.
        progress: Show progress on stderr.

    Returns:
        The report. The table has the manifest's columns, `source`, `destination` (relative to
        `output`) and what the function returned, one row per output, in input order: the same
        bytes for any number of workers, and however often the run was interrupted. If the manifest
        is the table of an earlier step, `source` is that step's output, and `origin` its source.

    Raises:
        OptionError: A setting is impossible, or `work` cannot be used as it is.
        InputError: The inputs are missing, empty or damaged, or none has a name in `redo`.
        OutputError: The output folder cannot be written to, is full, or is not the same folder
            on every node.
        ChangedError: `work` differs from that of the earlier run.
        BusyError: Another call is working on this output folder. The same call waits for it, and
            then returns what is there, as ranks do that prepare together.
        FailuresError: More failed than `max_failures`, or many in a row alike.
        WorkerDiedError: Workers cannot be kept alive.
    """
    options, settings = PreprocessOptions.of(locals()), settings_to_json(locals())
    if output is None:
        raise OptionError("preprocess needs an output folder: preprocess(work, inputs, output=...)")
    with saying_what_stays(output):
        listing = listing_for(work, inputs, save=save, folder=folder, batch_size=batch_size)
        keep_apart(inputs, output)
        listing = without_outputs(listing, output)
    described = partial(_described, work, save, listing.samples)
    given = inputs_text(inputs, listing)
    with Session(
        work, output, options, described=described, inputs=given, settings=settings
    ) as session:
        listing = without_outputs(listing.watching(earlier_watched(session.ledger)), output)
        call = USUAL if listing.samples is not None else call_of(work, as_text=listing.as_text)
        session.start_workers(listing.kind, inputs, files=listing.files, save=save, call=call)
        if listing.samples is not None:
            from forebay.runs.samples import sample_listing

            listing = sample_listing(listing.samples.numbered(*session.bases))
        session.enrol(listing, whole=bool(session.options.redone))
        _redo(session)
        return session.process_inputs()


@short_tracebacks
def retry(
    work: Any,
    output: str | os.PathLike[str],
    *,
    save: Callable[[Any, Any], Any] | None = None,
    num_workers: int | Literal["auto"] | None = None,
    backend: str | Ray | None = None,
    concurrency: int | None = None,
    batch_size: int | None = None,
    timeout: float | None = None,
    retries: int | None = None,
    accept_changes: bool = False,
    progress: bool = True,
) -> Report:
    """Try the failed inputs of an earlier run of `preprocess` again, and nothing else.

    All settings of that run hold, such as its `timeout` and `num_workers`, unless they are given.
    With `accept_changes=True` the failed inputs are tried with code that changed since.
    To retry the others, call them again: `predict` with `redo="failed"`, `cache` as it is; and
    `preprocess` itself if its inputs had credentials in their URLs, which are not stored.
    """
    given = dict(locals())
    from forebay.runs.ranges import verb_of

    meta = snapshot_of(output).meta
    verb = verb_of(meta)
    if verb != "preprocess":
        way = "with redo='failed'" if verb == "predict" else "which retries failed samples"
        raise OptionError(
            f"{os.fspath(output)!r} was made by {verb}, and retry only applies to preprocess\n"
            f"  Nothing was started. Call {verb} again, {way}."
        )
    options = PreprocessOptions.of(recorded_settings(meta, given))
    samples = listing_for(work, None, save=save).samples if is_map_style(work) else None
    described = partial(_described, work, save, samples)
    with Session(work, output, options, described=described, inputs="retry") as session:
        recorded = session.ledger.get_meta("call")
        if recorded is None:
            raise LedgerError(
                f"the run in {os.fspath(output)!r} ended before its first input, so none failed\n"
                "  Nothing was started. Make the call of preprocess again."
            )
        with reading("the call"):
            call = json.loads(recorded)
            kind = call["kind"]
            if kind not in KINDS:
                raise ValueError(kind)
            folder = None if call["folder"] is None else str(call["folder"])
            files = RowFiles(folder, tuple(map(str, call["watched"])))
            as_text = bool(call.get("as_text"))
            is_private = bool(call.get("is_private")) or session.ledger.needs_listing
        if is_private:
            raise OptionError(
                f"inputs of the run in {os.fspath(output)!r} had credentials in their URLs or "
                "rows, which forebay does not store\n"
                "  Nothing was started. Make the call of preprocess again: it tries the failed "
                "inputs again, too."
            )
        todo = None if samples is None else _found_again(session, samples)
        how = USUAL if samples is not None else call_of(work, as_text=as_text)
        session.start_workers(kind, files=files, save=save, call=how)
        return session.process_inputs(failed_only=True, todo=todo)


def _found_again(session: Session, samples: Samples) -> list[Todo]:
    """Return the failed samples, each with its index in a Dataset that may have another order."""
    from forebay.runs.samples import sample_listing

    todo = session.ledger.todo(failed_only=True)
    failed = {key_of(each.source, each.row): each for each in todo}
    found = []
    for index, one in enumerate(sample_listing(samples.numbered(*session.bases))):
        if each := failed.pop(key_of(one.source, one.row), None):
            found.append(each._replace(opens=str(index)))
    if failed:
        first = next(iter(failed.values())).source
        raise OptionError(
            f"{len(failed):,} of the failed samples are not in this Dataset, such as "
            f"{shortened(first)}\n"
            "  Nothing was started. Pass the Dataset of the call in which they failed."
        )
    return sorted(found)


def _redo(session: Session) -> None:
    """Make done inputs with the names in the options todo again."""
    options, ledger = session.options, session.ledger
    if not options.redone:
        return
    is_meant, last = _matching(options.redone), options.limit or math.inf
    meant = [each for each in ledger.listed() if is_meant(each.source or each.row or "")]
    if not meant:
        raise InputError(
            f"redo= names no input: {shortened(', '.join(options.redone))}\n"
            "  Nothing was processed, and nothing is lost. The first input is called "
            f"{shortened(ledger.name_of(1))}; a pattern such as '*.wav' stands for several."
        )
    done = {one.ordinal for one in meant if one.state == DONE and one.ordinal <= last}
    ledger.mark_todo(done - ledger.away)
    session.perform_pending()


def _matching(names: list[str]) -> Callable[[str], bool]:
    """Return what tells whether an input's name, or the last part of it, is one of the names."""
    known = frozenset(names)
    matches = [re.compile(translate(each)).match for each in names if {*each} & {*"*?["}]

    def is_meant(name: str) -> bool:
        short = name.rpartition("/")[2]
        return name in known or short in known or any(one(name) or one(short) for one in matches)

    return is_meant


def _described(work: Any, save: Any, samples: Samples | None) -> Fingerprint:
    """Return the description of what makes the outputs, for change detection."""
    if samples is None:
        return describe(work)
    from forebay.runs.samples import describe_bases

    bases = describe_bases(samples.bases, samples.lengths, fixed=False)
    parts = describe_parts({} if save is None else {"save": save})
    return replace(parts, name=bases[0].name, bases=bases)


def listing_for(
    work: Any,
    inputs: Any,
    *,
    save: Any = None,
    folder: str | os.PathLike[str] | None = None,
    batch_size: int | None = None,
) -> Listing:
    """Check `work` and its inputs, and return the listing."""
    if isinstance(work, str | bytes | os.PathLike | list | tuple | dict) or is_table(work):
        raise OptionError(
            "work must be a function, f(source) or f(source, out), or a map-style Dataset; got "
            f"{type(work).__name__}\n  Pass the function itself; FILE.py:FUNCTION is the command "
            "line's way to name it."
        )
    if is_map_style(work):
        from forebay.runs.samples import sample_listing, samples_of

        _check_dataset(work, inputs, folder)
        if batch_size is not None:
            raise OptionError(
                f"batch_size={batch_size} is for a function of inputs, and a Dataset gives one "
                "sample at a time\n  Nothing was started. Leave batch_size out."
            )
        if save is not None:
            _check_save(save)
        return sample_listing(samples_of(work))
    if save is not None:
        raise OptionError(
            "save= writes the samples of a Dataset, and the work is of type "
            f"{type(work).__name__}\n  Nothing was started. A function writes or returns its "
            "own files: leave save out."
        )
    if not callable(work):
        raise OptionError(
            "work must be a function, f(source) or f(source, out), or a map-style Dataset; got "
            f"{type(work).__name__}"
        )
    if inputs is None:
        raise OptionError(
            "inputs are missing: a function needs inputs to process\n  Nothing was started. "
            "Name a folder, a glob, a manifest or a list: preprocess(function, inputs, output)."
        )
    if call_of(work).gives_out and batch_size is not None:
        raise OptionError(
            f"batch_size={batch_size} is for a function of a list of inputs, and "
            f"{getattr(work, '__name__', work)} takes `out`, the folder of a single one\n"
            "  Nothing was started. Leave batch_size out, or return what it makes as rows."
        )
    return list_inputs(inputs, folder)


def _check_dataset(dataset: Any, inputs: Any, folder: str | os.PathLike[str] | None) -> None:
    """Raise OptionError for a Dataset class, and for arguments that a Dataset does not take."""
    if isinstance(dataset, type):
        raise OptionError(
            f"{dataset.__name__} is a Dataset class, not a Dataset instance\n"
            f"  Nothing was started. Create one, as in dataset = {dataset.__name__}(...), and pass "
            "that."
        )
    if inputs is not None:
        raise OptionError(
            f"a Dataset has its own inputs, and inputs={shortened(inputs)} was given too\n"
            "  Nothing was started. Leave the inputs out: preprocess(dataset, output=...)."
        )
    if folder is not None:
        raise OptionError(
            f"folder={os.fspath(folder)!r} is for tables in memory, and a Dataset has its own "
            "inputs\n  Nothing was started. Leave folder out."
        )


def _check_save(save: Any) -> None:
    if not callable(save):
        raise OptionError(
            f"save must be a function(sample, out); got {type(save).__name__}\n"
            "  Nothing was started."
        )
    if not call_of(save, names=("sample", "out")).gives_out:
        raise OptionError(
            f"save is called as save(sample, out), and {getattr(save, '__name__', save)} takes one "
            "argument\n  Nothing was started. Give it two parameters: the sample and the "
            "output."
        )
