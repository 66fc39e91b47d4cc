"""Internals of `forebay.DataLoader`: ARCHITECTURE.md lists the files and their purposes."""
