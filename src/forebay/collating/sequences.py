"""Packed rows: collate the sequences of each row one after another, into the batch's memory.

rows of samples ──> fields of as many items as tokens ──> (batch, size), written once
                └─> lengths ──> position_ids, sequence_ids, cu_seqlens, max_seqlen
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch

from forebay.base.batches import items_in
from forebay.collating.padding import check_value, dense, write_rows
from forebay.collating.rules import (
    Collation,
    Misfit,
    Path,
    default_at,
    described,
    fields_of,
    odd_one,
    refusal,
)
from forebay.errors import InputError
from forebay.memory.packing import new_tensor

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
                raise refusal(Misfit(path, number, described(row), ""), len(samples), _ADVICE)
        flat = [_fields(sample) for row in samples for sample in row]
        if any(each.keys() != flat[0].keys() for each in flat):
            odd = odd_one(path, [f"a sample with {sorted(each, key=repr)}" for each in flat])
            assert odd is not None
            raise refusal(odd, len(flat), f"Return the same fields for every sample. {_COUNTED}")
        names: list[Hashable] = [*TOKENS, *flat[0]]
        named = [name for name in names if items_in(flat[0].get(name)) is not None]
        if not named:
            raise refusal(Misfit(path, None, described(samples[0][0]), ""), len(samples), _ADVICE)
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
        """Return the values of each row one after another, in a tensor of a row each.

        Args:
            option: "pad" or "ignore", whose value comes after the last; "" for 0.
        """
        count = len(values)
        tensors = [dense(value, at, count, path, _DENSE) for at, value in enumerate(values)]
        first = tensors[0]
        for number, each in enumerate(tensors):
            if (each.dtype, each.shape[1:]) != (first.dtype, first.shape[1:]):
                odd = Misfit(path, number, described(each), f"in others it is {described(first)}")
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
