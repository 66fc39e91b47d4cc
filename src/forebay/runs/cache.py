"""cache(): run a dataset once, on every core, and read it from memory-mapped files afterwards.

See `runs/run.py` for how the work is done, and `caching/` for what is in the files.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import shutil
from base64 import b64decode
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from forebay.base.datasets import is_map_style
from forebay.base.file_stores import Folder, Store, folder_at
from forebay.base.files import read_regular
from forebay.base.randomness import generators_kept, seed_generators, seed_of_text
from forebay.base.value_classes import Identity, MisfitError, classes_in
from forebay.base.value_columns import nbytes_of
from forebay.caching.dataset import CachedDataset, cached_dataset
from forebay.caching.index import CachePlan, Index, check_size
from forebay.caching.layout import BLOCKS, INDEX, MOST_TIMES
from forebay.caching.shard_writer import ShardWork, layout_of, line_of, sample_failure
from forebay.caching.structure import leaves_of
from forebay.errors import (
    FailuresError,
    InputError,
    OptionError,
    short_tracebacks,
    shown_location,
)
from forebay.failures import Failure
from forebay.inputs.own_outputs import keep_apart
from forebay.ledger.database import InputRow, reading
from forebay.ledger.records import EarlierRows
from forebay.options import SHARD_BYTES, PreprocessOptions, Ray
from forebay.runs.calls import settings_to_json
from forebay.runs.fingerprint import Fingerprint
from forebay.runs.ranges import (
    Cut,
    SampleProgress,
    drop_gone_ranges,
    enrol_ranges,
    failed_in,
    numbers_to_text,
    range_of,
    recorded_cut,
    sample_ranges,
)
from forebay.runs.report import Report
from forebay.runs.run import Session
from forebay.runs.sample_numbers import digest_of_samples, enrol_identified, forget_earlier
from forebay.runs.samples import Samples, describe_bases, samples_of

# Minimum number of shards, if there are as many samples, so that every core has work and a kill
# costs little even if samples are small or slow.
LEAST_SHARDS = 128
# How many times smaller the shards of fewer samples may be before those of all are made anew.
MOST_SMALLER = 4

Transform = Callable[[Any], Any]


@short_tracebacks
def cache(
    dataset: Any,
    location: str | os.PathLike[str],
    *,
    load: Callable[[Any], Any] | None = None,
    transform: Transform | None = None,
    num_workers: int | Literal["auto"] | None = None,
    backend: str | Ray = "process",
    timeout: float | None = None,
    retries: int | None = None,
    version: str | None = None,
    accept_changes: bool = False,
    redo: Literal["*"] | None = None,
    progress: bool = True,
    shard_bytes: int = SHARD_BYTES,
    compression: Literal["zstd", "lz4"] | None = None,
) -> CachedDataset:
    """Run a dataset once, store every sample, and return a dataset that reads them from files.

    A sample may be a tensor, an array, a number, a string, bytes, a date or time, a PIL image or
    None, or any nesting of dicts, lists, tuples, sets, NamedTuples and dataclasses of these.
    Shapes, lengths, keys and types may differ from sample to sample: a column of the files then
    holds lists, or a field for each type. An object of any other class is refused, with its name.
    Random values in the dataset are drawn once; use `transform` for what should be random in each
    epoch.

    The same call again returns at once, without reading a sample of the dataset; after a kill it
    continues. Samples that have names, as those of `from_folder`, `from_table`, `from_ids` and a
    Dataset with `source_of` have, are known by them: new ones are added, changed ones are read
    again, and those that are gone are left out, and taken over if they come back; all others are
    taken over from earlier shards.

    Any number of processes may open a finished cache at once. Of several that make the same call,
    as ranks do, one makes it, and the others wait and then open it.

    Args:
        dataset: A map-style Dataset; with `load`, also what it is made of: a folder, a glob or a
            list of paths, or a table, as `from_folder`, `from_ids` and `from_table` take them.
        location: A folder for the files, created if missing, or the fsspec URL of one:
            `shard-*.arrow`, and forebay's own `.forebay`. With a URL each worker uploads its
            shards as it makes them; any machine continues, and opens, what another one made.
        load: Called with the path of a file, as it was listed, or with a row as a dict; it returns
            the sample.
        transform: Called with each sample each time it is read; it may change it in place.
        num_workers: Number of workers; None for one per core, or for as many as a cluster has room
            for; 0 to work in this process; "auto" as in `preprocess`.
        backend: As in `preprocess`.
        timeout: Seconds that a sample may take: a worker whose shard takes longer than that for
            each of its samples is killed, and its stack recorded.
        retries: How often a failed shard is tried again; None for 1.
        version: Your own name for the state of the dataset. While it stays the same, changes of
            the dataset and of its code are accepted; a new one writes every shard again.
        accept_changes: Keep what is done although the dataset changed, and use the new one for the
            rest: for a change that does not affect samples.
        redo: "*" writes every shard again; the earlier ones stay until they are replaced.
        progress: Show progress on stderr, in samples.
        shard_bytes: Approximate size of a file, before compression. It applies to a new cache; one
            that is continued keeps its size.
        compression: "zstd" or "lz4" to compress each block of about 4 MiB; None for what the cache
            has that is there, and none for a new one. Text and tokens get 2 to 5 times smaller,
            JPEG and PNG no smaller. Reading one sample decompresses its block, and each
            process keeps as many blocks as a window has; so a compressed cache in a folder is
            shuffled by windows of 256 MB, unless `open_cache(window=)` says otherwise.

    Returns:
        The dataset. `dataset[i]` equals the original's sample, bit for bit and type for type,
        but a NumPy string is read as a str or bytes, and a subclass of dict, list or tuple as one
        of these; an image has its mode, size, pixels and palette; a tensor is contiguous, in
        memory that it shares with the file until it is written to, or of its own with
        `compression`. A cache at a URL is read there, with nothing on disk: `open_cache` has other
        ways.

    Raises:
        OptionError: A setting is impossible, `dataset` is not a map-style Dataset, or the cache
            that is there has another `compression`.
        InputError: The dataset is empty, or a file of the cache is truncated.
        ChangedError: The dataset differs from that of the earlier run.
        FailuresError: Samples failed, or cannot be cached; the message names them.
        BusyError: Another call is making a cache there. The same call waits for it, and then opens
            what is there, as ranks do that prepare together.
        OutputError: The folder cannot be reached or written to, or is full.
        WorkerDiedError: Workers cannot be kept alive.
    """
    options = PreprocessOptions.of(locals())
    options.check_redo("*")
    settings = settings_to_json(locals())
    _check_compression(compression)
    place = folder_at(location)
    if load is not None:
        from forebay.items import dataset_from

        keep_apart(dataset, location)
        dataset = dataset_from(dataset, load)
    samples = _samples_of(dataset)
    described = functools.cache(functools.partial(_described, samples))
    index = None if options.redoes_all else Index.read(place)
    classes: dict[Identity, type] = {}
    if index is None or not _is_same(index, samples, version, described) or index.missing(place):
        where = place.url if isinstance(place, Store) else place.path
        with Session(
            dataset,
            where,
            options,
            described=described,
            verb="cache",
            inputs=f"{samples.lengths} {numbers_to_text(samples.places)}",
            settings=settings,
        ) as session:
            index = Index.read(place) if session.has_waited else None
            if index is None or not _is_same(index, samples, version, described):
                index = _made(session, dataset, samples, described(), classes, place, compression)
    _check_same_compression(index.plan, compression, place)
    return cached_dataset(place, index, transform, classes)


def _described(samples: Samples) -> Fingerprint:
    """Return the description of the Datasets that samples come from, for change detection."""
    bases = describe_bases(samples.bases, samples.lengths, fixed=True)
    return Fingerprint(bases[0].name, None, (), (), bases)


def _check_compression(compression: str | None) -> None:
    if compression not in (None, *MOST_TIMES):
        raise OptionError(
            f"compression={compression!r} must be 'zstd', 'lz4' or None\n  Nothing was started."
        )
    if compression is not None and not pa.Codec.is_available(compression):
        raise OptionError(
            f"compression={compression!r}: this pyarrow was built without it\n"
            "  Nothing was started. Install another build of pyarrow, or leave compression= out."
        )


def _check_same_compression(
    plan: CachePlan, compression: str | None, place: Store | Folder
) -> None:
    """Raise OptionError if a cache that is there is not compressed as asked for."""
    if compression in (None, plan.compression):
        return
    there = "without compression" if plan.compression is None else f"with {plan.compression!r}"
    raise OptionError(
        f"compression={compression!r}: the cache in {shown_location(place.locate(''))!r} was begun "
        f"{there}\n"
        "  Nothing was changed. Leave compression= out to continue it, or write all of it again "
        "with redo='*'."
    )


def _samples_of(dataset: Any) -> Samples:
    if not is_map_style(dataset) or isinstance(dataset, str):  # the name of a folder, probably
        raise OptionError(
            f"cache needs a map-style Dataset, with __getitem__ and __len__; got "
            f"{type(dataset).__name__}\n"
            "  Nothing was started. With load=, a function that returns the sample of a path or a "
            "row, give a folder, a glob, a list of paths or a table."
        )
    samples = samples_of(dataset)
    if not len(samples):
        raise InputError("the dataset has 0 samples\n  There is nothing to cache.")
    return samples


def _is_same(
    index: Index, samples: Samples, version: str | None, described: Callable[[], Fingerprint]
) -> bool:
    """Return whether a finished cache is of these samples: by `version`, or else by comparison."""
    if index.samples != digest_of_samples(samples) or version not in (None, index.version):
        return False
    known = Fingerprint.from_json(index.fingerprint)
    is_only = len(known.bases) == len(samples.bases) == 1  # several might be in another order
    return (version is not None and is_only) or known == described()


def _made(
    session: Session,
    dataset: Any,
    samples: Samples,
    work: Fingerprint,
    classes: dict[Identity, type],
    place: Store | Folder,
    compression: str | None,
) -> Index:
    """Make the missing shards, and write the index."""
    ledger, private = session.ledger, session.folder.private
    cut, total, plan = recorded_cut(session), len(samples), None
    if cut is not None:
        with reading("the plan"):
            plan = replace(CachePlan.from_json(json.loads(cut.facts)), samples=total)
        _check_same_compression(plan, compression, place)
        there = dict(session.folder.files())
        for name, size, _ in ledger.done_outputs():
            if name in there:
                check_size(place.locate(name), there[name], size)
    # With many more samples than there were, the shards may have to be larger.
    if cut is None or plan is None or -(-total // LEAST_SHARDS) > MOST_SMALLER * plan.per_shard:
        kept = compression if plan is None else plan.compression
        fresh = _plan(dataset, total, session.options.shard_bytes, classes, kept)
        if plan is None or fresh.per_shard > MOST_SMALLER * plan.per_shard:
            plan = fresh
    cut = Cut(total, plan.per_shard, json.dumps(plan.to_json()))
    samples, earlier = samples.numbered(*session.bases), EarlierRows()
    listing = None if samples.have_identities else sample_ranges(session, cut, samples)
    place.remove([INDEX])  # until all shards exist again
    marks = private / "marks"
    shutil.rmtree(marks, ignore_errors=True)  # left by a run that was killed
    if listing is None:
        earlier = enrol_identified(session, cut, samples.identified(), samples.name_of)
    else:
        enrol_ranges(session, cut, listing)
    counts = ledger.counts()
    if counts.done < counts.total:
        timeout = session.options.timeout
        if timeout is not None:
            session.options = replace(session.options, timeout=timeout * plan.per_shard)
        doing = ShardWork(dataset, plan, marks, earlier, samples.name_of)
        session.start_workers("rows", doing=doing, seeds_owned=False)
        done = min(counts.done * cut.size + earlier.samples, total)
        progress = SampleProgress(session, cut, done)
        report = session.process_inputs(progress=progress)
        if report.failed:
            raise FailuresError(_failed_samples(report, ledger.listed(), samples, marks))
        shutil.rmtree(marks, ignore_errors=True)
    else:
        session.remember_work()
    drop_gone_ranges(session)
    forget_earlier(ledger, session.folder)
    sizes = {name: size for name, size, _ in ledger.done_outputs()}
    with reading("shards"):
        records = [json.loads(each.metadata)[0] for each in ledger.results()]
        shards = [*zip(records, (sizes[name] for name in plan.names()), strict=True)]
        blocks = b"".join(b64decode(record["blocks"], validate=True) for record in records)
        texts = work.to_json(), ledger.get_meta("version"), digest_of_samples(samples)
        index = Index.of(plan, shards, blocks, *texts)
    place.write(BLOCKS, blocks)
    place.write(INDEX, index.to_json())
    return index


def _plan(
    dataset: Any,
    samples: int,
    shard_bytes: int,
    classes: dict[Identity, type],
    compression: str | None,
) -> CachePlan:
    """Load the first, the middle and the last sample, and decide how to divide the dataset."""
    # A dataset may open files with its first sample: open them in a copy, which is not sent to
    # workers.
    with generators_kept():
        try:
            probed = copy.copy(dataset)
        except Exception:  # noqa: BLE001 - whatever an odd object does
            probed = dataset
        failed: dict[int, BaseException] = {}
        found: dict[int, Any] = {}
        for index in dict.fromkeys((0, samples // 2, samples - 1)):
            seed_generators(seed_of_text(str(index)))
            try:
                sample = probed[index]
                layout_of([*found.values(), sample])
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - SystemExit too
                failed[index] = error  # a worker will report it
                continue
            found[index] = sample
            classes.update(classes_in(sample))
    if found and not layout_of([*found.values()]).names:
        at, sample = next(iter(found.items()))
        failed[at] = MisfitError(f"the sample is {sample!r}, which contains nothing to store")
    refused = {at: error for at, error in failed.items() if isinstance(error, MisfitError)}
    if not found or refused:
        shown = failed if not found else refused
        what = "include some that cannot be cached" if found else "all failed"
        lines = "\n".join(line_of(sample_failure(*one)) for one in shown.items())
        raise FailuresError(
            f"the first samples that were tried {what}\n{lines}\n"
            "  Nothing was started. Fix the dataset, and make the same call again."
        ) from next(iter(shown.values()))
    layout = layout_of([*found.values()])
    leaves = (leaves_of(layout.structure, sample) or () for sample in found.values())
    nbytes = sum(nbytes_of(leaf) for each in leaves for leaf in each)
    fitting = shard_bytes * len(found) // max(nbytes, 1)
    per_shard = max(1, min(fitting, -(-samples // LEAST_SHARDS)))
    return CachePlan(samples, per_shard, layout, compression)


def _failed_samples(
    report: Report, entries: Iterable[InputRow], samples: Samples, marks: Path
) -> str:
    """Return the message for a run in which samples failed."""
    found: list[Failure] = []
    count = 0
    for entry in entries:
        failures, number = failed_in(entry)
        mark = marks / str(range_of(entry.row)[0])  # left by a worker that was killed, or died
        if (
            failures
            and entry.metadata is None
            and mark.exists()
            and (index := read_regular(mark, 64).strip())
        ):
            at = int(index)
            failures = [each._replace(source=at).named(samples.name_of(at)) for each in failures]
            number = 1
        found += failures
        count += number
    indices = [each.source for each in found if isinstance(each.index, int)][:20]
    named = ", ".join([*map(str, indices), *["…"] * (count > len(indices))])
    left_out = (
        "Or leave them out of the dataset: what is done of the others is taken over."
        if samples.have_identities
        else "If you leave them out of the dataset, other samples get their indices: then start "
        "over with redo='*'. A Dataset that names its samples, with source_of(index), as that "
        "of from_folder and from_table does, need not start over."
    )
    some = [*map(line_of, found[:20]), *[f"… and {count - 20:,} more"] * (count > 20)]
    return "\n".join(
        [
            f"{count:,} of {len(samples):,} samples could not be cached: {named}",
            *(f"  {line}" for line in some),
            f"  No dataset is returned; {report.done:,} of {report.done + report.failed:,} shards "
            "are done and kept. Fix the samples and make the same call again; if you change the "
            "dataset's code, accept_changes=True keeps what is done.\n"
            f"  {left_out}",
            report.failures[0].traceback,
        ]
    )
