"""What a function may change in its process, and the next input must find as it was.

Everything else that it sets stays, as in a loop: globals, caches, the environment, handlers.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress


class ProcessState:
    """The working directory, the file mode mask, and whether an alarm is set."""

    def __init__(self) -> None:
        """Record the state that the process has now."""
        self._directory: str | None = None
        with suppress(FileNotFoundError):  # it was removed
            self._directory = os.getcwd()
        self._mask = os.umask(0o022)
        os.umask(self._mask)
        self._has_alarm = signal.getitimer(signal.ITIMER_REAL)[0] > 0

    def restore(self) -> None:
        """Undo `os.chdir`, `os.umask` and `signal.alarm` of the user's function."""
        os.umask(self._mask)
        if not self._has_alarm:
            signal.alarm(0)
        try:
            if os.getcwd() == self._directory:
                return
        except OSError:  # the function has removed the directory that it changed to
            pass
        if self._directory is not None:
            with suppress(OSError):
                os.chdir(self._directory)
