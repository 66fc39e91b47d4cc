"""Which samples form which batch: the plan of all epochs, for one rank or many. PURE.

    epoch e    position 0 ……………………………………………………………………… length
               | global batch 0      | global batch 1      | … tail
               | rank 0 | rank 1 | … |

The plan is of *global* batches: all samples of one step, over all ranks. Global batch `k` is the
samples at positions `k * global_batch_size` and after in the order of the epoch, and a rank's batch
is a slice of it. So the global batches are the same for any number of ranks that divides them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forebay.plan.mixture import Mixture
from forebay.plan.permutation import Permutation
from forebay.plan.seeds import ORDER, seed_of

# Positions to compute at a time: enough to be fast with numpy, few enough for a fast start.
BLOCK = 4096


class Share(NamedTuple):
    """One rank's part of one global batch.

    Attributes:
        first: Position of its first sample.
        samples: How many samples it has.
        repeated: How many samples are repeated after them, so that all ranks have equally many
            steps: 0 or 1.
    """

    first: int
    samples: int
    repeated: int = 0


class Block(NamedTuple):
    """Some consecutive batches of one rank.

    Attributes:
        indices: Samples, int64, a row for each batch; the last `repeated` of a row are repetitions.
        positions: Position in the epoch of each batch's first sample.
        repeated: See `Share`.
    """

    indices: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    repeated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The batches of a map-style dataset, as a function of seed, epoch and number.

    Attributes:
        length: Samples of an epoch.
        batch_size: Samples of a batch on one rank.
        world_size: Number of ranks.
        rank: The rank of this process.
        drop_last: Leave out the incomplete global batch at the end of an epoch.
        tail: How it is divided otherwise: "repeat" gives every rank the same number of samples, by
            repeating one where needed; "uneven" repeats none, so some ranks may have one step
            less.
        seed: The seed of the order.
        shuffle: Whether each epoch has a random order; otherwise it is that of the dataset.
        mixture: Where samples come from several sources; `length` is then an epoch's samples.
    """

    length: int
    batch_size: int
    seed: int
    shuffle: bool = False
    world_size: int = 1
    rank: int = 0
    drop_last: bool = False
    tail: str = "repeat"
    mixture: Mixture | None = None

    @property
    def global_batch_size(self) -> int:
        """Samples of one step, over all ranks."""
        return self.batch_size * self.world_size

    def end(self, sample: int = 0) -> int:
        """Return the position, over all ranks, at which an epoch from `sample` on ends."""
        left = max(self.length - sample, 0)
        return sample + left - (left % self.global_batch_size if self.drop_last else 0)

    def steps(self, sample: int = 0) -> int:
        """Return how many batches this rank has from position `sample` of an epoch on."""
        full, tail = divmod(self.end(sample) - sample, self.global_batch_size)
        share = share_of(tail, self)
        return full + (share.samples + share.repeated > 0)

    def blocks(
        self, epoch: int, sample: int = 0, order: int | None = None, origin: int | None = None
    ) -> Iterator[Block]:
        """Yield this rank's batches of an epoch, from a position on, in blocks.

        Args:
            epoch: Its number.
            sample: Position of the first global batch.
            order: The number that determines a shuffled order, if it is not the epoch's.
            origin: Samples of all earlier epochs, after which a mixture continues; None if these
                epochs were as long as this one.
        """
        drawn = epoch if order is None else order
        before, end = epoch * self.end() if origin is None else origin, self.end(sample)
        size, world = self.batch_size, self.global_batch_size
        together = max(BLOCK // size, 1)
        while (full := min((end - sample) // world, together)) > 0:
            positions = sample + self.rank * size + world * np.arange(full)
            yield Block(self._indices(before, drawn, positions, size), positions, 0)
            sample += full * world
        share = share_of(end - sample, self)
        if share.samples + share.repeated:
            position = np.array([sample + share.first])
            indices = self._indices(before, drawn, position, share.samples)
            if share.repeated:
                again = self._indices(before, drawn, np.array([self.rank % self.length]), 1)
                indices = np.concatenate([indices, again], axis=1)
            yield Block(indices, position, share.repeated)

    def _indices(
        self, before: int, drawn: int, starts: npt.NDArray[np.int64], count: int
    ) -> npt.NDArray[np.int64]:
        """Return the samples at `count` positions from each start on, a row for each start."""
        if self.mixture is not None:
            mixture = self.mixture
            if self.world_size == 1:  # consecutive
                whole = len(starts) * count
                found = mixture.indices(self.seed, self.shuffle, before + int(starts[0]), whole)
                return found.reshape(len(starts), count)
            rows = [
                mixture.indices(self.seed, self.shuffle, before + start, count)
                for start in starts.tolist()
            ]
            return np.stack(rows)
        positions = starts[:, None] + np.arange(count)
        if not self.shuffle:
            return positions
        order = Permutation(self.length, seed_of(self.seed, ORDER, drawn))
        return order.at(positions).astype(np.int64)


def share_of(samples: int, plan: Plan) -> Share:
    """Return one rank's part of a global batch of `samples` samples, which is at position 0.

    An incomplete batch is divided as evenly as possible: every rank has `samples // world_size` of
    them or one more, and where it has fewer than others, one is repeated.
    """
    if samples == plan.global_batch_size:
        return Share(plan.rank * plan.batch_size, plan.batch_size)
    begin = plan.rank * samples // plan.world_size
    end = (plan.rank + 1) * samples // plan.world_size
    most = -(-samples // plan.world_size)
    repeated = most - (end - begin) if plan.tail == "repeat" else 0
    return Share(begin, end - begin, repeated)
