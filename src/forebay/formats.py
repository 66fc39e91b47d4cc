"""Constants of the outputs' formats, for the options and for workers, which import no options."""

from __future__ import annotations

# The formats of the metadata table.
TABLE_FORMATS = ("parquet", "csv", "jsonl")
# About how large a shard of packed outputs is: larger than a shard of a cache, since a kill costs
# only single inputs of it.
SHARD_BYTES = 256 * 2**20
