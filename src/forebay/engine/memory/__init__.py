"""Batches in shared memory: its layout, who may read it, and what is sent by pipe."""
