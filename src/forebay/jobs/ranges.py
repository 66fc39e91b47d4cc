"""Rows of a dataset as inputs: so many in a row make one input, which is redone as a whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import repeat

from forebay.jobs.listing import Listing
from forebay.jobs.records import Input


def ranges(
    samples: int, size: int, identities: Callable[[], Iterator[str]] | None = None
) -> Listing:
    """List ranges of samples as rows of "first" and "count".

    Args:
        samples: How many there are.
        size: How many make a range; the last has fewer.
        identities: Returns what tells each range from what it was before; None where nothing can.
    """

    def rows() -> Iterator[Input]:
        told = repeat("") if identities is None else identities()
        for first, identity in zip(range(0, samples, size), told, strict=False):
            count = min(size, samples - first)
            yield Input("", json.dumps({"first": first, "count": count}), identity)

    return Listing("rows", ("first", "count"), f"a Dataset of {samples} samples", rows)
