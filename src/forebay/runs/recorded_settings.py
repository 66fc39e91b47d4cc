"""The settings of a run, in its ledger: they hold for a retry of what failed.

    preprocess(…, timeout=60) ──> ledger: {"timeout": 60} ──> retry(work, output)
                                                         └──> forebay retry OUTPUT … --timeout 60

A folder is data: functions and clusters are named there, for people, and never loaded or joined.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from forebay.errors import LedgerError, OptionError, shown_location
from forebay.ledger.database import reading
from forebay.options import AutoWorkers, PreprocessOptions, Ray, plain_number
from forebay.runs.source_code import reference_of

# The key in the ledger.
SETTINGS = "settings"
# Arguments of the entry points that say how a run works. Others say what it works with, or are
# meant for one call: limit, resume, redo, accept_changes, progress.
_KEPT = (
    *("num_workers", "concurrency", "backend", "timeout", "retries", "on_error", "max_failures"),
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
