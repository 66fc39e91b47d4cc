"""How many tokens each sample has, for `pack_sequences` and `batch_by_length`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

from forebay.base.datasets import is_map_style
from forebay.base.formatting import counted
from forebay.columns.slicing import ColumnDataset
from forebay.errors import InputError, OptionError
from forebay.seeds import Integers

# The first and last token of a piece have 32 bits.
LONGEST = 2**31 - 1


def token_counts(dataset: Any, lengths: Any) -> Integers:
    """Return the number of tokens of each sample."""
    if not is_map_style(dataset):
        raise OptionError(
            f"lengths decide which samples share a row, so the dataset needs __getitem__ and "
            f"__len__; got {type(dataset).__name__}\n"
            "  forebay.cache(dataset, directory) makes such a dataset of the samples."
        )
    if callable(lengths) and not isinstance(lengths, torch.Tensor):
        lengths = lengths(dataset)
    if isinstance(lengths, str):
        lengths = _column(dataset, lengths)
    try:
        found = np.asarray(lengths)
    except ValueError:  # lists of different lengths
        found = np.array(lengths, object)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise OptionError(
            f"lengths takes one integer for each sample; got {found.dtype} of shape {found.shape}"
        )
    if len(found) != len(dataset):
        raise InputError(
            f"there are {len(found):,} lengths for {counted(len(dataset), 'sample')}\n"
            "  Nothing was packed. Give one length for each sample of the dataset, in its order."
        )
    if not len(found):
        raise InputError("the dataset has no samples\n  There is nothing to pack.")
    if found.min() < 1 or found.max() > LONGEST:
        wrong = (found < 1) | (found > LONGEST)
        at = int(np.argmax(wrong))
        raise InputError(
            f"the length of sample {at} is {found[at]}; {int(wrong.sum()):,} of {len(found):,} "
            f"lengths are wrong\n  A length is from 1 to {LONGEST:,}. Nothing was packed. Leave "
            "samples without tokens out: torch.utils.data.Subset(dataset, indices)."
        )
    return found.astype(np.int32)


def _column(dataset: Any, name: str) -> Any:
    """Return the numbers in a column, or the lengths of its values, without reading a sample."""
    import pyarrow as pa

    if isinstance(dataset, Subset):
        return _column(dataset.dataset, name)[list(dataset.indices)]
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([_column(each, name) for each in dataset.datasets])
    names, items = getattr(dataset, "columns", ()), getattr(dataset, "items", None)
    if hasattr(dataset, "select_columns"):  # Hugging Face, which names the columns in its error
        table = dataset.select_columns([name]).with_format("arrow")[:]
    elif getattr(dataset, "remote", None) is not None and hasattr(dataset, "shard_tables"):
        raise OptionError(
            f"lengths={name!r}: of a cache in a bucket, columns are not read alone\n  Give the "
            "lengths themselves, which are best kept when the cache is made; or a function that "
            f"reads all samples once: lengths=lambda dataset: [len(each[{name!r}]) for each in "
            "dataset]; or read a copy: aws s3 sync or rclone makes it."
        )
    elif hasattr(dataset, "shard_tables"):  # a cache, of which one shard at a time is decompressed
        parts = (each[name] for each in dataset.shard_tables() if name in each.column_names)
        counts = [_counted(chunk, name) for part in parts for chunk in part.chunks]
        if counts and sum(map(len, counts)) == len(dataset):
            return pa.chunked_array(counts, pa.int64()).to_numpy()
        table = dataset.table()  # some shards have samples of another structure
    elif hasattr(dataset, "counts_of"):  # shards
        return np.asarray(dataset.counts_of(name))
    elif names and items is not None:  # the rows of a table
        table = pa.table({name: [row[names.index(name)] for row in items]} if name in names else {})
    elif isinstance(dataset, ColumnDataset):
        columns = dataset.columns
        names = tuple(columns.types)
        table = pa.table({name: columns.counts(name)} if name in names else {})
    else:
        raise OptionError(
            f"lengths={name!r} names a column, but a {type(dataset).__name__} has no columns\n"
            "  Give the lengths themselves, or a function that returns them for the dataset."
        )
    if name not in table.column_names:
        known = ", ".join(names or table.column_names) or "none"
        raise OptionError(f"there is no column {name!r}; the columns are: {known}")
    found = [_counted(chunk, name) for chunk in table[name].chunks]
    return pa.chunked_array(found, pa.int64()).to_numpy()


def _counted(values: Any, name: str) -> Any:
    """Return the integers of an Arrow array, or the lengths of its lists or tensors; 0 for null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = values.type
    if isinstance(kind, pa.FixedShapeTensorType):
        return pa.array(np.full(len(values), kind.shape[0]))
    if pa.types.is_struct(kind) and "shape" in kind.names:  # a cache's tensors
        values = pc.list_element(values.field("shape"), 0)
    elif not pa.types.is_integer(kind):
        try:
            values = pc.list_value_length(values)
        except pa.ArrowNotImplementedError as error:
            raise OptionError(
                f"the column {name!r} has values of type {kind}, which have no number of tokens\n"
                "  Name a column of integers, or of lists or tensors of tokens."
            ) from error
    return pc.fill_null(values.cast(pa.int64()), 0)
