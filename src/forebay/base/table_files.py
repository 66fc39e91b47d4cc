"""The files of tables: opened, decompressed and decoded, with errors that say in which line."""

from __future__ import annotations

import codecs
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple, NoReturn

from forebay.errors import InputError


def refuse(where: str, reason: str, advice: str, cause: BaseException | None = None) -> NoReturn:
    """Raise InputError with a message of two lines."""
    raise InputError(f"{where}: {reason}\n  {advice}") from cause


class TableFile(NamedTuple):
    """A file with a table: what errors call it, and how to open it, any number of times."""

    name: str
    open: Callable[[], BinaryIO]


def table_file(name: str, shown: str, open_file: Callable[[], BinaryIO]) -> TableFile:
    """Return a file with a table, which is decompressed if its name ends in .gz.

    Args:
        name: The last part of its path or URL.
        shown: What errors call it.
        open_file: Opens it as it is.
    """
    if not name.lower().endswith(".gz"):
        return TableFile(shown, open_file)

    def opened() -> BinaryIO:
        import gzip

        class Decompressed(gzip.GzipFile):
            def close(self) -> None:
                super().close()
                packed.close()

        packed = open_file()
        found: Any = Decompressed(fileobj=packed)
        return io.BufferedReader(found)

    return TableFile(shown, opened)


@contextmanager
def opening(file: TableFile) -> Iterator[BinaryIO]:
    """Open a file; turn errors of the disk into an InputError."""
    try:
        with file.open() as opened:
            yield opened
    except OSError as error:
        refuse(file.name, f"it cannot be read: {error}", "Check its path and permissions.", error)
    except (EOFError, zlib.error) as error:
        refuse(file.name, f"it cannot be decompressed: {error}", "Compress it again.", error)


def text_lines(file: TableFile, newline: str) -> Iterator[str]:
    """Yield the lines of a file in UTF-8, with or without a byte order mark."""
    with opening(file) as opened:
        try:
            with io.TextIOWrapper(opened, encoding="utf-8-sig", newline=newline) as text:
                yield from text
        except UnicodeDecodeError as error:
            where, reason = _undecodable(file)
            refuse(file.name + where, reason, "Save it as UTF-8.", error)


def _undecodable(file: TableFile) -> tuple[str, str]:
    """Find the first byte that is not UTF-8; the decoder only knows its position in a chunk."""
    offset = 0
    with file.open() as opened:
        for number, line in enumerate(opened, 1):
            if not offset and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                return "", "it is UTF-16 (it starts with a UTF-16 byte order mark), not UTF-8"
            try:
                line.decode()
            except UnicodeDecodeError as error:
                byte = line[error.start]
                return (
                    f", line {number}",
                    f"byte {offset + error.start} (0x{byte:02x}) is not UTF-8",
                )
            offset += len(line)
    return "", "it is not UTF-8"


def without_nul(file: TableFile, lines: Iterator[str]) -> Iterator[str]:
    """Yield lines; one with a NUL byte is an error."""
    for number, line in enumerate(lines, 1):
        if "\0" in line:
            advice = "It is damaged, or UTF-16 without a byte order mark: save it as UTF-8."
            refuse(f"{file.name}, line {number}", "a NUL byte", advice)
        yield line
