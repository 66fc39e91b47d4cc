"""A worker's end of a local output folder: files are staged until the driver publishes them.

See `folder.py` for how a file gets its final name.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import io
import os
import signal
import stat
import sys
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from forebay.base.output_names import (
    asked_name,
    folders_of,
    own_folder,
    worker_folder,
)
from forebay.errors import OutputError
from forebay.ledger.records import FileFields

if TYPE_CHECKING:
    from forebay.outputs.tars import OutputTar

# ---- staging folders -----------------------------------------------------------------------------
# Where a worker stages files: in a folder that its inputs share, or in one of a single input.
#
#     RUN-WORKER/speaker1/a.flac    `speaker1` is published: one file more for it
#     RUN-WORKER-7/rec/0.flac       `rec` is new: published as a whole, if its name is free
#
# All of these folders are in `.forebay/staging`.

# The most shared folders that a worker remembers.
_MOST_KNOWN = 10_000


class StagingFolders:
    """The staging folders of one worker."""

    def __init__(self, root: str, run: str, worker: int) -> None:
        self._root, self._run, self._worker = root, run, worker
        self.path = Path(root, worker_folder(run, worker))
        os.makedirs(self.path, exist_ok=True)
        self._known = {"": self.path}  # shared folders that exist, by the names to be published
        self._number = 0  # of the last folder of a single input

    def shared(self, folder: str, *, is_first: bool) -> Path | None:
        """Return the shared folder for files of a folder that is published already."""
        path = self._known.get(folder)
        if path is not None:
            return path
        try:
            if not stat.S_ISDIR(os.stat(f"{self._root}/{folder}").st_mode):
                return None
        except OSError as error:
            if is_first or error.errno != errno.ENOENT:
                return None
        path = self.path / folder
        try:
            os.makedirs(path, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            return None
        if len(self._known) >= _MOST_KNOWN:
            self._known = {"": self.path}
        self._known[folder] = path
        return path

    def is_free(self, path: Path, name: str) -> bool:
        """Return whether no earlier input used a path in a shared folder for a file of this name.

        The rename of such a file stays in the ledger until the next commit, and a run after a kill
        does it again: it must not find another input's file there.
        """
        if os.path.lexists(path):  # first: it gets its name at any time
            return False
        try:
            os.lstat(f"{self._root}/{name}")
        except OSError as error:
            return error.errno == errno.ENOENT  # otherwise a file is where this needs a folder
        return False

    def own(self) -> Path:
        """Make a folder for the files of one input alone."""
        self._number += 1
        path = Path(self._root, own_folder(self._run, self._worker, self._number))
        os.mkdir(path)
        return path


# ---- staged output -------------------------------------------------------------------------------


class Output:
    """What a function receives as `out`: the way to name the files that it makes.

    Its paths are valid until the function returns (for a generator: until it is exhausted).

    Attributes:
        source: The input's name, as the column `source` of the table has it: its path or URL, or
            for a sample of a Dataset its name, or its index as a string; "" for a row without one.
    """

    def __init__(
        self,
        source: str,
        staging: StagingFolders,
        *,
        is_alone: bool = False,
    ) -> None:
        """Stage the files of one input; `is_alone`: none of them in a folder that inputs share."""
        self.source = source
        self._staging = staging
        self._is_alone = is_alone
        # The folder of this input alone, as "", once it is needed, and those in it by their names.
        self._made: dict[str, Path] = {}
        self._names: dict[str, str] = {}  # staged path -> final name, in the order asked for
        self._paths: dict[str, Path] = {}  # final name -> staged path
        self._folders: dict[str, str] = {}  # folders that the names need -> one of those names

    def file(self, name: str | os.PathLike[str]) -> Path:
        """Return a private path to write one output file to.

        The file appears under `name` in the output folder only if the whole input succeeds. Close
        it before the function returns: an input that leaves one open fails.

        Args:
            name: Relative to the output folder; may hold folders ("speaker1/a.flac"), which
                are made. Asking for the same name again returns the same path.

        Raises:
            OutputError: The name is absolute, leaves the output folder or is forebay's own; or
                this input needs a file and a folder of the same name.
        """
        final = asked_name(name)
        if final in self._paths:
            return self._paths[final]
        folder, _, base = final.rpartition("/")
        if folder or self._folders:
            self._claim(final, folder)
        path = self._shared_path(final, folder, base) or self._own_path(folder, base)
        self._names[str(path)] = final
        self._paths[final] = path
        return path

    def _claim(self, final: str, folder: str) -> None:
        """Record the folders that a name needs."""
        folders = [] if folder in self._folders else folders_of(final)
        other = self._folders.get(final) or next((one for one in folders if one in self._paths), "")
        if other:
            raise OutputError(
                f"out.file({final!r}) clashes with {other!r}, which this input requested before\n"
                "  A name cannot be both a file and a folder. Rename one of the two."
            )
        self._folders.update(dict.fromkeys(folders, final))

    def _shared_path(self, final: str, folder: str, base: str) -> Path | None:
        """Return a path in the folder that inputs share; None if there is none that is free.

        There is none if the outputs of this input begin in a folder that is new: that can be
        published as a whole. All of them lie to each other as their names do, unless an earlier
        input uses one of them.
        """
        if self._is_alone or self._made:
            return None
        parent = self._staging.shared(folder, is_first=not self._paths)
        if parent is None or not self._staging.is_free(path := parent / base, final):
            return None
        return path

    def _own_path(self, folder: str, base: str) -> Path:
        if not self._made:
            self._made[""] = self._staging.own()
        if folder not in self._made:
            path = self._made[""] / folder
            os.makedirs(path, exist_ok=True)
            self._made[folder] = path
        return self._made[folder] / base

    def tar(self, name: str | os.PathLike[str] | None = None) -> OutputTar:
        """Create a tar file for many small outputs, which is one output of this input.

            with out.tar() as tar:
                return [tar.add(f"{k}.txt", line) | {"length": len(line)} for k, line in ...]

        Args:
            name: Its name in the output folder, as in `file`; None for that of the source, such as
                "a.tar" for "speaker1/a.txt".
        """
        from forebay.outputs.tars import OutputTar

        if name is None:
            stem = PurePosixPath(self.source).stem
            if not stem:
                raise OutputError(
                    "out.tar() has no name to use: this input is a row without a path\n"
                    "  Nothing was written. Give it one, as in out.tar('7.tar')."
                )
            name = f"{stem}.tar"
        return OutputTar(self.file(name))

    def final_name(self, path: str) -> str | None:
        """Return the final name of a path that `file` gave; None for any other."""
        return self._names.get(path)

    def names(self) -> list[str]:
        """Return the final names in the order they were asked for."""
        return [*self._names.values()]

    def collect(self, root: str, function: str = "the function") -> tuple[FileFields, ...]:
        """Return the files that were written, with staged paths relative to `root`."""
        files: list[FileFields] = []
        inodes: set[int] = set()
        maybe_open: dict[tuple[int, int], str] = {}
        start, leases = len(root) + 1, len(self._names) <= _MOST_LEASES
        for staged, name in self._names.items():
            try:
                status = _closed(staged) if leases else None
                if status is None:
                    status = os.lstat(staged)
                    maybe_open[status.st_dev, status.st_ino] = name
            except FileNotFoundError:
                raise OutputError(
                    f"out.file({name!r}) was requested, but the function never wrote it\n"
                    "  Nothing of this input was kept. Write to the path that out.file() returned. "
                    "A library that adds an ending, as numpy.save does with .npy, writes another "
                    "file: put the ending into the name."
                ) from None
            if (status.st_mode & 0o170000) != 0o100000:
                raise OutputError(
                    f"out.file({name!r}): the function did not leave a regular file there\n"
                    "  Nothing of this input was kept. Write a file to that path. For a folder of "
                    "files, name each of them, as in out.file('folder/a.npy')."
                )
            if status.st_nlink == 1 and status.st_ino in inodes:
                raise OutputError(
                    f"out.file({name!r}) is the same file as another output of this input\n"
                    "  Nothing was kept: one has overwritten the other. If the file system ignores "
                    "upper and lower case, give names that differ in more than that."
                )
            inodes.add(status.st_ino)
            files.append((name, status.st_size, staged[start:]))
        if maybe_open and _was_open(maybe_open, function):
            return self.collect(root, function)  # with the sizes that the files have now
        return tuple(files)

    def discard(self) -> None:
        """Remove what an input made that failed."""
        for path in (*self._names, *map(str, islice(self._made.values(), 1))):
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass
            except OSError:  # it is a folder
                import shutil

                shutil.rmtree(path, ignore_errors=True)
        self._made.clear()
        self._names.clear()
        self._paths.clear()
        self._folders.clear()


_current: ContextVar[Output | None] = ContextVar("output", default=None)


def get_output() -> Output | None:
    """Return the `out` of the sample that this thread makes for `preprocess`; None elsewhere.

    It is for a Dataset whose `__getitem__` writes files, which is not called with `out`. It has the
    method `file(name)`, which returns a path to write an output to. During training, in the
    calling program and in threads that `__getitem__` starts, the result is None.
    """
    return _current.get()


@contextmanager
def current(out: Output) -> Iterator[None]:
    """Make an output the one that `get_output` returns, in the block."""
    token = _current.set(out)
    try:
        yield
    finally:
        _current.reset(token)


# To look at a file: no link is followed, and a pipe is not waited for.
_LOOK = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# Of Linux; elsewhere no file system has leases.
_SETLEASE, _SETSIG = getattr(fcntl, "F_SETLEASE", -1), getattr(fcntl, "F_SETSIG", -1)
_SIGNAL = int(signal.SIGURG)
# A lease takes 2 us. With more files, it is faster to look at all descriptors of the process.
_MOST_LEASES = 8


def _closed(path: str) -> os.stat_result | None:
    """Return the status of a file that nobody has open for writing; None if that is not known.

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
        return os.fstat(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _was_open(files: dict[tuple[int, int], str], function: str) -> bool:
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


class Staging:
    """A worker's end of the output folder. It can be pickled."""

    def __init__(self, root: Path) -> None:
        """Stage below `root`, the output folder."""
        self.function = "the function"  # what messages call it
        self._root = str(root)
        self._driver = os.uname().nodename
        self._is_far = False
        self._run = os.urandom(4).hex()
        self.folders: StagingFolders  # once it is open

    def open(self, worker: int) -> None:
        """Create this worker's folder."""
        try:
            self.folders = StagingFolders(self._root, self._run, worker)
        except OSError as error:
            raise OutputError(
                f"a worker cannot make its folder for staged files: {error}\n"
                "  Completed work is kept, and no input counts as failed.\n"
                "  Free some space and inodes (see df -h and df -i), or make the output folder "
                "writable; then make the same call again."
            ) from error
        self._is_far = os.uname().nodename != self._driver

    def begin(self, source: str) -> Output:
        """Return the `out` of one input."""
        return Output(source, self.folders)

    def commit(self, output: Output) -> tuple[FileFields, ...]:
        """Return the staged files of one input."""
        files = output.collect(self._root, self.function)
        if self._is_far:  # the driver's flush does not reach this machine's page cache
            for _, _, staged in files:
                with open(os.path.join(self._root, staged), "rb") as file:
                    os.fsync(file.fileno())
        return files

    def is_full(self) -> bool:
        """Return whether the output's file system has run out of bytes or of files."""
        status = os.statvfs(self.folders.path)
        return status.f_bavail * status.f_frsize < 65_536 or (
            status.f_files > 0 and status.f_favail == 0
        )


# ---- renames -------------------------------------------------------------------------------------
# Renaming a file to a free name in one step, so that an existing file is never overwritten.
#
# renameat2(RENAME_NOREPLACE)   Linux: ext4, XFS, Btrfs, tmpfs, overlayfs and others
# link, then unlink             where there are hard links instead: NFS, macOS
# look, then rename             elsewhere; another process could come between the two

_AT_FDCWD, _NOREPLACE = -100, 1
_ENCODING = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()
# Errors of a file system or kernel that lacks an operation.
_UNSUPPORTED = frozenset(
    {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM, errno.EMLINK}
)


_libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_renameat2 = getattr(_libc, "renameat2", None)


def rename_new(old: str, new: str) -> None:
    """Rename a file to a name that is free."""
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
