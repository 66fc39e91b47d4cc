"""Ranges of samples as inputs of a session.

    100,000 samples ── Cut(size=8192) ──> {"first": 0, "count": 8192}, {"first": 8192, …}, …

A range is known by its place, and has the numbers of its samples; `sample_numbers.py` numbers
those that are known by more than an index. A run that is continued uses the same ranges: the ledger
records the size of a range. Progress, status and failures are counted in samples.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from forebay.base.formatting import counted
from forebay.base.origins import as_array
from forebay.errors import ChangedError
from forebay.failures import Failure, failure_from_json, failure_to_json
from forebay.inputs.listing import Listing
from forebay.ledger.database import (
    DONE,
    FAILED,
    TODO,
    InputRow,
    reading,
)
from forebay.ledger.records import Counts, Input
from forebay.observe.progress import Progress, log_samples_failed, run_label
from forebay.outputs.places import newest_ledger
from forebay.runs.run import Session
from forebay.runs.samples import Samples

if TYPE_CHECKING:
    from forebay.ledger.snapshot import Snapshot

# The key in the ledger under which the `Cut` is stored.
RANGES = "ranges"


@dataclass(frozen=True, slots=True)
class Cut:
    """How a dataset is divided into ranges."""

    samples: int
    size: int
    facts: str = ""

    def listing_of(self, keys: Any) -> Listing:
        """List the ranges as rows; each has its samples' numbers as its identity."""
        identities = [
            numbers_to_text(keys[at : at + self.size]) for at in range(0, len(keys), self.size)
        ]

        def rows() -> Iterator[Input]:
            firsts = range(0, self.samples, self.size)
            for first, identity in zip(firsts, identities, strict=False):
                count = min(self.size, self.samples - first)
                row = json.dumps({"first": first, "count": count})
                yield Input(f"samples {first} to {first + count - 1}", row, identity)

        return Listing("rows", ("first", "count"), f"a Dataset of {self.samples} samples", rows)


def recorded_cut(session: Session) -> Cut | None:
    """Return the cut of the run that this one continues; None if it continues none."""
    ledger = session.ledger
    recorded = None if session.starts_over else ledger.get_meta(RANGES)
    if recorded is None or ledger.get_meta("work") is None:  # without it, no work has begun
        return None
    with reading(f"{RANGES!r}"):
        known = json.loads(recorded)
        cut = Cut(int(known["samples"]), int(known["size"]), str(known["facts"]))
        if cut.samples < 1 or cut.size < 1:
            raise ValueError(f"{cut.samples} samples, {cut.size} in a range")
    return cut


def sample_ranges(session: Session, cut: Cut, samples: Samples) -> Listing:
    """List the ranges of samples; each is known by its place and by the numbers of its samples.

    What was made of samples that are still there may be made again, at another place. But a call
    with other samples does not remove what was made of those before.
    """
    keys = samples.keys()
    listing = cut.listing_of(keys)
    if session.starts_over:
        return listing
    now = {each.row: each.identity for each in listing}
    made = (each for each in session.ledger.listed() if each.state == DONE and each.identity)
    stale = [each for each in made if now.get(each.row) != each.identity]
    if not stale:
        return listing
    import numpy as np

    present = np.unique(as_array(keys))
    with reading("a range"):
        lost = sum(_number_lost(each, present) for each in stale)
    if lost and not session.accepts_changes:
        raise lost_samples(session, lost)
    files = counted(len(stale), "file")
    session.say(f"{files} made again, since other samples have their places now")
    return listing


def lost_samples(session: Session, lost: int) -> ChangedError:
    """Return the error for a dataset without samples that an output folder has."""
    return ChangedError(
        f"{lost:,} of the samples in {session.output!r} are not in this dataset, and what was "
        "made of them would be removed\n"
        "  Nothing was started, and nothing is lost. Choose one:\n"
        "  - start over, removing all of it: redo='*', or --redo '*';\n"
        "  - keep only the files whose samples have the places that they had: "
        "accept_changes=True, or --accept-changes;\n"
        "  - another output folder."
    )


def _number_lost(made: InputRow, present: Any) -> int:
    """Return how many samples of a range are not among these numbers, which are sorted."""
    import numpy as np

    numbers = numbers_from_text(made.identity, range_of(made.row)[1])
    if type(numbers) is not range:
        return int((~np.isin(numbers, present)).sum())
    ends = np.searchsorted(present, [numbers.stop, numbers.start])
    return len(numbers) - int(np.subtract(*ends))


def enrol_ranges(session: Session, cut: Cut, listing: Listing, **others: str) -> None:
    """Make the ranges the inputs of a session, and record the cut, and other strings.

    A range whose file is missing, or has another size, is made again. Files of ranges that the
    dataset no longer has stay until `drop_gone_ranges`.
    """
    ledger = session.ledger
    session.enrol(listing, whole=True)
    there = dict(session.folder.files())
    ledger.mark_todo(
        {at for name, nbytes, at in ledger.done_outputs() if there.get(name) != nbytes}
    )
    ledger.set_meta(RANGES, json.dumps(asdict(cut)), **others)


def drop_gone_ranges(session: Session) -> None:
    """Remove the files of ranges that the dataset no longer has: it has the files of all others."""
    session.ledger.prune(failed_too=False)
    session.perform_pending()


def numbers_to_text(numbers: Any) -> str:
    """Return numbers, a range or an array, as a short string: "0-8191" if they are consecutive."""
    import numpy as np

    if type(numbers) is not range and (np.diff(numbers) == 1).all():
        numbers = range(int(numbers[0]), int(numbers[-1]) + 1)
    if type(numbers) is range and numbers.step == 1:
        return f"{numbers[0]}-{numbers[-1]}"
    found = as_array(numbers)
    return base64.b64encode(found.astype("<u8" if found.max() >> 32 else "<u4").tobytes()).decode()


def numbers_from_text(text: str, count: int) -> Any:
    """Return the numbers, a range or an array, that `numbers_to_text` made a string of."""
    import numpy as np

    ends = text.split("-")
    if len(ends) == 2:
        first, last = map(int, ends)
        found: Any = range(first, last + 1)
    else:
        data = base64.b64decode(text, validate=True)
        found = np.frombuffer(data, f"<u{len(data) // count}").astype(np.int64)
    if len(found) != count:
        raise ValueError(f"{len(found)} numbers of {count} samples")
    return found


class SampleProgress(Progress):
    """Shows the progress of a session in samples, although the session counts ranges."""

    def __init__(self, session: Session, cut: Cut, done: int, *, by_batch: bool = False) -> None:
        label, visible = run_label(session.verb, session.output), session.options.progress
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


def verb_of(meta: Mapping[str, str]) -> str:
    """Return the entry point that wrote a ledger: "preprocess", "predict" or "cache"."""
    verb = meta.get("verb", "preprocess")
    with reading("its entry point"):
        if verb not in ("preprocess", "predict", "cache"):
            raise ValueError(verb)
    return verb


def is_index(meta: Mapping[str, str]) -> bool:
    """Return whether `index_shards` wrote a ledger: it is a run of `preprocess`."""
    return ":_ShardIndexing" in meta.get("work", "")


@contextmanager
def read_run_state(
    output: str | os.PathLike[str],
) -> Iterator[tuple[Snapshot, Iterator[Failure]]]:
    """Read the state of a run from another process, whether or not it is running."""
    from forebay.ledger.snapshot import read_entries, read_failures, read_snapshot

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
