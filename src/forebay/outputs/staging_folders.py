"""Where a worker stages files: in a folder that its inputs share, or in one of a single input.

    RUN-WORKER.0/speaker1/a.flac  named by `out.file`, in a folder that is published or none
    RUN-WORKER-7/rec/0.flac       all else: the folder that a function gets when it asks for one

All of these folders are in `.forebay/staging`, and below them a file has its final name. To make
and remove a folder takes longer than to write a small file, so most inputs need none of their
own. What is in a shared folder, and was named by no input, belongs to the one that just ended.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable

from forebay.base.output_names import own_folder, worker_folder
from forebay.errors import OutputError

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
                refuse_link(self.root, folder)
                others += [f"{folder}/{name}" for name in found if name not in known]
            self.is_crowded |= len(found) > _MOST_PENDING or len(known) > _MOST_KNOWN
        return others

    def own(self) -> str:
        """Return an empty folder for the files of one input alone."""
        path, self._spare = self._spare, None
        if path is None:
            self._own += 1
            path = f"{self.root}/{own_folder(self._run, self._worker, self._own)}"
            os.mkdir(path)
        return path

    def emptied(self, folder: str, name: str) -> str:
        """Move the only file out of the folder of one input, which another can use; return where.

        If it cannot be moved, it stays.
        """
        path = None if "/" in name else self.shared(name, is_first=True)
        if path is None:
            return f"{folder}/{name}"
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


def refuse_link(root: str, folder: str) -> None:
    """Raise OutputError if a link leads to a staging folder: what is there is somebody else's."""
    if os.path.realpath(folder) != os.path.realpath(root) + folder[len(root) :]:
        raise OutputError(
            "the function left a link in the place of its output folder\n"
            "  Nothing of this input was kept. Write into the folder that it was given."
        )
