"""Numbers of samples: the same ones from call to call, wherever they are in the dataset.

    identities ── record of the output folder ──> numbers: as before, or new
    ranges of numbers ── those of the ledger ──> the same: its file stays
                                            └──> another: what its samples had is taken over

The number of a sample stays with its name as long as its file does. A new sample gets a number that
none had before, and so does one whose file changed. A file that cannot be seen is not changed. So
a range with the numbers that it had is done, and its file stays as it is. Another range is made
again, but of its samples only those are made whose numbers no file has: the results of the others
are taken over from the files of the earlier run, of which links stay in `.forebay/earlier` until
all ranges are done. Those with results of samples that the dataset no longer has stay there until
`forebay prune`: such samples may only be away, in a folder that is not mounted.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from forebay.base.formatting import counted
from forebay.base.output_names import EARLIER, recorded_name
from forebay.errors import shortened
from forebay.ledger.database import DONE, InputRow, files_of, reading
from forebay.ledger.identity import NOT_SEEN
from forebay.ledger.ledger import Ledger
from forebay.ledger.records import NAMED, EarlierRows, Leftover, key_of
from forebay.outputs.folder import OutputFolder
from forebay.runs.ranges import (
    Cut,
    enrol_ranges,
    failed_samples,
    lost_samples,
    numbers_from_text,
    numbers_to_text,
    range_of,
)
from forebay.runs.run import Session
from forebay.runs.samples import Identified, Samples
from forebay.runs.source_code import sha256_of

# ---- numbers -------------------------------------------------------------------------------------

# The key in the ledger under which names and identities are recorded, in the order of the numbers.
RECORD = "samples"
# Of the samples of one identity: hashes of a name and of its file's identity, or 0 while that was
# not seen; and how many they are. Their numbers follow those of the ones before.
_PART = np.dtype([("name", "S12"), ("file", "<u4"), ("count", "<u8")])


@dataclass(frozen=True, slots=True, eq=False)
class NumberedSamples:
    """The numbers of a dataset's samples.

    Attributes:
        keys: The number of each sample, in the order of the dataset.
        record: The names and identities of all numbers, for the ledger.
        replaced: The numbers that samples had whose files changed.
        absent: The numbers of names that are not in the dataset now, sorted.
        new: How many have a name that the output folder did not know.
        unseen: The places of samples whose files cannot be seen, and could be before.
    """

    keys: npt.NDArray[np.int64]
    record: str
    replaced: npt.NDArray[np.int64]
    absent: npt.NDArray[np.int64]
    new: int
    unseen: npt.NDArray[np.int64]


def hashes_of(identified: Identified) -> npt.NDArray[Any]:
    """Return the hashes of samples' names and of the identities of their files."""
    names, files = bytearray(), []
    for each in identified.parts:
        key = key_of(each.source, each.row).encode("utf-8", "surrogatepass")
        names += blake2b(key, digest_size=12).digest()
        file = blake2b(each.identity.encode(), digest_size=4).digest()
        # A name that is not that of a file has an empty one.
        is_seen = bool(each.identity) and not each.identity.endswith(NOT_SEEN)
        files.append(max(int.from_bytes(file, "little"), 1) if is_seen else 0)
    found = np.empty(len(files), _PART)
    found["name"], found["file"] = np.frombuffer(bytes(names), "S12"), files
    found["count"] = identified.counts
    return found


def digest_of_samples(samples: Samples) -> str:
    """Return a hash of which samples these are."""
    if samples.have_identities:
        identified = samples.identified()
        return sha256_of(hashes_of(identified).tobytes() + identified.at.tobytes())
    return sha256_of(f"{samples.lengths} {numbers_to_text(samples.places)}".encode())


def _numbered(
    known: npt.NDArray[Any], found: npt.NDArray[Any], at: npt.NDArray[np.int64]
) -> NumberedSamples:
    """Return the numbers of samples; of two with one name and row it is the same.

    Args:
        known: What the output folder has.
        found: What there is now.
        at: See `Identified`.
    """
    names, first, parts = np.unique(found["name"], return_index=True, return_inverse=True)
    files, counts = found["file"][first], found["count"][first]
    order = np.argsort(known["name"], kind="stable")
    # Of the parts that had a name, the last.
    last = np.searchsorted(known["name"], names, "right", sorter=order) - 1
    was = order[np.maximum(last, 0)] if len(order) else np.zeros(len(names), np.int64)
    before = known[was] if len(order) else np.zeros(len(names), _PART)
    is_known = (last >= 0) & (before["name"] == names) & (before["count"] == counts)
    is_other = (last >= 0) & (before["name"] == names) & ~is_known
    is_changed = is_known & (files != 0) & (before["file"] != 0) & (files != before["file"])
    is_changed |= is_other
    is_first_seen = is_known & (before["file"] == 0)
    known["file"][was[is_first_seen]] = files[is_first_seen]
    (new,) = np.nonzero(~(is_known | is_other) | is_changed)
    new = new[np.argsort(first[new])]  # in the order of the dataset
    numbers = was.copy()
    numbers[new] = len(known) + np.arange(len(new))
    record = np.concatenate([known, found[first[new]]])
    by_name = np.argsort(record["name"], kind="stable")
    ordered = record["name"][by_name]
    current = by_name[np.append(ordered[1:] != ordered[:-1], True)]
    starts, sizes = _starts(record), record["count"].astype(np.int64)
    part = np.searchsorted(_starts(found), at, "right") - 1
    unseen = first[is_known & (files == 0) & (before["file"] != 0)]
    gone = np.setdiff1d(current, numbers)
    return NumberedSamples(
        keys=starts[numbers[parts.reshape(-1)]][part] + at - _starts(found)[part],
        record=base64.b64encode(record.tobytes()).decode(),
        replaced=_expanded(starts, sizes, was[is_changed]),
        absent=np.sort(_expanded(starts, sizes, gone)),
        new=int(counts[~(is_known | is_other)].sum()),
        unseen=np.flatnonzero(np.isin(part, unseen)),
    )


def _starts(parts: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the number of the first sample of each part."""
    counts = parts["count"].astype(np.int64)
    found: npt.NDArray[np.int64] = np.cumsum(counts) - counts
    return found


def _expanded(
    starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], parts: npt.NDArray[Any]
) -> npt.NDArray[np.int64]:
    """Return the numbers of the samples of some parts."""
    found: npt.NDArray[np.int64] = np.repeat(starts[parts], sizes[parts])
    return found + _counted_up(sizes[parts])


# ---- ranges --------------------------------------------------------------------------------------

# The key in the ledger under which the files in the folder of earlier ones are listed.
_EARLIER = "earlier"


class _EarlierFile(NamedTuple):
    """A file of an earlier run, from which results may be taken over.

    Attributes:
        name: Relative to the output folder.
        first: The first sample of its range, an index in the dataset of that time.
        numbers: Those of the range, as the ledger has them.
        failed: Which of the range have no row in it.
        record: What the ledger says of its content.
        absent: How many of its results are of samples that the dataset does not have now.
    """

    name: str
    size: int
    first: int
    samples: int
    numbers: str
    failed: list[int]
    record: Any
    absent: int = 0

    @classmethod
    def of(cls, entry: InputRow) -> _EarlierFile | None:
        """Return the file of a range that is done; None if it has none."""
        files = files_of(entry.outputs)
        if not files:
            return None
        first, count = range_of(entry.row)
        record = json.loads(entry.metadata)[0]
        failed = [int(each.index) - first for each in failed_samples(record)[0]]
        facts = {name: record[name] for name in record if name in ("columns", "weights")}
        return cls(*files[0], first, count, entry.identity, failed, facts)


def enrol_identified(
    session: Session, cut: Cut, identified: Identified, name_of: Callable[[int], str | None]
) -> EarlierRows:
    """Make the ranges of samples the inputs of a session; find what is taken over for them.

    Args:
        name_of: Returns the name of the sample at an index.
    """
    text = None if session.starts_over else session.ledger.get_meta(RECORD)
    with reading("the names of samples"):
        known = np.frombuffer(base64.b64decode(text or "", validate=True), _PART).copy()
    samples = _numbered(known, hashes_of(identified), identified.at)
    listing = cut.listing_of(samples.keys)
    with reading("earlier files"):
        earlier = [*_recorded(session.ledger)]
    if session.starts_over:
        enrol_ranges(session, cut, listing, **{RECORD: samples.record})
        session.folder.discard([each.name for each in earlier])
        return EarlierRows()
    now = {each.row: each.identity for each in listing}
    made = [each for each in session.ledger.listed() if each.state == DONE and each.identity]
    rows, unseen = EarlierRows(), tuple[str, ...]()
    with reading("a range"):
        stale = [each for each in made if now.get(each.row) != each.identity]
        if stale or earlier or samples.new or len(samples.unseen):
            named = (name_of(int(at)) for at in samples.unseen[:NAMED])
            unseen = (*filter(None, named),)
            _say_what_changed(session, made, samples, unseen)
            kept = {each.row for each in made} - {each.row for each in stale}
            earlier += filter(None, map(_EarlierFile.of, stale))
            again = [range_of(each.row) for each in listing if each.row not in kept]
            rows = _taken_over(session, samples, earlier, again)
    # First, so that no range has numbers that are not recorded.
    session.ledger.set_meta(RECORD, samples.record)
    enrol_ranges(session, cut, listing)
    session.unseen = unseen
    return rows


def _taken_over(
    session: Session,
    samples: NumberedSamples,
    files: list[_EarlierFile],
    again: list[tuple[int, int]],
) -> EarlierRows:
    """Return where the results of samples of these ranges are; keep links to those files."""
    file = np.full(len(samples.keys), -1, np.int32)
    row = np.zeros(len(samples.keys), np.int64)
    is_again = np.zeros(len(samples.keys), bool)
    for first, count in again:
        is_again[first : first + count] = True
    order = np.argsort(samples.keys, kind="stable")
    ordered = samples.keys[order]
    for number, each in enumerate(files):
        numbers = np.asarray(numbers_from_text(each.numbers, each.samples), np.int64)
        rows = np.delete(np.arange(each.samples), each.failed)
        # Of samples with one number, all.
        begin, end = (np.searchsorted(ordered, numbers[rows], side) for side in ("left", "right"))
        times = end - begin
        at = order[np.repeat(begin, times) + _counted_up(times)]
        file[at], row[at] = number, np.repeat(rows, times)
    file[~is_again] = -1
    absent = _holders_of(samples.absent, files)
    used = {*file.tolist()} - {-1}
    held = sorted(used | absent.keys())
    kept = _kept(session, [files[number]._replace(absent=absent[number]) for number in held])
    places = np.full(len(files) + 1, -1, np.int32)
    found = [*zip(held, kept, strict=True)]
    there = [number for number, each in found if each is not None and number in used]
    places[there] = np.arange(len(there))
    taken = [each for number, each in found if each is not None and number in used]
    locations = tuple((str(session.folder.locate(each.name)), each.first) for each in taken)
    return EarlierRows(locations, places[file], row, taken[0].record if taken else {})


def _holders_of(numbers: npt.NDArray[np.int64], files: list[_EarlierFile]) -> Counter[int]:
    """Return which of the files have results of these samples, and how many: the first of each.

    The first, so that samples that leave one after the other do not each keep a file.
    """
    holder = np.full(len(numbers), -1, np.int64)
    for number, each in enumerate(files if len(numbers) else ()):
        own = np.asarray(numbers_from_text(each.numbers, each.samples), np.int64)
        own = np.delete(own, each.failed)
        at = np.minimum(np.searchsorted(numbers, own), len(numbers) - 1)
        at = at[numbers[at] == own]
        holder[at[holder[at] < 0]] = number
    return Counter(holder[holder >= 0].tolist())


def _counted_up(times: npt.NDArray[Any]) -> Any:
    """Return 0, 1, … for each of some counts, one after the other."""
    total = int(times.sum())
    starts = np.repeat(np.cumsum(times) - times, times)
    return np.arange(total) - starts


def _say_what_changed(
    session: Session,
    made: list[InputRow],
    samples: NumberedSamples,
    unseen: tuple[str, ...],
) -> None:
    """Say which samples are new, changed or gone; raise ChangedError if all of them are others."""
    ranges = [np.asarray(numbers_from_text(each.identity, range_of(each.row)[1])) for each in made]
    was = np.unique(np.concatenate([*ranges, np.empty(0, np.int64)]))
    if not len(was):
        return
    changed = int(np.isin(samples.replaced, was).sum())
    gone = int((~np.isin(was, samples.keys)).sum()) - changed
    if gone == len(was) and not session.accepts_changes:
        raise lost_samples(session, gone)
    counts = {"new": samples.new, "changed": changed, "no longer in the dataset": gone}
    told = [f"{count:,} {'is' if count == 1 else 'are'} {what}" for what, count in counts.items()]
    told = [each for each, count in zip(told, counts.values(), strict=True) if count]
    if told:
        left = ": what was made of these leaves the output, and stays until `forebay prune`"
        left = left if gone else ""
        session.say(f"of {counted(len(samples.keys), 'sample')} {', '.join(told)}{left}")
    if unseen:
        session.note(
            f"the files of {counted(len(samples.unseen), 'sample')} cannot be seen now, such as "
            f"{shortened(unseen[0])}: what was made of them stays"
        )


# ---- earlier files -------------------------------------------------------------------------------


def _recorded(ledger: Ledger) -> Iterator[_EarlierFile]:
    """Yield the files that earlier runs left for those after them."""
    for fields in json.loads(ledger.get_meta(_EARLIER) or "[]"):
        found = _EarlierFile(*fields)
        folder, _, name = found.name.rpartition("/")
        if folder != EARLIER or recorded_name(name) != name:
            raise ValueError(f"the earlier file {found.name!r}")
        yield found._replace(size=int(found.size), absent=int(found.absent))


def _kept(session: Session, files: list[_EarlierFile]) -> list[_EarlierFile | None]:
    """Link the files to the folder of earlier ones, and record them; None for one that is gone."""
    folder, kept = session.folder, list[_EarlierFile | None]()
    for each in files:
        name = each.name
        if not name.startswith(f"{EARLIER}/"):
            name = f"{EARLIER}/{uuid.uuid4().hex[:12]}-{each.name}"
        is_there = folder.size(each.name) == each.size
        kept.append(each._replace(name=name) if is_there else None)
        if is_there and name != each.name:
            folder.link(each.name, name)
    recorded = {each.name for each in _recorded(session.ledger)}
    left = [each for each in kept if each is not None]
    if left or recorded:
        folder.flush()
        session.ledger.set_meta(_EARLIER, json.dumps(left))
        folder.discard(recorded - {each.name for each in left})
    return kept


def forget_earlier(ledger: Ledger, folder: OutputFolder, *, absent_too: bool = False) -> None:
    """Remove the earlier files, once all ranges are done.

    Args:
        absent_too: Also those with results of samples that the dataset no longer has.
    """
    with reading("earlier files"):
        recorded = [*_recorded(ledger)]
    left = [each for each in recorded if each.absent and not absent_too]
    if len(left) < len(recorded):
        folder.discard({each.name for each in recorded} - {each.name for each in left})
        ledger.set_meta(_EARLIER, json.dumps(left))


def absent_results(ledger: Ledger) -> Iterator[Leftover]:
    """Yield the files kept for samples that the dataset no longer has, if nothing is to be done."""
    total, done, _ = ledger.counts()
    with reading("earlier files"):
        recorded = [*_recorded(ledger)] if done == total else []
    for each in recorded:
        if each.absent:
            what = f"it has the results of {counted(each.absent, 'sample')} that the data lack now"
            yield Leftover(each.name, each.size, what)
