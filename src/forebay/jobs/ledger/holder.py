"""The process that holds an output folder, and whether it is alive, as far as can be seen."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from forebay.process_identity import is_alive, kernel, state_and_start


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds an output folder.

    Attributes:
        host: Name of the machine; "" while the holder has not written its record yet.
        pid: Process ID on that machine; 0 while there is no record yet.
        started: When it took the folder, ISO 8601 in UTC.
        command: Its command line or call, for messages.
        kernel: The running kernel and its namespace of process IDs; "" if that is not known.
        process_start: When that kernel started the process, in clock ticks since it booted, which
            distinguishes it from a later process with the same ID; "" if that is not known.
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

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Holder:
        """Return the holder that a record in JSON describes.

        Raises:
            ValueError, TypeError, AttributeError, ArithmeticError: The record is damaged.
        """
        kinds: dict[str, Any] = {"pid": int}
        return cls(**{name: kinds.get(name, str)(value) for name, value in record.items()})

    @property
    def is_visible(self) -> bool:
        """Whether the holder runs on this kernel, in the same namespace of process IDs."""
        return (self.host, self.kernel) == (os.uname().nodename, kernel())

    @property
    def is_alive(self) -> bool:
        """Whether the process of a visible holder exists, and is not another with the same ID."""
        return is_alive(self.pid, self.process_start)

    @property
    def is_known_dead(self) -> bool:
        """Whether its process is known to have ended."""
        return self.is_visible and not self.is_alive

    def is_copied(self, folder: str | os.PathLike[str]) -> bool:
        """Whether the record was copied here with another output folder of this machine."""
        return self.is_visible and self.folder != os.path.realpath(folder)
