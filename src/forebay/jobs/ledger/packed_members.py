"""What a ledger records of packed outputs: its place in a shard, and which shards there are.

The places are part of the inputs' records, so they are committed with the inputs. Which files in
the folder `packed` belong to this ledger is a record of its own: others are never touched.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay.jobs.ledger.database import chunks, reading, storable
from forebay.jobs.ledger.done_blocks import compress, expand
from forebay.jobs.ledger.records import PackedMember
from forebay.jobs.outputs.output_names import (
    MEMBER_INDEX,
    PACKED,
    is_packed,
    recorded_name,
    shard_name,
)
from forebay.jobs.packed.tar_member import BLOCK

if TYPE_CHECKING:
    from forebay.jobs.ledger.ledger import Ledger

_KEY = "packed"
_LARGEST = 1 << 62


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """Which files in the folder of packed outputs a ledger knows.

    Attributes:
        live: The shards that hold recorded outputs.
        dead: Those that are to be removed.
    """

    live: frozenset[int] = frozenset()
    dead: frozenset[int] = frozenset()

    @property
    def numbers(self) -> frozenset[int]:
        """All of them."""
        return self.live | self.dead

    @property
    def names(self) -> list[str]:
        """Their names relative to the output folder, and that of the index; empty without any."""
        names = [f"{PACKED}/{shard_name(each)}" for each in sorted(self.numbers)]
        return [*names, f"{PACKED}/{MEMBER_INDEX}"] if names else []


def read_shards(ledger: Ledger) -> ShardRecord:
    """Return the record of the shards.

    Raises:
        LedgerError: It is damaged.
    """
    with reading("shards"):
        found = json.loads(ledger.get_meta(_KEY) or '{"live": [], "dead": []}')
        live, dead = (frozenset(map(_count, found[key])) for key in ("live", "dead"))
        return ShardRecord(live, dead)


def write_shards(ledger: Ledger, shards: ShardRecord) -> None:
    """Replace the record of the shards."""
    found = {"live": sorted(shards.live), "dead": sorted(shards.dead)}
    ledger.set_meta(_KEY, json.dumps(found))


def recorded_members(ledger: Ledger) -> Iterator[tuple[int, PackedMember]]:
    """Yield the ordinal of the input, and the record, of every packed output, gone inputs' too.

    Raises:
        LedgerError: A record is damaged, or a name leads out of the folder.
    """
    with reading("packed outputs"):
        for ordinal, outputs in ledger.output_columns():
            for each in json.loads(outputs):
                if len(each) > 2:
                    yield ordinal, _checked(PackedMember(*each))


def move_members(ledger: Ledger, places: Mapping[str, tuple[int, int]]) -> None:
    """Record that packed outputs have other places, all of them in one transaction.

    Args:
        ledger: The ledger.
        places: Shard and offset by name.
    """
    with ledger.transaction() as db:
        ordinals: set[int] = set()
        for part, _ in chunks(places):
            marks = ",".join(["CAST(? AS TEXT)"] * len(part))
            sql = f"SELECT ordinal FROM outputs WHERE name IN ({marks})"  # noqa: S608
            names = [storable(name) for name in part]
            ordinals.update(one for (one,) in db.execute(sql, names) if one is not None)
        expand(db, ordinals)
        for part, marks in chunks(ordinals):
            sql = f"SELECT outputs, ordinal FROM inputs WHERE ordinal IN ({marks})"  # noqa: S608
            db.executemany(
                "UPDATE inputs SET outputs = ? WHERE ordinal = ?",
                [(_moved(outputs, places), ordinal) for outputs, ordinal in db.execute(sql, part)],
            )
        compress(db, ordinals)


def _moved(outputs: str, places: Mapping[str, tuple[int, int]]) -> str:
    found = json.loads(outputs)
    for each in found:
        if len(each) > 2 and each[0] in places:
            each[2:4] = places[each[0]]
    return json.dumps(found)


def _checked(member: PackedMember) -> PackedMember:
    """Return a member that is recorded.

    Raises:
        ValueError: Nothing can have that name or place.
        LedgerError: The name leads out of the folder.
    """
    name, size, shard, offset, crc = member
    if not is_packed(recorded_name(name)):
        raise ValueError(f"{name!r} is not the name of a packed output")
    if not type(size) is type(shard) is type(offset) is type(crc) is int:
        raise ValueError(f"{member} has no numbers")
    if min(size, shard, offset - BLOCK, crc) < 0 or offset % BLOCK or offset + size > _LARGEST:
        raise ValueError(f"{member} can be in no shard")
    return member


def _count(value: object) -> int:
    """Return a recorded count.

    Raises:
        ValueError: It is not an integer, negative, or too large.
    """
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise ValueError(f"{value!r} is not a count")
    return value
