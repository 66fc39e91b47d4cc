"""Whether a file is still open for writing, so that what is written next would be missing in it."""

from __future__ import annotations

import fcntl
import gc
import io
import os
import signal
from collections.abc import Container
from contextlib import suppress

from forebay.errors import OutputError

# To look at a file: no link is followed, and a pipe is not waited for.
_LOOK = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# Of Linux; elsewhere no file system has leases.
_SETLEASE, _SETSIG = getattr(fcntl, "F_SETLEASE", -1), getattr(fcntl, "F_SETSIG", -1)
_SIGNAL = int(signal.SIGURG)
# A lease takes 2 us. With more files, it is faster to look at all descriptors of the process.
MOST_LEASES = 8


def closed_status(path: str) -> os.stat_result | None:
    """Return the status of a file that nobody has open for writing; None if that is not known.

    Linux grants a lease for reading on such a file alone, if the file system has leases.
    """
    try:
        descriptor = os.open(path, _LOOK)
    except OSError:
        return None
    try:
        # If somebody opens the file meanwhile, the kernel sends a signal; this one is ignored.
        fcntl.fcntl(descriptor, _SETSIG, _SIGNAL)
        fcntl.fcntl(descriptor, _SETLEASE, fcntl.F_RDLCK)
        return os.fstat(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def was_open(files: dict[tuple[int, int], str], function: str) -> bool:
    """Return whether a file of these devices and inodes was open; raise OutputError if one is."""
    if _open_in_this_process(files) is None:
        return False
    # A file that only a cycle of references keeps open is fine: Python closes it when it finds the
    # cycle. But it may close the descriptor before it writes what is in the buffers.
    _flush_buffers(files)
    gc.collect()
    left = _open_in_this_process(files)
    if left is None:
        return True
    raise OutputError(
        f"out.file({left!r}) is still open for writing: {function} did not close it\n"
        "  Nothing of this input was kept, since what is not yet written to the file would be "
        "missing in it. Close it before the function returns, best with `with`: a global variable, "
        "a cache, an object or a thread keeps it open."
    )


def _flush_buffers(files: Container[tuple[int, int]]) -> None:
    for each in gc.get_objects():
        if issubclass(type(each), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
            with suppress(OSError, ValueError):  # it is closed, or over no file
                status = os.fstat(each.fileno())
                if (status.st_dev, status.st_ino) in files:
                    each.flush()


def _open_in_this_process(files: dict[tuple[int, int], str]) -> str | None:
    """Return the name of one of the files that this process has open for writing, if any."""
    with suppress(FileNotFoundError):  # without /proc, nobody knows
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):  # it was that of the listing, or another thread closed it
                status = os.fstat(descriptor)
                name = files.get((status.st_dev, status.st_ino))
                if name is not None and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE:
                    return name
    return None
