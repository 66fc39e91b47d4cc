"""Where a worker stages files, in a folder that inputs share or in one of an input; open files.

    RUN-WORKER.0/speaker1/a.flac  named by `out.file`, in a folder that is published or none
    RUN-WORKER-7/rec/0.flac       all else: the folder that a function gets when it asks for one

All of these folders are in `.forebay/staging`, and below them a file has its final name. To make
and remove a folder takes longer than to write a small file, so most inputs need none of their
own. What is in a shared folder, and was named by no input, belongs to the one that just ended.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import io
import os
import signal
import stat
from collections.abc import Container, Iterable
from contextlib import suppress

from forebay.base.output_names import own_folder, worker_folder
from forebay.errors import OutputError
from forebay.outputs.self_references import SelfReferences

# A shared folder is left for another when it has so many files that are not published yet, since
# it is listed for each input; or so many names that no further input can use.
_MOST_PENDING, _MOST_KNOWN = 32, 10_000


class StagingFolders:
    """The staging folders of one worker."""

    def __init__(self, root: str, run: str, worker: int) -> None:
        self.root, self._run, self._worker = root, run, worker
        # The function leaves files that it did not name: each input gets a folder of its own.
        self.are_apart = False
        # In each path to these folders, and in no other string.
        self._mark = f"/{worker_folder(run, worker, '')}"
        self.references = SelfReferences(run, worker)
        self._shared, self._own = -1, 0  # the numbers of the last folders
        self._spare: str | None = None  # an empty folder of one input
        self.is_crowded = False
        self._names: dict[str, set[str]] = {}  # in the shared folder and each below it
        self._left: list[str] = []  # those before, to be removed when they are empty
        self._begin_shared()

    def _begin_shared(self) -> None:
        """Make another shared folder."""
        self._left = [
            path for path in [*reversed(self._names), *self._left] if not removed_if_empty(path)
        ]
        self._shared, self.is_crowded = self._shared + 1, False
        self.path = f"{self.root}/{worker_folder(self._run, self._worker, f'.{self._shared}')}"
        os.makedirs(self.path, exist_ok=True)
        self._names = {self.path: set()}

    def shared(self, name: str, *, is_first: bool) -> str | None:
        """Return a path in the shared folder; None if a file of this name may not be there.

        The folder that the first one needs has to be published already: one that is new can be
        published as a whole. And no input before has had the path: the rename of its file stays in
        the ledger until the next commit, and a run after a kill does it again.
        """
        if is_first and self.is_crowded:
            self._begin_shared()
        folder, _, base = name.rpartition("/")
        path = f"{self.path}/{folder}" if folder else self.path
        known = self._names.get(path)
        if known is None:
            try:
                if not stat.S_ISDIR(os.stat(f"{self.root}/{folder}").st_mode):
                    return None
            except OSError as error:
                if is_first or error.errno != errno.ENOENT:
                    return None
            try:
                os.makedirs(path, exist_ok=True)
            except OSError:
                return None
            above = self.path
            for part in folder.split("/"):
                self._names.setdefault(above, set()).add(part)
                above = f"{above}/{part}"
            known = self._names.setdefault(path, set())
        if base in known:
            return None
        known.add(base)
        return f"{path}/{base}"

    def beside(self, paths: Iterable[str]) -> list[str]:
        """Return what lies beside these paths in the shared folder, and has no input yet."""
        others: list[str] = []
        for folder in {path.rpartition("/")[0] for path in paths}:
            known, found = self._names[folder], os.listdir(folder)
            if not known.issuperset(found):
                if (
                    os.path.realpath(folder)
                    != os.path.realpath(self.root) + folder[len(self.root) :]
                ):
                    raise link_in_place()
                others += [f"{folder}/{name}" for name in found if name not in known]
            self.is_crowded |= len(found) > _MOST_PENDING or len(known) > _MOST_KNOWN
        return others

    def own(self) -> str:
        """Return an empty folder for the files of one input alone, whose name is used once.

        The folder of an input before gets another name, unless anything is left in it: what that
        input started may still write to a path there.
        """
        self._own += 1
        path = f"{self.root}/{own_folder(self._run, self._worker, self._own)}"
        spare, self._spare = self._spare, None
        if spare is not None:
            try:
                os.rename(spare, path)
                if not os.listdir(path):
                    return path
            except OSError:
                pass
            return self.own()
        os.mkdir(path)
        return path

    def emptied(self, folder: str, name: str) -> str | None:
        """Move the only file out of the folder of one input; return where, or None if it stays."""
        path = None if "/" in name else self.shared(name, is_first=True)
        if path is not None:
            os.rename(f"{folder}/{name}", path)
            self._spare = folder
        return path

    def name_of(self, path: str) -> str | None:
        """Return the final name of a staged path, "" for a staging folder, None for other paths.

        It may lead to the folder in any way, such as without links.
        """
        _, mark, rest = path.partition(self._mark)
        return rest.partition("/")[2].rstrip("/") if mark else None


def removed_if_empty(folder: str) -> bool:
    """Remove a folder if it is empty; return whether it is gone."""
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        pass
    except OSError:
        return False
    return True


def link_in_place() -> OutputError:
    """Return the error for a link to a staging folder: what is there is somebody else's."""
    return OutputError(
        "the function left a link in the place of its output folder\n"
        "  Nothing of this input was kept. Write into the folder that it was given."
    )


# ---- open files ----------------------------------------------------------------------------------
# Whether a file is still open for writing, so that what is written next would be missing in it.

# To look at a file: no link is followed, and a pipe is not waited for.
_LOOK = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# Of Linux; elsewhere no file system has leases.
_SETLEASE, _SETSIG = getattr(fcntl, "F_SETLEASE", -1), getattr(fcntl, "F_SETSIG", -1)
_SIGNAL = int(signal.SIGURG)
# A lease takes 2 us. With more files, it is faster to look at all descriptors of the process.
MOST_LEASES = 8


def closed_status(path: str, references: SelfReferences) -> tuple[os.stat_result, bool] | None:
    """Return the status of a file that nobody has open for writing; None if that is not known.

    Also return whether paths of the staging folders are in it.

    Linux grants a lease for reading on such a file alone, if the file system has leases.
    """
    try:
        descriptor = os.open(path, _LOOK)
    except OSError:
        return None
    try:
        # If somebody opens the file meanwhile, the kernel sends a signal; this one is ignored.
        fcntl.fcntl(descriptor, _SETSIG, _SIGNAL)
        fcntl.fcntl(descriptor, _SETLEASE, fcntl.F_RDLCK)
        status = os.fstat(descriptor)
        return status, references.are_in(path, status.st_size, descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def was_open(files: dict[tuple[int, int], str], function: str) -> bool:
    """Return whether a file of these devices and inodes was open; raise OutputError if one is."""
    if _open_in_this_process(files) is None:
        return False
    # A file that only a cycle of references keeps open is fine: Python closes it when it finds the
    # cycle. But it may close the descriptor before it writes what is in the buffers.
    _flush_buffers(files)
    gc.collect()
    left = _open_in_this_process(files)
    if left is None:
        return True
    raise OutputError(
        f"out.file({left!r}) is still open for writing: {function} did not close it\n"
        "  Nothing of this input was kept, since what is not yet written to the file would be "
        "missing in it. Close it before the function returns, best with `with`: a global variable, "
        "a cache, an object or a thread keeps it open."
    )


def _flush_buffers(files: Container[tuple[int, int]]) -> None:
    for each in gc.get_objects():
        if issubclass(type(each), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
            with suppress(OSError, ValueError):  # it is closed, or over no file
                status = os.fstat(each.fileno())
                if (status.st_dev, status.st_ino) in files:
                    each.flush()


def _open_in_this_process(files: dict[tuple[int, int], str]) -> str | None:
    """Return the name of one of the files that this process has open for writing, if any."""
    with suppress(FileNotFoundError):  # without /proc, nobody knows
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):  # it was that of the listing, or another thread closed it
                status = os.fstat(descriptor)
                name = files.get((status.st_dev, status.st_ino))
                if name is not None and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE:
                    return name
    return None
