"""Inputs: listing what the user names, tables whose rows are inputs, and remote files."""
