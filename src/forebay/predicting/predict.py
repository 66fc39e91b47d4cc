"""predict(): make one prediction for every sample, in order, resumably.

A model runs here, on batches of a loader's workers; a factory's in each of the session's workers.
A part is a range of samples, one Parquet file, and one record in the ledger.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from forebay.errors import FailuresError, OptionError, OutputError, short_tracebacks
from forebay.ledger.records import EarlierRows, Todo
from forebay.observe.record import Trace
from forebay.options import AutoWorkers, PreprocessOptions, Ray, check_killable, cluster_of
from forebay.runs.calls import saying_what_stays, settings_to_json
from forebay.runs.fingerprint import Fingerprint, describe_parts
from forebay.runs.ranges import (
    Cut,
    SampleProgress,
    drop_gone_ranges,
    enrol_ranges,
    range_of,
    recorded_cut,
    sample_ranges,
)
from forebay.runs.report import PredictionReport
from forebay.runs.run import Session
from forebay.runs.samples import Identified, Samples, describe_bases, samples_of

if TYPE_CHECKING:  # importing forebay's command line must not load torch
    import pyarrow as pa
    import torch

    from forebay.predicting.data import RangeReader, Table
    from forebay.predicting.model import ModelFactory
    from forebay.predicting.part_writer import Types

PART_SIZE = 8192


@short_tracebacks
def predict(
    model: Any,
    data: Any,
    output: str | os.PathLike[str],
    *,
    batch_size: int | None = None,
    num_workers: int | Literal["auto"] | None = None,
    device: str | torch.device | None = None,
    backend: str | Ray = "process",
    load: Callable[[Any], Any] | None = None,
    folder: str | os.PathLike[str] | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    timeout: float | None = None,
    redo: Literal["*", "failed"] | None = None,
    version: str | None = None,
    accept_changes: bool = False,
    part_size: int = PART_SIZE,
    progress: bool = True,
) -> PredictionReport:
    """Run a model on every sample once, and write what it returns to Parquet files.

    The parts `part-00000.parquet`, … in `output` are one dataset for pyarrow, pandas and others:
    one row per sample, in order, with `index` (int64), the columns of the metadata table if `data`
    is one, otherwise `source` if the samples have names, and what the model returned: `prediction`
    for a tensor, or for a list with one element per sample; otherwise a column for each key of a
    dict, field of a NamedTuple or dataclass, or position (`0`, `1`, …) in a tuple. Elements of a
    list may be strings, numbers, None, bytes, tensors and arrays of any shape, lists, and dicts and
    the like, whose keys are columns. Numbers are plain columns, arrays of one shape Arrow's
    fixed-shape tensors, and others lists with their shapes. The types become wider as in a table; a
    value that fits no column fails its sample alone.

    The same call again continues with the missing parts. Samples that have names are known by them:
    files, the rows of a table, and those of a Dataset with `source_of`, as `from_folder`,
    `from_table` and `from_ids` return. Of these, new ones are predicted, changed ones again, and
    those that are gone leave the table, and come back without being predicted again; the
    predictions of all others are taken over.

    A sample that cannot be loaded, or on which the model fails, is found by halving its batch; it
    has no row and is in `failures`. If the first 20 samples all fail with the same error, the run
    stops, and the same call tries them again.

    Args:
        model: An nn.Module, set to `eval` for the run and called in `inference_mode`; or any
            function of a batch. It runs in this process, and workers make the batches. Or a factory
            of one of these: a class, or a callable without required arguments. It is called once
            in every worker, which then makes whole parts.
        data: A map-style Dataset; a DataLoader, whose dataset, batch size, collate function,
            workers and backend are used, but not the order. Or, together with `load`, files: a
            folder, a glob, the fsspec URL of either, or a list of paths and URLs. Or, together with
            `load`, a table: a file (.parquet, .csv, .jsonl), the folder that preprocess wrote one
            to, the fsspec URL of either, a DataFrame of pandas or polars, a `pyarrow.Table`, or a
            list of dicts.
        output: A folder, created if missing, or the fsspec URL of one.
        batch_size: Samples per batch; None for the loader's, or 64. It is halved when the device
            runs out of memory.
        num_workers: Number of workers; None for the loader's, or one per core; 0 for none; "auto",
            or a `forebay.AutoWorkers`, for as many as the model needs, as in `DataLoader`. With a
            factory it must be a number or None.
        device: Where the model and the batches are moved; None leaves the model where it is.
        backend: "process", "thread", "ray" or a `forebay.Ray`; by default the loader's.
        load: For files: called with the path of one, a URL's after it was downloaded. For a table:
            called with a row as a dict, like that of `forebay.from_table`. Returns the sample.
        folder: Where the relative `destination` of a table in memory starts; None for the working
            folder. A table in a file is in its own folder.
        collate_fn: As a DataLoader's; None for the loader's, or torch's default.
        timeout: Seconds that a batch may take. A worker that takes longer is killed.
        redo: "*" makes every part again, and "failed" those in which samples failed in an earlier
            run; each old file stays until the new one replaces it.
        version: Your own name for the state of model and data. While it stays the same, changes
            are accepted; with a new one every part is made again.
        accept_changes: Keep what is done although model or data changed, and use the new ones for
            the rest: for a change that does not affect predictions.
        part_size: Samples per part: so many that there are at most 100,000 parts. A kill costs no
            more than about ten seconds of work. A run that is continued keeps its part size.
        progress: Show progress on stderr, in samples.

    Returns:
        The report: `done`, `failed`, `failures` (each with `source`, `index`, `error`,
        `message`, `traceback`), `resumed`, `elapsed_s`, `output`.

    Raises:
        OptionError: A setting is impossible, or model or data cannot be used as they are.
        InputError: There are no samples, or the table is damaged.
        OutputError: The model's outputs do not belong to the samples one by one, or the folder
            cannot be written to, or is full.
        ChangedError: Model or data differ from those of the earlier run.
        FailuresError: The first samples all failed with the same error.
        BusyError: Another call is working on this output folder. The same call waits for it, and
            then returns what is there, as ranks do that prepare together.
        WorkerDiedError: A factory's worker died repeatedly on the same part.
    """
    from forebay.devices.device import check_device, device_of
    from forebay.predicting.checkpoints import checkpoints_of
    from forebay.predicting.data import names_table, reader_of, shown_rows, table_of
    from forebay.predicting.model import evaluating, is_factory
    from forebay.predicting.parts import CompletedParts, MadeHere, PartWork

    began, settings = time.monotonic(), settings_to_json(locals())
    has_factory, trace = is_factory(model), Trace()
    place = device_of(device)
    with saying_what_stays(output):
        table = table_of(data, load, folder, output)
    reader = reader_of(
        data, load, table, batch_size, num_workers, backend, collate_fn, timeout, part_size
    )
    _check_workers(reader, has_factory)
    if not (has_factory and cluster_of(reader.backend)):
        check_device(place)
    options = PreprocessOptions.of(
        locals(),
        num_workers=reader.num_workers if has_factory else 0,
        backend=reader.backend if has_factory else "process",
        timeout=(reader.timeout or None) if has_factory else None,
        retries=1 if has_factory else 0,
        max_failures=0,
        batch_size=None,
    )
    options.check_redo("*", "failed")
    with evaluating(model):
        listed = samples_of(reader.dataset) if table is None else table
        own = None if table is None else shown_rows(table.rows)
        has_identities = not isinstance(listed, Samples) or listed.have_identities
        described = partial(_described, model, reader, load, listed)
        given = f"{len(reader.dataset)}" if table is None else f"{table.rows!r}"
        with Session(
            model,
            output,
            options,
            described=described,
            verb="predict",
            inputs=given,
            settings=settings,
        ) as session:
            ledger = session.ledger
            if session.starts_over:
                checkpoints_of(session, [], EarlierRows())
            of_parts, cut, names, earlier = _enrolled(session, reader, listed)
            if own is None and names is not None:
                own = names_table(names)
            before = CompletedParts.of(ledger.results())
            retries = options.redo == "failed"
            again = before.failing if retries and not session.has_waited else []
            todo = [*ledger.todo(has_failed=not session.has_waited), *again]
            resumed = before.samples - sum(range_of(each.row)[1] for each in again)
            resumed += earlier.samples
            diagnosis: Callable[[], Any] = partial(of_parts.diagnosis, trace)
            factory = None
            if has_factory:
                known = before.weights | {*filter(None, [earlier.record.get("weights")])}
                factory = _factory_of(session, model, known)
                if not todo and factory.known:
                    _compare_weights(session, factory, SampleProgress(session, cut, resumed))
            if todo:
                parts = [range(at, at + count) for at, count in (range_of(x.row) for x in todo)]
                checkpoints = checkpoints_of(session, todo, earlier, skips_failures=retries)
                display = SampleProgress(session, cut, resumed, by_batch=not has_factory)
                work = PartWork(
                    of_parts,
                    None if has_factory else model,
                    parts,
                    checkpoints,
                    device=device,
                    table=own,
                    names=names,
                    known=before.columns,
                    here=None if has_factory else MadeHere(display.advance, trace),
                    factory=factory,
                    earlier=earlier,
                )
                if work.resumed:
                    display.advance(work.resumed, 0)
                    resumed += work.resumed
                starts = {each.ordinal: part.start for each, part in zip(todo, parts, strict=True)}
                try:
                    session.start_workers("rows", doing=work)
                    report = session.process_inputs(
                        todo=todo,
                        at_once=True,
                        progress=display,
                        committed=lambda done: checkpoints.remove(starts[each] for each in done),
                    )
                except FailuresError:  # every sample failed: the cause is not in the samples
                    ledger.mark_todo(CompletedParts.without_rows(ledger.results()))
                    raise
                finally:
                    work.close()
                diagnosis = partial(of_parts.diagnosis, trace, work.failing_share)
                if has_factory:
                    diagnosis = report.later["diagnosis"]
            else:
                session.remember_work()
            checkpoints_of(session, [], EarlierRows())  # what a kill left of one
            drop_gone_ranges(session)
            if has_identities:
                from forebay.runs.sample_numbers import forget_earlier

                forget_earlier(ledger, session.folder)
            done = CompletedParts.of(ledger.results())
            if done.columns and (parts_left := done.narrower(ledger.results(), done.columns)):
                _widen(session, cut, parts_left, done.columns)
            where = session.folder.locate("")
            # The session's own options are not those of the call.
            device_name = "None" if device is None else str(device)
            details = session.details(settings=_settings(reader, device_name, redo))
    took, failures = time.monotonic() - began, done.failures
    return PredictionReport(
        output=where,
        done=done.rows,
        failed=failures.total,
        resumed=resumed,
        failures=tuple(failures),
        elapsed_s=took,
        later={"diagnosis": diagnosis, "details": details},
        decisions=tuple(reason for _, reason in trace.decisions),
        notes=tuple(session.notes),
        unseen=session.unseen,
    )


def _widen(session: Session, cut: Cut, records: dict[Todo, Any], types: Types) -> None:
    """Write parts again whose columns have narrower types than those of all parts together."""
    from forebay.predicting.part_writer import WidenWork

    by_first = {range_of(part.row)[0]: record for part, record in records.items()}
    work = WidenWork(session.output, cut.size, types, by_first)
    session.start_workers("rows", doing=work)
    progress = SampleProgress(session, cut, cut.samples, by_batch=True)
    report = session.process_inputs(todo=[*records], at_once=True, progress=progress)
    for failure in report.failures:
        raise OutputError(
            f"a part cannot be written with the types that other parts have: {failure}\n"
            "  Nothing is lost: make the same call again."
        )


def _settings(reader: RangeReader, device: str, redo: str | None) -> dict[str, str]:
    """Return the arguments of the call as strings, with the values of those left out."""
    is_cluster = cluster_of(reader.backend) is not None
    workers = "as many as fit" if reader.num_workers is None else repr(reader.num_workers)
    shown = {
        "batch_size": reader.batch_size,
        "num_workers": workers,
        "backend": "ray" if is_cluster else reader.backend,
        "device": device,
        "part_size": reader.part_size,
        "timeout": reader.timeout or None,
        "redo": redo,
    }
    return {name: str(value) for name, value in shown.items()}


def _enrolled(
    session: Session, reader: RangeReader, listed: Table | Samples
) -> tuple[RangeReader, Cut, pa.Array | None, EarlierRows]:
    """Make the parts the inputs of a session.

    Returns:
        Their reader and cut, with the recorded size; the names of the samples, if they have names;
        and the predictions that are taken over.
    """
    from forebay.predicting.data import names_array
    from forebay.predicting.parts import check_number_of_parts

    samples, recorded = len(reader.dataset), recorded_cut(session)
    size = reader.part_size if recorded is None else recorded.size
    check_number_of_parts(samples, size)
    reader = replace(reader, part_size=size, batch_size=min(reader.batch_size, size))
    if session.options.timeout is not None:  # for a batch, and a worker's task is a part
        timeout = session.options.timeout * -(-size // reader.batch_size)
        session.options = replace(session.options, timeout=timeout)
    cut = Cut(samples, size)
    if not isinstance(listed, Samples):
        identified, has_names = Identified.of([*listed.listing]), True
    elif listed.have_identities:
        listed = listed.numbered(*session.bases)
        identified, has_names = listed.identified(), listed.have_names
    else:
        enrol_ranges(session, cut, sample_ranges(session, cut, listed.numbered(*session.bases)))
        return reader, cut, None, EarlierRows()

    from forebay.runs.sample_numbers import enrol_identified

    names = names_array(identified.names()) if has_names else None

    def name_of(index: int) -> str | None:
        return None if names is None else str(names[index])

    return reader, cut, names, enrol_identified(session, cut, identified, name_of)


def _factory_of(session: Session, model: Any, known: Collection[str]) -> ModelFactory:
    """Return what calls a factory, and accepts weights with these hashes, or any if asked."""
    from forebay.predicting.model import ModelFactory

    words = session.words_of_change(session.work.name, "the weights of its model differ")
    return ModelFactory(model, words, None if session.accepts_changes else known)


def _compare_weights(session: Session, factory: ModelFactory, progress: SampleProgress) -> None:
    """Have a worker make the model; raise ChangedError if its weights are other ones."""
    from forebay.predicting.model import SameWeightsError, WeightsCheck

    if session.options.workers > 1:
        session.options = replace(session.options, num_workers=1)
    session.start_workers("rows", doing=WeightsCheck(factory))
    task = Todo(1, "the weights", "{}")
    with suppress(SameWeightsError):
        session.process_inputs(todo=[task], at_once=True, progress=progress)


def _check_workers(reader: RangeReader, has_factory: bool) -> None:
    """Check that the settings of workers do not contradict each other."""
    if has_factory and reader.backend == "thread":
        raise OptionError(
            "backend='thread' is not possible with a factory: every worker makes its own model\n"
            "  Nothing was started. Use backend='process', or pass the model itself."
        )
    if has_factory and isinstance(reader.num_workers, AutoWorkers):
        raise OptionError(
            "num_workers='auto' is not possible with a factory: every worker holds a model, and "
            "more of them could exhaust the memory\n  Nothing was started. Set num_workers to a "
            "number, or pass the model itself."
        )
    check_killable(reader.timeout, reader.num_workers)
    if not has_factory and reader.num_workers is None and cluster_of(reader.backend) is not None:
        raise OptionError(
            "backend='ray' with a model in this process needs a number of workers for its batches"
            "\n  Nothing was started. Set num_workers=, or pass a factory: a model for each worker."
        )


def _described(model: Any, reader: RangeReader, load: Any, listed: Any) -> Fingerprint:
    """Return the code and parameters that the predictions depend on, for change detection.

    A table's rows are not included: each part has a separate fingerprint of its rows.
    """
    parts = {"model": model, "load": load, "collate_fn": reader.collate_fn}
    found = describe_parts({role: each for role, each in parts.items() if each is not None})
    if isinstance(listed, Samples):
        found = replace(found, bases=describe_bases(listed.bases, listed.lengths, fixed=True))
    return found
