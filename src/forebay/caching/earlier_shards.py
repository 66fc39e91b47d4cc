"""Samples that a cache takes over from the shards of an earlier run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from forebay.base.earlier_rows import Taken
from forebay.base.files import local_file


@contextmanager
def earlier_leaves(
    taken: Sequence[Taken], open_shard: Callable[[Path], Any], structure: Any
) -> Iterator[Callable[[int], list[Any] | None]]:
    """Yield what returns the leaves of a sample that an earlier shard has; None for another one.

    Args:
        open_shard: Opens a shard.
        structure: Of the samples: shards of another one have none that could be used.
    """
    places: dict[int, tuple[Any, int]] = {}
    with ExitStack() as stack:
        for each in taken:
            shard = open_shard(stack.enter_context(local_file(each.location)))
            if shard.structure == structure:
                rows = zip(each.indices, each.rows, strict=True)
                places.update((index, (shard, row)) for index, row in rows if row < len(shard))

        def leaves(index: int) -> list[Any] | None:
            shard, row = places.get(index, (None, 0))
            return None if shard is None else list(shard.leaves(row))

        yield leaves
