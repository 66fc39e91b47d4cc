"""The rows of a table between two passes: in memory, or compressed in a temporary file."""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import IO

from forebay.jobs.table.column_kinds import Row


class KeptRows:
    """Rows that are added once and read once, in the same order.

    Args:
        folder: Where the temporary file is made; it has no name there, and ends with this object.
        in_memory: The number of rows from which on there is a file.
    """

    def __init__(self, folder: Path, in_memory: int) -> None:
        self._folder, self._in_memory = folder, in_memory
        self._rows: list[Row] = []
        self._file: IO[bytes] | None = None
        self._sizes: list[int] = []
        self._count = 0

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows, whose values JSON has.

        Raises:
            OSError: The disk is full.
        """
        self._count += len(rows)
        if self._file is None and self._count <= self._in_memory:
            self._rows += rows
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - see `close`
            for start in range(0, len(self._rows), max(len(rows), 1)):
                self._write(self._rows[start : start + max(len(rows), 1)])
            self._rows = []
        self._write(rows)

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows."""
        return iter(self._rows) if self._file is None else self._read(self._file)

    def close(self) -> None:
        """Remove the temporary file."""
        if self._file is not None:
            self._file.close()

    def _write(self, rows: Sequence[Row]) -> None:
        assert self._file is not None, "there are many rows"
        body = zlib.compress(json.dumps(rows, separators=(",", ":")).encode(), 1)
        self._file.write(body)
        self._sizes.append(len(body))

    def _read(self, file: IO[bytes]) -> Iterator[Row]:
        file.seek(0)
        pages = (json.loads(zlib.decompress(file.read(size))) for size in self._sizes)
        return chain.from_iterable(pages)
