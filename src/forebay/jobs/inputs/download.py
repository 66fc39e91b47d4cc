"""Remote inputs: downloaded to a local path while a worker processes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forebay.errors import InputError
from forebay.jobs.preprocess_job import NoInputError


class Download:
    """Downloads one input at a time, each into a new folder; the `Fetch` of a PreprocessJob.

    Args:
        folder: Where those folders are created. The run empties it when it starts and when it
            ends, so a worker that was killed leaves no files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def __call__(self, source: str) -> Iterator[Path]:
        """Download the file that a URL names; yield the local path, which has the same file name.

        Raises:
            NoInputError: There is no such file.
        """
        # Every worker imports this module, and most download nothing.
        from tempfile import TemporaryDirectory

        from fsspec.core import url_to_fs

        # Opened here, in the worker: connections cannot be passed to another process.
        system, remote = url_to_fs(source)
        if _is_local(system):
            yield _existing(Path(remote), source)
            return
        os.makedirs(self._folder, exist_ok=True)
        with TemporaryDirectory(dir=self._folder, ignore_cleanup_errors=True) as scratch:
            path = Path(scratch, _file_name(remote))
            try:
                system.get_file(remote, str(path))
            except FileNotFoundError as error:
                raise NoInputError from error
            yield _existing(path, source)


@contextmanager
def fetched(url: str) -> Iterator[Path]:
    """Download one remote file; yield the local path, which has the same file name.

    Raises:
        InputError: There is no such file.
    """
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as scratch:
        try:
            with Download(Path(scratch))(url) as path:
                yield path
        except NoInputError as error:
            raise InputError(f"{url} does not exist") from error


def _is_local(system: Any) -> bool:
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(system, LocalFileSystem)


def _existing(path: Path, source: str) -> Path:
    """Return the path of a file after checking that it is one."""
    if path.is_dir():
        error: OSError = IsADirectoryError(f"{source}: an input is a file, this is a folder")
        raise NoInputError from error
    if not path.exists():
        raise NoInputError from FileNotFoundError(f"{source}: no such file")
    return path


def _file_name(remote: str) -> str:
    """Return the last part of a path, without the query of a URL."""
    if remote.startswith(("http://", "https://")):
        remote = remote.partition("?")[0].partition("#")[0]
    return remote.rstrip("/").rpartition("/")[2] or "input"
