"""Internals of `forebay.cache`: samples in Arrow files, and the Dataset that reads them."""
