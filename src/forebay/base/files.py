"""Paths and fsspec URLs: what they name, and files there, written in one step or with clear errors.

No other module asks whether a string is a URL, and only `file_stores.py` uses fsspec, too.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import random
import re
import stat
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from forebay.errors import (
    InputError,
    OptionError,
    OutputError,
    printable,
    shown_location,
)

# ---- locations -----------------------------------------------------------------------------------
# PURE, but for the working folder: a location is the path of a file or folder, or the URL of one.

_LOCAL = ("file://", "local://")


def is_url(location: str) -> bool:
    """Return whether a location is a URL, rather than a path."""
    return "://" in location


def absolute(location: str) -> str:
    """Return an absolute path; a URL as it is."""
    return location if is_url(location) else os.path.abspath(location)


def location_in(folder: str, name: str) -> str:
    """Return the location of a file in a folder; in a chain of URLs it belongs to the first."""
    if not is_url(folder) or os.path.isabs(name):
        return os.path.join(folder, name)
    first, chained, rest = folder.partition("::")
    return f"{first}{'' if first.endswith('/') else '/'}{name}{chained}{rest}"


def folder_of(location: str) -> str | None:
    """Return the folder of a file; None for a file in an archive (zip://a.csv::s3://b/c)."""
    if not is_url(location):
        return os.path.dirname(location)
    folder = _without_query(location).rpartition("/")[0]
    return None if "::" in location else folder if is_url(folder) else f"{folder}/"


def file_name(location: str) -> str:
    """Return the last part of a path or URL, without a query; of a chain of URLs, of the first."""
    return _without_query(location.partition("::")[0]).rstrip("/").rpartition("/")[2]


def _without_query(location: str) -> str:
    has_query = location.startswith(("http://", "https://"))
    return location.partition("?")[0].partition("#")[0] if has_query else location


def location_text(location: object) -> str:
    """Return a path or URL as a string."""
    text: Any = os.fspath(location) if isinstance(location, os.PathLike) else location
    if not isinstance(text, str) or "\0" in text:
        raise OptionError(
            f"{location!r} names no folder\n"
            "  Nothing was started. Pass a path or a URL, as a str or a Path, without null bytes."
        )
    return text


def local_path(location: str | os.PathLike[str]) -> str:
    """Return a path or URL as a string; a file:// URL as a path."""
    text = os.path.expanduser(location_text(location))
    if not text.startswith(_LOCAL) or "::" in text:
        return text
    from fsspec.implementations.local import LocalFileSystem

    return str(LocalFileSystem._strip_protocol(text))


def shown_values(value: Any) -> Any:
    """Return a value of JSON in which no string that is a URL has credentials.

    A URL within a longer string is part of the user's text, which stays as it is.
    """
    if isinstance(value, str):
        is_location = "://" in value and re.match(r"[A-Za-z][A-Za-z0-9+.-]*::?\S+$", value)
        return shown_location(value) if is_location else value
    if isinstance(value, list):
        return [*map(shown_values, value)]
    if isinstance(value, dict):
        return {key: shown_values(each) for key, each in value.items()}
    return value


# ---- local files ---------------------------------------------------------------------------------
# A path that comes from a disk (a file in an output folder or a cache, a name in a table) may be
# anything. It is opened here, and a small file is read here.


def open_regular(
    path: str | os.PathLike[str], flags: int = os.O_RDONLY, *, follows: bool = True
) -> FileIO:
    """Open a file that exists, without waiting; raise OSError if it is a pipe or a device.

    Args:
        follows: Whether the path may be a symbolic link.
    """
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | (0 if follows else os.O_NOFOLLOW)
    mode = "r+" if flags & os.O_RDWR else "r"
    file = FileIO(path, mode, opener=lambda name, _: os.open(name, flags, 0o666))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    return file


def read_regular(path: str | os.PathLike[str], most: int) -> bytes:
    """Return the content of a small file, opened in this way; raise OSError if it is larger."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", os.fspath(path))
        return file.read(most)


@contextmanager
def atomic_file(path: Path, *, is_ours: bool = True) -> Iterator[BinaryIO]:
    """Yield a file that, complete and on the disk, replaces `path`; or leave `path` as it is.

    Args:
        is_ours: Whether nobody else writes to the folder: then what a kill left is overwritten.
    """
    mark = "tmp" if is_ours else os.urandom(8).hex()
    temporary = path.with_name(f".{path.name[:100]}.{mark}")
    try:
        with temporary.open("wb" if is_ours else "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def refuse_foreign(private: Path) -> None:
    """Raise OutputError if forebay's own files are links, pipes or devices."""
    odd = private if private.is_symlink() else None
    if odd is None and private.is_dir():
        odd = next(itertools.filterfalse(_is_usual, private.iterdir()), None)
    if odd is not None:
        what = f"a link to {os.readlink(odd)!r}" if odd.is_symlink() else "a pipe or a device"
        raise OutputError(
            f"{str(odd)!r} is {what}, which forebay does not make\n"
            "  Nothing was started, because the run would write to it. Remove it, or choose "
            "another output folder."
        )


def _is_usual(path: Path) -> bool:
    """Return whether it is a file or a folder, or is gone: another run may have removed it."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return True
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


# ---- free names ----------------------------------------------------------------------------------
# Renaming a file to a free name in one step, so that an existing file is never overwritten.
#
# renameat2(RENAME_NOREPLACE)   Linux: ext4, XFS, Btrfs, tmpfs, overlayfs and others
# link, then unlink             where there are hard links instead: NFS, macOS
# look, then rename             elsewhere; another process could come between the two

_AT_FDCWD, _NOREPLACE = -100, 1
_ENCODING = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()
# Errors of a file system or kernel that lacks an operation.
_UNSUPPORTED = frozenset(
    {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM, errno.EMLINK}
)


_libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_renameat2 = getattr(_libc, "renameat2", None)


def rename_new(old: str, new: str) -> None:
    """Rename a file to a name that is free."""
    for rename in _WAYS:
        try:
            rename(old, new)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        else:
            return
    os.lstat(old)
    if os.path.lexists(new):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
    os.replace(old, new)


def _by_renameat2(old: str, new: str) -> None:
    if _renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), new)
    # As `os.fsencode` does, which takes four times as long.
    first, second = old.encode(*_ENCODING), new.encode(*_ENCODING)
    if _renameat2(_AT_FDCWD, first, _AT_FDCWD, second, _NOREPLACE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), new)


def _by_link(old: str, new: str) -> None:
    try:
        os.link(old, new, follow_symlinks=False)
    except FileExistsError:
        # NFS may have created the link and lost the reply; or a kill came before the unlink.
        if not os.path.samestat(os.lstat(old), os.lstat(new)):
            raise
    with suppress(FileNotFoundError):
        os.unlink(old)


_WAYS = (_by_renameat2, _by_link)


# ---- remote files --------------------------------------------------------------------------------
# Files at fsspec URLs: found and opened, with readable errors.

# How long a server may be silent in a request, and for how long a request is tried again.
SILENT_S, PATIENCE_S = 15.0, 90.0
# The same where a library tries nothing again: how often, and the longest first pause.
_MOST_TRIES, _PAUSE_S = 6, 0.2


def connect_url(url: str, *, anew: bool = False) -> tuple[Any, str]:
    """Return the file system of a URL or path, and the path there; raise what fsspec raises.

    Args:
        anew: Whether not to use a connection that there is: it may be another process's.
    """
    from fsspec.core import url_to_fs

    limits = _limits_of(url)
    system, path = url_to_fs(url, **limits)
    if anew:
        system.clear_instance_cache()
        system, path = url_to_fs(url, **limits)
    return system, path


def _limits_of(url: str) -> dict[str, Any]:
    """Return the settings by which s3fs, or fsspec's HTTP, gives up a server that is silent."""
    found: dict[str, Any] = {}
    for protocol in {part.partition("://")[0] for part in url.split("::") if is_url(part)}:
        if protocol in ("s3", "s3a"):  # s3fs makes five tries, and botocore two of each
            most = {"read_timeout": PATIENCE_S / 10, "retries": {"total_max_attempts": 2}}
            own = settings_of(protocol).get("config_kwargs", {})
            found[protocol] = {"config_kwargs": most | own}
        elif protocol in ("http", "https"):
            from aiohttp import ClientTimeout  # fsspec's HTTP needs it, too

            most = {"timeout": ClientTimeout(None, sock_connect=SILENT_S, sock_read=SILENT_S)}
            own = settings_of(protocol).get("client_kwargs", {})
            found[protocol] = {"client_kwargs": most | own}
    return found


_T = TypeVar("_T")


def tried(call: Callable[[], _T]) -> _T:
    """Return what a call to a store returns; tried again, after a pause, if its error may pass."""
    from forebay.base.store_errors import BROKEN, THROTTLED, store_error_kind

    began = time.monotonic()
    for attempt in itertools.count():
        try:
            return call()
        except Exception as error:
            is_over = attempt == _MOST_TRIES - 1 or time.monotonic() > began + PATIENCE_S
            if is_over or store_error_kind(error) not in (BROKEN, THROTTLED):
                raise
        time.sleep(random.uniform(0, _PAUSE_S * 2**attempt))  # noqa: S311
    raise AssertionError


def settings_of(protocol: str) -> dict[str, Any]:
    """Return the user's settings of fsspec for a protocol."""
    is_set = any(name.startswith("FSSPEC_") for name in os.environ)  # also for another folder
    is_set = is_set or os.path.isdir(os.path.expanduser("~/.config/fsspec"))
    if not is_set and "fsspec" not in sys.modules:  # its import takes longer than many programs
        return {}
    from fsspec.config import conf

    return dict(conf.get(protocol, {}))


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path there."""
    try:
        return connect_url(url)
    except Exception as error:
        raise _unreachable(url, error) from error


@contextmanager
def reached(url: str) -> Iterator[tuple[Any, str]]:
    """Yield the file system of a URL, and the path there; what it raises becomes an InputError."""
    system, path = file_system(url)
    try:
        # fsspec caches folders as long as the process lives, and would not see later changes.
        system.invalidate_cache()
        yield system, path
    except InputError:
        raise
    except FileNotFoundError as error:
        message = f"{printable(url)}: no such file or folder\n  Check the URL."
        raise InputError(message) from error
    except Exception as error:
        raise _unreachable(url, error) from error


def open_url(url: str) -> BinaryIO:
    """Open a file for reading."""
    system, path = file_system(url)
    file = cast("BinaryIO", system.open(path, "rb"))
    # A file in an archive does not keep its file system alive, which at its end closes the archive.
    weakref.finalize(file, id, system).atexit = False
    return file


def names_among(folder: str, names: Sequence[str]) -> list[str] | None:
    """Return which of the names are files in a folder; None if it is none."""
    if not is_url(folder):
        there = [name for name in names if os.path.isfile(os.path.join(folder, name))]
        return there if os.path.isdir(folder) else None
    with reached(folder) as (system, path):
        if system.info(path)["type"] != "directory":
            return None
        return [name for name in names if system.isfile(f"{path.rstrip('/')}/{name}")]


def _unreachable(url: str, error: Exception) -> InputError:
    words, advice = explained(error, "Check the URL, and what is there.")
    return InputError(f"{printable(url)}: it cannot be reached: {words}\n  {advice}")


def explained(error: Exception, otherwise: str) -> tuple[str, str]:
    """Return what an error of a file system says, and what to do."""
    from forebay.base.store_errors import store_advice, store_error_words

    return store_error_words(error), store_advice(error, otherwise)


# ---- download ------------------------------------------------------------------------------------
# Remote inputs: downloaded to a local path while a worker processes them.


class NoInputError(Exception):
    """There is no such input, or it may not be read; the cause says which."""


@contextmanager
def download(source: str, folder: Path | None = None) -> Iterator[Path]:
    """Download the file that a URL names; yield the local path, with the same file name.

    Args:
        folder: Where a new folder is made for it; None for that of temporary files.
    """
    # Every worker imports this module, and most download nothing.
    from fsspec.implementations.local import LocalFileSystem

    # Opened here, in the worker: connections cannot be passed to another process.
    system, remote = connect_url(source)
    if isinstance(system, LocalFileSystem):
        yield _existing(Path(remote), source)
        return
    from tempfile import TemporaryDirectory

    if folder is not None:
        os.makedirs(folder, exist_ok=True)
    with TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as scratch:
        path = Path(scratch, file_name(remote) or "input")
        try:
            tried(lambda: system.get_file(remote, str(path)))
        except (FileNotFoundError, PermissionError) as error:
            raise NoInputError from error  # another try would not help
        yield _existing(path, source)


@contextmanager
def fetched(url: str) -> Iterator[Path]:
    """Download one remote file; yield the local path, which has the same file name."""
    try:
        with download(url) as path:
            yield path
    except NoInputError as error:
        is_denied = isinstance(error.__cause__, PermissionError)
        what = "may not be read" if is_denied else "does not exist"
        raise InputError(f"{url} {what}") from error


@contextmanager
def local_file(location: str) -> Iterator[Path]:
    """Yield the local path of a file, which is downloaded for the block if it is a URL's."""
    if not is_url(location):
        yield Path(location)
        return
    with fetched(location) as path:
        yield path


def _existing(path: Path, source: str) -> Path:
    """Return the path of a file after checking that it is one."""
    if path.is_dir():
        error: OSError = IsADirectoryError(
            f"{source}: at a URL an input is a file, and this is a folder"
        )
        raise NoInputError from error
    if not path.exists():
        raise NoInputError from FileNotFoundError(f"{source}: no such file")
    return path
