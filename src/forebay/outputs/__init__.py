"""Outputs: staged and published, in a folder or a bucket, as files or in shards."""
