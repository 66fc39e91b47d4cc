"""`forebay.collate`: collate functions for what torch's default_collate cannot do.

    samples ── by_field ──┬── image  ──> pad(...)    ──> one tensor as large as the largest
                          ├── jpeg   ──> packed()    ──> the bytes of all, in one tensor
                          ├── boxes  ──> as_list     ──> a list
                          └── others ──> default     ──> as torch does it

Each is called with the list of a batch's samples, can be pickled, and may be a rule for a field.
In a loader's worker `pad` and `packed` write into the batch's slot of shared memory, as
default_collate does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

from forebay.base.batches import PackedBytes, items_in
from forebay.collating.byte_packing import Pack
from forebay.collating.padding import Pad, Padded, check_value, dense, write_rows
from forebay.collating.rules import (
    ByField,
    Collation,
    Misfit,
    Path,
    Rule,
    default,
    default_at,
    described_value,
    fields_of,
    odd_one,
    refusal,
)
from forebay.errors import InputError, OptionError
from forebay.memory.packing import new_tensor

# The most values that a sample is padded to at least: no memory holds more.
MOST_VALUES = 1 << 40

__all__ = ["PackedBytes", "Padded", "as_list", "by_field", "default", "packed", "pad", "sequences"]


def pad(value: float = 0, *, multiple_of: int | Sequence[int] = 1, lengths: bool = False) -> Pad:
    """Collate tensors of different shapes into one, padded to the largest of each dimension.

    Samples, or fields of them, may be tensors, numpy arrays, or sequences of numbers, nested or
    not, which are converted by `torch.tensor`. They must agree in their number of dimensions and in
    dtype; an empty sequence agrees with any. Order and values do not change; padding comes at the
    end of each dimension.

    Args:
        value: What to pad with. It must be a value of the samples' dtype.
        multiple_of: Round sizes up to a multiple of this: an int for the first dimension (the
            length), or one int for each of the first dimensions, such as (1, 32, 32) for images
            of [3, height, width].
        lengths: Return `Padded` instead: the tensor, the lengths, and a mask.

    Returns:
        A collate_fn, or a rule for `by_field`. It returns a tensor [batch, max of dimension 0, ...]
        of the samples' dtype, contiguous, newly allocated; or a `Padded`. It raises `InputError`,
        naming the first sample that differs from most, and `OptionError` if the dtype cannot
        represent `value`.

    Raises:
        OptionError: `value` is not a number, or `multiple_of` is not positive or is too large.
    """
    number = _number(value)
    if number is None:
        raise OptionError(
            f"pad(value=...) takes a number that a float can hold; got {described_value(value)}\n"
            "  pad is not a collate_fn itself but makes one: write collate_fn=pad()."
        )
    multiples = tuple(multiple_of) if isinstance(multiple_of, Sequence) else (multiple_of,)
    if not all(map(_is_multiple, multiples)) or math.prod(map(int, multiples)) > MOST_VALUES:
        raise OptionError(
            f"pad(multiple_of={multiple_of!r}) takes integers of at least 1, whose product is at "
            f"most {MOST_VALUES:,}\n"
            "  Give one int for the first dimension, or one for each of the first dimensions."
        )
    if not isinstance(lengths, bool):
        raise OptionError(f"pad(lengths={lengths!r}) is not valid; it must be True or False")
    return Pad(number, multiples if max(multiples, default=1) > 1 else (), lengths)


def packed() -> Pack:
    """Collate samples that are encoded bytes, such as JPEG files, into one tensor with offsets.

    Encoded bytes are `bytes`, bytearrays, and uint8 arrays or tensors of one dimension; their
    lengths may differ, and may be 0. Samples may also be dicts, NamedTuples, dataclasses or tuples,
    nested or not: each field of encoded bytes is packed, and all others are collated as torch does
    it. To pack some fields only, name them: `by_field(image=packed())`.

    Returns:
        A collate_fn, or a rule for `by_field`. It returns a `PackedBytes`, or a container like the
        samples with one for each field of encoded bytes. In a loader's worker the bytes are written
        directly into shared memory. It raises `InputError`, naming the sample, if a field is
        encoded bytes in some samples only, or if there are none at all.
    """
    return Pack()


def by_field(rules: Mapping[Any, Rule] | None = None, /, **named: Rule) -> ByField:
    """Collate each field of the samples by its own rule, and all others as torch does.

    Samples, all of one type, may be dicts, NamedTuples, dataclasses, tuples or lists. A batch is
    of the same type: a tuple stays a tuple, and a dataclass is rebuilt with its fields' batches
    (by `dataclasses.replace`, so its `__init__` and `__post_init__` see batches).

    Args:
        rules: For each dict key, field name, or index in a tuple: `pad(...)`, `packed()`,
            `as_list`, `default`, another `by_field` where the field itself has fields, or any
            function of a list.
        **named: The same, for fields whose names are identifiers.

    Returns:
        A collate_fn, or a rule for another `by_field`. It raises `InputError` for a sample that
        has other fields than most, and `OptionError` if a rule's field does not exist.

    Raises:
        OptionError: There is no rule, a field has two, or a rule cannot be called.
    """
    if not isinstance(rules, Mapping | None):
        raise OptionError(
            f"by_field takes a rule for each field; got a {type(rules).__name__}\n"
            "  by_field is not a collate_fn itself but makes one: by_field(image=pad())."
        )
    unnamed = dict(rules or {})
    twice = sorted(unnamed.keys() & named.keys())
    if twice:
        raise OptionError(f"by_field got two rules for {', '.join(map(repr, twice))}")
    every: dict[Any, Rule] = {**unnamed, **named}
    if not every:
        raise OptionError(
            "by_field got no rules\n"
            "  Name a field: by_field(image=pad()). Without any, leave collate_fn out."
        )
    for field, rule in every.items():
        if not _is_rule(rule):
            raise OptionError(
                f"the rule for field {field!r} must be a collate_fn; got {rule!r}\n"
                "  Write pad(), packed(), as_list, default, by_field(...), or a function of a list."
            )
    return ByField(every)


def sequences(*, size: int | None = None, pad: float = 0, ignore: int = -100) -> Sequences:
    """Collate rows of `forebay.pack_sequences`: sequences one after another, padded at the end.

    Every field of a sample that has as many items as the sample has tokens is packed in the same
    way: `labels` and other fields named after labels or targets are padded with `ignore`, masks and
    all others with 0. Fields of other sizes are collated as torch does it, over all sequences of
    the batch in their order. The field of tokens is `tokens` or `input_ids`, or else the first
    that has a length.

    Args:
        size: Tokens of a row, as in `pack_sequences`; None for those of the batch's longest row.
        pad: What to pad tokens with.
        ignore: What to pad labels with.

    Returns:
        A collate_fn. It returns a dict with the fields of a sample (`tokens` if the sample is only
        a tensor), each [batch, size, ...], and

        - `position_ids`: int64 [batch, size]: a token's place in its sequence (of a piece of a
            split sample: in the piece), from 0; at padding, too.
        - `sequence_ids`: int64 [batch, size]: 1 for the first sequence of a row, 2 for the second;
            0 is padding.
        - `cu_seqlens`: int32 [sequences + 1]: where each sequence begins in the batch's tokens, one
            row after another, and the end, as attention over variable lengths takes it. The padding
            of a row counts as a sequence.
        - `max_seqlen`: int: the length of the longest of them.

        It raises `InputError`, naming the sample, if samples have different dtypes, or a row is
        longer than `size`.

    Raises:
        OptionError: `size` is not positive.
    """
    if size is not None and not _is_multiple(size):
        raise OptionError(f"sequences(size={size!r}) takes an integer of at least 1, or None")
    if _number(pad) is None or _number(ignore) is None:
        raise OptionError(f"sequences(pad={pad!r}, ignore={ignore!r}) takes numbers")
    return Sequences(size, pad, ignore)


def as_list(samples: list[Any]) -> list[Any]:
    """Return the samples as a list, without stacking anything."""
    return list(samples)


def _number(value: object) -> int | float | None:
    """Return a number as torch takes it; None if there is none."""
    if isinstance(value, Integral) and -(1 << 63) <= int(value) < 1 << 64:
        return int(value)
    try:
        return float(value) if isinstance(value, Real) else None
    except OverflowError:
        return None


def _is_multiple(value: object) -> bool:
    return isinstance(value, Integral) and int(value) > 0


def _is_rule(rule: object) -> bool:
    """Return whether a rule can be called with a list; some functions only make rules."""
    return callable(rule) and rule not in (pad, packed, by_field, sequences)


# ---- packed rows ---------------------------------------------------------------------------------
# Collate the sequences of each row one after another, into the batch's memory.
#
#     rows of samples ──> fields of as many items as tokens ──> (batch, size), written once
#                     └─> lengths ──> position_ids, sequence_ids, cu_seqlens, max_seqlen

# The field of tokens is called one of these; otherwise it is the first that has a length.
TOKENS = ("tokens", "input_ids")
_ADVICE = (
    "sequences() takes rows of forebay.pack_sequences: lists of samples. A sample is a tensor, "
    "array or list of tokens, or a container with such a field."
)
_DENSE = (
    "sequences() packs each field of as many items as there are tokens: dense tensors, arrays and "
    "lists of numbers."
)
_COUNTED = "The samples of all rows are counted, one row after another."


@dataclass(frozen=True)
class Sequences(Collation):
    """The collate function that `sequences` returns."""

    size: int | None
    pad: int | float
    ignore: int

    def collate(self, samples: Sequence[Any], path: Path) -> dict[Hashable, Any]:
        """See `sequences`."""
        for number, row in enumerate(samples):
            if type(row) is not list or not row:
                raise refusal(Misfit(path, number, described_value(row), ""), len(samples), _ADVICE)
        flat = [_fields(sample) for row in samples for sample in row]
        if any(each.keys() != flat[0].keys() for each in flat):
            odd = odd_one(path, [f"a sample with {sorted(each, key=repr)}" for each in flat])
            assert odd is not None
            raise refusal(odd, len(flat), f"Return the same fields for every sample. {_COUNTED}")
        names: list[Hashable] = [*TOKENS, *flat[0]]
        named = [name for name in names if items_in(flat[0].get(name)) is not None]
        if not named:
            raise refusal(
                Misfit(path, None, described_value(samples[0][0]), ""), len(samples), _ADVICE
            )
        tokens = named[0]
        own = [len(each[tokens]) for each in flat]
        ends = np.cumsum([0, *map(len, samples)])
        rows = [own[begin:end] for begin, end in pairwise(ends.tolist())]
        totals = [sum(row) for row in rows]
        size = max(totals) if self.size is None else self.size
        if max(totals) > size:
            at = totals.index(max(totals))
            raise InputError(
                f"row {at} of a batch of {len(samples)} has {totals[at]:,} tokens, more than "
                f"sequences(size={size:,})\n  The batch was not made. Give the size of "
                "pack_sequences."
            )
        batch: dict[Hashable, Any] = {}
        for name in flat[0]:
            values = [each[name] for each in flat]
            try:
                if [*map(items_in, values)] == own:
                    option = "ignore" if re.search("label|target", str(name)) else ""
                    option = "pad" if name == tokens else option
                    batch[name] = self._packed(values, rows, size, option, (*path, name))
                else:
                    batch[name] = default_at(values, (*path, name))
            except InputError as error:
                error.add_note(f"forebay.collate: {_COUNTED}")
                raise
        return batch | _structure(rows, size)

    def _packed(
        self, values: list[Any], rows: list[list[int]], size: int, option: str, path: Path
    ) -> torch.Tensor:
        """Return the values of each row one after another, then that of `option`; 0 if it is ""."""
        count = len(values)
        tensors = [dense(value, at, count, path, _DENSE) for at, value in enumerate(values)]
        first = tensors[0]
        for number, each in enumerate(tensors):
            if (each.dtype, each.shape[1:]) != (first.dtype, first.shape[1:]):
                odd = Misfit(
                    path, number, described_value(each), f"in others it is {described_value(first)}"
                )
                raise refusal(odd, count, "Return one dtype and shape, but for the length.")
        is_mask = option == "ignore" and first.dtype is torch.bool
        fill = {"pad": self.pad, "ignore": self.ignore}.get("" if is_mask else option, 0)
        check_value(f"sequences({option}", fill, first.dtype, path)
        found = new_tensor((len(rows), size, *first.shape[1:]), first.dtype)
        pieces = iter(tensors)
        write_rows(found, [[*islice(pieces, len(row))] for row in rows], map(sum, rows), fill)
        return found


def _fields(sample: Any) -> Mapping[Hashable, Any]:
    """Return the fields of a sample; tokens alone are the field "tokens"."""
    fields = None if isinstance(sample, list) else fields_of(sample)
    return {"tokens": sample} if fields is None else {at: get(sample) for at, get in fields.items()}


def _structure(rows: list[list[int]], size: int) -> dict[Hashable, Any]:
    """Return where each sequence begins and ends."""
    lengths, numbers = [], []
    for row in rows:
        missing = size - sum(row)
        lengths += [*row, *[missing] * (missing > 0)]
        numbers += [*range(1, len(row) + 1), *[0] * (missing > 0)]
    each = np.array(lengths, np.int64)
    ends = np.cumsum(each)
    positions = np.arange(len(rows) * size) - np.repeat(ends - each, each)
    found: dict[Hashable, Any] = {
        "position_ids": positions,
        "sequence_ids": np.repeat(numbers, each),
    }
    for name, values in found.items():
        found[name] = new_tensor((len(rows), size), torch.int64)
        found[name].copy_(torch.from_numpy(values).view(len(rows), size))
    found["cu_seqlens"] = torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32))
    found["max_seqlen"] = int(each.max())
    return found
