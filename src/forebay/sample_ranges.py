"""The samples of a dataset as inputs of a session: so many in a row make one, done as a whole.

    100,000 samples ── Cut(size=8192) ──> {"first": 0, "count": 8192}, {"first": 8192, …}, …

A run that is continued is cut as it was begun: the ledger records the size of a range, and the
length of the dataset.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import repeat

from forebay.errors import ChangedError
from forebay.jobs.database import reading
from forebay.jobs.listing import Listing
from forebay.jobs.records import Input
from forebay.session import Session

Identities = Callable[[], Iterator[str]]


@dataclass(frozen=True, slots=True)
class Cut:
    """How a dataset is cut into ranges.

    Attributes:
        samples: Samples of the dataset.
        size: Samples of a range; the last may have fewer.
        facts: What else is to stay as it was when the run was begun, as a string.
    """

    samples: int
    size: int
    facts: str = ""

    def listing(self, identities: Identities | None = None) -> Listing:
        """List the ranges as rows of "first" and "count".

        Args:
            identities: Returns for each range a string that differs once its samples have changed;
                None where nothing can tell.
        """

        def rows() -> Iterator[Input]:
            known = repeat("") if identities is None else identities()
            for first, identity in zip(range(0, self.samples, self.size), known, strict=False):
                count = min(self.size, self.samples - first)
                yield Input("", json.dumps({"first": first, "count": count}), identity)

        return Listing("rows", ("first", "count"), f"a Dataset of {self.samples} samples", rows)


def cut_before(session: Session, key: str, samples: int, *, may_grow: bool) -> Cut | None:
    """Return how the run that this one continues was cut; None if it continues none.

    Args:
        session: The session.
        key: The ledger's name for the cut.
        samples: Samples of the dataset now.
        may_grow: Whether the dataset may have another length.

    Raises:
        ChangedError: The dataset has another length.
        LedgerError: What is recorded is damaged.
    """
    recorded = None if session.starts_over else session.ledger.get_meta(key)
    if recorded is None:
        return None
    with reading(f"{key!r}"):
        known = json.loads(recorded)
        cut = Cut(int(known["samples"]), int(known["size"]), str(known["facts"]))
        if cut.samples < 1 or cut.size < 1:
            raise ValueError(f"{cut.samples} samples, {cut.size} in a range")
    if cut.samples != samples and not may_grow and session.options.version is None:
        raise ChangedError(
            f"the dataset has {samples:,} samples, and had {cut.samples:,} when this was begun\n"
            "  Nothing was started, and nothing is lost. Choose one:\n"
            "  - start over, removing what was made of it: resume=False, or --restart;\n"
            "  - keep what is done, if the samples that were there are still the same: "
            "version='2', or --version 2;\n"
            "  - another output folder."
        )
    return replace(cut, samples=samples)


def enrol_ranges(
    session: Session, key: str, cut: Cut, identities: Identities | None = None
) -> None:
    """Make the ranges the inputs of a session, and record the cut.

    A range whose file is missing, or has another size, is to be done again. Files of ranges that
    the dataset does not have any more are removed.
    """
    ledger = session.ledger
    session.enrol(cut.listing(identities))
    there = dict(session.folder.files())
    ledger.mark_todo(
        [at for name, nbytes, at in ledger.outputs() if at < 0 or there.get(name) != nbytes]
    )
    session.settle()
    known = {"samples": cut.samples, "size": cut.size, "facts": cut.facts}
    ledger.set_meta(key, json.dumps(known))
