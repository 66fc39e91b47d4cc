"""Tar files of many small outputs of one input, each an output like any other; reading outputs."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, Self

from forebay.base.files import is_url, open_regular, open_url
from forebay.base.output_names import inside_name
from forebay.errors import InputError, OutputError, short_tracebacks, shortened


class OutputTar:
    """A tar file that a function writes, member by member; made by `out.tar`.

    Its bytes depend on nothing but the names and data of its members.
    """

    def __init__(self, path: Path) -> None:
        """Create the file, which exists as long as it is open, and after that."""
        self._path = path
        self._names: set[str] = set()
        self._lock = Lock()  # a function may have threads of its own
        self._tar = tarfile.open(path, "w", format=tarfile.PAX_FORMAT)  # noqa: SIM115

    def add(self, name: str | os.PathLike[str], data: Any) -> dict[str, Any]:
        """Append a member, and return where it is, as a row of the table.

        Args:
            name: Its name in the tar file, relative. Readers of WebDataset shards make one sample
                of "a.flac" and "a.json".
            data: The bytes: `bytes`, or any other buffer.

        Returns:
            A dict of `destination`, the tar file, `member`, its name, and `offset` and `size` of
            the data, with which `forebay.open_output` reads it.

        Raises:
            OutputError: The name is absolute or leaves the tar file, was used before, or is not
                Unicode.
            TypeError: The data are not bytes.
        """
        final, body = inside_name(name, "tar.add"), _as_bytes(name, data)
        try:
            final.encode()
        except UnicodeEncodeError:
            raise OutputError(
                f"tar.add({name!r}): that name cannot be written as UTF-8, which a tar file needs\n"
                "  Nothing was written. Replace the characters that are not Unicode."
            ) from None
        info = tarfile.TarInfo(final)  # with no owner, and the time 0
        info.size = len(body)
        with self._lock:
            if final in self._names:
                raise OutputError(
                    f"tar.add({name!r}): this tar file has a member of that name\n"
                    "  Give each a name of its own."
                )
            self._tar.addfile(info, io.BytesIO(body))
            self._names.add(final)
            offset = self._tar.offset - len(body) - (-len(body) % tarfile.BLOCKSIZE)
        place = {"member": final, "offset": offset, "size": len(body)}
        return {"destination": str(self._path), **place}

    def close(self) -> None:
        """Write the end of the tar file, and close it."""
        self._tar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _as_bytes(name: object, data: Any) -> bytes:
    if type(data) is bytes:
        return data
    try:
        return memoryview(data).tobytes()
    except (TypeError, ValueError, BufferError):
        raise TypeError(
            f"tar.add({name!r}, data) takes bytes or another buffer; got "
            f"{type(data).__name__}\n  Encode it first, for example with text.encode()."
        ) from None


@short_tracebacks
def open_output(
    path: str | os.PathLike[str], offset: int | None = None, size: int | None = None
) -> BinaryIO:
    """Open an output of `preprocess` for reading.

    Args:
        path: The output's path or fsspec URL, as `from_table` and a run over a table pass it in the
            column `destination`.
        offset: For a member of a tar file that `out.tar` made: where its data begin, as the column
            `offset` has it. None for the whole file.
        size: How many bytes the member has, as the column `size` has it.

    Returns:
        A binary file at its beginning. A member is read into memory.

    Raises:
        InputError: The file is too short for such a member.
        OSError: It cannot be opened or read.
    """
    name = os.fspath(path)
    file: BinaryIO = open_url(name) if is_url(name) else io.BufferedReader(open_regular(name))
    if offset is None and size is None:
        return file
    with file:
        end = file.seek(0, os.SEEK_END)
        if offset is None or size is None or min(offset, size) < 0 or offset + size > end:
            raise InputError(
                f"{shortened(name)} has {end:,} bytes, so there is no member of {size} bytes at "
                f"offset {offset}\n  Nothing was read. Run `forebay verify` on the output folder, "
                "then make the call again that made it."
            )
        file.seek(offset)
        return io.BytesIO(file.read(size))
