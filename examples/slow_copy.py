"""Copy files slowly: a job that takes long enough to be killed half-way."""

import time


def slow_copy(source, out):
    """Copy one file, in half a second."""
    time.sleep(0.5)
    (out / source.name).write_bytes(source.read_bytes())
