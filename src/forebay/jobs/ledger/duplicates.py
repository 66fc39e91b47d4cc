"""Find the inputs that a listing names twice, in bounded memory, once the ledger has all of them.

The hashes of the keys are divided into 256 parts, which go to a temporary file when there are
many: each part is then small enough to be looked through in memory.
"""

from __future__ import annotations

import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import IO, NamedTuple

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
        first: Its first place in the listing, from 1.
        second: Its second place.
        more: How many other inputs are listed more than once.
    """

    first: int
    second: int
    more: int


class KeyHashes:
    """The hashes of all keys of a listing."""

    def __init__(self) -> None:
        self._parts = [array("q") for _ in range(_PARTS)]
        self._held = 0
        self._file: IO[bytes] | None = None
        self._spilled: list[list[tuple[int, int]]] = [[] for _ in range(_PARTS)]

    def add(self, keys: Sequence[str]) -> None:
        """Add keys."""
        parts = self._parts
        for number in map(hash, keys):
            parts[number % _PARTS].append(number)
        self._held += len(keys)
        if self._held >= _IN_MEMORY:
            self._spill()

    def repeated(self) -> set[int]:
        """Return hashes that were added more than once, at most about 10,000 of them."""
        found: set[int] = set()
        for part, spilled in zip(self._parts, self._spilled, strict=True):
            numbers = array("q", part)
            for offset, nbytes in spilled:
                assert self._file is not None, "parts are spilled only into the file"
                self._file.seek(offset)
                numbers.frombytes(self._file.read(nbytes))
            if len(set(numbers)) < len(numbers):
                found.update(each for each, count in Counter(numbers).items() if count > 1)
            if len(found) > _COUNTED:
                break
        return found

    def close(self) -> None:
        """Remove the temporary file."""
        if self._file is not None:
            self._file.close()

    def _spill(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        for at, part in enumerate(self._parts):
            body = part.tobytes()
            self._spilled[at].append((self._file.tell(), len(body)))
            self._file.write(body)
            self._parts[at] = array("q")
        self._held = 0


def find_duplicate(
    keys: Iterable[Sequence[str]], again: Iterable[tuple[int, str]]
) -> Duplicate | None:
    """Return the first key that is listed twice; None if there is none.

    Args:
        keys: All keys, in lists and in any order.
        again: All ordinals and keys once more, in order; read only if some hashes are equal.
    """
    hashes = KeyHashes()
    try:
        for page in keys:
            hashes.add(page)
        suspected = hashes.repeated()
    finally:
        hashes.close()
    if not suspected:
        return None
    firsts: dict[str, int] = {}
    seconds: dict[int, int] = {}
    for ordinal, key in again:
        if hash(key) in suspected:
            first = firsts.setdefault(key, ordinal)
            if first != ordinal:
                seconds.setdefault(first, ordinal)
    if not seconds:
        return None  # different keys with one hash
    first = min(seconds)
    return Duplicate(first, seconds[first], len(seconds) - 1)


def listed_twice(value: str, is_row: bool, found: Duplicate, *, is_late: bool) -> InputError:
    """Return the error for an input that is listed twice.

    Args:
        value: The input: its path, or its row.
        is_row: Whether it is a row.
        found: Where it is listed.
        is_late: Whether some inputs were worked on before.
    """
    shown = value if len(value) <= _SHOWN else value[:_SHOWN] + "..."
    what = "row" if is_row else "input"
    more = f" (and so {'is' if found.more == 1 else 'are'} {found.more:,} more)"
    kept = (
        "The listing was read while its first inputs were worked on. Completed work is kept."
        if is_late
        else "Nothing was started, and the ledger is unchanged."
    )
    way = (
        "Remove one of them, or add a column that tells them apart."
        if is_row
        else "List each input once."
    )
    return InputError(
        f"{what} {shown} is listed twice: at positions {found.first} and {found.second}"
        f"{more if found.more else ''}\n  {kept} {way}"
    )
