"""A local output folder that cannot be written to, such as a mounted archive: it can be looked at.

The ledger is a copy, in a folder for temporary files. A call that has nothing left to do returns
its report, and `forebay verify` compares; whatever would have to be written raises the error.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.errors import OutputError
from forebay.ledger.database import LEDGER_FILE
from forebay.ledger.records import FileChange, Unpublished
from forebay.outputs.folder import OutputFolder

if TYPE_CHECKING:
    from forebay.ledger.ledger import Ledger

_REASONS = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


class ReadOnlyFolder(OutputFolder):
    """The outputs of an earlier run, and a copy of its ledger."""

    refusal: OutputError

    def __init__(self, path: Path, refusal: OutputError) -> None:
        self.path, self.refusal = path, refusal
        self._root = str(path)

    @contextmanager
    def ledger(self, command: str = "", call: str = "") -> Iterator[Ledger]:
        """Open a copy of the ledger, which is removed at the end."""
        from forebay.ledger.ledger import Ledger

        name = os.path.join(self.path, LEDGER_FILE)
        with tempfile.TemporaryDirectory(prefix="forebay-") as private:
            self.private = Path(private)
            for ending in ("", "-journal", "-wal"):
                with suppress(FileNotFoundError):
                    shutil.copyfile(name + ending, self.private / os.path.basename(name + ending))
            with Ledger.open(self.private, command, call) as ledger:
                yield ledger

    def flush(self) -> None:
        """Do nothing: nothing is written."""

    def perform(self, file_changes: Sequence[FileChange]) -> Iterator[list[Unpublished]]:
        """Raise the error if there is anything to do."""
        if file_changes:
            raise self.refusal
        return iter(())

    def write_table(self, name: str, write: Callable[[Path], object], *, replaces: bool) -> None:
        """Raise the error."""
        raise self.refusal

    def clean(self) -> None:
        """Do nothing: nothing is staged."""


def read_only_folder(path: Path, refusal: OutputError) -> ReadOnlyFolder | None:
    """Return a folder that can be looked at; None if there is none that a run has made."""
    is_refused = isinstance(refusal.__cause__, OSError) and refusal.__cause__.errno in _REASONS
    if not is_refused or not os.path.isfile(os.path.join(path, LEDGER_FILE)):
        return None
    return ReadOnlyFolder(path, refusal)
