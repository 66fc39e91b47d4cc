"""Batches in shared memory: the layout, the leases, and the messages sent by pipe or network."""
