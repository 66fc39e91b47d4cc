"""Inputs: listed from what the user names, and downloaded for a worker."""
