"""Shards that others wrote, read where they are: their formats, and an index of their blocks."""
