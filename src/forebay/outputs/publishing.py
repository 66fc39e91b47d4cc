"""Staged files get the names that the ledger has for them, and others are removed.

    file changes ── removals, then ── a folder at once ─── if it is new, and one input's alone
                                 └─── a file at a time ─── otherwise

A file gets its name only if nothing has that name, or a file of the same content: one that the
ledger does not know is never overwritten, unless that is asked for. And only if no folder on its
path is a symbolic link.
"""

from __future__ import annotations

import errno
import filecmp
import os
import stat
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from forebay.base.files import rename_new
from forebay.base.output_names import (
    PRIVATE,
    STAGING,
    folders_of,
    own_folder_of,
    path_elsewhere,
    recorded_name,
    removable_name,
    staged_name,
)
from forebay.ledger.records import FileChange, Unpublished

# How many files are published before the loop serves the workers: a few milliseconds of work.
PUBLISHED_AT_ONCE = 256
# The most folders about which something is remembered. An output folder can have millions.
FOLDERS_KNOWN = 100_000


# Errors of a rename that are due to the file's name. All others are errors of the disk.
_OF_THE_NAME = frozenset(
    {
        *(errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.ENAMETOOLONG),
        *(errno.ELOOP, errno.EXDEV, errno.EACCES, errno.EPERM, errno.EINVAL, errno.EILSEQ),
    }
)


class Publisher:
    """Performs the file changes of a ledger in a local output folder."""

    def __init__(self, path: Path, *, overwrites: bool = False) -> None:
        """Publish in this folder, which exists.

        Args:
            overwrites: Replace files that no input is known to have made.
        """
        self._root, self._overwrites = str(path), overwrites
        self._plain = {""}  # folders known to be reached without a link
        self._made = {""}  # folders known to exist

    def perform(self, file_changes: Sequence[FileChange]) -> Iterator[list[Unpublished]]:
        """Remove and publish files as the ledger says, removals first. Safe to do twice.

        A name that is removed and published is replaced in one step. Folders that removals leave
        empty are removed, too: a file may have that name next.
        """
        removed, published = set(), []
        for given, staged in file_changes:
            if path_elsewhere(given) is not None:
                continue  # no file of forebay's
            if staged is not None:
                published.append((recorded_name(given), staged_name(staged)))
            else:
                removed.add(removable_name(given))
        replaced = removed & {name for name, _ in published}
        self._remove(removed - replaced)
        reasons = self._publish(published, replaced)
        while part := list(islice(reasons, PUBLISHED_AT_ONCE)):
            yield [one for one in part if one is not None]

    def _remove(self, names: Iterable[str]) -> None:
        parents = set()
        for name in names:
            parent = _folder_of(name)
            if self._leads_elsewhere(parent) is not None:
                continue
            # It is already gone, or not a file of forebay's.
            with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                os.unlink(f"{self._root}/{name}")
            # A worker may be about to write to a staging folder that its inputs share.
            if not name.startswith(f"{PRIVATE}/") or own_folder_of(name):
                parents.add(parent)
        for parent in sorted(parents, key=len, reverse=True):
            self._remove_emptied(parent)

    def _remove_emptied(self, folder: str) -> None:
        """Remove a folder if it is empty or gone, and then those above it."""
        while folder not in ("", STAGING):
            try:
                os.rmdir(f"{self._root}/{folder}")
            except FileNotFoundError:
                pass
            except OSError:
                break
            self._made.discard(folder)
            self._plain.discard(folder)
            folder = _folder_of(folder)

    def _publish(
        self, files: Iterable[tuple[str, str]], replaced: Collection[str]
    ) -> Iterator[Unpublished | None]:
        """Publish files, given their names and staged names; yield what came of each rename."""
        own = defaultdict[str, list[str]](list)  # names, by the folder that one input had alone
        for name, staged in files:
            folder = own_folder_of(staged)
            if folder and staged == f"{folder}/{name}":
                own[folder].append(name)
            else:
                yield self._publish_file(name, staged, name in replaced)
        for folder, names in own.items():
            yield from self._publish_below(folder, "", names, replaced)

    def _publish_below(
        self, staged: str, folder: str, names: Iterable[str], replaced: Collection[str]
    ) -> Iterator[Unpublished | None]:
        """Publish files of the staging folder of one input, each new folder in one step.

        Args:
            folder: Where all of the names are.
        """
        start = len(folder) + bool(folder)
        parts = defaultdict[str, list[str]](list)
        for name in names:
            end = name.find("/", start)
            parts[name if end < 0 else name[:end]].append(name)
        for part, inside in parts.items():
            if inside == [part]:
                yield self._publish_file(part, f"{staged}/{part}", part in replaced)
            elif self._publish_folder(staged, part, inside):
                yield None
            else:
                yield from self._publish_below(staged, part, inside, replaced)
        if self._leads_elsewhere(place := f"{staged}/{folder}".rstrip("/")) is None:
            self._remove_emptied(place)

    def _publish_folder(self, staged: str, folder: str, names: Collection[str]) -> bool:
        """Publish a folder with all that is below it; return whether that was possible.

        It must be new, these files must be all that is in it, and it must have the group that a
        folder made in its place would have.
        """
        parent, path = _folder_of(folder), f"{self._root}/{staged}/{folder}"
        if folder in self._made or os.path.lexists(f"{self._root}/{folder}"):
            return False
        if self._leads_elsewhere(parent) is not None:
            return False
        if self._leads_elsewhere(f"{staged}/{folder}") is not None:
            return False
        try:
            if not _holds(path, folder, {*names}):
                return False
            self._make_folder(parent)
            if _inherited(path) != _inherited(f"{self._root}/{parent}"):
                return False
            rename_new(path, f"{self._root}/{folder}")
        except OSError:
            return False  # each of its files will say why
        return True

    def _publish_file(self, name: str, staged: str, replaces: bool) -> Unpublished | None:
        """Give a staged file its name; return the reason if that is impossible."""
        final, parent = f"{self._root}/{name}", _folder_of(name)
        elsewhere = self._leads_elsewhere(parent)
        if elsewhere is not None:
            reason = (
                f"{name!r} would leave the output folder: a symbolic link leads to {elsewhere!r}\n"
                "  Nothing was written there. Remove the link, or name the output differently."
            )
            return Unpublished(name, staged, reason)
        try:
            self._make_folder(parent)
            if self._leads_elsewhere(_folder_of(staged)) is not None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), staged)
            replaces |= self._overwrites
            (os.replace if replaces else rename_new)(f"{self._root}/{staged}", final)
            return None
        except FileNotFoundError:
            if os.path.lexists(final):
                return None  # done before
            self._made.discard(parent)
            reason = (
                f"{name!r} vanished between being staged and being published\n"
                f"  Something else removes files in {f'{self._root}/{PRIVATE}'!r}, or its folder. "
                "The next run creates it again."
            )
        except OSError as error:
            if error.errno == errno.EEXIST and _are_the_same(f"{self._root}/{staged}", final):
                os.replace(f"{self._root}/{staged}", final)
                return None
            if error.errno not in _OF_THE_NAME:
                raise
            reason = self._obstacle(name, error)
        return Unpublished(name, staged, reason)

    def _make_folder(self, folder: str) -> None:
        if folder not in self._made:
            if len(self._made) >= FOLDERS_KNOWN:
                self._made = {""}
            os.makedirs(f"{self._root}/{folder}", exist_ok=True)
            self._made.update([folder, *folders_of(folder)])

    def _obstacle(self, name: str, error: OSError) -> str:
        """Return why a file cannot have its name, as a message."""
        path = next(
            (one for one in folders_of(name) if not os.path.isdir(f"{self._root}/{one}")), None
        )
        if path is not None and os.path.lexists(f"{self._root}/{path}"):
            return (
                f"{name!r} needs a folder, but there is a file: {path!r}\n"
                "  Nothing was written there. Name one of the two differently."
            )
        if os.path.lexists(f"{self._root}/{name}"):
            if os.path.isdir(f"{self._root}/{name}"):  # of another input's outputs, perhaps
                return (
                    f"{name!r} exists already as a folder\n"
                    "  It was left as it is. Name the output differently, or move the folder away."
                )
            return (
                f"{name!r} exists already with other content, and no input of forebay's made it\n"
                "  It was left as it is. To replace such files, make the same call with "
                "overwrite=True (--overwrite). To keep what an earlier program made, let the "
                f"function use it: shutil.copy(out.final({name!r}), out / {name!r})."
            )
        return (
            f"{name!r} cannot be published: {error.strerror}\n"
            "  Nothing was written there. Check the permissions of its folder, or name the output "
            "differently."
        )

    def _leads_elsewhere(self, folder: str) -> str | None:
        """Return the real path of a folder that a symbolic link leads to; None if there is none."""
        if folder in self._plain:
            return None
        for each in (*folders_of(folder), folder):
            if each in self._plain:
                continue
            try:
                mode = os.lstat(f"{self._root}/{each}").st_mode
            except OSError:
                return None  # there is nothing yet
            if stat.S_ISLNK(mode):
                return os.path.realpath(f"{self._root}/{folder}")
            if stat.S_ISDIR(mode):  # otherwise a link may still be created there
                if len(self._plain) >= FOLDERS_KNOWN:
                    self._plain = {""}
                self._plain.add(each)
        return None


def _are_the_same(staged: str, final: str) -> bool:
    """Return whether a file has the content that another of its name is to have."""
    try:
        if not stat.S_ISREG(os.lstat(final).st_mode):
            return False
        return filecmp.cmp(staged, final, shallow=False)
    except OSError:  # there is none, as usual
        return False


def _folder_of(name: str) -> str:
    return name.rpartition("/")[0]


def _holds(path: str, folder: str, names: Collection[str]) -> bool:
    """Return whether a folder has these files, of which `folder` begins the names, and no other."""
    count, folders = 0, [folder]
    while folders:
        above = folders.pop()
        with os.scandir(path + above[len(folder) :]) as entries:
            for entry in entries:
                name = f"{above}/{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    folders.append(name)
                elif name in names and entry.is_file(follow_symlinks=False):
                    count += 1
                else:
                    return False
    return count == len(names)


def _inherited(folder: str) -> tuple[int, int]:
    """Return what a folder has from the one that it is in, and hands on: setgid bit and group."""
    status = os.stat(folder)
    bit = status.st_mode & stat.S_ISGID
    return bit, status.st_gid if bit else 0
