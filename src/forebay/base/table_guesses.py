"""Guess what a file is that is not the table that it seems to be, for the error that says so. PURE.

Nothing is read by a guess: a wrong one would label a whole data set wrongly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

# The ending of a file's name, such as ".wav".
_ending = re.compile(r"\.[A-Za-z][A-Za-z0-9]{1,5}$").search
_OTHERS = ";\t|"

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


def file_guess(name: str, lines: Sequence[str]) -> Guess | None:
    """Return the error for a file that seems to list inputs, given its first lines, or None."""
    lines = [line.strip() for line in lines if line.strip()]
    itself = f"To process the file itself, pass it in a list: [{name!r}]."
    if len(lines) > 1 and name.lower().endswith(".txt") and all(map(_ending, lines)):
        return (
            f"its lines seem to be paths, such as {lines[0]!r}",
            f"For these, pass a list: open({name!r}).read().splitlines(). {itself}",
        )
    if not name.lower().endswith(".json") or not lines:
        return None
    if len(lines) > 1 and all(map(_is_object, lines)):
        return (
            "each of its lines is a JSON object",
            f"For an input of each, rename it to end in .jsonl. {itself}",
        )
    if re.match(r"\[\s*\{", "".join(lines)):
        return (
            "it is a JSON list of objects",
            f"For an input of each, pass json.load(open({name!r})). {itself}",
        )
    return None


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
