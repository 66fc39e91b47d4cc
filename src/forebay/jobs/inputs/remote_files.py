"""Files at fsspec URLs: found and opened, with readable errors."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, BinaryIO, cast

from forebay.errors import InputError


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path there.

    Raises:
        InputError: There is no such kind of file system, or it is not installed.
    """
    from fsspec.core import url_to_fs

    try:
        system, path = url_to_fs(url)
    except Exception as error:
        raise unreachable(url, error) from error
    return system, path


def open_url(url: str) -> BinaryIO:
    """Open a file for reading."""
    system, path = file_system(url)
    file = cast("BinaryIO", system.open(path, "rb"))
    # A file in an archive does not keep its file system alive, which at its end closes the archive.
    weakref.finalize(file, id, system).atexit = False
    return file


def names_among(url: str, names: Sequence[str]) -> list[str] | None:
    """Return which of the names are files in the folder at a URL; None if it is a file.

    Raises:
        InputError: There is nothing, or it cannot be reached.
    """
    system, path = file_system(url)
    try:
        # fsspec caches folders as long as the process lives, and would not see later changes.
        system.invalidate_cache()
        if system.info(path)["type"] != "directory":
            return None
        return [name for name in names if system.isfile(f"{path.rstrip('/')}/{name}")]
    except FileNotFoundError as error:
        raise absent(url) from error
    except Exception as error:
        raise unreachable(url, error) from error


def folder_of(url: str) -> str | None:
    """Return the URL of a file's folder; None for a file in an archive (zip://a.csv::s3://b/c)."""
    if "::" in url:
        return None
    folder = url.rpartition("/")[0]
    return folder if "://" in folder else f"{folder}/"


def absent(url: str) -> InputError:
    """Return the error for a URL at which there is nothing."""
    return InputError(f"{_shown(url)}: no such file or folder\n  Check the URL.")


def unreachable(url: str, error: Exception) -> InputError:
    """Return the error for a URL that a file system could not open."""
    advice = "Check the URL, your credentials, and that its file system is installed (s3:// s3fs)."
    return InputError(f"{_shown(url)}: it cannot be reached: {error}\n  {advice}")


def _shown(url: str) -> str:
    return url if url.isprintable() else ascii(url)[1:-1]
