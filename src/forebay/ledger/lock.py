"""The lock that limits an output folder to one driver, and names that driver to a second one.

    lock       locked by the kernel (flock) while a driver runs; never removed
    lock.17    the record of the 17th driver: host, process and command; renewed while it runs

Some file systems have no flock, and some grant it on each node to another process (Lustre with
`localflock`, some FUSE). So the record counts as well. The file with the highest number is the one
that counts. To take the folder is to make the file with the next number, which the file system lets
only one process do. The file stays when its driver ends, marked as over, so numbers only grow.

A record counts while its process is alive, where that can be seen. A driver on another machine
renews its record every BEAT_S; it counts as dead when the record did not change for STALE_S by the
clock of the process that waits for the folder. So clocks need not agree.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forebay.base.files import open_regular
from forebay.base.process import is_alive, join_thread, kernel, start_thread, state_and_start
from forebay.errors import BusyError, LedgerError
from forebay.observe.progress import note

# ---- holder --------------------------------------------------------------------------------------
# The process that holds an output folder, and whether it is alive, as far as can be seen.


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds an output folder."""

    host: str = ""
    pid: int = 0
    started: str = ""
    command: str = ""
    kernel: str = ""
    process_start: str = ""
    folder: str = ""
    call: str = ""  # which call it makes; "" if it is none of an entry point

    def __str__(self) -> str:
        if not self.pid:
            return "a process that has only just started"
        return f"pid {self.pid} on {self.host}, since {self.started}"

    @classmethod
    def this_process(cls, command: str, folder: str | os.PathLike[str], call: str = "") -> Holder:
        """Return the record of this process, which takes the folder now."""
        return cls(
            host=os.uname().nodename,
            pid=os.getpid(),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            command=command,
            kernel=kernel(),
            process_start=state_and_start(os.getpid())[1],
            folder=os.path.realpath(folder),
            call=call,
        )

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Holder:
        """Return the holder that a record in JSON describes."""
        kinds: dict[str, Any] = {"pid": int}
        return cls(**{name: kinds.get(name, str)(value) for name, value in record.items()})

    @property
    def is_visible(self) -> bool:
        """Return whether the holder runs on this kernel, in the same namespace of process IDs."""
        return (self.host, self.kernel) == (os.uname().nodename, kernel())

    @property
    def is_alive(self) -> bool:
        """Return whether the process of a visible holder exists, and not another with its ID."""
        return is_alive(self.pid, self.process_start)

    @property
    def is_known_dead(self) -> bool:
        """Return whether its process is known to have ended."""
        return self.is_visible and not self.is_alive

    def is_copied(self, folder: str | os.PathLike[str]) -> bool:
        """Return whether the record was copied here with another output folder of this machine."""
        return self.is_visible and self.folder != os.path.realpath(folder)


# ---- lock ----------------------------------------------------------------------------------------

LOCK_NAME = "lock"

# How often a driver renews its record, and how long without that until it counts as dead.
BEAT_S = 5.0
STALE_S = 60.0

# What a file system without flock answers (some NFS and Lustre mounts).
_UNSUPPORTED = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}
# How long to wait for a lock that is held without a record that names its holder: `forebay status`
# holds a shared one for an instant, and a driver has its lock a moment before it has its record.
_NAMELESS_S = 5.0
_PAUSE_S = 0.02
_OVER = b"{}"
# A record has some hundred bytes, and the command of the run.
_RECORD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class _Record:
    """A record as it was read; `holder` is None if the run is over or has not written it yet."""

    number: int
    holder: Holder | None
    is_over: bool
    renewed_ns: int


class FolderLock:
    """One driver per output folder; locked by the constructor, released by `close`.

    The lock ends with the process that took it, even if that was killed. Forked children close
    their copy at once, so a worker that outlives a killed driver does not keep the folder locked.

    Args:
        command: This run's command, for the message to a second run.
        call: Which call it makes, for a second run that makes the same.
    """

    def __init__(self, path: Path, command: str = "", call: str = "") -> None:
        """Lock the folder; wait STALE_S if a run on another machine left its record behind."""
        self.path = path.absolute()
        self.native = True
        self._record = self.path
        self._over = threading.Event()
        self._renewing: threading.Thread | None = None
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise LedgerError(
                f"the folder {path.parent} cannot be written: {error.strerror}\n"
                "  Nothing was started. Choose an output folder that you can write to."
            ) from error
        try:
            self._take_flock()
            self._take_record(Holder.this_process(command, self.path.parent, call))
        except BaseException:
            os.close(self._fd)
            raise
        _held.add(self)

    def close(self) -> None:
        """Release the folder; a second call does nothing."""
        if self._fd < 0:
            return
        self._over.set()
        if self._renewing is not None:
            join_thread(self._renewing)
        try:
            with suppress(FileNotFoundError):  # another run took the folder over
                _write(self._record, _OVER, os.O_TRUNC)
        except OSError as error:
            raise LedgerError(f"{self._record} cannot be written: {error.strerror}") from error
        finally:
            self._abandon()

    def keep_alive(self) -> None:
        """Renew the record from now on, in a thread; a second call does nothing.

        Otherwise a run on another machine would take the folder over after STALE_S, if the file
        system has no locks.
        """
        if self._renewing is None:
            self._renewing = threading.Thread(target=self._renew, name="forebay-lock", daemon=True)
            start_thread(self._renewing)

    def check(self) -> None:
        """Raise BusyError if another run has taken the folder over, LedgerError if it is gone."""
        if self._record.exists():
            return
        newest = self._find_newest()
        if newest is None:
            raise LedgerError(
                f"{self.path.parent} is gone: it was removed, renamed or emptied during the run\n"
                "  This run ends, and has recorded nothing since. If the output folder has another "
                "name now, give it back its name; then make the same call again."
            )
        holder = newest.holder or Holder()
        raise BusyError(
            f"another run has taken over {self.path.parent}: {holder}\n"
            f"  This run had not renewed its lock for {STALE_S:g} s: it was stopped, or the file "
            "system did not answer.\n"
            "  This run ends, and has written nothing since."
        )

    def _take_flock(self) -> None:
        until = time.monotonic() + _NAMELESS_S
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                newest = self._find_newest()
                holder = None if newest is None else newest.holder
                if holder is not None and not holder.is_known_dead:
                    raise self._busy(holder) from None
                if time.monotonic() >= until:
                    raise self._busy(Holder()) from None
                time.sleep(_PAUSE_S)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise LedgerError(f"{self.path} cannot be locked: {error.strerror}") from error
                self.native = False
                return

    def _take_record(self, this: Holder) -> None:
        while True:
            newest = self._find_newest()
            if newest is not None:
                self._await_end(newest)
            number = 1 if newest is None else newest.number + 1
            record = _path(self.path, number)
            try:
                _write(record, json.dumps(asdict(this)).encode(), os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                continue
            except OSError as error:
                record.unlink(missing_ok=True)
                raise LedgerError(
                    f"{record} cannot be written: {error.strerror}\n"
                    "  Nothing was started. Free some space, or choose another folder."
                ) from error
            # A slow process may create a file that others created and removed in the meantime.
            numbers = _numbers(self.path)
            if max(numbers, default=number) == number:
                break
            record.unlink(missing_ok=True)
        self._record = record
        for earlier in numbers:
            if earlier < number:
                with suppress(OSError):  # an older record does not count
                    _path(self.path, earlier).unlink()

    def _await_end(self, record: _Record) -> None:
        """Wait until a record no longer counts."""
        first, since, is_said = record, time.monotonic(), False
        read_at = since  # before each reading: this process may be stopped after it, for long
        while not record.is_over:
            holder, waited_s = record.holder, read_at - since
            if holder is not None and (holder.is_visible or record != first):
                # If this were the same folder under another name, the flock would be held.
                is_copied = self.native and holder.is_copied(self.path.parent)
                if is_copied or holder.is_known_dead:
                    return
                raise self._busy(holder)
            if waited_s >= 2 * BEAT_S and not is_said:
                is_said = True
                note(
                    f"{self.path.parent} was held by {holder or Holder()}, which may have ended: "
                    f"waiting {STALE_S:g} s for it to renew its lock"
                )
            if waited_s >= STALE_S:
                return
            time.sleep(_PAUSE_S)
            read_at = time.monotonic()
            newest = self._find_newest()
            if newest is None or newest.number != record.number:
                return  # the caller checks the next one
            record = newest

    def _find_newest(self) -> _Record | None:
        try:
            return _newest(self.path)
        except OSError as error:  # it may be another user's
            raise LedgerError(
                f"{self.path.parent} may be held by another run: {error}\n"
                "  Nothing was started. Check the permissions of that file."
            ) from error

    def _renew(self) -> None:
        while not self._over.wait(BEAT_S):
            with suppress(OSError):  # it was taken over, or the file system does not answer
                os.utime(self._record)

    def _busy(self, holder: Holder) -> BusyError:
        lines = [f"another run holds {self.path.parent}: {holder}"]
        if holder.command:
            lines.append(f"  It runs: {holder.command}")
        lines.append(
            "  This run changed nothing. Wait until that one ends, watch it with `forebay status`, "
            "or stop it and call again."
        )
        if holder.pid and not holder.is_visible:
            lines.append(
                "  It runs on another machine. If it was killed there, this call succeeds "
                f"{STALE_S:g} s after that."
            )
        error = BusyError("\n".join(lines))
        error.holder = holder
        return error

    def _abandon(self) -> None:
        """Only close the descriptor; in a forked child, the parent keeps its lock."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def find_holder(path: Path) -> Holder | None:
    """Return the process that holds the lock file `path` now, or None; changes nothing.

    A driver on another machine counts while its record is younger than STALE_S by this machine's
    clock, since this does not wait.
    """
    newest = None
    with suppress(OSError):
        newest = _newest(path)
    holder = None if newest is None else newest.holder
    if _is_locked(path):
        return holder or Holder()
    if newest is None or holder is None:
        return None
    if holder.is_known_dead or holder.is_copied(path.parent):
        return None
    is_fresh = time.time() - newest.renewed_ns / 1e9 < STALE_S
    return holder if holder.is_visible or is_fresh else None


def _is_locked(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


# ---- records ------------------------------------------------------------------------------------


def _path(lock: Path, number: int) -> Path:
    return lock.with_name(f"{lock.name}.{number}")


def _numbers(lock: Path) -> list[int]:
    try:
        names = os.listdir(lock.parent)
    except OSError:
        return []
    ends = (name.removeprefix(f"{lock.name}.") for name in names)
    return [int(end) for end in ends if end.isdecimal()]


def _newest(lock: Path) -> _Record | None:
    """Return the record that counts; None if there is none."""
    while numbers := _numbers(lock):
        number = max(numbers)
        try:
            # Opened again each time, so that a network file system asks its server.
            with open_regular(_path(lock, number)) as file:
                body = file.read(_RECORD_BYTES)
                renewed_ns = os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            continue  # there is a newer one
        return _Record(number, _holder(body), body == _OVER, renewed_ns)
    return None


def _holder(body: bytes) -> Holder | None:
    try:
        return Holder.from_record(json.loads(body)) if body != _OVER else None
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return None


def _write(record: Path, body: bytes, flags: int) -> None:
    fd = os.open(record, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags, 0o666)
    try:
        os.write(fd, body)
    finally:
        os.close(fd)


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _abandon_all() -> None:
    for lock in list(_held):
        lock._abandon()


os.register_at_fork(after_in_child=_abandon_all)
