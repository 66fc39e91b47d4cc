"""What a worker does with files that its caller had open when it was forked."""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress


def read_on_alone() -> None:
    """Give this process a position of its own in each file that it inherited open for reading.

    Forked processes share one: each would read on where another one has sought.
    """
    with suppress(FileNotFoundError):  # without /proc
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # it was that of the listing, or may not be opened again
                _open_again(int(name))


def _open_again(descriptor: int) -> None:
    if descriptor <= 2 or not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        own_position(descriptor)


def own_position(descriptor: int) -> None:
    """Open a file again, so that this process alone moves its position; raise OSError if not."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    own = os.open(f"/proc/self/fd/{descriptor}", flags | os.O_CLOEXEC)
    try:
        os.lseek(own, os.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(own, descriptor, inheritable=os.get_inheritable(descriptor))
    finally:
        os.close(own)
