"""Inputs: listing what the user names, and tables whose rows are inputs."""
