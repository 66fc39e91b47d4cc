"""The job of a preprocess worker: process one input, return its staged files and metadata."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from copy import copy
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

from forebay.engine.job import Answer, Assignment, Refusal
from forebay.errors import OutputError
from forebay.jobs.inputs.row_paths import located
from forebay.jobs.ledger.records import FileFields
from forebay.jobs.outputs.staged_output import Output
from forebay.jobs.table.rows import encode, rows_of
from forebay.owned_generators import OwnedGenerators
from forebay.randomness import SetSeed, ThreadTurns, seed_generators, seed_of_text, seed_on_import

# Errors of the machine, not of the input: every other input would fail with them too.
_ENVIRONMENT = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
# The most metadata of one input; a row of the ledger, with all else in it, may have 1 GB.
MAX_METADATA_BYTES = 500_000_000

# Returns the final name of a staged path; None for any other path.
_Naming = Callable[[str], str | None]


class WorkerEnd(Protocol):
    """The worker's side of an output folder or bucket."""

    def open(self, incarnation: int) -> None:
        """Set up in the worker."""

    def begin(self, source: str) -> Output:
        """Return the `out` of one input."""
        ...

    def commit(self, output: Output) -> tuple[FileFields, ...]:
        """Return the files of one input; from now on they survive the worker's death."""
        ...

    def is_full(self) -> bool:
        """Tell whether the output's disk is full."""
        ...

    def close(self) -> None:
        """Close what is open."""


class Fetch(Protocol):
    """Downloads a remote input for as long as it is processed."""

    def __call__(self, source: str) -> AbstractContextManager[Path]:
        """Return the local path, removed on leaving; raise NoInputError if there is no file."""
        ...


class PreprocessJob:
    """Calls the user's function, or the user's Dataset, for one input at a time.

    Args:
        work: The function, or the Dataset.
        kind: What the inputs are: "paths", "rows" or "indices" (the work is a Dataset then).
        outputs: Where files are staged.
        fetch: Downloads inputs that are URLs.
        turns: For thread workers, which share the random generators of the process.
        folder: Where a row's relative `destination` starts; None if the rows are not from a table.
        save: Called with a sample of the Dataset and `out`; its metadata are those of the input.
        seeds_owned: Whether to seed the generators that the work owns; otherwise it does so itself.
    """

    keeps_tasks = False

    def __init__(
        self,
        work: Any,
        kind: str,
        outputs: WorkerEnd,
        fetch: Fetch | None = None,
        turns: ThreadTurns | None = None,
        folder: str | None = None,
        save: Callable[[Any, Output], Any] | None = None,
        *,
        seeds_owned: bool = True,
    ) -> None:
        self._turns = turns
        self._seeds_owned = seeds_owned
        self._save = save
        self._folder = folder
        self._work = work
        self._kind = kind
        self._outputs = outputs
        self._fetch = fetch
        self._directory: str | None = None
        self._owned = OwnedGenerators()
        self._parent = "", Path()  # the folder of the last input, as a string and parsed

    def open(self, incarnation: int, worker_id: int) -> None:
        """Make the staging folder, and record the working directory."""
        self._outputs = copy(self._outputs)  # worker threads share what their jobs refer to
        self._outputs.open(incarnation)
        with suppress(FileNotFoundError):  # it was removed
            self._directory = os.getcwd()
        seed_on_import(True)
        if self._seeds_owned:
            self._owned = OwnedGenerators(work=self._work, save=self._save)
        if self._owned and self._turns is not None:
            self._turns.run_alone()

    def close(self) -> None:
        """Stop seeding libraries that are imported; close the outputs."""
        self._outputs.close()
        seed_on_import(False)

    def abandon(self, thread: Thread) -> bool:
        """Release the locks of an abandoned thread; return whether it was only waiting for one."""
        return self._turns is not None and self._turns.abandon(thread)

    def run(self, assignment: Assignment) -> Answer:
        """Return `((name, size, staged, place), …), metadata JSON` for one input `(source, row)`.

        Raises:
            Refusal: "input": there is no such file. "output": a name, a file or the metadata is
                not acceptable. "environment": the disk is full or read-only.
        """
        source, row = assignment.payload
        seed = seed_of_text(source if row is None else row)
        out = self._outputs.begin(source)

        def undo() -> None:
            nonlocal out
            out.discard()
            out = self._outputs.begin(source)

        try:
            if self._turns is None:
                seed_generators(seed)
                self._owned.seed(seed)
                metadata = self._metadata(source, row, out)
            else:

                def call(set_seed: SetSeed) -> str:
                    self._owned.beside(set_seed)(seed)
                    return self._metadata(source, row, out)

                metadata = self._turns.run(call, undo)
            files = self._outputs.commit(out)  # last: into a bucket, it publishes them
        except BaseException as error:
            full = isinstance(error, Exception) and self._is_environment(error)
            out.discard()
            if full:
                raise Refusal("environment") from error
            if isinstance(error, OutputError):
                raise Refusal("output") from error
            raise
        return Answer((files, metadata), len(metadata))

    def _metadata(self, source: str, row: str | None, out: Output) -> str:
        """Call the function for one input; return the metadata as JSON."""
        try:
            returned, final_name = self._call(source, row, out)
            return _checked(encode(out.rows(rows_of(returned)), out.names(), final_name))
        finally:
            self._restore_directory()

    def _restore_directory(self) -> None:
        """Undo `os.chdir` of the user's function: later inputs may have relative paths."""
        try:
            if os.getcwd() == self._directory:
                return
        except FileNotFoundError:  # the function has removed the one that it changed to
            pass
        except OSError:
            return
        if self._directory is not None:
            with suppress(OSError):
                os.chdir(self._directory)

    def _call(self, source: str, row: str | None, out: Output) -> tuple[Any, _Naming]:
        """Return what the function returned, and how to name the paths in it."""
        if self._kind == "indices":
            sample = self._work[int(source if row is None else row)]
            if self._save is not None:
                sample = _exhausted(self._save(sample, out))
            return sample, out.final_name
        if row is not None:
            listed = located(json.loads(row), self._folder)
            return _exhausted(self._work(listed, out)), out.final_name
        if "://" in source and self._fetch is not None:
            return self._call_fetched(self._fetch, source, out)
        try:
            mode = os.stat(source).st_mode
        except OSError as error:
            raise Refusal("input") from error
        if (mode & 0o170000) == 0o040000:
            cause = IsADirectoryError(errno.EISDIR, "an input is a file, this is a folder", source)
            raise Refusal("input") from cause
        at = source.rfind("/") + 1
        if source[:at] != self._parent[0]:  # parsed once for all inputs of a folder
            self._parent = source[:at], Path(source[:at])
        return _exhausted(self._work(self._parent[1] / source[at:], out)), out.final_name

    def _call_fetched(self, fetch: Fetch, source: str, out: Output) -> tuple[Any, _Naming]:
        """Call the function with a download of its input."""
        try:
            with fetch(source) as path:
                returned = _exhausted(self._work(path, out))
        except NoInputError as error:
            raise Refusal("input") from error.__cause__
        fetched = str(path)
        return returned, lambda text: source if text == fetched else out.final_name(text)

    def _is_environment(self, error: Exception) -> bool:
        if isinstance(error, OSError) and error.errno in _ENVIRONMENT:
            return True
        try:
            return self._outputs.is_full()
        except OSError:
            return False


class NoInputError(Exception):
    """There is no such input; the cause says why."""


def _checked(metadata: str) -> str:
    """Return the metadata of one input.

    Raises:
        OutputError: The ledger cannot hold it.
    """
    if len(metadata) * 4 <= MAX_METADATA_BYTES:  # no character has more bytes
        return metadata
    nbytes = len(metadata.encode(errors="surrogatepass"))
    if nbytes > MAX_METADATA_BYTES:
        raise OutputError(
            f"the metadata of one input has {nbytes:,} bytes as JSON; at most "
            f"{MAX_METADATA_BYTES:,} can be recorded\n"
            "  Write large values to out.file(), and return the rest."
        )
    return metadata


def _exhausted(returned: Any) -> Any:
    """Run a generator to its end, while its input and `out` are still valid."""
    is_lazy = hasattr(returned, "__next__")
    return list(returned) if is_lazy else returned
