"""Train from a bucket: forebay beside its peers, on one server with latency, a tail and a rate."""

from __future__ import annotations

from benchmarks.bucket.epochs import disk, epochs, ranks
from benchmarks.bucket.exact import faults, grid, kills
from benchmarks.bucket.index import index
from benchmarks.bucket.shards import epochs as shard_epochs
from benchmarks.bucket.shards import faults as shard_faults
from benchmarks.bucket.shards import first as shard_first
from benchmarks.bucket.shards import index as shard_index
from benchmarks.bucket.shards import local as shard_local

TABLES = {
    "bucket-epochs": epochs,
    "bucket-disk": disk,
    "bucket-ranks": ranks,
    "bucket-grid": grid,
    "bucket-faults": faults,
    "bucket-kills": kills,
    "bucket-index": index,
    "shards-epochs": shard_epochs,
    "shards-first": shard_first,
    "shards-local": shard_local,
    "shards-index": shard_index,
    "shards-faults": shard_faults,
}
