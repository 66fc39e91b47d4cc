"""The files of tables: opened, decompressed and decoded, with errors that say in which line."""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple, NoReturn

from forebay.base.output_names import PACKINGS
from forebay.errors import InputError, shown_location


def refuse(where: str, reason: str, advice: str, cause: BaseException | None = None) -> NoReturn:
    """Raise InputError with a message of two lines."""
    raise InputError(f"{where}: {reason}\n  {advice}") from cause


class TableFile(NamedTuple):
    """A file with a table: what errors call it, and how to open it, any number of times."""

    name: str
    open: Callable[[], BinaryIO]


def table_file(name: str, shown: str, open_file: Callable[[], BinaryIO]) -> TableFile:
    """Return a file with a table, which is decompressed if its name ends in one of PACKINGS.

    Args:
        name: The last part of its path or URL.
        shown: What errors call it.
        open_file: Opens it as it is.
    """
    packing = next((each for each in PACKINGS if name.lower().endswith(each)), None)
    if packing is None:
        return TableFile(shown, open_file)
    return TableFile(shown, lambda: io.BufferedReader(_Decompressed(open_file(), packing), 1 << 16))


class _Decompressed(io.RawIOBase):
    """The content of a compressed file, which is closed with this one."""

    def __init__(self, packed: BinaryIO, packing: str) -> None:
        self._packed = packed
        self._stream = _stream_of(packed, packing)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(len(buffer))
        except OSError:
            raise
        except Exception as error:  # each library has errors of its own
            raise EOFError(str(error)) from error
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        super().close()
        self._packed.close()


def _stream_of(packed: BinaryIO, packing: str) -> Any:
    """Return what reads the content of a compressed file; a library is loaded when it is needed."""
    if packing == ".gz":
        from gzip import GzipFile

        return GzipFile(fileobj=packed)
    if packing == ".bz2":
        from bz2 import BZ2File

        return BZ2File(packed)
    if packing == ".xz":
        from lzma import LZMAFile

        return LZMAFile(packed)
    import pyarrow

    return pyarrow.CompressedInputStream(packed, "zstd")


@contextmanager
def opening(file: TableFile) -> Iterator[BinaryIO]:
    """Open a file; turn errors of the disk into an InputError."""
    try:
        with file.open() as opened:
            yield opened
    except OSError as error:
        refuse(file.name, f"it cannot be read: {error}", "Check its path and permissions.", error)
    except EOFError as error:
        refuse(file.name, f"it cannot be decompressed: {error}", "Compress it again.", error)


def text_lines(file: TableFile, newline: str) -> Generator[str, None, None]:
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


# ---- guesses -------------------------------------------------------------------------------------
# What a file is that is not the table that it seems to be, for the error that says so. Nothing is
# read by a guess: a wrong one would label a whole data set wrongly.

# The ending of a file's name, such as ".wav".
_ending = re.compile(r"\.[A-Za-z][A-Za-z0-9]{1,5}$").search
_OTHERS = ";\t|"
# Files of many records, in formats that are not read as a manifest.
_OTHER_TABLES = (
    *(".xlsx", ".xls", ".ods", ".orc", ".avro", ".feather", ".arrow", ".ipc", ".h5", ".hdf5"),
    *(".npz", ".pkl", ".pickle", ".db", ".sqlite"),
)
# How much of a text file is read to find out whether it lists inputs.
_PEEK_BYTES = 4096

# A reason and an advice, the two parts of an error.
Guess = tuple[str, str]


def separator_guess(
    separator: str, columns: Sequence[str], fields: Sequence[str] | None = None
) -> Guess | None:
    """Return the error for a table whose fields are separated by another character, or None.

    Args:
        columns: The header.
        fields: A row with another number of fields; None if it is not known yet.
    """
    if fields is None and len(columns) > 1:
        return None
    header, row = separator.join(columns), separator.join(columns if fields is None else fields)
    for other in _OTHERS.replace(separator, ""):
        if 0 < header.count(other) == row.count(other):
            break
    else:
        if columns[0].startswith("#") and fields is not None:
            return "its first line is a comment", "Remove it: the first line names the columns."
        return None
    called = {",": "commas", "\t": "tabs"}[separator]
    what = f"its header is one column, {columns[0]!r}: " if len(columns) == 1 else ""
    return (
        f"{what}fields are separated by {called}, and here they seem to be by {other!r}",
        f"Write it with {called}, or pass the table that pandas.read_csv(..., sep={other!r}) "
        "returns; with quoting=3 if quotes are part of the text, and header=None and names=[...] "
        "if the first line is a row.",
    )


def header_guess(columns: Sequence[str], fields: Sequence[str]) -> Guess | None:
    """Return the error for a table whose header seems to be a row, given the next row, or None."""
    for column, field in zip(columns, fields, strict=True):
        one, other = _ending(column), _ending(field)
        if one and other and one[0].lower() == other[0].lower():
            return (
                f"its first line seems to be a row, not a header: {column!r} is the name of a file",
                "Add a first line that names the columns, such as path,label; that row would be "
                "missing.",
            )
    return None


def refuse_other_lists(name: str, open_file: Callable[[], BinaryIO]) -> None:
    """Raise InputError for a file that seems to list inputs, and is no manifest."""
    shown = shown_location(name)
    if guess := _file_guess(shown, open_file):
        refuse(shown if shown.isprintable() else ascii(shown), *guess)


def _first_lines(open_file: Callable[[], BinaryIO]) -> list[str]:
    """Return the first whole lines of a text file that are not blank; [] for another file."""
    try:
        with open_file() as file:
            data = file.read(_PEEK_BYTES)
            lines = data.decode().split("\n")[: 3 if len(data) < _PEEK_BYTES else -1][:3]
    except (OSError, UnicodeDecodeError):
        return []
    return [line.strip() for line in lines if line.strip()]


def _file_guess(name: str, open_file: Callable[[], BinaryIO]) -> Guess | None:
    """Return the error for a file that seems to list inputs, or None."""
    ending = name[name.rfind(".") :].lower()
    itself = f"To process the file itself, pass it in a list: [{name!r}]."
    if ending in _OTHER_TABLES:
        return (
            "it may hold many inputs, in a format that forebay does not read as a table",
            "For an input of each row, pass the table that pandas.read_excel(...), or pandas's "
            f"reader of that format, returns, or a list of dicts. {itself}",
        )
    lines = _first_lines(open_file) if ending in (".txt", ".json") else []
    if len(lines) > 1 and ending == ".txt" and all(map(_ending, lines)):
        return (
            f"its lines seem to be paths, such as {lines[0]!r}",
            f"For these, pass a list: open({name!r}).read().splitlines(). {itself}",
        )
    if ending != ".json":
        return None
    if len(lines) > 1 and all(map(_is_object, lines)):
        return (
            "each of its lines is a JSON object",
            f"For an input of each, rename it to end in .jsonl. {itself}",
        )
    if found := re.match(r"\[\s*([{\"])", "".join(lines)):
        return (
            f"it is a JSON list of {'objects' if found[1] == '{' else 'strings'}",
            f"For an input of each, pass json.load(open({name!r})). {itself}",
        )
    return None


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
