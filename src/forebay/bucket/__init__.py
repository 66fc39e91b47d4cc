"""Caches in a bucket: one process per node fetches blocks, all others read them."""
