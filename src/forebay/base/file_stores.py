"""Folders, local or at a URL of any fsspec file system: the operations that forebay needs.

Every exception on writing (each file system has its own) becomes an `OutputError`; a missing file
is a result, not an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from forebay.base.files import (
    atomic_file,
    connect_url,
    explained,
    is_url,
    local_path,
    location_in,
    read_regular,
    tried,
)
from forebay.errors import (
    ForebayError,
    OutputError,
)

_SMALL_BYTES = 1 << 20


class Store:
    """The folder that a URL names. Pickled as its URL, and opened when it is first used."""

    def __init__(self, url: str, error: type[ForebayError] = OutputError) -> None:
        """Remember the URL, and the class of the exceptions to raise."""
        self.url, self._error = url if url.endswith("://") else url.rstrip("/"), error

    def __getstate__(self) -> tuple[Any, ...]:
        """Leave out the connection, which belongs to one process."""
        return self.url, self._error

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Arrive closed."""
        self.__init__(*state)  # type: ignore[misc]

    def open(self) -> None:
        """Find the file system, which every other method does when it is first needed."""
        _ = self._opened

    @property
    def canonical_url(self) -> str:
        """The URL in the normal form of its file system."""
        if "::" in self.url:
            return self.url
        return str(self._system.unstrip_protocol(self._root))

    def locate(self, name: str) -> str:
        """Return the URL of a file."""
        return location_in(self.url, name)

    def read(self, name: str, most: int = _SMALL_BYTES) -> bytes | None:
        """Return a small file; None if there is none, or if it is large."""
        if (self.size(name) or 0) > most:
            return None
        with suppress(FileNotFoundError), self._in_words("read", FileNotFoundError, name=name):
            return bytes(tried(lambda: self._system.cat_file(self._key(name))))
        return None

    def write(self, name: str, data: bytes) -> None:
        """Write a small file."""
        with self._in_words("written"):
            self._system.pipe_file(self._key(name), data)

    def upload(self, files: Sequence[tuple[str, str]]) -> None:
        """Write files, given as pairs of local path and name, in parallel if the store can."""
        system = self._system
        local = [path for path, _ in files]
        keys = [self._key(name) for _, name in files]
        with self._in_words("written"):
            if system.async_impl:
                system.put(local, keys)
            else:
                for path, key in zip(local, keys, strict=True):
                    system.put_file(path, key)

    def download(self, name: str, path: Path) -> bool:
        """Fetch a file to a local path; return False if there is none."""
        with suppress(FileNotFoundError), self._in_words("read", FileNotFoundError, name=name):
            tried(lambda: self._system.get_file(self._key(name), str(path)))
            return True
        return False

    def copy(self, name: str, other: str) -> None:
        """Copy a file within the store."""
        with self._in_words("copied", name=name):
            self._system.cp_file(self._key(name), self._key(other))

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; it is not an error if some are gone already."""
        from fsspec.core import has_magic

        system = self._system
        keys = [self._key(name) for name in names]
        # Many go in one request; but a list is searched for globs, which names may look like.
        many = [key for key in keys if system.async_impl and not has_magic(key)]
        single = [key for key in keys if not system.async_impl or has_magic(key)]
        if many:
            with suppress(FileNotFoundError), self._in_words("changed", FileNotFoundError):
                system.rm(many)
                many = []
        # If one of many was missing, it is unknown whether the others were removed.
        for key in single + many:
            with suppress(FileNotFoundError), self._in_words("changed", FileNotFoundError):
                system.rm_file(key)

    def size(self, name: str) -> int | None:
        """Return a file's bytes; None if there is none."""
        with suppress(FileNotFoundError), self._in_words("read", FileNotFoundError, name=name):
            self._system.invalidate_cache()
            return int(tried(lambda: self._system.info(self._key(name)))["size"])
        return None

    def files(self) -> list[tuple[str, int]]:
        """Return the name and bytes of every file, sorted."""
        with suppress(FileNotFoundError), self._in_words("read", FileNotFoundError):
            self._system.invalidate_cache()
            found = self._system.find(self._root, detail=True)
            start = len(self._root) + 1
            return sorted(
                (path[start:], int(info["size"] or 0))
                for path, info in found.items()
                # A key that ends with "/" is how an object store marks a folder.
                if info["type"] != "directory" and not path.endswith("/")
            )
        return []

    def top(self) -> set[str]:
        """Return the names of the files and folders at the top."""
        with suppress(FileNotFoundError), self._in_words("read", FileNotFoundError):
            self._system.invalidate_cache()
            found = self._system.ls(self._root, detail=False)
            start = len(self._root) + 1
            return {path.rstrip("/")[start:] for path in found} - {""}
        return set()

    @property
    def is_parallel(self) -> bool:
        """Whether several threads may read at once."""
        return bool(self._system.async_impl)

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        try:
            system, path = connect_url(self.url)
        except Exception as error:
            words, advice = explained(error, "Check the URL.")
            raise self._error(
                f"{self.url} cannot be reached: {words}\n  Nothing was started. {advice}"
            ) from error
        return system, path.rstrip("/")

    @property
    def _system(self) -> Any:
        return self._opened[0]

    @property
    def _root(self) -> str:
        return self._opened[1]

    def _key(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _in_words(self, done: str, *others: type[Exception], name: str = "") -> Iterator[None]:
        """Turn all exceptions of the file system, but these others, into one of forebay's."""
        try:
            yield
        except others:
            raise
        except Exception as error:
            url = self.locate(name) if name else self.url
            words, advice = explained(
                error, "Check the URL and your rights there; then make the same call again."
            )
            words = f"{type(error).__name__}: {words}"
            raise self._error(f"{url} cannot be {done}: {words}\n  {advice}") from error


class Folder:
    """A local folder, with those operations of a `Store` that a cache needs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def locate(self, name: str) -> str:
        """Return the path of a file."""
        return str(self.path / name)

    def read(self, name: str, most: int = _SMALL_BYTES) -> bytes | None:
        """Return a small file; None if there is none; raise OSError if it is larger."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return read_regular(self.path / name, most)
        return None

    def write(self, name: str, data: bytes) -> None:
        """Write a file in one step."""
        try:
            with atomic_file(self.path / name) as file:
                file.write(data)
        except OSError as error:
            raise OutputError(
                f"{self.locate(name)!r} cannot be written: {error.strerror}\n"
                "  Check the permissions and the space of its folder; the same call continues."
            ) from error

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; it is not an error if some are gone already."""
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def size(self, name: str) -> int | None:
        """Return a file's bytes; None if there is none."""
        with suppress(FileNotFoundError):
            return (self.path / name).stat().st_size
        return None

    def files(self) -> list[tuple[str, int]]:
        """Return the name and bytes of whatever is at the top, sorted."""
        found = []
        with os.scandir(self.path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # a link to what is no longer there
                    found.append((entry.name, entry.stat().st_size))
        return sorted(found)


def folder_at(
    location: str | os.PathLike[str], error: type[ForebayError] = OutputError
) -> Store | Folder:
    """Return the folder that a path or a URL names; `error` is what a store raises."""
    text = local_path(location)
    return Store(text, error) if is_url(text) else Folder(Path(os.path.abspath(text)))
