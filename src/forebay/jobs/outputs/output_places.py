"""The interface of an output location: a local folder or a bucket."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from forebay.errors import OptionError
from forebay.formats import SHARD_BYTES
from forebay.jobs.ledger.holder import Holder
from forebay.jobs.ledger.ledger import Ledger
from forebay.jobs.ledger.records import FileChange, Unpublished
from forebay.jobs.ledger.snapshot import Snapshot, read_snapshot
from forebay.jobs.outputs.bucket import Bucket, newest_copy
from forebay.jobs.outputs.output_folder import OutputFolder
from forebay.jobs.outputs.output_names import PRIVATE
from forebay.jobs.preprocess_job import WorkerEnd

_LOCAL = ("file://", "local://")


class OutputPlace(Protocol):
    """The driver's side of an output location.

    Attributes:
        private: forebay's own local folder, for staged files.
    """

    private: Path

    def ledger(self, command: str = "") -> AbstractContextManager[Ledger]:
        """Open the ledger, for one driver at a time."""
        ...

    def copy_ledger(self, ledger: Ledger, *, now: bool = False) -> None:
        """Copy the ledger to a bucket, so that it survives the loss of this machine."""

    def staging(self, shard_bytes: int = SHARD_BYTES) -> WorkerEnd:
        """Return what the workers need to write here; `shard_bytes` is the size of a shard."""
        ...

    def flush(self) -> None:
        """Flush what was written to disk."""

    def perform(self, file_changes: Sequence[FileChange]) -> Iterator[list[Unpublished]]:
        """Remove and publish files, part by part; yield what cannot be published of each part."""
        ...

    def complete_shards(self, ledger: Ledger) -> None:
        """Publish the shards of packed outputs, and their index."""

    def packed_outputs(self, ledger: Ledger) -> Iterator[tuple[str, int]]:
        """Return name and bytes of the recorded packed outputs that are in their shards."""
        ...

    def size(self, name: str) -> int | None:
        """Return a published file's bytes; None if there is none."""
        ...

    def files(self) -> list[tuple[str, int]]:
        """Return the name and bytes of every file, forebay's own left out, sorted."""
        ...

    def write_table(self, name: str, write: Callable[[Path], object], *, replaces: bool) -> None:
        """Write and publish a table; raise FileExistsError if it may not replace a file."""

    def locate(self, name: str) -> Path | str:
        """Return where a published file is: a path, or a URL."""
        ...

    def clean(self) -> None:
        """Remove all staged files."""


def open_place(output: str | os.PathLike[str]) -> OutputPlace:
    """Return the folder or the bucket that `output` names.

    Raises:
        OutputError: It cannot be written to.
    """
    text = local_path(output)
    return Bucket(text) if "://" in text else OutputFolder(Path(os.path.abspath(text)))


@contextmanager
def newest_ledger(output: str | os.PathLike[str]) -> Iterator[tuple[Path, Holder | None]]:
    """Find the ledger of a place, to be read from outside with `forebay.jobs.ledger.snapshot`.

    Yields:
        The local folder that holds it, and the running driver if the lock is elsewhere.

    Raises:
        LedgerError: There is none.
    """
    text = local_path(output)
    if "://" in text:
        with newest_copy(text) as found:
            yield found
    else:
        yield Path(text) / PRIVATE, None


def snapshot_of(output: str | os.PathLike[str]) -> Snapshot:
    """Read the counts in the ledger of a place from outside.

    Raises:
        LedgerError: There is none.
    """
    with newest_ledger(output) as (folder, live):
        return read_snapshot(folder, live)


def path_text(output: str | os.PathLike[str]) -> str:
    """Return a path or URL as a string.

    Raises:
        OptionError: It is none.
    """
    text: Any = os.fspath(output) if isinstance(output, os.PathLike) else output
    if not isinstance(text, str) or "\0" in text:
        raise OptionError(
            f"{output!r} names no folder\n"
            "  Nothing was started. Pass a path or a URL, as a str or a Path, without null bytes."
        )
    return text


def local_path(output: str | os.PathLike[str]) -> str:
    """Return a path or URL as a string; a file:// URL as a path.

    Raises:
        OptionError: It is none.
    """
    text = os.path.expanduser(path_text(output))
    if not text.startswith(_LOCAL) or "::" in text:
        return text
    from fsspec.implementations.local import LocalFileSystem

    return str(LocalFileSystem._strip_protocol(text))
