"""Internals of `forebay.DataLoader`."""
