"""Outputs: staged, committed and published, in a folder or in a bucket."""
