"""The lock that keeps an output folder to one driver, and whom it names to the second one."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
import weakref
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from forebay.errors import BusyError, LedgerError

LOCK_NAME = "lock"

# What a file system without flock answers (some NFS and Lustre mounts).
_UNSUPPORTED = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}
# A second shell that looks on holds a shared lock for an instant: not a reason to give up.
_TRIES = 5
_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds an output folder.

    Attributes:
        host: Name of the machine; "" while the holder has not written its record yet.
        pid: Process id on that machine; 0 likewise.
        started: When it took the folder, ISO 8601 in UTC.
        command: What it runs, as it was told.
    """

    host: str = ""
    pid: int = 0
    started: str = ""
    command: str = ""

    def __str__(self) -> str:
        if not self.pid:
            return "a process that has only just started"
        return f"pid {self.pid} on {self.host}, since {self.started}"


class FolderLock:
    """One driver per output folder; taken by making it, given back by `close`.

    The kernel holds the lock (flock), so it goes with the process that took it, whatever killed
    it. Forked children give up their copy at once: a worker that outlives a killed driver does
    not keep the folder. Where the file system has no flock, the record in the file is all there
    is: it counts while its process is alive, and for ever if it is from another machine.

    Args:
        path: The lock file; its folder must exist. It is never removed, only emptied.
        command: What to tell the one who comes second.

    Attributes:
        native: True if the file system has locks; False if only the record guards the folder.

    Raises:
        BusyError: Another run holds it; the message names the run.
        LedgerError: The folder cannot be written.
    """

    def __init__(self, path: Path, command: str = "") -> None:
        self.path = path
        self.native = True
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise LedgerError(
                f"the folder {path.parent} cannot be written: {error.strerror}\n"
                "  Nothing was started. Choose an output folder that you may write to."
            ) from error
        try:
            self._take()
            here = Holder(os.uname().nodename, os.getpid(), _now(), command)
            self._write(json.dumps(asdict(here)).encode())
        except BaseException:
            os.close(self._fd)
            raise
        _held.add(self)

    def close(self) -> None:
        """Give the folder back; a second call does nothing."""
        if self._fd < 0:
            return
        try:
            self._write(b"")
        finally:
            self._abandon()

    def _take(self) -> None:
        for remaining in reversed(range(_TRIES)):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if not remaining:
                    raise self._busy(_read(self._fd) or Holder()) from None
                time.sleep(_PAUSE_S)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise LedgerError(f"{self.path} cannot be locked: {error.strerror}") from error
                self.native = False
                if (holder := _recorded(self._fd)) is not None:
                    raise self._busy(holder) from None
                return

    def _busy(self, holder: Holder) -> BusyError:
        lines = [f"another run holds {self.path.parent}: {holder}"]
        if holder.command:
            lines.append(f"  It runs: {holder.command}")
        lines.append(
            "  This run touched nothing. Wait until that one ends, look on with `forebay status`, "
            "or stop it and call again: what it has done stays done."
        )
        if not self.native:
            lines.append(
                "  This file system has no locks, so a run on a lost machine cannot be told "
                f"from a live one: if it is surely over, delete {self.path}."
            )
        return BusyError("\n".join(lines))

    def _write(self, record: bytes) -> None:
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, record, 0)
        except OSError as error:
            raise LedgerError(f"{self.path} cannot be written: {error.strerror}") from error

    def _abandon(self) -> None:
        """Close the descriptor alone; in a forked child the parent's lock outlives this."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def find_holder(path: Path) -> Holder | None:
    """Return who holds the lock file `path` right now, or None; changes nothing."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(fd) or Holder()
    except OSError:
        return _recorded(fd)
    else:
        return None
    finally:
        os.close(fd)


def _recorded(fd: int) -> Holder | None:
    """The holder by its record alone, for file systems without locks."""
    holder = _read(fd)
    if holder is None or (holder.host == os.uname().nodename and not _is_alive(holder.pid)):
        return None
    return holder


def _read(fd: int) -> Holder | None:
    try:
        fields = json.loads(os.pread(fd, 1 << 20, 0))
        return Holder(
            str(fields["host"]), int(fields["pid"]), str(fields["started"]), str(fields["command"])
        )
    except (ValueError, KeyError, TypeError, OSError):
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # somebody else's process
    return True


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _abandon_all() -> None:
    for lock in list(_held):
        lock._abandon()


os.register_at_fork(after_in_child=_abandon_all)
