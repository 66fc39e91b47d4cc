"""Internals of `forebay.collate`: rules for fields, padding, and errors that name the sample."""
