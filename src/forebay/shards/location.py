"""What a user names as shards: a folder, a pattern, a list, local or at a URL; found and sorted."""

from __future__ import annotations

import glob
import itertools
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

from forebay.base.files import connect_url, is_url, local_path, reached
from forebay.base.output_names import PRIVATE, TABLES
from forebay.errors import InputError, OptionError, shown_location
from forebay.shards.format import format_by_suffix, format_named

Location = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
# Chooses the shards among the names of files in a folder.
_Choose = Callable[[str, Sequence[str]], list[str]]

# A pattern that names more is a mistake.
MOST_SHARDS = 10_000_000
# Shards that are compressed as a whole, by the ends of their names.
CODECS = {
    ".gz": "gzip",
    ".tgz": "gzip",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".bz2": "bz2",
}
_MAGIC = frozenset("*?[")
# What stores call what changes with an object: `blob_id` is that of Hugging Face.
_TAGS = "ETag", "etag", "md5Hash", "content_md5", "blob_id", "mtime", "LastModified", "created"
_braces = re.compile(r"\{([^{}]*)\}").search
_numbers = re.compile(r"(\d+)\.\.(\d+)").fullmatch
# Files that say what is in a folder beside its shards.
_BESIDE = frozenset(("index.json", "dataset_info.json", "state.json", "dataset_dict.json"))


class Listed(NamedTuple):
    """A shard as its folder lists it.

    Attributes:
        name: Its path from the folder that all of them share.
        size: Its bytes.
        tag: What changes with its content: an ETag, or when it was written.
    """

    name: str
    size: int
    tag: str


class ShardList(NamedTuple):
    """The shards of a location, sorted by name.

    Attributes:
        root: The folder that they are in, a path or a URL; as the user named it, so it does not
            depend on which shards there are.
    """

    root: str
    shards: tuple[Listed, ...]


def find_shards(location: Location, form: str | None = None, *, may_mix: bool = False) -> ShardList:
    """Return the shards at a location.

    Args:
        location: A folder, whose shards are found by their suffixes, in its folders too; a file; a
            glob; a pattern with braces, such as `train-{000..999}.tar` or `{train,val}-*.tar`; or a
            list of these.
        form: The name of their format, whatever the suffixes of files that are named; None to go
            by suffix.
        may_mix: Whether shards in a folder may have several formats.

    Raises:
        OptionError: The location names nothing that can be looked for.
        InputError: A shard is missing, there is none, or the location cannot be reached.
    """
    given = _given(location)
    named = [each for one in given for each in expanded(local_path(one))]
    if chained := next((each for each in named if "::" in each), None):
        raise OptionError(
            f"{shown_location(chained)!r} is a chain of URLs, of which no part can be read\n"
            "  Name shards that are files of their own."
        )
    if len({each.partition("://")[0] if is_url(each) else "" for each in named}) > 1:
        raise OptionError(
            "shards of several kinds of places are named, and those of one dataset are in one\n"
            "  Name local ones, or those in one bucket."
        )
    look = _looked_up if is_url(named[0]) else _on_disk
    if not is_url(named[0]):
        named = [*map(os.path.abspath, named)]
    root, found = look(named, partial(_shards_of, form=form, may_mix=may_mix))
    if not found:
        raise InputError(
            f"{_shown(given)}: there are no shards\n"
            "  A folder is searched for the suffixes of known formats: .tar, .parquet, .jsonl, "
            ".arrow, .mds, also with .gz, .zst and others. Name others by a glob, with format=."
        )
    shards = tuple(sorted(found))
    _refuse_twice(root, shards)
    return ShardList(root, shards)


def _given(location: Location) -> list[Any]:
    some: Any = location
    if isinstance(location, str | os.PathLike) or not isinstance(location, Iterable):
        some = [location]
    given: list[Any] = [*some]
    if not given or not all(isinstance(each, os.PathLike) or each for each in given):
        raise OptionError(
            f"location={location!r} names no shards\n"
            "  Name a folder, a pattern such as 'train-*.tar', or shards in a list."
        )
    return given


def root_of_known(location: Location, names: Sequence[str]) -> str | None:
    """Return the folder of shards whose names an index has, without a listing.

    Args:
        location: As for `find_shards`.
        names: All shards of the index, from the folder that they share.

    Returns:
        None if only a listing can tell, or if the location does not name just these shards.
    """
    named = [each for one in _given(location) for each in expanded(local_path(one))]
    if not all(is_url(each) and "::" not in each for each in named):
        return None
    if len(named) > 1:  # a list of shards; of folders or patterns, a listing tells more
        root = _common([each.rpartition("/")[0] for each in named])
        return root if {f"{root}/{each}" for each in names} == {*named} else None
    folder, _, last = named[0].rstrip("/").rpartition("/")
    if not _has_magic(named[0]):  # a folder, unless it may be the only shard
        return None if [*names] == [last] else f"{folder}/{last}"
    if _has_magic(folder) or "**" in last or not all(fnmatchcase(each, last) for each in names):
        return None
    return None if any("/" in each for each in names) else folder


def _refuse_twice(root: str, shards: Sequence[Listed]) -> None:
    """Raise InputError for a shard that is there with and without compression."""
    seen = dict[str, str]()
    for each in shards:
        other = seen.setdefault(codec_of(each.name)[1], each.name)
        if other != each.name:
            raise InputError(
                f"{shown_location(root)}: {other!r} and {each.name!r} are the same samples, once "
                "compressed\n  Name those of one kind by a glob, such as '*.mds' or '*.mds.zstd'."
            )


def expanded(pattern: str) -> list[str]:
    """Return the names that braces stand for: `{000..009}` and `{a,b}`.

    Raises:
        OptionError: They are more than any dataset has.
    """
    todo, done = [pattern], list[str]()
    while todo:
        each = todo.pop()
        if (found := _braces(each)) is None:
            done.append(each)
            continue
        choices = [*_choices(found[1])]
        if len(done) + (len(todo) + 1) * len(choices) > MOST_SHARDS:  # the others have these, too
            raise OptionError(f"{pattern!r} stands for more than {MOST_SHARDS:,} shards")
        todo += [f"{each[: found.start()]}{one}{each[found.end() :]}" for one in choices]
    return [*dict.fromkeys(done)]  # what is around inner braces comes once for each of them


def _choices(text: str) -> Iterable[str]:
    if (found := _numbers(text)) is None:
        return text.split(",")
    first, last = int(found[1]), int(found[2])
    if last - first > MOST_SHARDS:
        raise OptionError(f"{{{text}}} stands for more than {MOST_SHARDS:,} shards")
    is_padded = any(each.startswith("0") and len(each) > 1 for each in found.groups())
    width = max(map(len, found.groups())) if is_padded else 0
    return (f"{at:0{width}}" for at in range(first, last + 1))


def codec_of(name: str) -> tuple[str | None, str]:
    """Return how a shard is compressed, None if it is not; and its name without that suffix."""
    for suffix, codec in CODECS.items():
        if name.lower().endswith(suffix):
            return codec, name[: -len(suffix)] + (".tar" if suffix == ".tgz" else "")
    return None, name


def _shards_of(folder: str, names: Sequence[str], form: str | None, may_mix: bool) -> list[str]:
    """Return which files in a folder are its shards.

    Raises:
        InputError: They have several formats, as where a tar has its metadata beside it.
    """
    runs = {each.partition(f"{PRIVATE}/")[0] for each in names if f"{PRIVATE}/" in each}
    beside = {f"{run}{table}" for run in runs for table in TABLES}  # an index has one
    found = dict[str, list[str]]()
    for name in names:
        if name not in beside and (known := _format_of(name, form)) is not None:
            is_loose = form is None and codec_of(name)[1].lower().endswith(".json")
            found.setdefault("" if is_loose else known, []).append(name)
    if len(found) > 1:
        found.pop("", None)  # what is said about the other shards
    if len(found) > 1 and not may_mix:
        counts = ", ".join(f"{len(each):,} of {known!r}" for known, each in sorted(found.items()))
        raise InputError(
            f"{shown_location(folder)!r} has shards of several formats: {counts}\n"
            f"  Nothing was read. Name those of one by format={min(found)!r}, or by a glob."
        )
    return [name for each in found.values() for name in each]


def _format_of(name: str, form: str | None) -> str | None:
    """Return the format of a file in a folder; None if it is no shard."""
    parts = name.split("/")
    if any(each.startswith((".", "_")) for each in parts) or parts[-1] in _BESIDE:
        return None
    plain = codec_of(name)[1]
    if form is not None:
        return form if plain.lower().endswith(format_named(form).suffixes) else None
    known = format_by_suffix(plain)
    return None if known is None else known.name


def _steady(pattern: str) -> str:
    """Return the part of a pattern before its first wildcard, up to a folder."""
    magic = next((at for at, each in enumerate(pattern) if each in _MAGIC), len(pattern))
    return pattern[:magic].rpartition("/")[0]


def _has_magic(name: str) -> bool:
    return not _MAGIC.isdisjoint(name)


def _on_disk(named: Sequence[str], choose: _Choose) -> tuple[str, set[Listed]]:
    folders = [each if os.path.isdir(each) else _steady(each) for each in named]
    root = os.path.commonpath(folders)

    def listed(path: str) -> Listed:
        state = os.stat(path)
        return Listed(os.path.relpath(path, root), state.st_size, str(state.st_mtime_ns))

    found = set[Listed]()
    paths: Iterable[str]
    for each in named:
        if os.path.isdir(each):
            inner = [
                os.path.relpath(os.path.join(folder, name), each)
                for folder, _, names in os.walk(each, onerror=_refuse_unreadable)
                for name in names
            ]
            paths = (os.path.join(each, name) for name in choose(each, inner))
        elif _has_magic(each) and not os.path.exists(each):
            paths = (path for path in glob.iglob(each, recursive=True) if os.path.isfile(path))
        else:
            paths = [each]
        try:
            found.update(map(listed, paths))
        except FileNotFoundError as error:
            raise InputError(f"{error.filename!r}: there is no such file or folder") from error
        except OSError as error:
            _refuse_unreadable(error)
    return root, found


def _refuse_unreadable(error: OSError) -> None:
    """Raise InputError for a folder or a file, so that no samples are missing in silence."""
    raise InputError(
        f"{error.filename!r} cannot be read: {error.strerror}\n"
        "  Nothing was read. Check its permissions; or name the others by a glob or a list."
    ) from error


def _looked_up(named: Sequence[str], choose: _Choose) -> tuple[str, set[Listed]]:
    """Find shards at URLs: one listing for each folder that is named, and not one a shard."""
    plain = [each for each in named if not _has_magic(each)]
    by_folder = {
        folder: [*names]
        for folder, names in itertools.groupby(sorted(plain), lambda each: each.rpartition("/")[0])
    }
    found: dict[str, Listed] = {}
    steady = list[str]()
    with reached(named[0]) as (system, _):
        protocol = named[0].partition("://")[0]

        def keep(infos: Mapping[str, Any]) -> None:
            for path, info in infos.items():
                url = path if is_url(path) else f"{protocol}://{path.lstrip('/')}"
                if info["type"] != "directory":
                    found[url] = Listed(url, int(info["size"] or 0), tag_of(info))

        for each in filter(_has_magic, named):
            steady.append(_steady(each))
            keep(system.glob(connect_url(each)[1], detail=True))
        for folder, names in by_folder.items():
            infos = _infos(system, names, folder)
            for name, info in infos:
                if info["type"] != "directory":
                    steady.append(folder)
                    keep({name: info})
                    continue
                steady.append(name.rstrip("/"))
                path = connect_url(name)[1].rstrip("/")
                inner = system.find(path, detail=True)
                names = choose(name, [key[len(path) + 1 :] for key in inner])
                keep({f"{path}/{each}": inner[f"{path}/{each}"] for each in names})
    root = _common(steady)
    start = len(root) + 1
    if other := next((url for url in found if not url.startswith(f"{root}/")), None):
        raise InputError(
            f"{shown_location(other)!r} was found in {shown_location(root)!r}, which is not its "
            "folder\n  Name the shards by the URLs that their file system lists."
        )
    return root, {each._replace(name=url[start:]) for url, each in found.items()}


def _infos(system: Any, names: Sequence[str], folder: str) -> Iterator[tuple[str, Any]]:
    """Yield what is known of some files or folders that are in one."""
    there: dict[str, Any] = {}
    if len(names) > 1:
        with suppress(Exception):  # a server that lists nothing
            listed = system.ls(connect_url(folder)[1], detail=True)
            there = {posixpath.basename(each["name"].rstrip("/")): each for each in listed}
    for name in names:
        last = name.rstrip("/").rpartition("/")[2]
        info = there.get(last)
        try:
            yield name, system.info(connect_url(name)[1]) if info is None else info
        except FileNotFoundError as error:
            where = shown_location(name)
            raise InputError(f"{where!r}: there is no such object or folder") from error


def tag_of(info: Mapping[str, Any]) -> str:
    """Return what a store says of an object that changes with its content."""
    for name in _TAGS:
        if value := info.get(name):
            return str(value).strip('"')
    return ""


def _common(folders: Sequence[str]) -> str:
    """Return the folder that all are in, with the protocol and the bucket."""
    parts = [each.rstrip("/").split("/") for each in folders]
    shared = [each[0] for each in itertools.takewhile(lambda one: len({*one}) == 1, zip(*parts))]  # noqa: B905
    if len(shared) < 3:
        raise OptionError(
            "the shards of one dataset are in one bucket, and these have "
            f"{shown_location(folders[0])!r} and {shown_location(folders[-1])!r}"
        )
    return "/".join(shared)


def _shown(given: Sequence[Any]) -> str:
    more = f" and {len(given) - 1:,} more" if len(given) > 1 else ""
    return f"{shown_location(os.fspath(given[0]))!r}{more}"
