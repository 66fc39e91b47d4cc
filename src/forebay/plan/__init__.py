"""Which samples form which batch, and the seeds they are made with. PURE."""
