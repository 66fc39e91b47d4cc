"""All shards as one Arrow table over their memory maps.

The column types of shards may differ: all samples of one shard may have the same shape, and those
of another not. The table has the wider type; only its small offsets are rebuilt.
"""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa

from forebay.arrow_arrays import array_of, array_of_numpy
from forebay.caching.columns import Spec, arrow_type, widened
from forebay.caching.shard_reader import Shard


def table_of(shards: list[Shard]) -> pa.Table:
    """Return the rows of all shards, in order.

    Raises:
        MisfitError: Their columns have no type in common.
    """
    specs = shards[0].specs
    for shard in shards[1:]:
        specs = [widened(*pair) for pair in zip(specs, shard.specs, strict=True)]
    tables = [_as_wide(shard.table(), shard.specs, specs) for shard in shards]
    return pa.concat_tables([table.replace_schema_metadata(None) for table in tables])


def _as_wide(table: pa.Table, specs: list[Spec], wide: list[Spec]) -> pa.Table:
    for at, (own, wanted) in enumerate(zip(specs, wide, strict=True)):
        if own != wanted:
            kind = arrow_type(wanted)
            chunks = [_cast(chunk, own, wanted) for chunk in table.column(at).chunks]
            table = table.set_column(
                at, table.field(at).with_type(kind), pa.chunked_array(chunks, kind)
            )
    return table


def _cast(chunk: pa.Array, own: Spec, wanted: Spec) -> pa.Array:
    kind = arrow_type(wanted)
    if own.kind == "none":
        return pa.nulls(len(chunk), kind)
    if own.kind == "str":
        return chunk.cast(kind)
    shape = own.shape or ()
    storage = chunk.storage if isinstance(chunk, pa.ExtensionArray) else chunk
    values = storage.values if isinstance(storage, pa.FixedSizeListArray) else storage
    each = math.prod((*shape, *own.stored[1]))
    ends = array_of_numpy(np.arange(len(chunk) + 1) * each)
    shapes = array_of([shape] * len(chunk), pa.list_(pa.int64()))
    lists = pa.LargeListArray.from_arrays(ends, values)
    mask = chunk.is_null() if chunk.null_count else None
    return pa.StructArray.from_arrays([lists, shapes], fields=list(kind), mask=mask)
