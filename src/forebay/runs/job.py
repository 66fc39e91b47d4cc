"""The job of a preprocess worker: process one input, return its staged files and metadata."""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from forebay.base.draw_detection import ThreadTurns
from forebay.base.files import NoInputError, is_url
from forebay.base.generators import OwnedGenerators
from forebay.base.process import is_worker
from forebay.base.randomness import SetSeed, seed_generators, seed_of_text, seed_on_import
from forebay.errors import OutputError
from forebay.inputs.row_paths import (
    NO_FILES,
    RowFiles,
    files_named,
    files_of_row,
    identity_of_files,
    located,
    seen_identity,
    with_open_paths,
)
from forebay.ledger.identity import AFTERWARDS
from forebay.ledger.records import key_of
from forebay.outputs.output import Output, current
from forebay.outputs.staging import Staging
from forebay.pools.events import Answer, Assignment, Refusal
from forebay.pools.worker import end_fork
from forebay.runs.process_state import ProcessState
from forebay.runs.returned import (
    EncodedRows,
    checked,
    encode,
    exhausted,
    files_in,
    rows_of_files,
    rows_returned,
)
from forebay.runs.user_call import USUAL, Call

# Errors of the machine, not of the input: every other input would fail with them too.
_ENVIRONMENT = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})

# Of strings that forebay wrote: `loads` looks for white space first, which takes as long.
_read_json = json.JSONDecoder().raw_decode
_NOTHING_KEPT = nullcontext()
# Work of less is done again as soon as a hash of its file would tell that it need not be.
HASHED_AFTER_S = 5e-4

# Downloads a remote input for as long as it is processed: returns the local path, removed on
# leaving; raises NoInputError if there is no file.
Fetch = Callable[[str], AbstractContextManager[Path]]
# Staged path and size of each file, by its final name.
Files = dict[str, tuple[str, int]]
# Returns the final name of a staged path; None for any other path.
_Naming = Callable[[str], str | None]
_Made = TypeVar("_Made")
# The paths of the files that a function returned, and the metadata.
_Returned = tuple[list[str], Any]


class PreprocessJob:
    """Calls the user's function, or the user's Dataset, for one input at a time.

    Args:
        files: Where the files are that rows name; without a folder, rows are from no table.
        call: How the function is called.
        concurrency: Inputs that a worker processes at once, each in a thread of its own.

    Attributes:
        copies: The jobs of these threads, once it is open; None for one at a time.
    """

    keeps_tasks = False
    finds_generators = True
    copies: list[PreprocessJob] | None = None

    def __init__(
        self,
        work: Any,
        kind: str,
        outputs: Staging,
        fetch: Fetch | None = None,
        turns: ThreadTurns | None = None,
        files: RowFiles = NO_FILES,
        save: Callable[[Any, Output], Any] | None = None,
        *,
        call: Call = USUAL,
        seeds_owned: bool = True,
        concurrency: int = 1,
    ) -> None:
        self._calling = call
        self._turns = turns
        self._concurrency = concurrency
        self._seeds_owned = seeds_owned
        self._save = save
        self._files, self._folder = files, files.folder
        self._work = work
        self._kind = kind
        self._outputs = outputs
        outputs.function = name_of_work(work, kind, save)
        self._fetch = fetch
        self._state: ProcessState  # once it is open
        self._owned: OwnedGenerators  # once it is open
        self._is_first = True
        self._parent = "", Path()  # the folder of the last input, as a string and parsed

    def open(self, incarnation: int, worker_id: int) -> None:
        """Make the staging folder, and record the process state that each input finds."""
        outputs = self._outputs  # worker threads share what their jobs refer to
        self._outputs = copy(outputs)
        self._outputs.open(incarnation * self._concurrency)
        self._state = ProcessState()
        seed_on_import(True)
        roots = {"work": self._work, "save": self._save} if self._seeds_owned else {}
        self._owned = OwnedGenerators(**roots)
        if self._concurrency > 1:
            self._open_copies(outputs, incarnation)
        if self._turns is not None:
            self._turns.owned = self._owned

    def _open_copies(self, outputs: Staging, incarnation: int) -> None:
        """Make the jobs of the threads, which share all but their outputs."""
        self._turns = ThreadTurns()
        self.copies = [self]
        for number in range(1, self._concurrency):
            other = copy(self)
            other._outputs = copy(outputs)
            other._outputs.open(incarnation * self._concurrency + number)
            self.copies.append(other)

    def close(self) -> None:
        """Stop seeding libraries that are imported."""
        seed_on_import(False)

    def abandon(self, thread: Thread) -> bool:
        """Release the locks of an abandoned thread; return whether it was only waiting for one."""
        return self._turns is not None and self._turns.abandon(thread)

    def run(self, assignment: Assignment) -> Answer:
        """Return `((name, size, staged), …), metadata JSON, content` for one input.

        Its payload is its source, its row, and, of a sample its index, or, if it has credentials,
        what opens it.
        """
        source, row, *others = assignment.payload
        key = key_of(source, row)
        opens = others[0] if others else key
        out, began = self._outputs.begin(source), time.perf_counter()
        since = _file_time()

        def undo() -> None:
            nonlocal out
            out.discard()
            out = self._outputs.begin(source)

        try:
            files, metadata = self._seeded(
                key, lambda: self._results(source, row, opens, out), undo
            )
            written = self._outputs.commit(out, files)  # last: into a bucket, it publishes them
        except BaseException as error:
            cause = error.__cause__ if isinstance(error, Refusal) else error
            is_full = isinstance(error, Exception) and self._is_environment(cause)
            out.discard()
            if is_full:
                raise Refusal("environment") from cause
            if isinstance(error, OutputError):
                raise Refusal("output") from error
            raise
        took_s = time.perf_counter() - began
        content = self._content(source, row, took_s)
        if (left := self._afterwards(source, row, since)) and not content.startswith(left):
            content = left
        content = f"{AFTERWARDS}{content}" if left else content
        fields = (written, metadata, content), len(metadata)
        return tuple.__new__(Answer, fields)  # calls no Python code

    def _finds_more(self) -> bool:
        """Return whether the first input made generators, and is to be processed again."""
        self._is_first = False
        if not self._seeds_owned or (more := self._owned.grown()) is None:
            return False
        self._owned = more
        return True

    def _seeded(self, key: str, make: Callable[[], _Made], undo: Callable[[], None]) -> _Made:
        """Return what `make` returns, which draws by the key of an input.

        Args:
            undo: Called before `make` is called again.
        """
        seed = seed_of_text(key)
        if self._turns is not None:

            def call(set_seed: SetSeed) -> _Made:
                set_seed(seed)
                return make()

            return self._turns.run(call, undo)

        def seeded() -> _Made:
            is_kept = self._owned and not is_worker()
            with self._owned.kept() if is_kept else _NOTHING_KEPT:
                seed_generators(seed)
                self._owned.seed(seed)
                return make()

        made = seeded()
        if self._is_first and self._finds_more():
            undo()
            made = seeded()
        return made

    def _content(self, source: str, row: str | None, took_s: float) -> str:
        """Return the identity of the file that was read, with a hash of its content, or ""."""
        if took_s < HASHED_AFTER_S or not source:
            return ""
        if self._kind == "rows" and self._folder is None:  # a range of samples, and no file
            return ""
        from forebay.inputs.contents import content_identity

        return content_identity(source, row, self._folder, took_s)

    def _afterwards(self, source: str, row: str | None, since_ns: int) -> str:
        """Return the identity of the files of an input, if they may have changed since a time."""
        if not source or self._kind == "indices":
            return ""
        if row is None:  # a URL is no file that changes
            return seen_identity(source) if _may_have_changed(source, since_ns) else ""
        if self._folder is None:
            return ""
        folder, watched = self._files
        named = files_of_row(_read_json(row)[0], watched) if watched else [(source, "path")]
        found = (path for each in named for path in files_named(*each, folder))
        if not any(_may_have_changed(path, since_ns) for path in found):
            return ""
        return identity_of_files(named, folder, seen_identity)

    def _results(self, source: str, row: str | None, opens: str, out: Output) -> tuple[Files, str]:
        """Call the function for one input; return its files, and the metadata as JSON."""
        (paths, metadata), final_name = self._call(source, row, opens, out)
        files = out.collect(self._outputs.function)
        names = [*files]
        if paths:
            inputs = [source, *(json.loads(row).values() if row is not None else ())]
            places, elsewhere = self._places(paths, inputs, final_name)
            rows = rows_of_files(places, metadata)
            files |= elsewhere
        elif isinstance(metadata, EncodedRows):
            return files, checked(metadata.finished(names, out.asked))
        else:
            rows = rows_returned(metadata)
        return files, checked(encode(rows, names, final_name, out.asked))

    def _places(
        self, paths: list[str], inputs: list[Any], final_name: _Naming
    ) -> tuple[list[str], Files]:
        """Return the `destination` of each path that a function returned, and other files there.

        Those are files that the function wrote by itself; one that is its input is none.
        """
        read = {os.path.realpath(each) for each in inputs if isinstance(each, str) and each}
        places, files = list[str](), Files()
        for path in paths:
            place = final_name(path)
            if place is None and is_url(path):
                place = path
            if place is None:
                place, found = self._outputs.written_at(path)
                files |= {} if os.path.realpath(path) in read else found
            places.append(place)
        return places, files

    def _call(
        self, source: str, row: str | None, opens: str, out: Output
    ) -> tuple[_Returned, _Naming]:
        """Return what the function returned, and how to name the paths in it."""
        if self._kind == "indices":
            token = current.set(out)
            try:
                name_of = out.name_of
                return self._worked(self._saved, int(opens), out, name_of=name_of), name_of
            finally:
                current.reset(token)
        if row is None and is_url(source) and self._fetch is not None:
            return self._call_fetched(self._fetch, source, opens, out)
        given, name_of = self._given(source, row, opens), out.name_of
        return self._returned_for(given, out, name_of), name_of

    def _given(self, source: str, row: str | None, opens: str) -> Any:
        """Return what the function is called with, for a row or a local path."""
        if row is not None:
            listed = _read_json(opens)[0]
            if self._folder:
                listed = located(listed, self._folder)
            if source and self._folder:
                listed = with_open_paths(listed, self._files.watched, self._folder)
            return listed
        try:
            os.stat(source)
        except OSError as error:
            if "\\" in source and isinstance(error, FileNotFoundError):
                what = f"{error.strerror} (here folders are separated by '/', not by '\\')"
                error = FileNotFoundError(error.errno, what, source)
            raise Refusal("input") from error
        if self._calling.as_text:
            return source
        at = source.rfind("/") + 1
        if source[:at] != self._parent[0]:  # parsed once for all inputs of a folder
            self._parent = source[:at], Path(source[:at])
        return self._parent[1] / source[at:]

    def _returned_for(self, given: Any, out: Output, name_of: _Naming) -> Any:
        """Return what the function returned, for a path or a row."""
        if self._calling.gives_out:
            text = self._calling.out_as_text
            output = os.fspath(out) if text else out
            return self._worked(self._work, given, output, name_of=name_of)
        token = current.set(out)
        try:
            return self._worked(self._work, given, name_of=name_of)
        finally:
            current.reset(token)

    def _saved(self, index: int, out: Output) -> Any:
        """Return a sample, or what `save` returned for it."""
        sample = self._work[index]
        return sample if self._save is None else self._save(sample, out)

    def _worked(
        self,
        call: Callable[..., Any],
        *given: Any,
        name_of: _Naming | None,
        looked_at: Callable[[Any], Any] = files_in,
    ) -> Any:
        """Return what the user's code returned; a process that it forked, and left, ends here.

        Not later: it would publish, or remove, the files of this process.

        Args:
            name_of: Names the staged paths in rows; None if what is returned are no rows.
            looked_at: Called with it in the working directory that the code has left.
        """
        process = os.getpid()
        try:
            returned = exhausted(call(*given), name_of)
        except BaseException as error:
            if os.getpid() != process:
                end_fork(error)
            raise
        else:
            if os.getpid() != process:
                end_fork()
            return looked_at(returned)
        finally:
            self._state.restore()

    def _call_fetched(
        self, fetch: Fetch, source: str, opens: str, out: Output
    ) -> tuple[_Returned, _Naming]:
        """Call the function with a download of its input."""
        try:
            with fetch(opens) as path:
                fetched = str(path)

                def name_of(text: str) -> str | None:
                    return source if text == fetched else out.name_of(text)

                given = fetched if self._calling.as_text else path
                returned = self._returned_for(given, out, name_of)
        except NoInputError as error:
            raise Refusal("input") from error.__cause__
        _check_kept(returned[0], fetched)
        return returned, name_of

    def _is_environment(self, cause: BaseException | None) -> bool:
        if isinstance(cause, OSError) and cause.errno in _ENVIRONMENT:
            return True
        try:
            return self._outputs.is_full()
        except OSError:
            return False


# Linux's CLOCK_REALTIME_COARSE, which Python does not name: file systems stamp files with it. It
# is up to 10 ms behind `time.time()`, by which a file would have been changed too early.
_COARSE_CLOCK = 5


def _file_time() -> int:
    """Return the time that a file system gives a file that is changed now, in nanoseconds."""
    return time.clock_gettime_ns(_COARSE_CLOCK)


def _may_have_changed(path: str, since_ns: int) -> bool:
    """Return whether a file was changed since a time; of a folder that is not known."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return False
    return status.st_ctime_ns >= since_ns or stat.S_ISDIR(status.st_mode)


def name_of_work(work: Any, kind: str, save: Any) -> str:
    """Return what messages call the user's code."""
    called = getattr(work, "func", work) if kind != "indices" else save  # `func`: of a partial
    name = str(getattr(called, "__qualname__", type(called).__qualname__))
    if kind != "indices":
        return name
    return f"{type(work).__qualname__}.__getitem__{f' or {name}' if save is not None else ''}"


def _check_kept(paths: list[str], fetched: str) -> None:
    """Raise OutputError for a path beside the download of an input, which is removed."""
    for path in paths:
        name = os.path.relpath(path, os.path.dirname(fetched))
        if not name.startswith("../") and path != fetched and not is_url(path):
            raise OutputError(
                f"the function wrote {name!r} beside the download of its input, which is removed\n"
                "  Nothing of this input was kept. Give the function a second parameter, out, and "
                f"write to out / {name!r}."
            )
