"""Find files in a folder, by a glob, and below a URL: one rule for all of them.

- Names that start with a dot are left out, unless the pattern has that dot.
- A link is followed, but not to a folder that it lies in.
- A folder that cannot be read is an error: its files would be missing without a word.
- The order is that of the whole paths, as strings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence, Set
from fnmatch import fnmatchcase
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

from forebay.base.files import is_url
from forebay.errors import InputError
from forebay.ledger.identity import FOLDER, NOT_SEEN

# A pattern by its names, in which `**` stands for any number of folders. A search has several at
# once: what is left of the pattern in a folder, in each of the ways in which it may be there.
Pattern = tuple[str, ...]
Patterns = frozenset[Pattern]
EVERYTHING: Patterns = frozenset({("**", "*")})

_has_magic = re.compile(r"[*?[]").search


class Entry(NamedTuple):
    """A file or folder in a folder; `info` is what a file system says of it."""

    name: str
    path: str
    is_folder: bool
    info: Any = None


# Returns what is in a folder, and a value that is the same for the same folder; only the entries
# of some names if these are given.
_Lister = Callable[[str, Set[str] | None], tuple[list[Entry], Any]]


def patterns_of(text: str) -> Patterns:
    """Return the pattern that a glob is, relative to where its search begins."""
    names = [name for name in text.split("/")[:-1] if name] + [text.rpartition("/")[2]]
    if names[-1] == "**":  # its files, at any depth
        names.append("*")
    return frozenset({tuple(names)})


def matches(names: Sequence[str], patterns: Patterns) -> bool:
    """Return whether the names of a path match."""
    for name in names:
        patterns = _below(patterns, name)
    return () in patterns


def _below(patterns: Patterns, name: str) -> Patterns:
    """Return what is left of patterns behind a name."""
    is_hidden = name[:1] == "." and name != "."
    if patterns is EVERYTHING or patterns is EVERYTHING_BELOW:  # the usual case
        return frozenset() if is_hidden else EVERYTHING_BELOW
    found: set[Pattern] = set()
    for pattern in patterns:
        while pattern:
            first, rest = pattern[0], pattern[1:]
            if first != "**":
                # A name may be that of a pattern: "[x]" is one of a folder, too.
                fits = name == first or fnmatchcase(name, first)
                if fits and not (is_hidden and not first.startswith(".")):
                    found.add(rest)
                break
            if not is_hidden:
                found.add(pattern)
            pattern = rest
    return frozenset(found)


# What is left of `EVERYTHING` behind a name: all below it, and the name itself.
EVERYTHING_BELOW: Patterns = EVERYTHING | {()}


def _search(
    folder: str,
    patterns: Patterns,
    entries_of: _Lister,
    above: tuple[Any, ...] = (),
    *,
    folders: bool = False,
) -> Iterator[Entry]:
    """Yield the files in a folder that match, by path; only one folder is in memory at a time.

    Args:
        folders: Yield the folders that match instead.
    """
    firsts = {each[0] for each in patterns}
    names = None if any(map(_has_magic, firsts)) else firsts
    entries, here = entries_of(folder, names)
    if here is not None and here in above:  # a symbolic link to a folder that it is in
        return
    for entry in sorted(entries, key=lambda each: each.name + "/" * each.is_folder):
        below = _below(patterns, entry.name)
        if entry.is_folder is folders and () in below:
            yield entry
        if entry.is_folder and (rest := EVERYTHING if below is EVERYTHING_BELOW else below - {()}):
            yield from _search(entry.path, rest, entries_of, (*above, here), folders=folders)


# ---- local files ---------------------------------------------------------------------------------


def folder_files(folder: str) -> Iterator[str]:
    """Yield the paths of all files in a folder and below it."""
    return (each.path for each in _search(folder, EVERYTHING, _local_entries))


def glob_files(pattern: str) -> Iterator[str]:
    """Yield the paths of the files that match a glob, or of the folders if it ends with a slash."""
    folder, rest = divided_glob(pattern.rstrip("/"))
    folders = pattern.endswith("/")
    if os.path.isdir(folder or os.curdir):
        found = _search(folder, patterns_of(rest), _local_entries, folders=folders)
        yield from (each.path for each in found)


def divided_glob(pattern: str) -> tuple[str, str]:
    """Return the folder in which a glob begins, and the rest of it, relative to that.

    Its first names are those of folders, even with characters such as `[`, if such folders exist.
    """
    folder, rest = "", pattern
    while (at := rest.find("/") + 1) and (
        not _has_magic(rest[:at]) or os.path.isdir(folder + rest[:at])
    ):
        folder, rest = folder + rest[:at], rest[at:]
    return folder, rest


def away_folders() -> Callable[[str], bool]:
    """Return what tells whether the folder that a file was in is away.

    That is a folder that does not exist, or that has no files: it may be that of a disk that is not
    mounted now, or in one. What a server or bucket does not list is gone.
    """

    @lru_cache(1)  # files come in the order of their paths
    def has_no_files(folder: str) -> bool:
        try:
            with os.scandir(folder) as found:
                return all(each.name.startswith(".") for each in found)
        except FileNotFoundError:
            return True
        except (OSError, ValueError):
            return False

    def is_away(path: str) -> bool:
        path = path.removeprefix("file://")
        return not is_url(path) and has_no_files(os.path.dirname(path.rstrip("/")) or os.curdir)

    return is_away


def folder_identity(folder: str) -> str:
    """Return what changes with the files in a folder and below it: names, sizes and times.

    Hidden files count, too. NOT_SEEN without files: it may be a folder that is not mounted. Raise
    OSError if one of them cannot be seen.
    """
    found, folders = list[str](), [""]
    while folders:
        above = folders.pop()
        with os.scandir(os.path.join(folder, above)) as entries:
            for entry in entries:
                name = above + entry.name
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{name}/")
                else:
                    status = os.lstat(entry.path) if _is_broken(entry) else entry.stat()
                    found.append(f"{name}\0{status.st_size}\0{status.st_mtime_ns}")
    if not found:
        return NOT_SEEN
    text = "\n".join(sorted(found)).encode("utf-8", "surrogatepass")
    return f"{FOLDER}{len(found)}:{sha256(text).hexdigest()[:32]}"


def _is_broken(entry: os.DirEntry[str]) -> bool:
    return entry.is_symlink() and not os.path.exists(entry.path)


def _local_entries(folder: str, names: Set[str] | None) -> tuple[list[Entry], Any]:
    start = os.path.join(folder, "")
    try:
        if names is not None:
            return [
                Entry(name, start + name, os.path.isdir(start + name))
                for name in names
                if _exists(start + name)
            ], None
        status = os.stat(folder or os.curdir)
        with os.scandir(folder or os.curdir) as found:
            entries = [_local_entry(each, start) for each in found]
    except OSError as error:
        advice = "make it readable" if isinstance(error, PermissionError) else "remove the cause"
        raise InputError(
            f"{folder!a}: it cannot be listed: {error}\n"
            f"  Its files would be skipped silently, so the listing stops: {advice}."
        ) from error
    return [each for each in entries if each is not None], (status.st_dev, status.st_ino)


def _exists(path: str) -> bool:
    """Return whether there is a file, folder or link; raise OSError if that cannot be seen."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the name
        return False
    return True


def _local_entry(entry: os.DirEntry[str], start: str) -> Entry | None:
    """Return an entry; None for what is not an input, such as a pipe."""
    try:
        is_folder = entry.is_dir()
        is_input = is_folder or entry.is_file() or entry.is_symlink()
    except OSError:  # a link to itself, or into a folder that cannot be read
        is_folder, is_input = False, True
    return Entry(entry.name, start + entry.name, is_folder) if is_input else None


# ---- URLs ----------------------------------------------------------------------------------------


def url_files(system: Any, path: str, *, is_glob: bool) -> dict[str, Any]:
    """Return the files below a path of an fsspec file system, or that match it, with their facts.

    Raises:
        InputError: A local folder cannot be read.
        Exception: What the file system raises.
    """
    if "file" in system.protocol:
        found = glob_files(path) if is_glob else folder_files(path)
        return dict.fromkeys(found)
    folder, patterns = path, EVERYTHING
    if is_glob:
        at = path.rfind("/", 0, _has_magic(path).start()) + 1  # type: ignore[union-attr]
        folder, patterns = path[:at], patterns_of(path[at:])
    if not _has_own_search(system):  # fsspec's would leave out what it cannot read

        def entries_of(inner: str, _: Set[str] | None) -> tuple[list[Entry], Any]:
            return _remote_entries(system, inner), None

        return {each.path: each.info for each in _search(folder, patterns, entries_of)}
    root = folder.rstrip("/")
    found = system.glob(path, detail=True) if is_glob else system.find(path, detail=True)
    start = len(root) + bool(root)
    return {
        name: info
        for name, info in sorted(found.items())
        # A key that ends with "/" is how an object store marks a folder.
        if info["type"] != "directory"
        and not name.endswith("/")
        and matches(name[start:].split("/"), patterns)
    }


def _has_own_search(system: Any) -> bool:
    """Return whether a file system lists many folders at once, with few requests."""
    kind = type(system)
    methods = [getattr(kind, f"_{name}", getattr(kind, name)) for name in ("find", "glob")]
    return any(each.__module__ not in ("fsspec.spec", "fsspec.asyn") for each in methods)


def _remote_entries(system: Any, folder: str) -> list[Entry]:
    found = []
    for info in system.ls(folder, detail=True):
        path = info["name"]
        name = path.rstrip("/").rpartition("/")[2]
        if path.rstrip("/") != folder.rstrip("/"):  # some list a folder as its own first entry
            found.append(Entry(name, path, info["type"] == "directory", info))
    return found


def full_url(system: Any, name: str, url: str) -> str:
    """Return the URL of a file found under `url`, in a chain such as zip://*.wav::s3://b/a.zip."""
    first, chained, rest = url.partition("::")
    full = str(system.unstrip_protocol(name))
    if not chained:
        return full
    return f"{full}::{rest}" if is_url(first) else f"{first}::{full}"
