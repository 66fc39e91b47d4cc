"""The private folder of the files that `forebay top` reads: one per user and machine.

It is in the user's runtime folder, or in the temporary one where that is missing. A link, a folder
of another user, or one that others may enter is not used.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress


def candidates() -> list[str]:
    """Return where the folder may be, best first.

    A program and a later shell may differ in their variables, so a reader looks at all of them.
    """
    user = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    bases = [runtime] if os.path.isabs(runtime) else []
    if os.path.isdir(f"/run/user/{user}"):
        bases.append(f"/run/user/{user}")
    found = [os.path.join(base, "forebay") for base in bases]
    shared = (tempfile.gettempdir(), "/tmp")  # noqa: S108 - what is found there is checked
    found += [os.path.join(base, f"forebay-{user}") for base in shared]
    return list(dict.fromkeys(found))


def is_private(folder: str) -> bool:
    """Tell whether a path is a folder of this user that nobody else may enter, and no link."""
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return is_own and not status.st_mode & 0o077


def writable_folder() -> str | None:
    """Return the folder to write to, created if missing; None if there cannot be one."""
    for folder in candidates():
        with suppress(OSError):
            os.mkdir(folder, 0o700)
        if is_private(folder):
            return folder
    return None
