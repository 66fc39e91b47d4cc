"""Inputs in memory that are no paths: which are tables of rows, and what to do with others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from forebay.errors import InputError

# What to do with a list of these.
_NUMBERS = "give rows: [{'number': each} for each in inputs]; the function gets each dict."
_NEXT_STEPS = {
    int: f"For a function of a number, {_NUMBERS}",
    float: f"For a function of a number, {_NUMBERS}",
    tuple: "For a function of several values, give rows, such as [{'image': a, 'mask': b} for a, b "
    "in inputs]; the function gets each dict. Of a DataFrame, give that itself.",
    list: "Give all paths in one list: forebay divides the work itself. For a function of several "
    "rows at once, give rows and batch_size=.",
}


def is_table(value: object) -> bool:
    """Return whether a value is a table in memory; a list is one if its first element is a dict."""
    if isinstance(value, list | tuple):
        return bool(value) and isinstance(value[0], Mapping)
    kind = type(value)  # a property of an instance might compute something
    return hasattr(kind, "columns") and (
        hasattr(kind, "__arrow_c_stream__") or hasattr(kind, "__dataframe__")
    )


def is_of_rows(value: object) -> bool:
    """Return whether a value is a Dataset of dicts, in any library."""
    kind = type(value)
    if isinstance(value, str | bytes | Mapping) or not (
        hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")
    ):
        return False
    with suppress(Exception):  # whatever an odd object raises
        return isinstance(next(iter(rows_in(value)())), Mapping)
    return False


def rows_in(value: Any) -> Callable[[], Iterable[Any]]:
    """Return a function that returns the rows of a list or a Dataset, from the first one on."""
    if hasattr(type(value), "__iter__"):
        return partial(iter, value)
    return lambda: (value[index] for index in range(len(value)))


def no_inputs(value: object) -> InputError:
    """Return the error for inputs that are nothing to be listed."""
    advice = (
        "Give a list of paths, a folder, a glob, a .csv, .jsonl or .parquet manifest, a DataFrame, "
        "or a list of dicts."
    )
    if isinstance(value, Mapping):
        advice = (
            "Give its values, list(inputs.values()); or, for a function of key and value, rows: "
            "[{'name': a, 'path': b} for a, b in inputs.items()]."
        )
    return InputError(f"inputs: got {type(value).__name__} instead of paths\n  {advice}")


def no_path(value: object, index: int) -> InputError:
    """Return the error for an element of a list that is no path, with what to do instead."""
    kind, like = type(value).__name__, value
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a number of numpy
        like = value.item()
    advice = "A path is a str or a pathlib.Path. Rows are a list of dicts alone, or a manifest."
    advice = next((text for each, text in _NEXT_STEPS.items() if isinstance(like, each)), advice)
    return InputError(f"inputs[{index}]: got {kind} instead of a path\n  {advice}")
