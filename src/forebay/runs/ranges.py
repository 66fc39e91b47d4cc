"""The samples of a dataset as inputs of a session: each range of samples is one input.

    100,000 samples ── Cut(size=8192) ──> {"first": 0, "count": 8192}, {"first": 8192, …}, …

A run that is continued uses the same ranges: the ledger records the size of a range, and the length
of the dataset. Progress, status and failures are counted in samples.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from typing import Any

from forebay.errors import ChangedError
from forebay.failures import Failure, failure_from_json, failure_to_json
from forebay.inputs.listing import Listing
from forebay.ledger.database import FAILED, TODO, reading
from forebay.ledger.inputs import InputRow
from forebay.ledger.records import Counts, Input
from forebay.ledger.snapshot import Snapshot, read_entries, read_failures, read_snapshot
from forebay.observe.progress import Progress, label_of, log_samples_failed
from forebay.outputs.places import newest_ledger
from forebay.runs.run import Session

# The key in the ledger under which the `Cut` is stored.
_KEY = "ranges"

Identities = Callable[[], Iterator[str]]


@dataclass(frozen=True, slots=True)
class Cut:
    """How a dataset is divided into ranges."""

    samples: int
    size: int
    facts: str = ""

    def listing(self, identities: Identities | None = None) -> Listing:
        """List the ranges as rows of "first" and "count".

        Args:
            identities: Returns for each range a string that changes with its samples; None if
                changes cannot be detected.
        """

        def rows() -> Iterator[Input]:
            known = repeat("") if identities is None else identities()
            for first, identity in zip(range(0, self.samples, self.size), known, strict=False):
                count = min(self.size, self.samples - first)
                row = json.dumps({"first": first, "count": count})
                yield Input(f"samples {first} to {first + count - 1}", row, identity)

        return Listing("rows", ("first", "count"), f"a Dataset of {self.samples} samples", rows)


def recorded_cut(session: Session, samples: int, *, may_grow: bool) -> Cut | None:
    """Return the cut of the run that this one continues; None if it continues none."""
    ledger = session.ledger
    recorded = None if session.starts_over else ledger.get_meta(_KEY)
    if recorded is None or ledger.get_meta("work") is None:  # without it, no work has begun
        return None
    with reading(f"{_KEY!r}"):
        known = json.loads(recorded)
        cut = Cut(int(known["samples"]), int(known["size"]), str(known["facts"]))
        if cut.samples < 1 or cut.size < 1:
            raise ValueError(f"{cut.samples} samples, {cut.size} in a range")
    if cut.samples != samples and not may_grow and session.options.version is None:
        raise ChangedError(
            f"the dataset has {samples:,} samples, and had {cut.samples:,} when the run began\n"
            "  Nothing was started, and nothing is lost. Choose one:\n"
            "  - start over, removing what was made of it: resume=False, or --restart;\n"
            "  - keep what is done, if the samples that were there are still the same: "
            "version='2', or --version 2;\n"
            "  - another output folder."
        )
    return replace(cut, samples=samples)


def enrol_ranges(session: Session, cut: Cut, identities: Identities | None = None) -> None:
    """Make the ranges the inputs of a session, and record the cut.

    A range whose file is missing, or has another size, is made again. Files of ranges that the
    dataset no longer has are removed.
    """
    ledger = session.ledger
    session.enrol(cut.listing(identities), whole=True)
    there = dict(session.folder.files())
    ledger.mark_todo(
        [at for name, nbytes, at in ledger.outputs() if at < 0 or there.get(name) != nbytes]
    )
    session.perform_pending()
    ledger.set_meta(_KEY, json.dumps(asdict(cut)))


class SampleProgress(Progress):
    """Shows the progress of a session in samples, although the session counts ranges."""

    def __init__(self, session: Session, cut: Cut, done: int, *, by_batch: bool = False) -> None:
        label, visible = label_of(session.verb, session.output), session.options.progress
        super().__init__(cut.samples, done, visible, unit="sample", label=label)
        self._size, self._by_batch, self._left = cut.size, by_batch, cut.samples - done

    def update(self, done: int, failed: int, metadata: Sequence[str] = ()) -> None:
        """Count and log the samples of ranges that ended.

        Of a range that failed no sample has a result, so all of them count as failed.
        """
        if self._by_batch:
            return
        lost = [each for text in metadata for each in failed_samples(json.loads(text)[0])[0]]
        log_samples_failed(lost)
        samples = self._samples_of(done)
        self.advance(samples - len(lost), self._samples_of(failed) + len(lost))

    def advance(self, done: int, failed: int) -> None:
        """Count samples that ended."""
        super().update(done, failed)

    def _samples_of(self, ranges: int) -> int:
        samples = min(ranges * self._size, self._left)  # the last range may be smaller
        self._left -= samples
        return samples


# ---- reading the state of a run ----------------------------------------------------------------


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
            size = json.loads(snapshot.meta[_KEY])["size"]
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
