"""Packed outputs: many small outputs in few tar files, called shards."""
