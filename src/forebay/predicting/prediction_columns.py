"""A model's outputs as columns of a table: names, types and shapes, the same in the whole run.

tensor                     prediction
dict, NamedTuple           a column for each key or field, by its name
tuple, list                0, 1, …
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from forebay.errors import OutputError

INDEX = "index"
ALONE = "prediction"
# A column's type and the shape of one sample's value, such as ["float32", [10]]; as in JSON.
Spec = list[Any]
# Arrays with one row per sample, by column.
Columns = dict[str, np.ndarray[Any, Any]]


def columns_of(outputs: Any, indices: list[int]) -> Columns:
    """Return a model's outputs by column, each a new array with one row per sample.

    Raises:
        OutputError: They are not dense tensors or arrays, do not have one row per sample, or have
            strings that are not Unicode.
    """
    columns: Columns = {}
    for name, value in _named(outputs):
        if name in columns:  # the keys 1 and "1" of a dict
            raise OutputError(
                f"two of the columns that the model returned would be called {name!r}\n"
                "  Nothing of this part was kept. Return them in a dict, with strings as its keys."
            )
        if not isinstance(value, torch.Tensor | np.ndarray):
            raise OutputError(
                f"the model returned {_kind(value)} as {name!r}, for the batch of samples "
                f"{_shown(indices)}\n"
                "  It has to return tensors or arrays whose first dimension is the batch, or a "
                "dict, NamedTuple or tuple of them. Wrap the model in a function that does."
            )
        if odd := _oddity(value):
            raise OutputError(
                f"the model returned {name!r} as a {odd}, which Parquet cannot store\n"
                "  Return a dense tensor or a plain array: to_dense(), to_padded_tensor(), "
                "dequantize() or filled() makes one."
            )
        rows = value.shape[0] if value.ndim else 0
        if rows != len(indices):
            raise OutputError(
                f"the model returned {rows:,} row{'s' * (rows != 1)} as {name!r} for "
                f"{len(indices):,} sample{'s' * (len(indices) != 1)}: {_shown(indices)}\n"
                f"  Its shape is {tuple(value.shape)}, and the first dimension has to be the "
                "batch. Nothing of this part was kept. Have the model return one row per sample."
            )
        if 0 in value.shape[1:]:
            raise OutputError(
                f"the model returned {name!r} of shape {tuple(value.shape)}: its rows are empty\n"
                "  Nothing of this part was kept. Leave it out of what the model returns."
            )
        columns[_storable(name, "the name of a column")] = _array(name, value)
    if not columns:
        raise OutputError(
            f"the model returned an empty {type(outputs).__name__} for the batch of samples "
            f"{_shown(indices)}\n  Have it return at least one tensor, with one row per sample."
        )
    return columns


def specs_of(columns: Columns) -> dict[str, Spec]:
    """Return the type and shape of each column."""
    return {
        name: ["str" if array.dtype.kind == "U" else array.dtype.name, list(array.shape[1:])]
        for name, array in columns.items()
    }


def check_specs(known: Mapping[str, Spec], found: Mapping[str, Spec], index: int) -> None:
    """Check that a batch has the columns of the run, in any order.

    Args:
        known: The columns of the run.
        found: The columns of a batch.
        index: The first sample of the batch.

    Raises:
        OutputError: They differ.
    """
    for name in dict.fromkeys((*known, *found)):
        was, now = known.get(name), found.get(name)
        if was != now:
            raise OutputError(
                f"sample {index} has {_spec_text(now)} as {name!r}, and the samples before had "
                f"{_spec_text(was)}\n"
                "  A column has one type and one shape. Nothing of this part was kept. Have the "
                "model return the same for every sample: pad, cut or reduce what varies. "
                "To switch to the new columns, start over: resume=False, or --restart."
            )


def _named(outputs: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(outputs, Mapping):
        yield from ((str(name), value) for name, value in outputs.items())
    elif isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        yield from zip(outputs._fields, outputs, strict=True)
    elif isinstance(outputs, list | tuple):
        yield from ((str(at), value) for at, value in enumerate(outputs))
    else:
        yield ALONE, outputs


def _oddity(value: torch.Tensor | np.ndarray[Any, Any]) -> str:
    """Return the kind of a value that is not a plain array; "" for one that is."""
    if isinstance(value, np.ndarray):
        return "masked array" if isinstance(value, np.ma.MaskedArray) else ""
    if value.is_nested:
        return "nested tensor"
    if value.layout != torch.strided:
        return "sparse tensor"
    return "quantized tensor" if value.is_quantized else "meta tensor" if value.is_meta else ""


def _array(name: str, value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if value.is_floating_point() and value.dtype not in _FLOATS:
            value = value.float()  # NumPy and Arrow have neither bfloat16 nor float8
        value = value.resolve_conj().resolve_neg()  # such as the imaginary part of a conjugate
        # Always a copy: it may be a view of a batch whose memory is reused, or of the model's
        # state.
        array = np.array(value.cpu().numpy(), order="C")
    else:
        array = np.array(value, order="C")
    if array.dtype.kind == "b" and array.ndim > 1:
        array = array.view(np.uint8)  # Arrow has no tensors of bool
    if array.dtype.kind == "U":
        _storable("".join(array.flat), f"a string of {name!r}")
    storable = "biuf" if array.ndim > 1 else "biufU"
    if array.dtype.kind not in storable or array.dtype.char == "g":  # a long double
        raise OutputError(
            f"the model returned {name!r} as {array.dtype}, which Parquet cannot store\n"
            "  Return numbers of up to 64 bits; torch.view_as_real turns complex ones into two."
        )
    return array


_FLOATS = (torch.float16, torch.float32, torch.float64)


def _storable(text: str, what: str) -> str:
    """Return a string; raise OutputError if it has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at = slice(max(error.start - 20, 0), error.end + 20)
        raise OutputError(
            f"the model returned {text[at]!r} in {what}, which Parquet cannot store: it is not "
            "valid Unicode\n"
            "  Nothing of this part was kept. Replace such characters: "
            "text.encode(errors='replace').decode()."
        ) from None
    return text


def _spec_text(spec: Spec | None) -> str:
    if spec is None:
        return "nothing"
    return f"{spec[0]} of shape {tuple(spec[1])}"


def _kind(value: Any) -> str:
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _shown(indices: list[int]) -> str:
    last = f" … {indices[-1]}" if len(indices) > 1 else ""
    return f"{indices[0]}{last}"
