"""Listing the inputs of a job: what the user names becomes a stream of `Input` records.

Whatever makes the whole listing unusable (an empty folder, a truncated manifest) is an
`InputError`. One bad path among many is not: its identity is NOT_SEEN or "directory".
"""

from __future__ import annotations

import glob
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from io import BufferedReader
from typing import TYPE_CHECKING, Any

from forebay.base.files import (
    file_name,
    file_system,
    folder_of,
    is_url,
    local_path,
    location_in,
    open_regular,
    open_url,
    reached,
)
from forebay.base.output_names import SUFFIXES, TABLES
from forebay.base.table_files import refuse_other_lists
from forebay.errors import InputError, OptionError, shown_location
from forebay.inputs.other_inputs import is_of_rows, is_table, no_inputs, no_path
from forebay.inputs.row_paths import NO_FILES, RowFiles, seen_identity
from forebay.ledger.database import LEDGER_FILE
from forebay.ledger.identity import NOT_SEEN
from forebay.ledger.records import Input, LinkInput, shown_input
from forebay.options import PreprocessOptions

if TYPE_CHECKING:
    from forebay.inputs.manifests import Manifest


# What inputs are: paths and URLs, rows of a table, or indices of a Dataset.
KINDS = ("paths", "rows", "indices")


@dataclass(frozen=True, slots=True)
class Listing:
    """The inputs of one job; each iteration reads their sizes and times again.

    **Order.** The user's for a list and a manifest; by path, as strings, for a folder or a glob.

    Attributes:
        kind: One of KINDS.
        files: Where the files are that rows name.
        total: The number of inputs; None if it is not known before the listing ends.
        fingerprint: Changes with a large manifest that is read from any row on; "" for others.
        samples: Those of a Dataset, a `Samples`; None for other inputs.
        as_text: Whether the user listed paths as strings.
        manifest: The table of the rows; None for other inputs.
    """

    kind: str
    columns: tuple[str, ...]
    description: str
    _walk: Callable[..., Iterator[Input]] = field(repr=False, compare=False)
    is_search: bool = False
    files: RowFiles = NO_FILES
    total: int | None = None
    fingerprint: str = ""
    samples: Any = field(default=None, repr=False, compare=False)
    as_text: bool = False
    manifest: Manifest | None = field(default=None, repr=False, compare=False)

    @property
    def folder(self) -> str | None:
        """Where relative paths of rows may start."""
        return self.files.folder

    @property
    def is_distinct(self) -> bool:
        """Return whether no input can be listed twice."""
        return self.is_search or self.kind == "indices"

    def watching(self, known: Sequence[str]) -> Listing:
        """Return this listing as read anew, with the columns of files of an earlier run."""
        if self.manifest is None or set(known) <= set(self.files.watched):
            return self
        manifest = self.manifest.watching(known)
        files = self.files._replace(watched=manifest.watched)
        return replace(self, _walk=manifest.inputs, files=files, manifest=manifest)

    def through(self, check: Callable[[Iterable[Input]], Iterator[Input]]) -> Listing:
        """Return this listing with a check that every input passes through when it is listed."""
        return replace(self, _walk=lambda *first: check(self._walk(*first)))

    def __iter__(self) -> Iterator[Input]:
        """Yield the inputs as a stream."""
        return self._walk()

    def read_on(self, first: int) -> Iterator[Input]:
        """Yield the inputs from an ordinal on, if there is a fingerprint."""
        return self._walk(first)


def list_inputs(inputs: object, folder: str | os.PathLike[str] | None = None) -> Listing:
    """Find out what `inputs` are, and make sure that there are any."""
    # A set's order changes from run to run, and the metadata is written in the inputs' order.
    if isinstance(inputs, set | frozenset):
        inputs = sorted(inputs, key=str)
    elif isinstance(inputs, Iterator):
        inputs = tuple(inputs)
    if is_table(inputs) or is_of_rows(inputs):
        from forebay.inputs.memory_tables import memory_manifest

        manifest, start = memory_manifest(inputs, folder)
        files = RowFiles(start, manifest.watched)
        columns, name, walk = manifest.columns, manifest.name, manifest.inputs
        return Listing("rows", columns, name, walk, files=files, manifest=manifest)
    if folder is not None:
        raise OptionError(
            f"folder={os.fspath(folder)!r} is for tables in memory, and the inputs are a "
            f"{type(inputs).__name__}\n  Nothing was started. Leave folder out: a table in a file "
            "is in its own folder."
        )
    if isinstance(inputs, str | os.PathLike):
        name = os.path.expanduser(_path_text(inputs, "the inputs' path"))
        return _list_url(name) if is_url(name) else _list_path(name)
    if isinstance(inputs, bytes | bytearray | Mapping) or not isinstance(inputs, Iterable):
        raise no_inputs(inputs)
    paths = tuple(inputs)
    as_text = True
    for index, path in enumerate(paths):
        if not isinstance(path, str):  # a fast path, since there may be millions
            as_text = False
            if not isinstance(path, os.PathLike):
                raise no_path(path, index)
    if not paths:
        raise InputError("inputs: the list is empty\n  Give at least one path.")
    description = f"a list of {len(paths)} path{'s' * (len(paths) != 1)}"
    walk = partial(_walk_list, paths)
    return Listing("paths", (), description, walk, total=len(paths), as_text=as_text)


def _list_path(name: str) -> Listing:
    shown = name if name.isprintable() else ascii(name)
    if glob.has_magic(name) and not os.path.lexists(name):
        return _list_glob(name, shown)
    try:
        mode = os.stat(name).st_mode
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        if _is_absent(error):
            reason, advice = "no such file or folder", f"The working folder is {os.getcwd()}."
            if "\\" in name:
                advice += " In a path of this system, folders are separated by '/', not '\\'."
        else:
            reason, advice = f"it cannot be read: {error}", "Check its permissions."
        raise InputError(f"{shown}: {reason}\n  {advice}") from error
    if stat.S_ISDIR(mode) and os.path.isfile(os.path.join(name, LEDGER_FILE)):
        from forebay.inputs.tables import only_table, tables_in

        return _list_path(os.path.join(name, only_table(tables_in(name), shown)))
    if stat.S_ISDIR(mode):
        return list_folder(name)
    if name.lower().endswith(SUFFIXES):
        if not stat.S_ISREG(mode):  # to open it could take for ever
            raise InputError(
                f"{shown}: it is a pipe or a device, and a manifest is read more than once\n"
                "  Save it as a file."
            )
        from forebay.inputs.manifests import open_manifest

        folder, table = os.path.split(name)
        if os.path.isfile(os.path.join(folder, LEDGER_FILE)):
            from forebay.inputs.unfinished import warn_if_stale

            warn_if_stale(folder, table)
        return _rows_of(
            open_manifest(name, lambda: BufferedReader(open_regular(name)), folder),
            os.path.abspath(folder),
        )
    if stat.S_ISREG(mode):
        refuse_other_lists(name, partial(open_regular, name))
    return Listing("paths", (), shown, lambda: _walk_list((name,)))


def list_folder(name: str) -> Listing:
    """List all files under a folder, except hidden ones, even if it is an output folder.

    A name that is not UTF-8 has lone surrogates, as everywhere in Python.
    """
    from forebay.inputs.search import folder_files

    shown = name if name.isprintable() else ascii(name)
    reason = "no files in this folder (hidden ones are left out)"
    return _found(shown, lambda: map(_file, folder_files(name)), reason)


def _list_glob(name: str, shown: str) -> Listing:
    from forebay.inputs.search import glob_files

    found = [*glob_files(name)]
    is_of_files = not name.endswith("/")
    folders = glob.glob(name, recursive=True) if is_of_files and not found else []
    reason = "this glob matches folders only" if folders else "this glob matches nothing"
    head, tail = (shown, "*") if folders else os.path.split(shown)
    advice = f"The working folder is {os.getcwd()}."
    if "[" in shown and not folders:
        advice += " In a glob, [ab] stands for one of the characters; for a bracket write [[]."
    if folders:
        advice += f" To process each of them as one input: '{os.path.join(shown, '')}'."
    if folders or "**" not in shown:
        advice += f" To look in all folders below: '{os.path.join(head, '**', tail)}'."
    return _found(shown, lambda: _walk_list(found), reason, advice)


def _list_url(url: str) -> Listing:
    from forebay.inputs.search import full_url, url_files

    shown = url if url.isprintable() else ascii(url)
    with reached(url) as (system, path):
        is_glob = False
        try:
            is_folder = system.info(path)["type"] == "directory"
        except FileNotFoundError:
            if not glob.has_magic(path):
                raise
            is_glob = True
        else:
            if not is_folder and file_name(path).lower().endswith(SUFFIXES):
                from forebay.inputs.manifests import open_manifest

                manifest = open_manifest(url, lambda: open_url(url), None)
                return _rows_of(manifest, folder_of(url))
            if not is_folder:
                refuse_other_lists(url, partial(open_url, url))
                return Listing("paths", (), shown, lambda: _walk_list((url,)))
            inside = path.rstrip("/") + "/"
            if "::" not in url and system.isfile(inside + LEDGER_FILE):
                from forebay.inputs.tables import only_table
                from forebay.inputs.unfinished import warn_if_stale

                tables = [table for table in TABLES if system.isfile(inside + table)]
                warn_if_stale(url, table := only_table(tables, shown))
                return _list_url(location_in(url, table))
        found = url_files(system, path, is_glob=is_glob)
        first = path.partition("/")[0]
        if not found and first and not glob.has_magic(first) and not system.exists(first):
            raise InputError(f"{shown}: there is no {first!r}\n  Check the URL.")
    urls = [full_url(system, name, url) for name in found]
    if None in found.values():  # nothing is known of them but their names
        return _found(shown, lambda: _walk_list(urls), "no files there")
    pairs = zip(urls, found.values(), strict=True)
    inputs = tuple(_remote(each, _remote_identity(info)) for each, info in pairs)
    return _found(shown, lambda: iter(inputs), "no files there")


def _rows_of(manifest: Manifest, folder: str | None) -> Listing:
    name = f"manifest {manifest.name}"
    return Listing(
        "rows",
        manifest.columns,
        name,
        manifest.inputs,
        files=RowFiles(folder, manifest.watched),
        total=manifest.total,
        fingerprint=manifest.fingerprint,
        manifest=manifest,
    )


def _found(
    description: str,
    walk: Callable[[], Iterator[Input]],
    reason: str,
    advice: str = "There is nothing to process.",
) -> Listing:
    if next(walk(), None) is None:
        raise InputError(f"{description}: {reason}\n  {advice}")
    return Listing("paths", (), description, walk, is_search=True)


def _walk_list(paths: Iterable[str | os.PathLike[str]]) -> Iterator[Input]:
    failures: dict[tuple[Any, str], int] = {}
    for path in paths:
        name = str(os.fspath(path))
        yield _remote(name, _url_identity(name, failures)) if is_url(name) else _file(name)


def _remote(url: str, identity: str) -> Input:
    return shown_input(shown_location(_storable(url)), None, identity, url)


def _file(path: str) -> Input:
    """Return the input at a path, with one system call unless it is a link."""
    try:
        status = os.lstat(path)
    except (OSError, ValueError):
        return Input(path, None, NOT_SEEN)
    if stat.S_ISREG(status.st_mode):
        return Input(path, None, f"{status.st_size}:{status.st_mtime_ns}")
    kind = LinkInput if stat.S_ISLNK(status.st_mode) else Input
    return kind(path, None, seen_identity(path))


def _is_absent(error: Exception) -> bool:
    """Return whether an error means that nothing exists; a name with a NUL (ValueError) cannot."""
    return isinstance(error, FileNotFoundError | NotADirectoryError | ValueError)


# A server that fails so often in a row, or once after so many seconds, is asked for nothing more:
# it is down, and each of a million requests could wait for it.
_MOST_FAILURES, _SLOW_S = 10, 5.0


def _url_identity(url: str, failures: dict[tuple[Any, str], int]) -> str:
    """Return a value that changes with an object.

    Args:
        failures: How often each server has failed in a row; it is updated.
    """
    system, path = file_system(url)
    server = system, url.partition("://")[2].partition("/")[0]
    if server not in failures:
        system.invalidate_cache()
        failures[server] = 0
    if failures[server] >= _MOST_FAILURES:
        return NOT_SEEN
    began = time.monotonic()
    try:
        info = system.info(path)
    except (FileNotFoundError, PermissionError):
        failures[server] = 0
        return NOT_SEEN
    except Exception:  # noqa: BLE001 - stores raise their own types; the function will raise it again
        is_slow = time.monotonic() - began > _SLOW_S
        failures[server] = _MOST_FAILURES if is_slow else failures[server] + 1
        return NOT_SEEN
    failures[server] = 0
    return "directory" if info["type"] == "directory" else _remote_identity(info)


def _remote_identity(info: Mapping[str, Any]) -> str:
    """Return a value that changes with an object's bytes: its etag, or its size and age."""
    etag = info.get("etag") or info.get("ETag")
    if etag:
        return str(etag).strip('"')
    ages = ("mtime", "LastModified", "last_modified", "updated", "created")
    age = next((info[name] for name in ages if info.get(name)), "")
    if isinstance(age, datetime) and age.tzinfo:
        age = age.timestamp()  # some return both forms for the same file, from find() and info()
    parts = (info.get("size"), age)
    return ":".join(str(part) for part in parts if part not in (None, ""))


def _path_text(path: object, what: str) -> str:
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        kind = type(path).__name__
        advice = "A path is a str or a pathlib.Path. Rows are a list of dicts alone, or a manifest."
        raise InputError(f"{what}: got {kind} instead of a path\n  {advice}")
    return str(text)


def name_text(given: object, what: str) -> str:
    """Return the name of a sample, a string or a path, without credentials."""
    return shown_location(_path_text(given, what))


def with_storable_names(listed: Iterable[Input]) -> Iterator[Input]:
    """Yield inputs; one whose name the metadata table cannot store is an error."""
    for each in listed:
        _storable(each.source)
        yield each


def _storable(path: str) -> str:
    """Refuse a name that is not UTF-8: the metadata table cannot store it."""
    if path.isascii():  # the usual case
        return path
    try:
        path.encode()
    except UnicodeEncodeError as error:
        advice = (
            "The metadata table holds the name of each input as UTF-8, so the run stops "
            "here. Rename the file, or leave it out."
        )
        raise InputError(f"{path!a}: its name is not UTF-8\n  {advice}") from error
    return path


def local_inputs(inputs: Any) -> tuple[str, ...]:
    """Return local paths that every node must see: one of the inputs, or their folder.

    Both are checked, since an unmounted folder exists but is empty.
    """
    first = inputs
    if isinstance(inputs, list | tuple) and inputs:
        first = inputs[0]
    if not isinstance(first, str | os.PathLike):
        return ()
    text = local_path(first)
    if is_url(text) or (first is inputs and not os.path.isdir(text)):
        return ()  # a manifest or a glob is read here
    path = os.path.abspath(text)
    if first is inputs:
        with suppress(OSError):  # the listing reports it
            path = min((each.path for each in os.scandir(path)), default=path)
    return (path,) if os.path.lexists(path) else ()  # what is away here may be so everywhere


def check_in_reach(text: str, options: PreprocessOptions) -> None:
    """Check that the workers can reach a path or URL."""
    if options.workers == 0 or options.backend == "thread":
        return
    if any(part.startswith("memory://") for part in text.split("::")):
        raise OptionError(
            f"{text} is in the memory of this process, but workers are other processes\n"
            "  Nothing was started. Use num_workers=0, or backend='thread' if the call takes it."
        )


def in_reach(listed: Iterable[Input], options: PreprocessOptions) -> Iterator[Input]:
    """Yield the inputs after checking that the workers can read them."""
    for each in listed:
        if each.source and is_url(each.source):
            check_in_reach(each.source, options)
        yield each
