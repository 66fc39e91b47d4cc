"""Which blocks of a cache stay in memory and on disk, by who holds them. PURE."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence


class Residency:
    """Which blocks are in memory, who holds them, and which blocks on disk are of use.

    A block is in memory as long as a window or a reader holds it. On disk, those that arrive first
    stay, whatever is used later, since with a new order in each epoch the block that was used last
    is no less likely to be needed next (see docs/design/0011).
    """

    def __init__(self) -> None:
        self._clients: dict[int, Counter[int]] = defaultdict(Counter)  # how often each holds what
        self._holders: Counter[int] = Counter()
        self._in_memory: set[int] = set()
        self._used: dict[int, int] = {}  # blocks on disk, and the last epoch that used each
        self._epoch: int | None = None
        self._swept: int | None = None

    def hold(self, client: int, blocks: Sequence[int], epoch: int | None = None) -> list[int]:
        """Note that a client needs blocks; return what to fetch.

        Args:
            epoch: Of the window that they are; None for others.
        """
        if epoch is not None and self._epoch is None:  # what earlier jobs left counts as used now
            self._used = dict.fromkeys(self._used, epoch)
        if epoch is not None:
            self._epoch = max(self._epoch or 0, epoch)
        self._clients[client].update(blocks)
        self._holders.update(blocks)
        self._used |= {block: self._epoch or 0 for block in blocks if block in self._used}
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

    def put_on_disk(self, block: int) -> None:
        """Note that a block is on disk."""
        self._used.setdefault(block, self._epoch or 0)

    def forget(self, block: int) -> None:
        """Note that a block is on disk no more."""
        self._used.pop(block, None)

    def stale(self) -> list[int]:
        """Forget blocks on disk that were used neither in this epoch nor in the last; return them.

        They belong to ranks that are elsewhere now.
        """
        oldest = (self._epoch or 0) - 1
        if self._swept == self._epoch:
            return []
        self._swept = self._epoch
        found = [
            block
            for block, epoch in self._used.items()
            if epoch < oldest and not self._holders[block]
        ]
        for block in found:
            del self._used[block]
        return found

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
