"""What has to come from a loader: by the documents, and by what came before under the same names.

It knows which samples there are, which order a sampler has, and where the trainer is. What it does
not know, such as a shuffled order or a drawn number, it learns where it comes first, and from then
on that has to be the same, however the loader is made.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .life import WrongError
from .loader_data import (
    BROKEN,
    COUNT,
    TOGETHER,
    Record,
    distributed_order,
    order_of,
)
from .loader_trainer import Taken

STREAMS = ("stream", "stream-shuffled", "stream-state", "stream-epoch", "stream-state-epoch")
TOLD = ("epochal", "stream-epoch", "stream-state-epoch")
ROWS = ("packed", "grouped")
# Whose samples are asked for together: what they draw depends on the batch of a rank.
GROUPED = ("groups", "cache", "tar", "parquet", "jsonl", "arrow", "mds")

Setup = dict[str, str]


def is_plain(setup: Setup) -> bool:
    """Return whether a loader has only torch's arguments."""
    plain = {
        "seed": "none",
        "buffer": "none",
        "world": "1",
        "backend": "process",
        "failing": "none",
    }
    return (
        all(setup[axis] == value for axis, value in plain.items())
        and setup["workers"] != "auto"
        and setup["data"] not in ("mix", *ROWS)
    )


def is_seeded(setup: Setup) -> bool:
    """Return whether order and draws are functions of a seed that the user knows."""
    return setup["seed"] != "none" or setup["world"] != "1"


def is_drawn_again(setup: Setup) -> bool:
    """Return whether each iteration draws an order of its own, as with torch."""
    draws_by_itself = setup["sampler"] == "drawn" or setup["holder"] == "sampler"
    return draws_by_itself or setup["data"] == "stream-shuffled" or not is_seeded(setup)


def workers_of(setup: Setup) -> int:
    """Return how many parts a stream has."""
    return max(1, int(setup["workers"])) if setup["workers"] != "auto" else 1


def size_of(setup: Setup) -> int:
    """Return how many samples, or rows, all ranks take in a step."""
    if setup["data"] == "grouped":
        return int(setup["world"])
    return 1 if setup["batch"] == "raw" else TOGETHER


def steps_of(setup: Setup) -> int | None:
    """Return how many batches an epoch has, where the loader knows it before it ends."""
    if setup["data"] in (*STREAMS, *ROWS):
        return None
    size = size_of(setup)
    return COUNT // size if setup["tail"] == "drop" else -(-COUNT // size)


@dataclass
class Position:
    """Where a trainer is, and what it has seen of this epoch.

    Attributes:
        batch: How many batches of the epoch it has got.
        seen: The samples of the epoch so far, in order.
        told: What `set_epoch` was called with.
        branch: What else the order follows from: weights, or an order without a known seed.
        sources: Of a mixture, all samples of each source so far.
        is_whole: Whether no epoch was left before its end.
        is_clean: Whether nothing but taking batches has happened.
        first: Where the first iteration since the loader was made, or a state loaded, began in its
            epoch; None once that is over.
        began: How many samples of the epoch had come then.
    """

    epoch: int = 0
    batch: int = 0
    seen: list[int] = field(default_factory=list)
    told: int = 0
    version: int = 0
    order: int = 1
    branch: str = "0"
    sources: dict[str, list[int]] = field(default_factory=lambda: {"a": [], "b": []})
    is_clean: bool = True
    is_whole: bool = True
    first: int | None = 0
    began: int = 0

    def moved_to(self, epoch: int) -> None:
        """The loader was told to begin an epoch."""
        self.epoch, self.batch, self.seen, self.is_clean = epoch, 0, [], False
        if self.first is not None:
            self.first, self.began = 0, 0


class Oracle:
    """Judges what comes."""

    def __init__(self) -> None:
        self.at = Position()
        self.orders: dict[Any, tuple[int, ...]] = {}
        self.draws: dict[Any, tuple[float, ...]] = {}
        self.where: dict[Any, Any] = {}
        self.digests: dict[Any, tuple[Any, ...]] = {}
        self.clean: dict[tuple[int, int], tuple[Any, ...]] = {}
        self.last_epoch = 0

    def got(self, setup: Setup, taken: Taken) -> None:
        """Judge the next batch.

        Raises:
            WrongError: It is not what had to come.
        """
        at, records = self.at, taken.records()
        self.last_epoch = max(self.last_epoch, at.epoch)
        self.judge(setup, at.epoch, at.batch, records)
        if at.is_clean:
            self.clean[at.epoch, at.batch] = tuple(records), taken.digests, at.told
        key = self._key(setup, at.epoch, at.batch), setup["world"]
        self.digests.setdefault(key, (at.told, at.version, taken.digests))
        at.seen += [each.id for each in records]
        at.batch += 1

    def judge(self, setup: Setup, epoch: int, batch: int, records: Sequence[Record]) -> None:
        """Judge a batch of an epoch."""
        name = f"epoch {epoch}, batch {batch}"
        self._judge_said(setup, name, records)
        if setup["data"] in ROWS:
            records = sorted(records)
        ids = tuple(each.id for each in records)
        expected = self._expected(setup, epoch, batch)
        if expected is not None and list(ids) != expected:
            raise WrongError(f"{name} has samples {list(ids)} instead of {expected}")
        key = self._key(setup, epoch, batch)
        before = self.orders.setdefault(key, ids)
        if before != ids:
            raise WrongError(f"{name} has samples {list(ids)}, and had {list(before)} before")
        if setup["draws"] != "nothing" and setup["holder"] != "sampler":
            self._judge_draws(setup, name, (epoch, batch), records)

    def _judge_said(self, setup: Setup, name: str, records: Sequence[Record]) -> None:
        """Judge what each sample says of `set_epoch` and its version."""
        at = self.at
        for each in records:
            if setup["data"] in TOLD and each.told != at.told:
                raise WrongError(
                    f"{name}: sample {each.id} was told epoch {each.told} instead of {at.told}"
                )
            if setup["data"] != "columns" and each.version != at.version:
                raise WrongError(
                    f"{name}: sample {each.id} is of version {each.version} of the dataset"
                    f" instead of {at.version}"
                )

    def _judge_draws(
        self, setup: Setup, name: str, place: tuple[int, int], records: Sequence[Record]
    ) -> None:
        key: Any = self._key(setup, *place)
        if setup["holder"] == "collate" or setup["data"] in GROUPED:
            key = key, setup["world"], setup["tail"] if setup["world"] != "1" else ""
        drawn = tuple(each.draw for each in records)
        if setup["draws"].startswith("own-") and not is_seeded(setup):
            return  # in each worker the same, as with torch
        if setup["draws"].startswith("own-") and setup["data"] in STREAMS:
            return  # left alone: streams divide their work by what they own
        if not is_plain(setup):
            before = self.draws.setdefault(key, drawn)
            if before != drawn:
                raise WrongError(f"{name} drew {drawn}, and {before} before")
        # Draws follow from the place in an epoch, which another sample has in another order.
        told = self.at.told if setup["sampler"] in ("told", "distributed") else 0
        context: Any = self.at.branch, told, self.at.order
        if setup["holder"] == "collate" or setup["data"] in GROUPED:
            context += setup["world"], setup["tail"]
        for each in records:
            sample: Any = place[0], each.id
            if setup["holder"] == "collate":
                sample = place
            other = self.where.setdefault((context, each.draw), sample)
            if other != sample:
                raise WrongError(
                    f"{name}: sample {each.id} drew {each.draw}, as {other} did before"
                )

    def _key(self, setup: Setup, epoch: int, batch: int) -> Any:
        """Return what the order of a batch is a function of."""
        key: tuple[Any, ...] = self.at.branch, epoch, batch
        if setup["data"] in STREAMS:
            key += ("workers", workers_of(setup))
        if setup["data"] == "grouped":
            key += ("world", setup["world"])
        if setup["sampler"] == "fixed":
            key += ("order", self.at.order)
        if setup["sampler"] in ("told", "distributed"):
            key += ("told", self.at.told)
        return key

    def _expected(self, setup: Setup, epoch: int, batch: int) -> list[int] | None:
        """Return the samples of a batch, where the documents say which."""
        size, kind = size_of(setup), setup["data"]
        if kind in STREAMS:
            if kind == "stream-shuffled":
                return None
            batches = stream_batches(workers_of(setup), size)
            batches = [each for each in batches if setup["tail"] != "drop" or len(each) == size]
            return batches[batch] if batch < len(batches) else []
        if kind in ("mix", *ROWS):
            return None
        order = {
            "sequence": list(range(COUNT)),
            "fixed": order_of(self.at.order),
            "distributed": distributed_order(self.at.told),
            "told": order_of(self.at.told),
            "state": order_of(epoch),
            "batches": order_of(1),
        }.get(setup["sampler"])
        if order is None or setup["holder"] == "sampler":
            return None
        found = order[batch * size : (batch + 1) * size]
        if setup["tail"] == "drop" and len(found) < size:
            return []
        return [each for each in found if setup["failing"] != "skip" or each != BROKEN]

    def ended(self, setup: Setup) -> None:
        """Judge the end of an epoch, and begin the next one."""
        at = self.at
        name, seen = f"epoch {at.epoch}", Counter(at.seen)
        if setup["data"] == "mix":
            self._judge_mix(setup, name)
        else:
            self._judge_whole(setup, name, seen)
        at.epoch, at.batch, at.seen, at.first = at.epoch + 1, 0, [], None

    def _judge_whole(self, setup: Setup, name: str, seen: Counter[int]) -> None:
        wanted = Counter(range(COUNT))
        if setup["failing"] == "skip":
            wanted[BROKEN] = 0
        size = size_of(setup)
        if setup["sampler"] == "weights":
            length = COUNT - COUNT % size * (setup["tail"] == "drop")
            if seen.keys() - wanted.keys() or seen.total() != length:
                raise WrongError(f"{name} has samples {sorted(seen.elements())}")
            return
        repeated = sorted((seen - wanted).elements())
        missing = sorted((wanted - seen).elements())
        if setup["tail"] == "drop" and setup["data"] not in STREAMS:
            if setup["data"] in ROWS or len(missing) <= COUNT % size:
                missing = []
        elif setup["tail"] == "drop":
            parts = stream_batches(workers_of(setup), size)
            if len(missing) == sum(len(each) for each in parts if len(each) < size):
                missing = []
        if repeated or missing:
            raise WrongError(f"{name}: samples {missing} never came, {repeated} more than once")

    def _judge_mix(self, setup: Setup, name: str) -> None:
        at = self.at
        length = COUNT - COUNT % TOGETHER * (setup["tail"] == "drop")
        if len(at.seen) != length:
            raise WrongError(f"{name} of a mixture has {len(at.seen)} samples")
        for source, first, count in (("a", 0, 9), ("b", 100, 14)):
            sofar = at.sources[source]
            sofar += [each - first for each in at.seen if first <= each < first + count]
            if setup["tail"] == "drop" or not at.is_whole:
                continue
            for start in range(0, len(sofar), count):
                part = sofar[start : start + count]
                if len(set(part)) < len(part):
                    raise WrongError(
                        f"{name}: source {source} repeats samples before all have come: {sofar}"
                    )

    def replayed(self, setup: Setup, epoch: int, batch: int, taken: Taken) -> None:
        """Judge a batch that was made again."""
        key = self._key(setup, epoch, batch), setup["world"]
        before = self.digests.get(key)
        is_fixed = is_seeded(setup) or not setup["draws"].startswith("own-")
        if (
            is_fixed
            and before
            and before[:2] == (self.at.told, self.at.version)
            and before[2] != taken.digests
        ):
            raise WrongError(f"a replay of epoch {epoch}, batch {batch} has other contents")
        is_last = (batch + 1) * size_of(setup) >= COUNT
        if setup["world"] == "1" or not is_last:
            self.judge(setup, epoch, batch, taken.records())

    def left(self, setup: Setup, epoch: int) -> bool:
        """The trainer left the epoch: the next one begins, but for a look at one batch.

        Args:
            epoch: The loader's, now: an exception may have cost a batch that the trainer never got.

        Returns:
            Whether it was such a look, so that the same batch comes again.
        """
        at, first = self.at, self.at.first
        at.first = None
        is_short = first is not None and at.batch - first <= 1 and not self.is_over(setup)
        if is_short and epoch == at.epoch:
            at.batch, at.seen = first or 0, at.seen[: at.began]
            return True
        at.is_whole = False
        at.epoch, at.batch, at.seen = at.epoch + 1, 0, []
        return False

    def is_over(self, setup: Setup) -> bool:
        """Return whether the last batch of the epoch has come."""
        return self.at.batch > 0 and self.at.batch == steps_of(setup)

    def saved(self, setup: Setup) -> Position:
        """Return the position to be continued from: after the last batch, the next epoch."""
        now = self.at
        self.at = copy.deepcopy(now)
        if self.is_over(setup):
            self.ended(setup)
        now, self.at = self.at, now
        return now

    def may_be_epoch(self, setup: Setup, epoch: int) -> bool:
        """Return whether a loader may be in an epoch: after its last batch, it is in the next."""
        if steps_of(setup) is None:
            return epoch == self.at.epoch or (self.at.batch > 0 and epoch == self.at.epoch + 1)
        return epoch == self.at.epoch + self.is_over(setup)


def stream_batches(workers: int, size: int) -> list[list[int]]:
    """Return the batches of a stream that is divided among workers, as torch orders them."""
    parts = [list(range(COUNT))[worker::workers] for worker in range(workers)]
    batches = [
        [part[first : first + size] for first in range(0, len(part), size)] for part in parts
    ]
    longest = max(len(each) for each in batches)
    return [each[number] for number in range(longest) for each in batches if number < len(each)]
