"""The process that holds an output folder, and whether it is alive, as far as this one can see."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime

from forebay.process_identity import is_alive, kernel, state_and_start


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds an output folder.

    Attributes:
        host: Name of the machine; "" while the holder has not written its record yet.
        pid: Process id on that machine; 0 likewise.
        started: When it took the folder, ISO 8601 in UTC.
        command: What it runs, as it was told.
        kernel: The running kernel and its namespace of process ids; "" where that is not known.
        process_start: When that kernel started the process, in clock ticks since it booted: what
            tells a process from a later one with the same id. "" where that is not known.
        folder: Where the folder of the lock is on that machine, without symbolic links.
    """

    host: str = ""
    pid: int = 0
    started: str = ""
    command: str = ""
    kernel: str = ""
    process_start: str = ""
    folder: str = ""

    def __str__(self) -> str:
        if not self.pid:
            return "a process that has only just started"
        return f"pid {self.pid} on {self.host}, since {self.started}"

    @classmethod
    def this_process(cls, command: str, folder: str | os.PathLike[str]) -> Holder:
        """Return the record of this process, which takes the folder now."""
        return cls(
            host=os.uname().nodename,
            pid=os.getpid(),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            command=command,
            kernel=kernel(),
            process_start=state_and_start(os.getpid())[1],
            folder=os.path.realpath(folder),
        )

    @property
    def is_visible(self) -> bool:
        """Whether this process would see the holder's: they share a kernel and its process ids."""
        return (self.host, self.kernel) == (os.uname().nodename, kernel())

    @property
    def is_alive(self) -> bool:
        """Whether the process of a visible holder is there, and not another with the same id."""
        return is_alive(self.pid, self.process_start)

    @property
    def is_known_dead(self) -> bool:
        """Whether its process is known to have ended."""
        return self.is_visible and not self.is_alive

    def is_copied(self, folder: str | os.PathLike[str]) -> bool:
        """Whether the record came into this folder with a copy of another one of this machine."""
        return self.is_visible and self.folder != os.path.realpath(folder)
