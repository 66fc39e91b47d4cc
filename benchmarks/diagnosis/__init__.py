"""Runs with one planted cause of waiting each, and what `loader.diagnose()` says of them."""
