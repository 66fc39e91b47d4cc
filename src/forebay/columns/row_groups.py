"""Columns of Parquet files that do not fit into memory, read by row groups."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from forebay.base.table_files import refuse
from forebay.columns.arrow_columns import Columns, ragged, row_numbers
from forebay.columns.column_types import open_columns

if TYPE_CHECKING:
    import numpy as np


# A warning is due if so many row groups were read for less than one row in so many of theirs.
_GROUPS_READ, _ROWS_READ = 16, 16


class RowGroups:
    """What `Columns` is, for Parquet files that do not fit into memory.

    A row group is read when rows of it are taken, and the last two are kept: enough for rows in
    order. Rows in a random order take a row group each.

    Args:
        identities: Of each file, what changes with it.

    Raises:
        InputError: The first row group cannot be read, or see `Columns`.
    """

    def __init__(
        self, paths: Sequence[str], names: Sequence[str], where: str, identities: Sequence[str]
    ) -> None:
        import numpy as np
        from pyarrow import parquet

        self._arguments = paths, names, where, identities
        self._footers = [*map(parquet.read_metadata, paths)]
        sizes = [
            (file, number, footer.row_group(number).num_rows)
            for file, footer in enumerate(self._footers)
            for number in range(footer.num_row_groups)
        ]
        # File and number of each; an empty one has no columns.
        self._numbers = [(file, number) for file, number, size in sizes if size]
        self._ends = np.cumsum([size for *_, size in sizes if size])
        self._held: dict[int, Columns] = {}
        self._asked = self._read = self._groups_read = 0
        first = self._group(0)
        self.types = first.types
        self.nbytes = first.nbytes * len(self) // len(first)

    def __reduce__(self) -> Any:
        """Pickle the paths."""
        return RowGroups, self._arguments

    def __len__(self) -> int:
        return int(self._ends[-1])

    def take(self, index: Any) -> dict[str, Any]:
        """See `Columns.take`."""
        return self._gathered(index, Columns.take)

    def each(self, index: Any) -> dict[str, Sequence[Any]]:
        """See `Columns.each`."""
        return self._gathered(index, Columns.each)

    def counts(self, name: str) -> Any:
        """See `Columns.counts`."""
        import numpy as np

        return np.concatenate([self._group(at).counts(name) for at in range(len(self._ends))])

    def _gathered(self, index: Any, take: Callable[[Columns, Any], Any]) -> dict[str, Any]:
        import numpy as np

        numbers = row_numbers(index, len(self))
        parts: list[dict[str, Any]] = []
        groups, places = self._ends.searchsorted(numbers, "right"), []
        for group in np.unique(groups).tolist() or [0]:
            places.append(np.flatnonzero(groups == group))
            columns = self._group(group)
            first = self._ends[group] - len(columns)
            parts.append(take(columns, numbers[places[-1]] - first))
        self._asked += len(numbers)
        self._warn_of_order()
        if len(parts) == 1:
            return parts[0]
        order = np.argsort(np.concatenate(places))
        return {name: _joined(name, [each[name] for each in parts], order) for name in parts[0]}

    def _group(self, at: int) -> Columns:
        """Return the columns of a row group, which are read unless they were used just before.

        Args:
            at: Its number among those with rows.
        """
        if (found := self._held.get(at)) is not None:
            return found
        from pyarrow import parquet

        paths, names, where, identities = self._arguments
        number, group = self._numbers[at]
        path = paths[number]
        where = f"{where if len(paths) == 1 else f'from_table: {path}'}, row group {group}"
        check_identity(where, path, identities[number])
        try:
            with parquet.ParquetFile(path, metadata=self._footers[number]) as file:
                table = file.read_row_group(group, names).select(names)
            table.validate(full=True)  # strings of other writers may not be UTF-8
        except Exception as error:  # noqa: BLE001 - pyarrow's errors have no common root
            refuse(
                where, f"it cannot be read: {error}", "If it is truncated, write it again.", error
            )
        found = open_columns(table, where)
        self._held = {**dict(list(self._held.items())[-1:]), at: found}
        self._read, self._groups_read = self._read + len(found), self._groups_read + 1
        return found

    def _warn_of_order(self) -> None:
        if self._groups_read < _GROUPS_READ or self._read < _ROWS_READ * self._asked:
            return
        warnings.warn(
            f"{self._arguments[2]}: the columns do not fit into memory, so row groups are read as "
            f"needed, {self._groups_read:,} so far with {self._read:,} rows, of which "
            f"{self._asked:,} were used: the order is random\n  Nothing is wrong, but slow. Write "
            "an Arrow file, which is mapped: see docs/how-to/tables.md. Or leave shuffle out.",
            RuntimeWarning,
            stacklevel=2,
        )
        self._groups_read = -1 << 62  # once


def _joined(name: str, parts: list[Any], order: np.ndarray[Any, Any]) -> Any:
    """Return arrays or lists one after the other, in another order of the rows."""
    import numpy as np

    if isinstance(parts[0], list):
        every = list(chain.from_iterable(parts))
        return [every[at] for at in order.tolist()]
    shapes = {part.shape[1:] for part in parts if len(part)}
    if len(shapes) > 1:
        one, two, *_ = sorted(shape[0] for shape in shapes)
        raise ragged(name, f"a list of {one} and one of {two}")
    return np.concatenate(parts)[order]


def file_identity(path: str) -> str:
    """Return what changes with a file, or when it is replaced."""
    status = os.stat(path)
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"


def check_identity(where: str, path: str, identity: str) -> None:
    """Raise InputError if a file has another identity than when it was opened."""
    if file_identity(path) != identity:
        advice = "Make the dataset again, and leave a file alone while it is in use."
        refuse(where, "the file was changed while it was in use", advice)
