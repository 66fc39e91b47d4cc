"""The samples of a dataset as inputs of a session: each is one input, or each range of samples is.

    Subset(ConcatDataset([a, b]), indices) ──> bases (a, b), places ──> numbers 30, 31, …
    100,000 samples ── Cut(size=8192) ──> {"first": 0, "count": 8192}, {"first": 8192, …}, …

A sample is known by the name that its Dataset gives it, or else by its number: the index in the
Dataset that it comes from, after the samples of the Datasets before. Whatever selects, joins and
reorders, it stays the same one. A range is known by its place, and has the numbers of its samples;
`named_samples.py` numbers those that have names.

A run that is continued uses the same ranges: the ledger records the size of a range. Progress,
status and failures are counted in samples.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, chain, pairwise, repeat
from typing import Any

from forebay.base.datasets import is_map_style
from forebay.base.files import is_url
from forebay.base.formatting import counted
from forebay.errors import ChangedError, InputError, shown_location
from forebay.failures import Failure, failure_from_json, failure_to_json
from forebay.inputs.listing import Listing, identity_of, name_text, with_storable_names
from forebay.ledger.database import (
    DONE,
    FAILED,
    TODO,
    Snapshot,
    read_failures,
    read_snapshot,
    reading,
)
from forebay.ledger.inputs import InputRow, read_entries
from forebay.ledger.records import Counts, Input
from forebay.observe.progress import Progress, label_of, log_samples_failed
from forebay.outputs.places import newest_ledger
from forebay.runs.fingerprint import Extents, names_samples, parts_of_samples, text_of_part
from forebay.runs.run import Session

# ---- samples -------------------------------------------------------------------------------------
# Where the samples of a Dataset come from. A wrapper of torch or of forebay that only selects or
# joins is looked through. What cannot be, such as a Subset of keys that are no indices, or a
# wrapper with a `__getitem__` of its own, is a base itself.

# Numbers that are made Python's at once.
_PAGE = 8192


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """The samples of a map-style Dataset.

    Attributes:
        bases: The Datasets that they come from, each once.
        lengths: How many samples each of these has.
        places: Of each sample, its index in the concatenation of the bases: a range, or an array
            of int64.
        numbers: The number of each base in the output folder.
        extents: Where the output folder numbers the samples of each base; see `Base`.
    """

    bases: tuple[Any, ...]
    lengths: tuple[int, ...]
    places: Any
    numbers: Sequence[int]
    extents: Sequence[Extents]

    def __len__(self) -> int:
        return len(self.places)

    def of(self, session: Session) -> Samples:
        """Return the samples with the numbers that they have in the output folder."""
        work, numbers = session.work
        extents = [work.bases[number].extents for number in numbers]
        return replace(self, numbers=numbers, extents=extents)

    def keys(self) -> Any:
        """Return the number of each sample in the output folder, like `places`."""
        at, starts, shifts = 0, [], []
        for length, extents in zip(self.lengths, self.extents, strict=True):
            end = at + length
            for first, count in extents:
                starts.append(at)
                shifts.append(first - at)
                at = min(at + count, end)  # the base may have had more samples
        if not any(shifts):
            return self.places
        import numpy as np

        places = _array(self.places)
        return places + np.array(shifts)[np.searchsorted(starts, places, "right") - 1]

    @property
    def have_names(self) -> bool:
        """Whether some of the Datasets name their samples."""
        return any(map(names_samples, self.bases))

    def name_of(self, index: int) -> str | None:
        """Return the name that its Dataset gives a sample; None if it gives none."""
        if not self.have_names:
            return None
        place, firsts = int(self.places[index]), [*accumulate(self.lengths[:-1], initial=0)]
        at = bisect_right(firsts, place) - 1
        return sample_name(self.bases[at], place - firsts[at])

    def inputs(self) -> Iterator[Input]:
        """Yield the samples as inputs; one that is selected again has "#2" behind what it is."""
        keys = self.keys()
        again = None if type(keys) is range else _occurrences(keys)
        names = [_Names(*each) for each in zip(self.bases, self.lengths, self.numbers, strict=True)]
        some_known = any(each.are_known for each in names)
        if again is None and not some_known:
            yield from map(Input, map(str, _integers(keys)))
            return
        firsts = [*accumulate(self.lengths[:-1], initial=0)]
        counts = repeat(1) if again is None else _integers(again)
        for place, key, count in zip(_integers(self.places), _integers(keys), counts, strict=False):
            more = f"#{count}" if count > 1 else ""
            at = bisect_right(firsts, place) - 1
            if names[at].are_known:
                yield names[at].input(place - firsts[at], more)
            else:  # with a row, beside names, it is a string in the table, too
                yield Input(text := f"{key}{more}", text if some_known else None)


class _Names:
    """The names that a base gives its samples."""

    def __init__(self, base: Any, length: int, number: int) -> None:
        self._base, self._number = base, number
        self.are_known = names_samples(base)
        self._again: Any = None
        if self.are_known:
            import numpy as np

            self._parts = [*parts_of_samples(base, length).values()]

            self._again = _occurrences(np.fromiter(map(self._hash, range(length)), np.int64))

    def input(self, index: int, more: str) -> Input:
        """Return a sample as an input.

        Args:
            more: Tells a sample that is selected again from the first.
        """
        name = sample_name(self._base, index)
        assert name is not None, "only of a base that names its samples"
        # Samples with one name are numbered in the order of the base.
        count = 1 if self._again is None else int(self._again[index])
        row = f"{self._number} {count}{more} {name}"
        for part in self._parts:
            # What the Dataset has of a sample beside its name, such as its label.
            value = part[index]
            shown = shown_location(value) if type(value) is str else ""
            if not shown or not f"/{name}".endswith(f"/{shown}"):
                row += f" {text_of_part(value)}"
        return Input(name, row, "" if is_url(name) else identity_of(name))

    def _hash(self, index: int) -> int:
        try:
            return hash(sample_name(self._base, index))
        except Exception:  # noqa: BLE001 - it is raised again if the sample is selected
            return hash((index,))


def sample_name(base: Any, index: int) -> str | None:
    """Return the name that a Dataset gives a sample; None if it gives none."""
    if not names_samples(base):
        return None
    given = base.source_of(index)
    given = str(given) if isinstance(given, int) else given
    return name_text(given, f"the Dataset's source_of({index})")


def _occurrences(keys: Any) -> Any:
    """Return for each key how many are equal to it up to there; None if no key is there twice."""
    import numpy as np

    order = np.argsort(keys, kind="stable")
    is_first = np.diff(keys[order], prepend=keys[order[:1]] - 1) != 0
    if is_first.all():
        return None
    at = np.arange(len(keys))
    counts = np.empty(len(keys), np.int64)
    counts[order] = at - np.maximum.accumulate(np.where(is_first, at, 0)) + 1
    return counts


def sample_listing(samples: Samples) -> Listing:
    """List samples as inputs; the file that one is named after counts for changes."""
    n = len(samples)
    if n < 1:
        raise InputError(f"inputs: the Dataset has {n} samples\n  There is nothing to process.")
    description = f"a Dataset of {n} sample{'s' * (n != 1)}"
    listing = Listing("indices", (), description, samples.inputs, total=n, samples=samples)
    return listing.through(with_storable_names)


def samples_of(dataset: Any) -> Samples:
    """Return what the samples of a map-style Dataset are made of."""
    bases: dict[int, tuple[Any, int, int]] = {}
    places = _places(dataset, bases)
    found, firsts, lengths = zip(*bases.values(), strict=True)
    extents = [(each,) for each in zip(firsts, lengths, strict=True)]
    return Samples(found, lengths, places, range(len(found)), extents)


def _places(dataset: Any, bases: dict[int, tuple[Any, int, int]]) -> Any:
    """Return the places of a Dataset's samples, and add the bases that are new.

    Args:
        bases: By id: a base, its first place, its length.
    """
    torch_data, mixing = sys.modules.get("torch.utils.data"), sys.modules.get("forebay.mixing")
    if torch_data is not None and _only_selects(dataset, torch_data.Subset):
        inner = dataset.dataset
        indices = _checked(dataset.indices, len(inner)) if is_map_style(inner) else None
        if indices is not None:
            return _taken(_places(inner, bases), indices)
    parts: Iterable[Any] = ()
    if torch_data is not None and _only_selects(dataset, torch_data.ConcatDataset):
        parts = dataset.datasets
    elif mixing is not None and _only_selects(dataset, mixing.MixedDataset):
        parts = dataset.datasets.values()
    if parts and sum(map(len, parts)) == len(dataset):  # the parts may have grown
        return _joined([_places(part, bases) for part in parts])
    if id(dataset) not in bases:
        _, first, length = next(reversed(bases.values()), (None, 0, 0))
        bases[id(dataset)] = dataset, first + length, len(dataset)
    _, first, length = bases[id(dataset)]
    return range(first, first + length)


def _only_selects(dataset: Any, kind: type) -> bool:
    """Return whether a Dataset finds and names its samples as this class of wrappers does."""
    own = type(dataset)
    if not issubclass(own, kind) or callable(getattr(dataset, "source_of", None)):
        return False
    names = ("__getitem__", "__getitems__", "__len__")
    return all(getattr(own, name, None) is getattr(kind, name, None) for name in names)


def _checked(indices: Any, length: int) -> Any:
    """Return indices as a range or an array, counted from 0; None if some are no indices."""
    import numpy as np

    if type(indices) is range and indices and min(indices[0], indices[-1]) >= 0:
        return indices if max(indices[0], indices[-1]) < length else None
    try:
        found = np.asarray(indices)
    except Exception:  # noqa: BLE001 - a tensor on a device, a sequence that raises
        return None
    if found.ndim == 1 and not found.size:
        return range(0)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        return None
    if found.min() < -length or found.max() >= length:
        return None
    found = found.astype(np.int64)
    return np.where(found < 0, found + length, found)


def _taken(places: Any, indices: Any) -> Any:
    """Return the places at these indices."""
    if type(places) is not range:
        return places[_array(indices)]
    first, step = places.start, places.step
    if type(indices) is not range:
        return first + step * indices
    return range(first + step * indices.start, first + step * indices.stop, step * indices.step)


def _joined(parts: list[Any]) -> Any:
    """Return places one after the other; they are a range if they are consecutive."""
    parts = [part for part in parts if len(part)] or [range(0)]
    are_ranges = all(type(part) is range and part.step == 1 for part in parts)
    if are_ranges and all(one.stop == other.start for one, other in pairwise(parts)):
        return range(parts[0].start, parts[-1].stop)
    import numpy as np

    return np.concatenate([_array(part) for part in parts])


def _array(places: Any) -> Any:
    import numpy as np

    if type(places) is range:
        return np.arange(places.start, places.stop, places.step, dtype=np.int64)
    return places


def _integers(numbers: Any) -> Iterator[int]:
    """Return numbers as Python's integers."""
    if type(numbers) is range:
        return iter(numbers)
    firsts = range(0, len(numbers), _PAGE)
    return chain.from_iterable(numbers[first : first + _PAGE].tolist() for first in firsts)


# ---- ranges --------------------------------------------------------------------------------------

# The key in the ledger under which the `Cut` is stored.
_KEY = "ranges"


@dataclass(frozen=True, slots=True)
class Cut:
    """How a dataset is divided into ranges."""

    samples: int
    size: int
    facts: str = ""

    def listing_of(self, keys: Any) -> Listing:
        """List the ranges as rows; each has its samples' numbers as its identity."""
        identities = [text_of(keys[at : at + self.size]) for at in range(0, len(keys), self.size)]

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
    recorded = None if session.starts_over else ledger.get_meta(_KEY)
    if recorded is None or ledger.get_meta("work") is None:  # without it, no work has begun
        return None
    with reading(f"{_KEY!r}"):
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

    present = np.unique(_array(keys))
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
        "  - start over, removing all of it: resume=False, or --restart;\n"
        "  - keep only the files whose samples have the places that they had: "
        "accept_changes=True, or --accept-changes;\n"
        "  - another output folder."
    )


def _number_lost(made: InputRow, present: Any) -> int:
    """Return how many samples of a range are not among these numbers, which are sorted."""
    import numpy as np

    numbers = numbers_in(made.identity, range_of(made.row)[1])
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
    ledger.set_meta(_KEY, json.dumps(asdict(cut)), **others)


def drop_gone_ranges(session: Session) -> None:
    """Remove the files of ranges that the dataset no longer has: it has the files of all others."""
    session.ledger.prune(failed_too=False)
    session.perform_pending()


def text_of(numbers: Any) -> str:
    """Return numbers, a range or an array, as a short string: "0-8191" if they are consecutive."""
    import numpy as np

    if type(numbers) is not range and (np.diff(numbers) == 1).all():
        numbers = range(int(numbers[0]), int(numbers[-1]) + 1)
    if type(numbers) is range and numbers.step == 1:
        return f"{numbers[0]}-{numbers[-1]}"
    found = _array(numbers)
    return base64.b64encode(found.astype("<u8" if found.max() >> 32 else "<u4").tobytes()).decode()


def numbers_in(text: str, count: int) -> Any:
    """Return the numbers, a range or an array, that `text_of` made a string of."""
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
