"""The job of a preprocess worker: one input in, its staged files and its metadata out."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

from forebay.engine.job import Answer, Assignment, Refusal
from forebay.errors import OutputError
from forebay.jobs.manifest import located
from forebay.jobs.outputs import Output
from forebay.jobs.records import OutputFile
from forebay.jobs.rows import encode, rows_of
from forebay.randomness import Seeds, ThreadTurns, seed_generators, seed_of_text, seed_on_import

# Errors that are the machine's and not the input's: every other input would meet them too.
_ENVIRONMENT = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


# Gives the name that a path has outside of the worker; None if it has no other.
_Naming = Callable[[str], str | None]


class WorkerEnd(Protocol):
    """A worker's end of wherever the outputs go."""

    def open(self, incarnation: int) -> None:
        """Set up in the worker."""

    def begin(self) -> Output:
        """Return the `out` of one input."""
        ...

    def commit(self, output: Output) -> tuple[OutputFile, ...]:
        """Return what one input made, safe against the worker's death."""
        ...

    def is_full(self) -> bool:
        """Tell whether there is no room left for outputs."""
        ...


class Fetch(Protocol):
    """Brings a remote input to a local path for as long as it is worked on."""

    def __call__(self, source: str) -> AbstractContextManager[Path]:
        """Return the local path, removed on leaving; raise NoInputError if there is no file."""
        ...


class PreprocessJob:
    """Calls the user's function, or asks the user's Dataset, for one input at a time.

    Args:
        work: The function, or the Dataset.
        kind: What the inputs are: "paths", "rows" or "indices" (the work is a Dataset then).
        outputs: Where files are staged.
        fetch: For inputs that are URLs, which have to be brought here first.
        turns: For workers that are threads of one process, and share its random generators.
        folder: Where a row's relative `destination` starts; None where rows are of no table.
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
    ) -> None:
        self._turns = turns
        self._folder = folder
        self._work = work
        self._kind = kind
        self._outputs = outputs
        self._fetch = fetch

    def open(self, incarnation: int, worker_id: int) -> None:
        """Make the staging folder."""
        self._outputs.open(incarnation)
        seed_on_import(True)

    def close(self) -> None:
        """Leave imports as they were."""
        seed_on_import(False)

    def abandon(self, thread: Thread) -> bool:
        """Free what an abandoned thread holds; return whether it was waiting for its turn."""
        return self._turns is not None and self._turns.abandon(thread)

    def run(self, assignment: Assignment) -> Answer:
        """Return `((OutputFile, …), metadata JSON)` for one input `(source, row)`.

        Raises:
            Refusal: "input": there is no such file. "output": a name or file is not acceptable.
                "environment": the disk is full or read-only; not the input's fault.
        """
        source, row = assignment.payload
        seed = seed_of_text(source if row is None else row)
        out = self._outputs.begin()

        def call(seeds: Seeds) -> str:
            seeds(seed)
            returned, final_name = self._call(source, row, out)
            return encode(rows_of(returned), out.names(), final_name)

        def undo() -> None:
            nonlocal out
            out.discard()
            out = self._outputs.begin()

        try:
            if self._turns is not None:
                metadata = self._turns.run(call, undo)
            else:
                metadata = call(seed_generators)
            files = self._outputs.commit(out)  # last: it may publish them
        except BaseException as error:
            full = isinstance(error, Exception) and self._is_environment(error)
            out.discard()
            if full:
                raise Refusal("environment") from error
            if isinstance(error, OutputError):
                raise Refusal("output") from error
            raise
        return Answer((files, metadata), len(metadata))

    def _call(self, source: str, row: str | None, out: Output) -> tuple[Any, _Naming]:
        """Return what the work returned, and the name that a path in it has outside."""
        if self._kind == "indices":
            return self._work[int(source)], out.final_name
        if row is not None:
            listed = located(json.loads(row), self._folder)
            return _exhausted(self._work(listed, out)), out.final_name
        try:
            with self._local(source) as path:
                returned = _exhausted(self._work(path, out))
        except NoInputError as error:
            raise Refusal("input") from error.__cause__
        if "://" not in source:
            return returned, out.final_name
        fetched = str(path)
        return returned, lambda text: source if text == fetched else out.final_name(text)

    def _local(self, source: str) -> AbstractContextManager[Path]:
        if "://" in source and self._fetch is not None:
            return self._fetch(source)
        path = Path(source)
        try:
            mode = os.stat(path).st_mode
        except OSError as error:
            raise NoInputError from error
        if (mode & 0o170000) == 0o040000:
            cause = IsADirectoryError(errno.EISDIR, "an input is a file, this is a folder", source)
            raise NoInputError from cause
        return nullcontext(path)

    def _is_environment(self, error: Exception) -> bool:
        if isinstance(error, OSError) and error.errno in _ENVIRONMENT:
            return True
        try:
            return self._outputs.is_full()
        except OSError:
            return False


class NoInputError(Exception):
    """Raised where an input is looked for: there is none; the cause says why."""


def _exhausted(returned: Any) -> Any:
    """Run a generator to its end, while its input and `out` are still valid."""
    is_lazy = hasattr(returned, "__next__")
    return list(returned) if is_lazy else returned
