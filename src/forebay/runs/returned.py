"""What a function returned for an input: the files that it names, and the rows of the table.

    {"n": 1}, [{...}, {...}], 7         metadata: rows
    (files, metadata), [(file, {...})]  both: one path or several; a row for all, or one for each
    path, [path, path]                  files alone, if they exist

Files are `os.PathLike` objects. A string is a path only beside metadata: alone it is a value.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

from forebay.base.files import is_url, shown_values
from forebay.base.row_values import json_value, python_rows, record_fields
from forebay.errors import OutputError, shortened

# ---- files ---------------------------------------------------------------------------------------


def files_in(returned: Any) -> tuple[list[str], Any]:
    """Return the absolute paths of the files that a function returned, and the metadata.

    What may be files or a value is decided by what exists.
    """
    kind = type(returned)
    first: Any
    if returned is None or kind is dict:  # the usual cases
        return [], returned
    if isinstance(returned, os.PathLike) or _are_all(os.PathLike, returned):
        paths = _paths(returned)
        return (paths, None) if _missing(paths) is None else ([], returned)
    if kind is list and returned and all(map(_is_file_with_row, returned)):
        first, metadata = (
            [each for each, _ in returned],
            [record_fields(row) or row for _, row in returned],
        )
    elif kind is tuple and len(returned) == 2 and _is_metadata(returned[1]):
        first, metadata = returned
    else:
        return [], returned
    if isinstance(first, list | tuple) and not first:
        return [], metadata  # no file this time
    paths = _paths(first)
    missing = _missing(paths)
    if not paths or (missing is not None and metadata is None):
        return [], returned
    if missing is not None:
        raise OutputError(
            f"the function returned files and metadata, but there is no file {shortened(missing)}\n"
            "  Nothing of this input was kept. The first of such a pair is the path of a file, or "
            "a list of paths. For a string that is no path, return a dict: {'label': ...}."
        )
    return paths, metadata


def rows_of_files(places: Sequence[str], metadata: Any) -> list[dict[str, Any]] | None:
    """Return the rows for files that a function returned, given the `destination` of each."""
    if not any(places):  # it returned `out`: all that is in it
        return rows_returned(metadata)
    is_one = metadata is None or record_fields(metadata) is not None
    rows = rows_returned(metadata) or ([{}] if is_one else [])
    rows = rows * len(places) if is_one else rows
    if len(places) == 1:
        places = [*places] * len(rows)
    if len(places) != len(rows):
        raise TypeError(
            f"the function returned {len(places):,} files and {len(rows):,} dicts of metadata\n"
            "  Return one dict for each file, or one for all of them."
        )
    return [{"destination": place, **row} for place, row in zip(places, rows, strict=True)]


def _are_all(kind: type, values: Any) -> bool:
    is_list = type(values) in (list, tuple) and bool(values)
    return is_list and all(isinstance(each, kind) for each in values)


def _is_metadata(value: Any) -> bool:
    return value is None or _is_row(value) or (_are_all(object, value) and all(map(_is_row, value)))


def _is_row(value: Any) -> bool:
    return _rows_of(value) is not None


def _is_file_with_row(value: Any) -> bool:
    if type(value) is not tuple or len(value) != 2:
        return False
    return isinstance(value[0], str | os.PathLike) and _is_row(value[1])


def _paths(value: Any) -> list[str]:
    """Return one path or several, absolute; [] if the value is something else."""
    values = [*value] if type(value) in (list, tuple) else [value]
    if not all(isinstance(each, str | os.PathLike) for each in values):
        return []
    texts = [os.fsdecode(each) for each in values]
    return [text if is_url(text) else os.path.abspath(text) for text in texts]


def _missing(paths: Iterable[str]) -> str | None:
    """Return the first path where nothing is."""
    return next((path for path in paths if not is_url(path) and not os.path.exists(path)), None)


# ---- rows ----------------------------------------------------------------------------------------

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_SCALARS = (str, bytes, os.PathLike)
# The most rows that are encoded at once, and what is between their JSON: in no string of JSON.
PIECE_ROWS, PIECES = 4096, "\n"
# The most metadata of one input; a row of the ledger, with all else in it, may have 1 GB.
MAX_METADATA_BYTES = 500_000_000


def _encode() -> Callable[[list[Any]], str]:
    """Return what makes JSON of rows: `encode` prepares as much each time as a row takes."""
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return _ENCODER.encode
    quoted, default = json.encoder.encode_basestring, _ENCODER.default
    chunks = make(None, default, quoted, None, ":", ",", False, False, True)
    return lambda rows: "".join(chunks(rows, 0))


_json = _encode()


def exhausted(returned: Any, name_of: Callable[[str], str | None] | None) -> Any:
    """Run a generator to its end, while its input and `out` are still valid."""
    if returned is None or type(returned) is dict:  # the usual cases
        return returned
    if hasattr(returned, "__await__") or hasattr(returned, "__anext__"):
        if hasattr(returned, "close"):
            returned.close()  # or Python warns that nobody awaited it
        raise TypeError(
            f"async code returned an object of type {type(returned).__name__}, which nothing runs\n"
            "  Nothing of this input was kept. Run it: return asyncio.run(...)."
        )
    if not hasattr(returned, "__next__"):
        return returned
    first = [*islice(returned, PIECE_ROWS)]
    if len(first) < PIECE_ROWS or name_of is None or not all(map(_is_row, first)):
        return [*first, *returned]
    rows = chain(first, returned)
    del first
    return EncodedRows(rows, name_of)


def rows_returned(returned: Any) -> list[dict[Any, Any]] | None:
    """Return the rows in what a function returned, exhausting it if it is a generator.

    None is returned as it is. A record (see `record_fields`) is one row, a table has its rows,
    an iterable of these those of each; anything else is one row with the value in the column
    `metadata`. Of a tuple or list of an array and other values, such as (image, label), each has
    its column, `metadata_0` and so on: as one value they would have no type but JSON.
    """
    if returned is None:
        return None
    if type(returned) is dict:  # the usual case
        return [returned]
    if (rows := _rows_of(returned)) is not None:
        return rows
    kind = type(returned)
    is_array = hasattr(kind, "dtype") and hasattr(kind, "tolist")
    if is_array or isinstance(returned, _SCALARS) or not isinstance(returned, Iterable):
        return [{"metadata": returned}]
    values = list(returned)
    rows, other = _rows_among(values)
    if other is None:
        return rows
    if rows:
        raise _mixed(other, len(values))
    dimensions = {getattr(value, "ndim", -1) for value in values}
    if len(dimensions) > 1 and max(dimensions) > 0:
        return [{f"metadata_{at}": value for at, value in enumerate(values)}]
    return [{"metadata": values}]


def _rows_among(values: Iterable[Any]) -> tuple[list[dict[Any, Any]], type | None]:
    """Return the rows of those values that have some, and the type of the first that has none."""
    rows, other = list[dict[Any, Any]](), None
    for value in values:
        if (found := _rows_of(value)) is not None:
            rows += found
        elif other is None:
            other = type(value)
    return rows, other


def _mixed(other: type, count: int) -> TypeError:
    return TypeError(
        f"metadata must all be dicts, or records with fields, but one of {count} values "
        f"is of type {other.__name__}"
    )


def _rows_of(value: Any) -> list[dict[Any, Any]] | None:
    """Return the rows of a record or of a table; None for anything else."""
    if (record := record_fields(value)) is not None:
        return [record]
    kind = type(value)
    is_arrow = hasattr(kind, "__arrow_c_stream__") or hasattr(kind, "__arrow_c_array__")
    if not (is_arrow and hasattr(kind, "columns")):
        return None
    if hasattr(kind, "iloc"):  # of pandas: by column, or numbers of several types would be floats
        columns = {name: value.iloc[:, at].tolist() for at, name in enumerate(value.columns)}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return value.to_dicts() if hasattr(kind, "to_dicts") else python_rows(value)


def encode(
    rows: list[dict[str, Any]] | None,
    names: Sequence[str],
    final_name: Callable[[str], str | None],
    asked: Sequence[str] = (),
) -> str:
    """Return the rows as JSON, with every staged path replaced by its final name.

    More than PIECE_ROWS of them are several lists of JSON, in pieces that are read one by one.

    A missing `destination` is filled in for an input with one output; a function that returns
    None, or an empty dict, gets one row with a `destination` for each output. An input without
    output and metadata has no row: there is nothing that the next step could open.

    Args:
        names: The final names of the outputs.
        final_name: Returns the final name of a staged path, None for any other string.
        asked: The names that the function gave to `out.file`.
    """
    if rows is None or (rows and not any(rows)):
        rows = [{"destination": name} for name in names]
    elif one := _one_output(names, asked):
        rows = [row if "destination" in row else {"destination": one, **row} for row in rows]
    if len(rows) <= PIECE_ROWS:
        return _encoded(rows, final_name)
    parts = range(0, len(rows), PIECE_ROWS)
    return PIECES.join(_encoded(rows[at : at + PIECE_ROWS], final_name) for at in parts)


def _encoded(rows: Sequence[Any], final_name: Callable[[str], str | None]) -> str:
    def string(text: str) -> str:  # a final name, or a URL without credentials
        return final_name(text) or (shown_values(text) if "://" in text else text)

    try:
        return _json([json_value(row, string, is_returned=True) for row in rows])
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(_what_is_wrong(rows)) from error


class EncodedRows:
    """The many rows that a generator yields, as JSON: only a piece of them are dicts at a time."""

    def __init__(self, rows: Iterator[Any], final_name: Callable[[str], str | None]) -> None:
        self._pieces, count, size = list[str](), 0, 0
        while values := [*islice(rows, PIECE_ROWS)]:
            count += len(values)
            piece, other = _rows_among(values)
            if other is not None:
                raise _mixed(other, count)
            self._pieces.append(_encoded(piece, final_name))
            del values, piece  # before the next ones are made
            size += len(self._pieces[-1])
            _check_size(size)

    def finished(self, names: Sequence[str], asked: Sequence[str]) -> str:
        """Return the rows as `encode` does."""
        if one := _one_output(names, asked):
            for at, piece in enumerate(self._pieces):
                rows = ({"destination": one, **row} for row in json.loads(piece))
                self._pieces[at] = _json([*rows])
        return PIECES.join(self._pieces)


def _check_size(nbytes: int) -> None:
    """Raise OutputError if the metadata of one input are larger than can be recorded."""
    if nbytes > MAX_METADATA_BYTES:
        raise OutputError(
            f"the metadata of one input have {nbytes:,} bytes as JSON; at most "
            f"{MAX_METADATA_BYTES:,} can be recorded\n"
            "  Nothing of this input was kept. Write large values, or a table of its rows, to a "
            "file in `out`, and return the rest; or divide the input."
        )


def checked(metadata: str) -> str:
    """Return the metadata of one input; raise OutputError if they are too large."""
    if len(metadata) * 4 > MAX_METADATA_BYTES:  # no character has more bytes
        _check_size(len(metadata.encode(errors="surrogatepass")))
    return metadata


def _one_output(names: Sequence[str], asked: Sequence[str]) -> str:
    """Return the output of an input if there is one, a file, or a folder with several; else ""."""
    if len(asked) == 1:
        return asked[0]
    if asked or len(names) < 2:
        return names[0] if len(names) == 1 else ""
    first = names[0].partition("/")[0]
    return first if all(name == first or name.startswith(f"{first}/") for name in names) else ""


def _what_is_wrong(rows: Sequence[Any]) -> str:
    for row in rows:
        for column, value in row.items():
            try:
                _ENCODER.encode(json_value({column: value}, is_returned=True))
            except RecursionError:
                reason = "it holds itself, or is nested too deep"
            except (TypeError, ValueError) as error:
                reason = str(error).removeprefix("a value of type ")
            else:
                continue
            return (
                f"metadata {column!r} is not JSON-serializable: {reason} "
                f"(type {type(value).__name__})\n"
                "  Return numbers, strings, lists and dicts; write anything else to out.file()."
            )
    return "the metadata is not JSON-serializable: two of its columns have the same name"
