"""Find the inputs that a listing names twice, in bounded memory, once the ledger has all of them.

The hashes of the keys are divided into 256 parts, which go to a temporary file when there are
many: each part is then small enough to be looked through in memory.
"""

from __future__ import annotations

import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from forebay.errors import InputError

_PARTS = 256
# Hashes in memory, of 8 bytes each.
_IN_MEMORY = 1 << 21
# Keys that are counted, if very many are listed twice.
_COUNTED = 10_000
# Characters of a value in a message.
_SHOWN = 80


class Duplicate(NamedTuple):
    """An input that is listed twice.

    Attributes:
        second: Its second place.
        more: How many other inputs are.
    """

    first: int
    second: int
    more: int
    value: str
    is_row: bool


def _repeated(keys: Iterable[str]) -> set[int]:
    """Return the hashes of keys that are there more than once, at most about 10,000 of them."""
    found: set[int] = set()
    parts = [array("q") for _ in range(_PARTS)]
    spilled: list[list[tuple[int, int]]] = [[] for _ in range(_PARTS)]
    with tempfile.SpooledTemporaryFile(max_size=1) as file:
        for held, number in enumerate(map(hash, keys), 1):
            parts[number % _PARTS].append(number)
            if held % _IN_MEMORY == 0:
                for part, places in zip(parts, spilled, strict=True):
                    places.append((file.tell(), part.itemsize * len(part)))
                    file.write(part.tobytes())
                    del part[:]
        for part, places in zip(parts, spilled, strict=True):
            for offset, nbytes in places:
                file.seek(offset)
                part.frombytes(file.read(nbytes))
            if len(set(part)) < len(part):
                found.update(each for each, count in Counter(part).items() if count > 1)
            del part[:]
            if len(found) > _COUNTED:
                break
    return found


def find_duplicate(rows: Callable[[], Iterable[Sequence[Any]]]) -> Duplicate | None:
    """Return the first key that is listed twice; None if there is none.

    Args:
        rows: Returns the inputs from the first on: ordinal, source and row of each.
    """
    suspected = _repeated(each[1] if each[2] is None else each[2] for each in rows())
    if not suspected:
        return None
    firsts: dict[str, int] = {}
    seconds: dict[int, Duplicate] = {}
    for ordinal, source, row, *_ in rows():
        key = source if row is None else row
        if hash(key) in suspected and (first := firsts.setdefault(key, ordinal)) != ordinal:
            seconds.setdefault(first, Duplicate(first, ordinal, 0, key, row is not None))
    if not seconds:
        return None  # different keys with one hash
    return seconds[min(seconds)]._replace(more=len(seconds) - 1)


def listed_twice(found: Duplicate, *, is_late: bool) -> InputError:
    """Return the error for an input that is listed twice."""
    value, is_row = found.value, found.is_row
    shown = value if len(value) <= _SHOWN else value[:_SHOWN] + "..."
    what = "row" if is_row else "input"
    more = f" (and so {'is' if found.more == 1 else 'are'} {found.more:,} more)"
    way = "List each input once, as list(dict.fromkeys(paths)) does."
    if is_row:
        way = (
            "Remove one of them, as drop_duplicates() of pandas does, or add a column that tells "
            "them apart."
        )
    if "://" in value:
        way += " URLs that differ in their credentials alone are the same."
    kept = (
        "The listing was read while its first inputs were worked on."
        if is_late
        else "Nothing was started, and the ledger is unchanged."
    )
    return InputError(
        f"{what} {shown} is listed twice: at positions {found.first} and {found.second}"
        f"{more if found.more else ''}\n  {kept} {way}"
    )
