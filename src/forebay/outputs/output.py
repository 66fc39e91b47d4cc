"""What a function receives as `out`: the files of one input, staged until they are published."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from forebay.base.output_names import (
    asked_name,
    bad_name,
    folders_of,
)
from forebay.errors import OutputError
from forebay.outputs.staging_folders import (
    MOST_LEASES,
    StagingFolders,
    closed_status,
    link_in_place,
    removed_if_empty,
    was_open,
)

if TYPE_CHECKING:
    from forebay.outputs.tars import OutputTar


class Output(os.PathLike[str]):
    """What a function receives as `out`: an empty folder, whose files become the input's outputs.

    It is used like a `pathlib.Path`: `out / "a.flac"`, `os.path.join(out, "a.flac")`, and
    `out + "/a.flac"`, which is a string. A file that
    is left in it gets the same name in the output folder, if the input succeeds. Files are closed
    when the function returns (for a generator: when it is exhausted). Links and devices fail the
    input; empty folders are not kept.

    Attributes:
        source: The input's name, as the column `source` of the table has it: its path or URL, or
            for a sample of a Dataset its name, or its index as a string; "" for a row without one.
    """

    def __init__(
        self,
        source: str,
        folders: StagingFolders,
        locate: Callable[[str], Path | str],
        *,
        is_alone: bool = False,
    ) -> None:
        """Stage the files of one input.

        Args:
            locate: Returns where a published file is.
            is_alone: Whether none of them is in a folder that inputs share.
        """
        self.source = source
        self._folders, self._locate = folders, locate
        # Returns the final name of a path in the folder, "" for the folder, None for any other.
        self.name_of = folders.name_of
        self._is_alone = is_alone
        self._own: str | None = None  # the folder of this input alone, once it is needed
        self._paths: dict[str, str] = {}  # final name -> staged path, in the order asked for
        self._shared: list[str] = []  # those of the paths that are in a shared folder
        self._needed: dict[str, str] = {}  # folders that the names need -> one of those names
        self._made = {""}  # folders that exist in that of this input

    def __fspath__(self) -> str:
        """Return the path of the folder."""
        if self._own is None:
            self._own = self._folders.own()
        return self._own

    __str__ = __fspath__

    def __truediv__(self, name: str | os.PathLike[str]) -> Path:
        """Return a path in the folder; OutputError for one that is not."""
        return self.joinpath(name)

    def __add__(self, text: str) -> str:
        """Return the path of the folder as a string, with more behind it."""
        return os.fspath(self) + text

    def final(self, name: str | os.PathLike[str]) -> Path | str:
        """Return where an output will be once it is published, to be written into a file.

        Args:
            name: Its name in the output folder, or its path, as `out / name` returns it.

        Returns:
            An absolute path; a URL if the output folder is one.

        Raises:
            OutputError: The name is not one that an output can have.
        """
        staged = self.name_of(os.fspath(name))
        return self._locate(asked_name(name if staged is None else staged))

    def joinpath(self, *names: str | os.PathLike[str]) -> Path:
        """Return a path in the folder; OutputError for one that is not."""
        path = Path(self).joinpath(*names)
        for name in names:
            # A file there is lost, or is the input: `out / source`, if that is absolute.
            if ((text := os.fspath(name))[:1] == "/" or ".." in text) and not self._holds(path):
                raise bad_name(f"out / {text!r}")
        return path

    def _holds(self, path: Path) -> bool:
        return f"{os.path.normpath(path)}/".startswith(f"{os.path.normpath(self)}/")

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that a `pathlib.Path` has."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(Path(self), name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Go to another process as a path."""
        return Path, (os.fspath(self),)

    def file(self, name: str | os.PathLike[str]) -> Path:
        """Return the path of one file in the folder, with the folders above it made.

        An input fails that does not write a file that it asked for.

        Args:
            name: Relative to the output folder; may hold folders ("speaker1/a.flac"). Asking for
                the same name again returns the same path.

        Raises:
            OutputError: The name is absolute, leaves the output folder or is forebay's own; or
                this input needs a file and a folder of the same name.
        """
        final = asked_name(name)
        if final not in self._paths:
            folder = final.rpartition("/")[0]
            if folder or self._needed:
                self._claim(final, folder)
            path = None
            if self._own is None and not (self._is_alone or self._folders.are_apart):
                path = self._folders.shared(final, is_first=not self._paths)
            if path is not None:
                self._shared.append(path)
            else:
                path = f"{os.fspath(self)}/{final}"
                if folder not in self._made:
                    os.makedirs(f"{self._own}/{folder}", exist_ok=True)
                    self._made.add(folder)
            self._paths[final] = path
        return Path(self._paths[final])

    def _claim(self, final: str, folder: str) -> None:
        """Record the folders that a name needs."""
        folders = [] if folder in self._needed else folders_of(final)
        other = self._needed.get(final) or next((one for one in folders if one in self._paths), "")
        if other:
            raise OutputError(
                f"out.file({final!r}) clashes with {other!r}, which this input requested before\n"
                "  A name cannot be both a file and a folder. Rename one of the two."
            )
        self._needed.update(dict.fromkeys(folders, final))

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

    @property
    def asked(self) -> list[str]:
        """The names that the function gave to `file`, in their order."""
        return [*self._paths]

    def collect(self, function: str) -> dict[str, tuple[str, int]]:
        """Return staged path and size of each file by its final name: first those asked for.

        Args:
            function: What messages call the function.
        """
        if self._own is None and not self._paths:  # the usual case of rows
            return {}
        files, inodes = dict[str, tuple[str, int]](), set[int]()
        maybe_open: dict[tuple[int, int], str] = {}
        found, references, held = self._found(), self._folders.references, list[str]()
        leases = len(found) <= MOST_LEASES
        for name, path in found.items():
            try:
                known = closed_status(path, references) if leases else None
                status, holds = known or (os.lstat(path), False)
            except FileNotFoundError:
                raise _never_written(name) from None
            if (status.st_mode & 0o170000) != 0o100000:
                self._move_out([])  # of a shared folder; what is in one's own has been looked at
                return self.collect(function)
            if status.st_nlink == 1 and status.st_ino in inodes:
                raise _same_file(name)
            inodes.add(status.st_ino)
            if known is None:
                maybe_open[status.st_dev, status.st_ino] = name
            elif holds:
                held.append(name)
            files[name] = path, status.st_size
        if maybe_open and was_open(maybe_open, function):
            return self.collect(function)  # with the sizes that the files have now
        for name in maybe_open.values():
            path, size = files[name]
            with open(path, "rb", buffering=0) as file:
                if references.are_in(path, size, file.fileno()):
                    held.append(name)
        for name in held:
            path, _ = files[name]
            files[name] = path, references.mend(path, name, can_be=not self._is_alone)
        return files

    def settled(self, files: Mapping[str, tuple[str, int]]) -> Mapping[str, tuple[str, int]]:
        """Return where the files are until they are published; call it when nothing can fail.

        The only file of a folder is moved out of it, so that another input can have the folder.
        """
        if len(files) == 1 and self._own is not None and not self._is_alone:
            ((name, (path, size)),) = files.items()
            if path and (moved := self._folders.emptied(self._own, name)) is not None:
                self._own, files = None, {name: (moved, size)}
        return files

    def _found(self) -> dict[str, str]:
        """Return the paths of all files, by final names."""
        if self._shared:
            others = self._folders.beside(self._shared)
            if others or self._own is not None:
                self._move_out(others)
        if self._own is None:
            return self._paths
        try:
            left = _files_in(self._own)
        except FileNotFoundError:
            raise OutputError(
                "the function removed its output folder\n"
                "  Nothing of this input was kept. Write into the folder that it was given; where "
                "there is nothing to write, leave it empty."
            ) from None
        if not left:
            _refuse_beside(self._own)
        for name, path in self._paths.items():
            if name not in left and not os.path.isdir(path):
                raise (_same_file if os.path.lexists(path) else _never_written)(name)
        asked = [name for name in self._paths if name in left]
        return {name: f"{self._own}/{name}" for name in dict.fromkeys((*asked, *left))}

    def _move_out(self, others: Iterable[str]) -> None:
        """Move what this input has in the shared folder into one of its own.

        Args:
            others: The paths that it did not ask for.
        """
        self._folders.are_apart = True
        for path in (*self._shared, *others):
            name = self._folders.name_of(path) or ""
            target = f"{os.fspath(self)}/{name}"
            if os.path.lexists(path) and os.path.lexists(target):
                raise OutputError(
                    f"{name!r} was written to out.file({name!r}), and in the folder `out`, too\n"
                    "  Nothing of this input was kept. Use one of the two for all of its files."
                )
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with suppress(FileNotFoundError):
                os.rename(path, target)
        self._shared.clear()
        self._paths = {name: f"{self._own}/{name}" for name in self._paths}

    def discard(self) -> None:
        """Remove what an input made that failed."""
        import shutil

        left: list[str] = []
        self._folders.is_crowded |= bool(self._shared)  # the function may still write there
        with suppress(OSError, OutputError):  # it is no folder any more, or a link
            left = [*self._folders.beside(self._shared), *self._shared]
        for path in left:
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(FileNotFoundError):
                    os.unlink(path)
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
        self._own = None
        for kept in (self._shared, self._paths, self._needed):
            kept.clear()
        self._made = {""}


def _files_in(top: str) -> list[str]:
    """Return the names of all files in a folder and below it, sorted; remove empty folders."""
    found, empty, folders = list[str](), list[str](), [""]
    if os.path.islink(top):
        raise link_in_place()
    while folders:
        folder = folders.pop()
        with os.scandir(f"{top}/{folder}") as entries:
            listed = [*entries]
        if not listed:
            empty.append(folder)
        for entry in listed:
            name = folder + entry.name
            if not folder:
                asked_name(name)
            if entry.is_dir(follow_symlinks=False):
                folders.append(f"{name}/")
            elif entry.is_file(follow_symlinks=False):
                found.append(name)
            else:
                what = "a link" if entry.is_symlink() else "a pipe, a socket or a device"
                raise OutputError(
                    f"the function left {what} in its output folder: {name!r}\n"
                    "  Nothing of this input was kept, since only regular files and folders can be "
                    "outputs. Write a file instead, or remove it before the function returns."
                )
    for folder in empty:
        while folder and removed_if_empty(f"{top}/{folder}"):
            folder = folder[: folder.rfind("/", 0, -1) + 1]
    return sorted(found)


def _refuse_beside(own: str) -> None:
    """Raise OutputError for a file beside a folder, as `out.with_suffix(".wav")` makes it."""
    with os.scandir(os.path.dirname(own)) as entries:
        name = next((each.name for each in entries if not each.is_dir(follow_symlinks=False)), "")
    if name:
        os.unlink(os.path.join(os.path.dirname(own), name))
        raise OutputError(
            f"the function left nothing in its output folder, and wrote {name!r} beside it\n"
            "  Nothing of this input was kept. `out` is a folder, not a file: write to a name in "
            "it, such as out / 'a.wav'."
        )


def _same_file(name: str) -> OutputError:
    return OutputError(
        f"out.file({name!r}) is the same file as another output of this input\n"
        "  Nothing was kept: one has overwritten the other. If the file system ignores upper and "
        "lower case, give names that differ in more than that."
    )


def _never_written(name: str) -> OutputError:
    return OutputError(
        f"out.file({name!r}) was requested, but the function never wrote it\n"
        "  Nothing of this input was kept. Write to the path that out.file() returned. A library "
        "that adds an ending, as numpy.save does with .npy, writes another file: put the ending "
        "into the name."
    )


# The output that `get_output` returns.
current: ContextVar[Output | None] = ContextVar("output", default=None)


def get_output() -> Output | None:
    """Return the `out` of the sample that this thread makes for `preprocess`; None elsewhere.

    It is for a Dataset whose `__getitem__` writes files, which is not called with `out`. It has the
    method `file(name)`, which returns a path to write an output to. During training, in the
    calling program and in threads that `__getitem__` starts, the result is None.
    """
    return current.get()
