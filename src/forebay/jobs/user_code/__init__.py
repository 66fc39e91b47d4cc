"""The user's function: found by its name, and described to detect changes."""
