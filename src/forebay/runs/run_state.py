"""The state of a run in samples, read from its ledger."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from forebay.failures import Failure, failure_from_json, failure_to_json
from forebay.ledger.database import FAILED, TODO, InputRow, reading
from forebay.ledger.records import Counts
from forebay.ledger.snapshot import Snapshot, read_entries, read_failures, read_snapshot
from forebay.outputs.places import newest_ledger


def verb_of(meta: Mapping[str, str]) -> str:
    """Return the entry point that wrote a ledger: "preprocess", "predict" or "cache"."""
    verb = meta.get("verb", "preprocess")
    with reading("its entry point"):
        if verb not in ("preprocess", "predict", "cache"):
            raise ValueError(verb)
    return verb


@contextmanager
def read_run_state(
    output: str | os.PathLike[str],
) -> Iterator[tuple[Snapshot, Iterator[Failure]]]:
    """Read the state of a run from another process, whether or not it is running."""
    with newest_ledger(output) as (folder, live):
        snapshot = read_snapshot(folder, live)
        if verb_of(snapshot.meta) == "preprocess":
            yield snapshot, read_failures(folder)
            return
        total = done = failed = 0
        for entry in read_entries(folder):
            with reading("a range"):
                count = range_of(entry.row)[1]
            lost = failed_in(entry)[1]
            total, failed = total + count, failed + lost
            done += 0 if entry.state in (TODO, FAILED) else count - lost
        counts = Counts(total, done, failed)
        with reading("the run"):
            run = json.loads(snapshot.meta.get("run", "{}"))
            size = json.loads(snapshot.meta[RANGES])["size"]
            run |= {name: int(run.get(name, 0)) * size for name in ("done", "failed")}
        meta = snapshot.meta | {"run": json.dumps(run)}
        failures = (one for entry in read_entries(folder) for one in failed_in(entry)[0])
        yield replace(snapshot, counts=counts, meta=meta, unit="sample"), failures


def failed_in(entry: InputRow) -> tuple[list[Failure], int]:
    """Return the failed samples of a range that are recorded by index, and the number of all."""
    with reading("a range"):
        failure = entry.failure
        listed, count = failed_samples(json.loads(entry.metadata or "[{}]")[0])
        if failure is None:
            return listed, count
        if not count:  # its worker died or hung, so none of its samples has a result
            return [failure], range_of(entry.row)[1]
    whole = failure._replace(message="")._asdict()
    return [Failure(**whole | failure_to_json(one)) for one in listed], count


def failed_samples(record: Mapping[str, Any]) -> tuple[list[Failure], int]:
    """Return the failed samples that the record of a range lists, and the number of all."""
    listed = [failure_from_json(one) for one in record.get("failures", ())]
    return listed, int(record.get("failed", len(listed)))


def range_of(row: str | None) -> tuple[int, int]:
    """Return the first sample of a range, and how many it has."""
    found = json.loads(row or "")
    return int(found["first"]), int(found["count"])


# The key in the ledger under which the `Cut` is stored.
RANGES = "ranges"
