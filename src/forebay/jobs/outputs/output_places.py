"""Where outputs go: what a run asks of a place, be it a folder or a bucket."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from forebay.errors import OptionError
from forebay.jobs.ledger.holder import Holder
from forebay.jobs.ledger.ledger import Ledger
from forebay.jobs.ledger.records import Chore, Input, Unpublished
from forebay.jobs.ledger.snapshot import Snapshot, read_snapshot
from forebay.jobs.outputs.bucket import Bucket, newest_copy
from forebay.jobs.outputs.output_folder import OutputFolder
from forebay.jobs.outputs.output_names import PRIVATE
from forebay.jobs.preprocess_job import WorkerEnd
from forebay.options import PreprocessOptions

_LOCAL = ("file://", "local://")


class OutputPlace(Protocol):
    """The driver's end of wherever the outputs go.

    Attributes:
        private: A local folder of forebay's own, for what is on its way.
    """

    private: Path

    def ledger(self, command: str = "") -> AbstractContextManager[Ledger]:
        """Open the ledger, for one driver at a time."""
        ...

    def keep(self, ledger: Ledger, *, now: bool = False) -> None:
        """See to it that the ledger outlives this machine, if the place does."""

    def staging(self) -> WorkerEnd:
        """Return what the workers need to write here."""
        ...

    def flush(self) -> None:
        """Make durable what was written here."""

    def perform(self, chores: Sequence[Chore]) -> list[Unpublished]:
        """Remove and publish files; return those that cannot be published."""
        ...

    def size(self, name: str) -> int | None:
        """Return a published file's bytes; None if there is none."""
        ...

    def files(self) -> list[tuple[str, int]]:
        """Return the name and bytes of every file, forebay's own left out, sorted."""
        ...

    def write_table(self, name: str, write: Callable[[Path], object], *, replaces: bool) -> None:
        """Have a table written, and publish it; raise FileExistsError if it may not replace one."""

    def locate(self, name: str) -> Path | str:
        """Return where a published file is: a path, or a URL."""
        ...

    def clean(self) -> None:
        """Remove everything that was on its way."""


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
        The local folder that holds it, and the driver at work where the lock is elsewhere.

    Raises:
        LedgerError: There is none.
    """
    text = local_path(output)
    if "://" in text:
        with newest_copy(text) as found:
            yield found
    else:
        yield Path(text) / PRIVATE, None


def look_at(output: str | os.PathLike[str]) -> Snapshot:
    """Read the counts in the ledger of a place from outside.

    Raises:
        LedgerError: There is none.
    """
    with newest_ledger(output) as (folder, live):
        snapshot = read_snapshot(folder)
        return replace(snapshot, live=live or snapshot.live)


def local_path(output: str | os.PathLike[str]) -> str:
    """Return a path or URL as text, a URL of this machine's own files as their path."""
    text = os.path.expanduser(os.fspath(output))
    if not text.startswith(_LOCAL) or "::" in text:
        return text
    from fsspec.implementations.local import LocalFileSystem

    return str(LocalFileSystem._strip_protocol(text))


def local_inputs(inputs: Any) -> tuple[str, ...]:
    """Return local paths that whoever can read the inputs can see: one of them, or their folder.

    The folder may be there where its contents are not: as a mount point without its mount.
    """
    first = inputs
    if isinstance(inputs, list | tuple) and inputs:
        first = inputs[0]
    if not isinstance(first, str | os.PathLike):
        return ()
    text = local_path(first)
    if "://" in text or (first is inputs and not os.path.isdir(text)):
        return ()  # a manifest or a glob is read here
    path = os.path.abspath(text)
    if first is inputs:
        path = min((each.path for each in os.scandir(path)), default=path)
    return (path,)


def check_in_reach(text: str, options: PreprocessOptions) -> None:
    """Refuse a URL of this process's own memory, if the workers are other processes.

    Raises:
        OptionError: It is one, and they are.
    """
    if options.workers == 0 or options.backend == "thread":
        return
    if any(part.startswith("memory://") for part in text.split("::")):
        raise OptionError(
            f"{text} is in the memory of this process, but workers are other processes\n"
            "  Nothing was started. Use num_workers=0, or backend='thread' if the call takes it."
        )


def in_reach(listed: Iterable[Input], options: PreprocessOptions) -> Iterator[Input]:
    """Pass the inputs on, having checked that the workers can get at them."""
    for each in listed:
        if "://" in each.source:
            check_in_reach(each.source, options)
        yield each
