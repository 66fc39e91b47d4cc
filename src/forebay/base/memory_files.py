"""Files in memory without a name, for what processes share."""

from __future__ import annotations

import ctypes
import os
import warnings
from contextlib import suppress

# As in <linux/memfd.h>.
_CLOEXEC = 1
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the file has no name there

_was_warned = False


def memory_file(name: str) -> int:
    """Return the descriptor of a new file in memory, closed on exec.

    Where the system refuses such files, it is an unlinked file: in /dev/shm if that is a folder,
    otherwise in the folder for temporary files, with a warning, since that may be on a disk.

    Args:
        name: Shown in /proc, behind "memfd:".

    Raises:
        OSError: No file can be made anywhere.
    """
    for create in (_by_python, _by_libc):
        with suppress(AttributeError, OSError):
            return create(name)
    if os.path.isdir(_SHARED_MEMORY):
        with suppress(OSError):
            return _unlinked(_SHARED_MEMORY)
    import tempfile  # not above: it imports `random`, and a user's module may have that name

    folder = tempfile.gettempdir()
    found = _unlinked(folder)
    _warn_once(folder)
    return found


def _by_python(name: str) -> int:
    return os.memfd_create(name, os.MFD_CLOEXEC)


def _by_libc(name: str) -> int:
    """Make the system call where Python was built without it, as conda's was."""
    descriptor = int(ctypes.CDLL(None, use_errno=True).memfd_create(name.encode(), _CLOEXEC))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "memfd_create")
    return descriptor


def _unlinked(folder: str) -> int:
    import tempfile

    # O_TMPFILE never gives the file a name; without it, the file has one for a moment.
    with tempfile.TemporaryFile(dir=folder, prefix="forebay-", buffering=0) as file:
        return os.dup(file.fileno())


def _warn_once(folder: str) -> None:
    global _was_warned  # noqa: PLW0603 - once for the whole process
    if not _was_warned:
        _was_warned = True
        warnings.warn(
            f"this system refuses files in memory, so unlinked files in {folder} serve\n"
            "  If that folder is on a disk, batches are written there. Set TMPDIR to a folder in "
            "memory (tmpfs), or allow memfd_create.",
            RuntimeWarning,
            stacklevel=2,
        )
