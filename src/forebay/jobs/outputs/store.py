"""A folder of any fsspec file system: the operations that forebay needs, with readable errors.

Every exception on writing (each store has its own) becomes an `OutputError`; a missing file is a
result, not an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from forebay.errors import OutputError


class Store:
    """The folder that a URL names. Pickled as its URL, and opened when it is first used.

    Args:
        url: The folder, such as "s3://bucket/pieces".
    """

    def __init__(self, url: str) -> None:
        """Remember the URL."""
        self.url = url if url.endswith("://") else url.rstrip("/")
        self._opened: tuple[Any, str] | None = None

    def __getstate__(self) -> str:
        """Leave out the connection, which belongs to one process."""
        return self.url

    def __setstate__(self, url: str) -> None:
        """Arrive closed."""
        self.__init__(url)  # type: ignore[misc]

    def open(self) -> None:
        """Find the file system, which every other method does when it is first needed.

        Raises:
            OutputError: There is no such kind, or it is not installed.
        """
        _ = self._system

    @property
    def canonical_url(self) -> str:
        """The URL in the normal form of its file system."""
        if "::" in self.url:
            return self.url
        return str(self._system.unstrip_protocol(self._root))

    def locate(self, name: str) -> str:
        """Return the URL of a file; in a chain of URLs the file belongs to the first."""
        first, chained, rest = self.url.partition("::")
        return f"{first}{'' if first.endswith('/') else '/'}{name}{chained}{rest}"

    def read(self, name: str) -> bytes | None:
        """Return a small file; None if there is none."""
        with suppress(FileNotFoundError), self._in_words("read", FileNotFoundError):
            return bytes(self._system.cat_file(self._key(name)))
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
        with suppress(FileNotFoundError), self._in_words("read", FileNotFoundError):
            self._system.get_file(self._key(name), str(path))
            return True
        return False

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
        with suppress(FileNotFoundError), self._in_words("read", FileNotFoundError):
            self._system.invalidate_cache()
            return int(self._system.info(self._key(name))["size"])
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
    def _system(self) -> Any:
        return self._open()[0]

    @property
    def _root(self) -> str:
        return self._open()[1]

    def _open(self) -> tuple[Any, str]:
        if self._opened is None:
            from fsspec.core import url_to_fs

            try:
                system, path = url_to_fs(self.url)
            except Exception as error:
                raise OutputError(
                    f"{self.url} cannot be reached: {error}\n  Nothing was started. Check the "
                    "URL, and that its file system is installed (s3:// needs s3fs)."
                ) from error
            self._opened = system, path.rstrip("/")
        return self._opened

    def _key(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _in_words(self, done: str, *others: type[Exception]) -> Iterator[None]:
        """Turn all exceptions of the file system, but these others, into an OutputError."""
        try:
            yield
        except others:
            raise
        except Exception as error:
            raise OutputError(
                f"{self.url} cannot be {done}: {type(error).__name__}: {error}\n"
                "  Check that it exists, your credentials, and the network; then make the same "
                "call again."
            ) from error
