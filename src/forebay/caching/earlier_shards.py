"""Samples that a cache takes over from the shards of an earlier run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from forebay.base.files import local_file
from forebay.caching.structure import MISSING
from forebay.ledger.records import Taken


@contextmanager
def earlier_samples(
    taken: Sequence[Taken], open_shard: Callable[[Path], Any]
) -> Iterator[Callable[[int], Any]]:
    """Yield what returns a sample that an earlier shard has; `MISSING` for another one.

    Args:
        open_shard: Opens a shard.
    """
    places: dict[int, tuple[Any, int]] = {}
    with ExitStack() as stack:
        for each in taken:
            shard = open_shard(stack.enter_context(local_file(each.location)))
            rows = zip(each.indices, each.rows, strict=True)
            places.update((index, (shard, row)) for index, row in rows if row < len(shard))

        def sample(index: int) -> Any:
            shard, row = places.get(index, (None, 0))
            return MISSING if shard is None else shard.sample(row)

        yield sample
