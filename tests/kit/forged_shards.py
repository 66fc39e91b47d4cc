"""Shards as an attacker, or a broken disk, might leave them: changes of real ones."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator

_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 1 << 20, 1 << 30, (1 << 31) - 1, 1 << 31,
            (1 << 32) - 1, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)  # fmt: skip


def forged(data: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """Yield changes of a shard, the same for the same seed.

    Bytes and bits flipped, numbers replaced by large or negative ones, parts cut out, repeated or
    moved, the end cut off; rather near the beginning and the end, where formats have their tables.
    """
    rng = random.Random(seed)
    for _ in range(count):
        found = bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            _CHANGES[rng.randrange(len(_CHANGES))](rng, found)
        yield bytes(found)


def _place(rng: random.Random, data: bytearray) -> int:
    near = min(len(data), rng.choice((64, 512, 4096, 1 << 30)))
    at = rng.randrange(near) if near else 0
    return at if rng.random() < 0.5 else len(data) - 1 - at


def _flip_bit(rng: random.Random, data: bytearray) -> None:
    if data:
        data[_place(rng, data)] ^= 1 << rng.randrange(8)


def _set_byte(rng: random.Random, data: bytearray) -> None:
    if data:
        data[_place(rng, data)] = rng.randrange(256)


def _set_number(rng: random.Random, data: bytearray) -> None:
    form, number = rng.choice("BHIQ"), rng.choice(_NUMBERS)
    text = struct.pack(rng.choice("<>") + form, number & ((1 << 8 * struct.calcsize(form)) - 1))
    at = _place(rng, data) if data else 0
    data[at : at + len(text)] = text


def _cut_end(rng: random.Random, data: bytearray) -> None:
    del data[rng.randrange(len(data) + 1) :]


def _cut_out(rng: random.Random, data: bytearray) -> None:
    at = _place(rng, data) if data else 0
    del data[at : at + rng.choice((1, 2, 8, 100))]


def _repeat(rng: random.Random, data: bytearray) -> None:
    at = _place(rng, data) if data else 0
    data[at:at] = data[at : at + rng.choice((1, 8, 100, 1000))]


def _copy(rng: random.Random, data: bytearray) -> None:
    if data:
        at, to, size = _place(rng, data), _place(rng, data), rng.choice((4, 8, 64))
        data[to : to + size] = data[at : at + size]


_CHANGES = (_flip_bit, _flip_bit, _set_byte, _set_number, _set_number, _cut_end, _cut_out, _repeat,
            _copy)  # fmt: skip
