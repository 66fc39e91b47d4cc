"""Which blocks of a cache stay in memory, by who holds them. PURE."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence


class Residency:
    """Which blocks are in memory, and who holds them: as long as a window or a reader does."""

    def __init__(self) -> None:
        self._clients: dict[int, Counter[int]] = defaultdict(Counter)  # how often each holds what
        self._holders: Counter[int] = Counter()
        self._in_memory: set[int] = set()

    def hold(self, client: int, blocks: Sequence[int]) -> list[int]:
        """Note that a client needs blocks; return what to fetch."""
        self._clients[client].update(blocks)
        self._holders.update(blocks)
        return [block for block in blocks if not self.is_here(block)]

    def release(self, client: int, blocks: Sequence[int]) -> list[int]:
        """Note that a client has read blocks that it held; return what to drop."""
        _subtract(self._clients[client], blocks)
        return self._let_go(blocks)

    def leave(self, client: int) -> list[int]:
        """Forget a client; return what to drop."""
        return self._let_go([*self._clients.pop(client, Counter()).elements()])

    def is_held(self, block: int) -> bool:
        """Return whether anybody needs a block."""
        return self._holders[block] > 0

    def is_here(self, block: int) -> bool:
        """Return whether a block can be read."""
        return block in self._in_memory

    def put_in_memory(self, block: int) -> None:
        """Note that a block has arrived in memory."""
        self._in_memory.add(block)

    def _let_go(self, blocks: Sequence[int]) -> list[int]:
        """Return the blocks that nobody holds now, which are no longer in memory."""
        free = _subtract(self._holders, blocks)
        self._in_memory.difference_update(free)
        return free


def _subtract(counts: Counter[int], blocks: Sequence[int]) -> list[int]:
    """Count blocks less; return those that do not count any more."""
    counts.subtract(blocks)
    gone = [block for block in dict.fromkeys(blocks) if counts[block] <= 0]
    for block in gone:
        del counts[block]
    return gone
