"""Batches in shared memory: how it is cut up, who may read it, and what travels beside it."""
