"""Renaming a file to a free name in one step, so that an existing file is never overwritten.

renameat2(RENAME_NOREPLACE)   Linux: ext4, XFS, Btrfs, tmpfs, overlayfs and others
link, then unlink             where there are hard links instead: NFS, macOS
look, then rename             elsewhere; another process could come between the two
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable
from contextlib import suppress

_AT_FDCWD, _NOREPLACE = -100, 1
_ENCODING = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()
# Errors of a file system or kernel that lacks an operation.
_UNSUPPORTED = frozenset(
    {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM, errno.EMLINK}
)


def _c_function() -> Callable[[int, bytes, int, bytes, int], int] | None:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


_renameat2 = _c_function()


def rename_new(old: str, new: str) -> None:
    """Rename a file to a name that is free.

    Raises:
        FileExistsError: Something has that name; both are as they were.
        OSError: See `os.rename`.
    """
    for rename in _WAYS:
        try:
            rename(old, new)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        else:
            return
    os.lstat(old)
    if os.path.lexists(new):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
    os.replace(old, new)


def _by_renameat2(old: str, new: str) -> None:
    if _renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), new)
    # As `os.fsencode` does, which takes four times as long.
    first, second = old.encode(*_ENCODING), new.encode(*_ENCODING)
    if _renameat2(_AT_FDCWD, first, _AT_FDCWD, second, _NOREPLACE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), new)


def _by_link(old: str, new: str) -> None:
    try:
        os.link(old, new, follow_symlinks=False)
    except FileExistsError:
        # NFS may have created the link and lost the reply; or a kill came before the unlink.
        if not os.path.samestat(os.lstat(old), os.lstat(new)):
            raise
    with suppress(FileNotFoundError):
        os.unlink(old)


_WAYS = (_by_renameat2, _by_link)
