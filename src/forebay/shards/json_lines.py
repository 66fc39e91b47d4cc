"""JSON lines as shards: an object on each line, as Python's `json` reads it.

NaN and the infinities are floats, integers may have more than 64 bits, of a key that an object has
twice the last value counts. Blank lines are skipped.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.base.formatting import byte_size
from forebay.base.table_files import refuse
from forebay.errors import InputError, shortened
from forebay.shards.format import BLOCK_BYTES, BlockDecoder, FoundBlocks, ShardFile, ShardFormat

# A sample is in memory as a whole, and a missing newline shall not take all of it.
_MOST_LINE_BYTES = 256 << 20
# Blank lines whose places the index keeps, to say in which line an error is.
_MOST_JUMPS = 1000
_BOM = codecs.BOM_UTF8
_OTHER_BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_NEWLINE, _OPENS = ord("\n"), ord("{")
_ADVICE = 'Each line must hold one object, such as {"text": "a"}, in UTF-8.'


class JsonLinesShards(ShardFormat):
    """Shards that hold a JSON object on each line."""

    name = "jsonl"
    suffixes = (".jsonl", ".ndjson", ".json")
    may_be_empty = True

    def matches(self, head: bytes) -> bool:
        """See `ShardFormat`."""
        line, newline, _ = head.removeprefix(_BOM).lstrip().partition(b"\n")
        try:
            return isinstance(json.loads(line), dict)
        except (ValueError, RecursionError):
            return not newline and line.startswith(b'{"')  # the head has a part of the line

    def find(self, shard: ShardFile) -> FoundBlocks:
        """See `ShardFormat`."""
        rows, extents = list[int](), list[tuple[int, int, int]]()
        starts = list[npt.NDArray[np.int64]]()
        lines = list[npt.NDArray[np.int64]]()
        offset = line = 0
        piece = BLOCK_BYTES
        while offset < shard.size:
            data = shard.read(offset, min(shard.size - offset, piece))
            ends = np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE) + 1
            if offset + len(data) == shard.size and (not len(ends) or ends[-1] < len(data)):
                ends = np.append(ends, len(data))  # the last line has no newline
            if not len(ends):
                if piece > _MOST_LINE_BYTES:
                    what = f"it has more than {byte_size(_MOST_LINE_BYTES)}"
                    refuse(f"{shard.name}, line {line + 1:,}", what, _ADVICE)
                piece *= 2
                continue
            begins = _objects(shard.name, data, np.append(0, ends[:-1]), ends, line, not offset)
            if len(begins):
                rows.append(len(begins))
                first, end = int(begins[0]), int(ends[ends > begins[-1]][0])
                extents.append((len(extents), offset + first, end - first))
                starts.append(begins - first)
                lines.append(line + 1 + np.searchsorted(ends, begins, "right"))
            offset, line, piece = offset + int(ends[-1]), line + len(ends), BLOCK_BYTES
        return FoundBlocks(
            np.array(rows, np.int64),
            np.array(extents, np.int64).reshape(-1, 3),
            _jumps(np.concatenate([*lines, np.empty(0, np.int64)])),
            starts=np.concatenate([*starts, np.empty(0, np.int64)]),
        )

    def chosen(
        self, info: bytes, extents: npt.NDArray[np.int64], columns: Sequence[str]
    ) -> npt.NDArray[np.bool_]:
        """See `ShardFormat`: whole lines are needed."""
        return np.ones(len(extents), bool)

    def decoder(self, info: bytes, columns: Sequence[str] | None) -> BlockDecoder:
        """See `ShardFormat`."""
        return _Lines(info, columns)


def _jumps(lines: npt.NDArray[np.int64]) -> bytes:
    """Return which samples follow blank lines, and their lines; of many such samples the first."""
    jumps = np.flatnonzero(np.diff(lines, prepend=0) != 1)[:_MOST_JUMPS]
    return np.column_stack([jumps, lines[jumps]]).tobytes()


def _objects(
    name: str,
    data: memoryview,
    begins: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    line: int,
    is_start: bool,
) -> npt.NDArray[np.int64]:
    """Return where the lines begin that are not blank; raise InputError for one without an object.

    Args:
        line: How many lines come before.
        is_start: Whether the shard begins here.
    """
    if is_start and bytes(data[:2]) in _OTHER_BOMS:
        refuse(f"{name}, line 1", "it is UTF-16, not UTF-8", _ADVICE)
    if is_start and data[:3] == _BOM:
        begins[0] += len(_BOM)
    firsts = np.frombuffer(data, np.uint8)[np.minimum(begins, len(data) - 1)]
    kept = firsts == _OPENS
    for at in np.flatnonzero(~kept).tolist():
        text = bytes(data[begins[at] : ends[at]]).strip()
        kept[at] = bool(text)
        if text and not text.startswith(b"{"):
            what = f"it holds {shortened(text[:60])} instead of a JSON object"
            refuse(f"{name}, line {line + at + 1:,}", what, _ADVICE)
    found: npt.NDArray[np.int64] = begins[kept]
    return found


class _Lines(BlockDecoder):
    """The lines of a block."""

    def __init__(self, info: bytes, columns: Sequence[str] | None) -> None:
        self._jumps = np.frombuffer(info, np.int64).reshape(-1, 2)
        self._columns, self._decode = columns, json.JSONDecoder().decode

    def place_of(self, sample: int) -> str:
        """See `BlockDecoder`."""
        jumps = self._jumps
        if len(jumps) == _MOST_JUMPS and sample > jumps[-1, 0]:
            return super().place_of(sample)
        at = int(np.searchsorted(jumps[:, 0], sample, "right"))
        before, line = jumps[at - 1].tolist() if at else (0, 1)
        return f"line {line + sample - before:,}"

    def sample(self, data: memoryview) -> Any:
        """See `BlockDecoder`."""
        try:
            found = self._decode(str(data, "utf-8"))
        except UnicodeDecodeError as error:
            byte = f"byte {error.start:,} of the line (0x{data[error.start]:02x})"
            raise ValueError(f"{byte} is not UTF-8") from error
        except json.JSONDecodeError as error:
            what = f"not JSON at character {error.pos:,} of the line: {error.msg}"
            raise ValueError(what) from error
        except RecursionError as error:
            raise ValueError("the object is nested too deeply") from error
        if not isinstance(found, dict):
            raise ValueError(f"a JSON {type(found).__name__} instead of an object")
        if self._columns is None:
            return found
        try:
            return {column: found[column] for column in self._columns}
        except KeyError as error:
            known = shortened([*found])
            raise InputError(
                f"the object has no key {error}; it has {known}\n"
                "  Where not all objects have it, leave columns= out, and choose in transform=."
            ) from error
