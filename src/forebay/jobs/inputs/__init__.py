"""Inputs: listing what the user names, and downloading remote ones for a worker."""
