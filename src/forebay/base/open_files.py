"""Files that this process has open for reading: which of them were read from meanwhile."""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress


def read_positions() -> dict[int, tuple[str, int]]:
    """Return, by descriptor, the path and the position of each file open for reading alone."""
    found = {}
    with suppress(OSError):  # no /proc
        for name in os.listdir("/proc/self/fd"):
            fd = int(name)
            with suppress(OSError):  # that of the listing itself is closed by now
                is_read = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
                if is_read and stat.S_ISREG(os.fstat(fd).st_mode):
                    path = os.readlink(f"/proc/self/fd/{name}")
                    found[fd] = path, os.lseek(fd, 0, os.SEEK_CUR)
    return found


def moved_since(before: dict[int, tuple[str, int]]) -> set[str]:
    """Return the files whose positions have changed since `read_positions` returned `before`."""
    now = read_positions()
    return {found[0] for fd, found in before.items() if now.get(fd, found) != found}
