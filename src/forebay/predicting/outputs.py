"""What a model returned, as columns of a table with a row for each sample.

    tensor, array                      prediction
    list with an element per sample    prediction; of dicts or the like, a column for each key
    dict, NamedTuple, dataclass,       a column for each key or field, by its name: "a.b" for a
    DataFrame                          dict in a dict
    tuple, another list                0, 1, …

A tensor or an array has a row per sample; any other value is a list with an element per sample. The
types of the columns are those of `base/value_types.py`; classes do not matter, so that a NamedTuple
and a dataclass are dicts, and an integer among floats is one of them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence, Set
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from forebay.base.arrow_arrays import array_of_numpy
from forebay.base.batches import field_names
from forebay.base.typed_columns import MOST_DIGITS
from forebay.base.value_classes import MOST_DEPTH, MisfitError, container_kind, items_of
from forebay.base.value_inference import named_misfit, spec_of, widened_alike
from forebay.base.value_types import Nested, Spec, arrow_type
from forebay.errors import OutputError
from forebay.failures import Failure
from forebay.predicting.part_writer import Rows, Types, joined_type, widened_column

ALONE = "prediction"
# More columns are data, rather than fields.
MOST_COLUMNS = 4096
_FLOATS = (torch.float16, torch.float32, torch.float64)


def rows_of_outputs(outputs: Any, indices: list[int], known: Types) -> tuple[Rows, list[Failure]]:
    """Return the rows in a model's outputs, and the samples whose values fit no column.

    Args:
        known: The types of the columns of the samples before.

    Raises:
        OutputError: It is unknown which value is that of which sample.
    """
    try:
        return _rows_of(outputs, indices, known)
    except RecursionError as error:
        raise OutputError(
            f"the model returned {_kind(outputs)} that contains itself, or is nested too deeply, "
            f"for the batch of samples {_shown(indices)}\n"
            "  Nothing of this part was kept. Return tensors, arrays, or dicts and lists of them."
        ) from error


def _rows_of(outputs: Any, indices: list[int], known: Types) -> tuple[Rows, list[Failure]]:
    failed: dict[int, MisfitError] = {}
    columns: dict[str, _Values] = {}
    for name, value in _columns(outputs, indices, known, failed):
        if name in columns:  # the keys 1 and "1" of a dict
            raise OutputError(
                f"two of the columns that the model returned would be called {name!r}\n"
                "  Nothing of this part was kept. Return them in a dict, with strings as its keys."
            )
        columns[_storable(name)] = _Values.of(name, value, known.get(name, Spec("none")), failed)
    if not columns:
        raise OutputError(
            f"the model returned an empty {type(outputs).__name__} for the batch of samples "
            f"{_shown(indices)}\n  Have it return at least one tensor, with one row per sample."
        )
    kept = [row for row in range(len(indices)) if row not in failed]
    types = {name: values.spec for name, values in columns.items()}
    arrays = {name: values.array(kept) for name, values in columns.items()}
    failures = [Failure.of(error, source=indices[row]) for row, error in failed.items()]
    return Rows([indices[row] for row in kept], types, arrays), failures


class _Values(NamedTuple):
    """A column: an array with a row per sample, or a list with a value for each."""

    spec: Spec
    values: Any

    @classmethod
    def of(cls, name: str, value: Any, known: Spec, failed: dict[int, MisfitError]) -> _Values:
        """Find the type of a column; add the rows that do not fit to those that failed."""
        if isinstance(value, np.ndarray):
            own = _spec_of_array(value)
            try:
                return cls(joined_type(name, known, own), value)
            except MisfitError as error:
                failed.update((row, error) for row in range(len(value)) if row not in failed)
                return cls(known, [None] * len(value))
        spec, plain = known, list[Any]()
        for row, each in enumerate(value):
            plain.append(None)
            try:
                own = plain_value(each)
                spec = widened_alike(spec, _ragged(spec_of(own)))
                plain[row] = own
            except MisfitError as error:
                failed.setdefault(row, named_misfit(name, error))
        return cls(spec, plain)

    def array(self, kept: list[int]) -> pa.Array:
        """Return the rows that are kept as a column."""
        if isinstance(self.values, np.ndarray):
            own = _spec_of_array(self.values)
            some = self.values if len(kept) == len(self.values) else self.values[kept]
            return widened_column(_array_of(some, own), own, self.spec)
        from forebay.base.value_columns import column_of

        column = column_of(self.spec)
        column.extend([self.values[row] for row in kept])
        return column.taken()


def _array_of(array: np.ndarray[Any, Any], spec: Spec) -> pa.Array:
    """Return an array as the Arrow column of its type."""
    if array.ndim == 1:
        return array_of_numpy(array)
    flat = array.reshape(-1)  # Arrow has no tensors of bool
    values = array_of_numpy(flat.view(np.uint8) if array.dtype.kind == "b" else flat)
    kind = arrow_type(spec)
    lists = pa.Array.from_buffers(kind.storage_type, len(array), [None], children=[values])
    return pa.ExtensionArray.from_storage(kind, lists)


def _spec_of_array(array: np.ndarray[Any, Any]) -> Spec:
    if array.ndim > 1:
        return Spec("array", array.dtype.str, array.shape[1:])
    known = {"int64": "int", "float64": "float", "bool": "bool"}
    kind = known.get(array.dtype.name)
    return Spec("number", array.dtype.str) if kind is None else Spec(kind)


def _ragged(spec: Spec, depth: int = 0) -> Spec:
    """Return a type in which arrays within containers may have any shape."""
    if isinstance(spec, Nested):
        parts = tuple(_ragged(part, depth + 1) for part in spec.parts)
        fields = (spec.dtype, spec.shape, parts, spec.keys, spec.home, spec.states)
        return Nested(spec.kind, *fields)
    return Spec("array", spec.dtype, None) if depth and spec.kind == "array" else spec


def _columns(
    outputs: Any, indices: list[int], known: Types, failed: dict[int, MisfitError]
) -> Iterator[tuple[str, Any]]:
    """Yield each column: its name, and an array or a list with a value per sample."""
    if _is_per_sample(outputs, len(indices), known):
        names = _keys_of(outputs, known)
        if names is None:
            yield ALONE, list(outputs)
            return
        fields = [_fields_of(each) for each in outputs]
        for row, (each, one) in enumerate(zip(fields, outputs, strict=True)):
            if each is None and one is not None:
                what = f"is {_kind(one)}, and a dict in other samples"
                failed[row] = MisfitError(f"{ALONE!r} {what}")
        for name in names:
            yield name, [None if each is None else each.get(name) for each in fields]
        return
    if isinstance(outputs, list) and outputs and not any(map(_is_batch, outputs)):
        _check_rows(ALONE, (len(outputs),), indices)  # one value per sample, but not for each
    for name, value in _named(outputs, ""):
        yield name, _rows_in(name, value, indices)


def _is_per_sample(outputs: Any, count: int, known: Types) -> bool:
    """Return whether outputs are a list with an element for each sample.

    A list of as many batches as there are samples could be fields: it is what the samples before
    were, or else a value for each sample.
    """
    if not isinstance(outputs, list) or len(outputs) != count:
        return False
    if known and "0" in known and ALONE not in known:
        return not all(_has_rows(each, count) for each in outputs)
    return True


def _is_batch(value: Any) -> bool:
    """Return whether a value can be a column, or several."""
    if isinstance(value, Mapping):
        return any(map(_is_batch, value.values()))
    is_one = value is None or isinstance(value, str | bytes | int | float | complex | np.generic)
    return not is_one and getattr(value, "ndim", 1) != 0


def _has_rows(value: Any, count: int) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray) and value.shape[:1] == (count,)


def _keys_of(outputs: Sequence[Any], known: Types) -> list[str] | None:
    """Return the names of the columns for a list of dicts or the like; None for other lists."""
    if ALONE in known:
        return None
    fields = [_fields_of(each) for each in outputs]
    others = sum(
        each is None and one is not None for each, one in zip(fields, outputs, strict=True)
    )
    if not known and others >= sum(map(bool, fields)):  # most are no dicts
        return None
    names = dict.fromkeys(known)
    for each in fields:
        names.update(dict.fromkeys(each or ()))
    if len(names) > MOST_COLUMNS:
        raise OutputError(
            f"the model returned dicts with {len(names):,} different keys, each of them a column\n"
            "  Return the dict under a key of its own: {'counts': {…}}."
        )
    return list(names)


def _fields_of(value: Any) -> dict[str, Any] | None:
    """Return the columns of one sample; None if it is one value."""
    kind = None if value is None else container_kind(value)
    if kind is None or kind in ("list", "tuple"):
        return None
    return dict(zip(map(str, items_of(value, kind)[0]), items_of(value, kind)[1], strict=True))


def _named(outputs: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the parts of outputs that are a column each."""
    is_frame = hasattr(outputs, "columns") and hasattr(outputs, "to_numpy")
    if isinstance(outputs, Mapping) or is_frame:
        pairs: Any = (
            (str(name), outputs[name]) for name in (outputs.columns if is_frame else outputs)
        )
    elif isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        pairs = zip(outputs._fields, outputs, strict=True)
    elif isinstance(outputs, tuple) or (isinstance(outputs, list) and not path):
        pairs = ((str(at), value) for at, value in enumerate(outputs))
    elif (names := field_names(type(outputs))) is not None:
        pairs = ((name, getattr(outputs, name)) for name in names if hasattr(outputs, name))
    else:
        yield path or ALONE, outputs
        return
    for name, value in pairs:
        yield from _named(value, f"{path}.{name}" if path else name)


def _rows_in(name: str, value: Any, indices: list[int]) -> Any:
    """Return an array or a list with a value for each sample."""
    count = len(indices)
    if value is None:
        return [None] * count
    if not isinstance(value, torch.Tensor | np.ndarray | list):
        if not hasattr(value, "to_numpy"):  # a column of pandas
            raise OutputError(
                f"the model returned {_kind(value)} as {name!r}, for the batch of samples "
                f"{_shown(indices)}\n"
                "  It has to return tensors or arrays whose first dimension is the batch, lists "
                "with an element per sample, or a dict, NamedTuple or tuple of them. Wrap the "
                "model in a function that does."
            )
        value = value.to_numpy()
    if odd := _oddity(value):
        raise OutputError(
            f"the model returned {name!r} as a {odd}, which Parquet cannot store\n"
            "  Return a dense tensor or a plain array: to_dense(), to_padded_tensor(), "
            "dequantize() or filled() makes one."
        )
    shape = (len(value),) if isinstance(value, list) else tuple(value.shape)
    _check_rows(name, shape, indices)
    if 0 in shape[1:]:
        raise OutputError(
            f"the model returned {name!r} of shape {shape}: its rows are empty\n"
            "  Nothing of this part was kept. Leave it out of what the model returns."
        )
    return value if isinstance(value, list) else _array(name, value)


def _check_rows(name: str, shape: tuple[int, ...], indices: list[int]) -> None:
    """Raise OutputError if there are not as many rows as samples."""
    rows, count = shape[0] if shape else 0, len(indices)
    if rows != count:
        raise OutputError(
            f"the model returned {rows:,} row{'s' * (rows != 1)} as {name!r} for "
            f"{count:,} sample{'s' * (count != 1)}: {_shown(indices)}\n"
            f"  Its shape is {shape}, and the first dimension has to be the "
            "batch. Nothing of this part was kept. Have the model return one row per sample."
        )


def _oddity(value: Any) -> str:
    """Return the kind of a value that is not a plain array; "" for one that is."""
    if isinstance(value, np.ndarray):
        return "masked array" if isinstance(value, np.ma.MaskedArray) else ""
    if not isinstance(value, torch.Tensor):
        return ""
    if value.is_nested:
        return "nested tensor"
    if value.layout != torch.strided:
        return "sparse tensor"
    return "quantized tensor" if value.is_quantized else "meta tensor" if value.is_meta else ""


def _array(name: str, value: Any) -> Any:
    """Return a batch as a new array, or as a list of its rows if they are no numbers."""
    array = _of_tensor(value) if isinstance(value, torch.Tensor) else value
    if array.dtype.kind in "UOTSMm":
        return list(array) if array.ndim > 1 else array.tolist() if _is_text(array) else [*array]
    if _unstorable(array):
        raise OutputError(
            f"the model returned {name!r} as {array.dtype}, which Parquet cannot store\n"
            "  Return numbers of up to 64 bits; torch.view_as_real turns complex ones into two."
        )
    # Always a copy: it may be a view of a batch whose memory is reused, or of the model's state.
    return np.array(array, array.dtype.newbyteorder("="), order="C")


def _is_text(array: np.ndarray[Any, Any]) -> bool:
    return array.dtype.kind not in "Mm"


def _of_tensor(value: torch.Tensor) -> np.ndarray[Any, Any]:
    value = value.detach()
    if value.is_floating_point() and value.dtype not in _FLOATS:
        value = value.float()  # NumPy and Arrow have neither bfloat16 nor float8
    # Such as the imaginary part of a conjugate.
    found: np.ndarray[Any, Any] = value.resolve_conj().resolve_neg().cpu().numpy()
    return found


def _unstorable(array: Any) -> bool:
    return array.dtype.kind not in "biuf" or array.dtype.char == "g"  # a long double


def plain_value(value: Any, depth: int = 0) -> Any:
    """Return one sample's value without what a table has no need for: classes, devices, views."""
    if depth > MOST_DEPTH:
        raise MisfitError(f"is nested deeper than {MOST_DEPTH} levels, or contains itself")
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return _plain_array(value, depth)
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, enum.Enum):
        return plain_value(value.value, depth + 1)
    if isinstance(value, str):
        return _unicode(str.__str__(value))
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return value if type(value) is kind else kind(value)
    if isinstance(value, Decimal):
        return _plain_decimal(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return value if type(value) is bytes else bytes(value)
    if isinstance(value, Set):
        return [plain_value(each, depth + 1) for each in sorted(value, key=repr)]
    kind_name = container_kind(value)
    if kind_name is None:
        return value
    keys, values = items_of(value, kind_name)
    plain = [plain_value(each, depth + 1) for each in values]
    if kind_name == "list":
        return plain
    return tuple(plain) if kind_name == "tuple" else dict(zip(keys, plain, strict=True))


def _plain_decimal(value: Decimal) -> Decimal | None:
    """Return an equal Decimal that a column of numbers can hold, if one can; None for NaN."""
    if value.is_nan():
        return None
    if not value.is_finite() or abs(value.adjusted()) >= MOST_DIGITS:
        return Decimal(value)
    text = f"{value:f}"
    return Decimal(text if value else text.lstrip("-"))


def _plain_array(value: Any, depth: int) -> Any:
    if odd := _oddity(value):
        raise MisfitError(f"is a {odd}, which Parquet cannot store; make it a dense one")
    array = _of_tensor(value) if isinstance(value, torch.Tensor) else np.asarray(value)
    if array.dtype.kind in "Mm":
        return _plain_times(array)
    if array.dtype.kind in "UOTS":
        return plain_value(array.tolist(), depth + 1)
    if _unstorable(array):
        raise MisfitError(f"is of dtype {array.dtype}; make it numbers of up to 64 bits")
    if array.ndim:
        return np.array(array, array.dtype.newbyteorder("="), order="C")
    return array[()] if array.dtype.name not in ("int64", "float64", "bool") else array.item()


def _plain_times(array: np.ndarray[Any, Any]) -> Any:
    """Return times as Python has them; None for NaT."""
    if array.ndim:
        return [_plain_times(each) for each in array]
    if np.isnat(array):
        return None
    return array.astype(f"{array.dtype.kind}8[us]").item()


def _unicode(text: str) -> str:
    """Return a string; raise MisfitError if it has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at = slice(max(error.start - 20, 0), error.end + 20)
        raise MisfitError(
            f"has the string {text[at]!r}, which Parquet cannot store: it is not valid Unicode; "
            "replace such characters: text.encode(errors='replace').decode()"
        ) from None
    return text


def _storable(text: str) -> str:
    """Return the name of a column; raise OutputError if it has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at = slice(max(error.start - 20, 0), error.end + 20)
        raise OutputError(
            f"the model returned {text[at]!r} in the name of a column, which Parquet cannot store: "
            "it is not valid Unicode\n"
            "  Nothing of this part was kept. Replace such characters: "
            "text.encode(errors='replace').decode()."
        ) from None
    return text


def _kind(value: Any) -> str:
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _shown(indices: list[int]) -> str:
    last = f" … {indices[-1]}" if len(indices) > 1 else ""
    return f"{indices[0]}{last}"
