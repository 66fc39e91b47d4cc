"""The calls that work on an output folder: which are the same, and what an earlier one leaves.

    rank 0   takes the folder ── works ──> ends
    rank 1   the same call: waits ───────> takes the folder, and finds all done

Which call a process makes is in the record of its lock, so any process that sees the folder can
tell, also on another node. Another call ends with a BusyError. If the process that works dies, one
that waits takes the folder, and continues the work.

    preprocess(…, timeout=60) ──> ledger: {"timeout": 60} ──> retry(work, output)
                                                         └──> forebay retry OUTPUT … --timeout 60

The settings of a call hold for a retry of what failed. A folder is data: functions and clusters are
named there, for people, and never loaded or joined.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forebay.base.files import is_url, local_path, location_text
from forebay.base.formatting import counted
from forebay.base.process import is_worker
from forebay.errors import (
    BusyError,
    ForebayError,
    InputError,
    LedgerError,
    OptionError,
    OutputError,
    shortened,
    shown_location,
)
from forebay.inputs.listing import Listing
from forebay.ledger.database import reading
from forebay.ledger.ledger import Ledger
from forebay.ledger.lock import Holder
from forebay.options import AutoWorkers, PreprocessOptions, Ray, plain_number
from forebay.outputs.folder import OutputFolder
from forebay.outputs.places import snapshot_of
from forebay.runs.fingerprint import Fingerprint
from forebay.runs.source_code import reference_of

# How often to try to take the folder, and one in a bucket, for which requests are paid.
PAUSE_S, BUCKET_PAUSE_S = 0.1, 2.0
# After how long to say what is waited for, and how often again.
FIRST_SAID_S, SAID_EVERY_S = 1.0, 60.0
# So many inputs of a list are enough to tell two calls apart: the ledger compares them all later.
_COMPARED, _MOST_CHARACTERS = 100, 10_000


def open_place(output: str | os.PathLike[str]) -> OutputFolder:
    """Return the output folder that a path or a URL names, which is made where there is none."""
    text = local_path(output)
    if not is_url(text):
        path = Path(os.path.abspath(text))
        try:
            return OutputFolder(path)
        except OutputError as error:
            from forebay.outputs.read_only import read_only_folder

            if (folder := read_only_folder(path, error)) is None:
                raise
            return folder
    from forebay.outputs.bucket import BucketFolder

    return BucketFolder(text)


def call_id(verb: str, described: Fingerprint, options: PreprocessOptions, inputs: str) -> str:
    """Return a hash of what a call does: two equal calls have the same one, in any process.

    Args:
        inputs: Tells them from the inputs of other calls.
    """
    given: list[Any] = [options.version, options.accept_changes, options.limit]
    given += [options.redoes_all, options.redone, options.metadata]
    text = "\n".join([verb, described.to_json(), json.dumps(given), inputs])
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:32]


def inputs_text(inputs: Any, listing: Listing) -> str:
    """Return a string that tells inputs from others."""
    if isinstance(inputs, str | os.PathLike):
        return location_text(inputs)
    if listing.samples is not None:
        return ""  # the description of the work has the Datasets
    if isinstance(inputs, set | frozenset):
        inputs = sorted(inputs, key=str)
    if isinstance(inputs, Sequence):
        return f"{len(inputs)} {[*map(str, inputs[:_COMPARED])]}"
    shown = "" if isinstance(inputs, Iterator) else repr(inputs)[:_MOST_CHARACTERS]
    return f"{listing.total} {listing.columns} {shown}"


@dataclass(slots=True)
class TakenFolder:
    """An output folder that this process has, perhaps after waiting for others.

    Attributes:
        earlier: The processes that made the same call, and that were waited for.
    """

    ledger: Ledger
    earlier: list[Holder] = field(default_factory=list)

    @property
    def is_begun(self) -> bool:
        """Return whether one of them got as far as its inputs: then nothing is started over."""
        with suppress(ValueError, TypeError, AttributeError):
            run = json.loads(self.ledger.get_meta("run") or "{}")
            return run.get("pid") in {each.pid for each in self.earlier}
        return False


def take_folder(
    stack: ExitStack, folder: OutputFolder, call: str, output: str, say: Callable[[str], None]
) -> TakenFolder:
    """Take the folder; wait for a process that has it and makes the same call.

    Args:
        say: Shows what is waited for.

    Raises:
        BusyError: A process has it that makes another call, or that could wait for this one.
    """
    earlier, due = list[Holder](), time.monotonic() + FIRST_SAID_S
    while True:
        try:
            return TakenFolder(stack.enter_context(folder.ledger(call=call)), earlier)
        except BusyError as error:
            holder = error.holder
            if holder is None or holder.call != call or _may_wait_for_this(holder):
                raise
        if holder not in earlier:
            earlier.append(holder)
        if time.monotonic() >= due:
            due = time.monotonic() + SAID_EVERY_S
            say(f"the same call is running: {holder}; waiting for its end{_progress(output)}")
        time.sleep(BUCKET_PAUSE_S if is_url(output) else PAUSE_S)


def _may_wait_for_this(holder: Holder) -> bool:
    """Return whether a holder may be waiting: for its worker, or for this thread's own caller."""
    return is_worker() or (holder.is_visible and holder.pid == os.getpid())


def _progress(output: str) -> str:
    with suppress(ForebayError):  # it has only begun, or is ending
        counts = snapshot_of(output).counts
        return f" ({counts.done:,} of {counts.total:,} done, {counts.failed:,} failed so far)"
    return ""


# The key in the ledger.
SETTINGS = "settings"
# Arguments of the entry points that say how a run works. Others say what it works with, or are
# meant for one call: limit, redo, accept_changes, progress.
_KEPT = (
    *("num_workers", "concurrency", "backend", "timeout", "retries", "max_failures"),
    *("metadata", "batch_size", "device"),
)
_DEFAULTS = {"backend": "process", "metadata": "parquet"}
_CODE, UNNAMED = ("save", "load"), "FILE.py:FUNCTION"
# More workers, or inputs at once in each, are no setting of a person's.
_MOST_WORKERS = 1 << 12


def settings_to_json(arguments: Mapping[str, Any]) -> str:
    """Return the settings among the arguments of an entry point that are not the defaults."""
    kept: dict[str, Any] = {}
    for name in _KEPT:
        value = plain_number(arguments.get(name))
        if value is None or value == _DEFAULTS.get(name):
            continue
        if isinstance(value, AutoWorkers):
            value = {"max": int(value)}
        elif isinstance(value, Ray):
            known = {key: each for key, each in asdict(value).items() if each is not None}
            known["address"] = shown_location(value.address) if value.address else ""
            value = known | {"runtime_env": value.runtime_env is not None}  # it may have secrets
        elif not isinstance(value, int | float | str):
            value = str(value)  # a device, an index of NumPy
        kept[name] = value
    for name in _CODE:
        if (function := arguments.get(name)) is not None:
            kept[name] = _reference(function)
    return json.dumps(kept)


def _reference(function: Any) -> str:
    with suppress(Exception):  # whatever an odd object does
        return reference_of(function) or UNNAMED
    return UNNAMED


def earlier_watched(ledger: Ledger) -> list[str]:
    """Return the columns of files that the earlier run of a ledger watched."""
    with reading("the call"):
        return [*map(str, json.loads(ledger.get_meta("call") or "{}").get("watched", ()))]


def recorded_settings(meta: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run, each replaced by what is given for it and is not None.

    Args:
        meta: The strings of the run's ledger.

    Raises:
        OptionError: The run had a cluster that has to be named again.
        LedgerError: The record is damaged.
    """
    given = {name: value for name, value in given.items() if value is not None}
    found = {name: each for name, each in _read(meta).items() if name in _KEPT} | given
    if isinstance(found.get("backend"), dict):
        found["backend"] = _cluster(found["backend"])
    if isinstance(workers := found.get("num_workers"), dict):
        with reading("the settings"):
            found["num_workers"] = AutoWorkers(min(int(workers["max"]), _MOST_WORKERS))
    with reading("the settings"):
        for name in {"num_workers", "concurrency"} & found.keys() - given.keys():
            if int(found[name]) > _MOST_WORKERS:
                raise ValueError(f"{name}={found[name]}")
    try:
        PreprocessOptions.of({name: found[name] for name in found.keys() - given.keys()})
    except OptionError as error:
        raise LedgerError(f"the ledger's record of the settings is damaged: {error}") from error
    return found


def settings_shown(meta: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of a run by the names of the command line's options, for people."""
    found = _read(meta)
    if isinstance(found.get("num_workers"), dict):
        found["num_workers"] = "auto"
    if isinstance(cluster := found.get("backend"), dict):
        plain = {"address": "", "num_cpus": 1, "num_gpus": 0}
        others = {name: cluster[name] for name in plain if cluster.get(name) != plain[name]}
        found |= {"backend": "ray"} | others
    return found


def _read(meta: Mapping[str, str]) -> dict[str, Any]:
    with reading("the settings"):
        return dict(json.loads(meta.get(SETTINGS, "{}")))


def _cluster(found: Mapping[str, Any]) -> Ray:
    """Return the cluster of a run, unless something would be joined or run that a folder names."""
    if found.get("address") or found.get("runtime_env"):
        at = f"Ray at {found['address']}" if found.get("address") else "Ray with a runtime_env"
        raise OptionError(
            f"the run used {at}, and retry joins no cluster, and sets up no node, because a folder "
            "names it\n  Nothing was started. Pass backend=forebay.Ray(...) as in that run, or "
            "--backend ray with its options."
        )
    names = ("num_cpus", "num_gpus", "resources", "max_workers")
    with reading("the settings"):
        try:
            return Ray(**{name: found[name] for name in names if name in found})
        except OptionError as error:
            raise ValueError(str(error)) from error


@contextmanager
def saying_what_stays(output: str | os.PathLike[str]) -> Iterator[None]:
    """Add to an InputError of the block what an earlier run has done: nothing was changed yet."""
    try:
        yield
    except InputError as error:
        from forebay.runs.notes import unit_of

        done, noun = 0, "input"
        with suppress(ForebayError, OSError):
            found = snapshot_of(output)
            done, noun = found.counts.done, unit_of(found.meta.get("verb", ""))
        if not done:
            raise
        shown = shortened(shown_location(os.fspath(output)))
        raise InputError(
            f"{error}\n  What earlier runs made in {shown} stays as it is: {counted(done, noun)} "
            "done. If the inputs are only away, make the same call again when they are back."
        ) from error.__cause__
