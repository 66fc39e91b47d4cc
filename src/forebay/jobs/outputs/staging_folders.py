"""Where a worker stages files: in a folder that its inputs share, or in one of a single input.

    RUN-WORKER/speaker1/a.flac    `speaker1` is published: one file more for it
    RUN-WORKER-7/rec/0.flac       `rec` is new: published as a whole, if its name is free

All of these folders are in `.forebay/staging`.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from forebay.jobs.outputs.output_names import own_folder, worker_folder

# The most shared folders that a worker remembers.
_MOST_KNOWN = 10_000


class StagingFolders:
    """The staging folders of one worker.

    Args:
        root: The output folder.
        run: Part of their names, different in each run: an abandoned thread of an earlier run may
            still write to its folder.
        worker: The worker's number, never used before in this run.

    Attributes:
        path: The folder that its inputs share.
    """

    def __init__(self, root: str, run: str, worker: int) -> None:
        self._root, self._run, self._worker = root, run, worker
        self.path = Path(root, worker_folder(run, worker))
        os.makedirs(self.path, exist_ok=True)
        self._known = {"": self.path}  # shared folders that exist, by the names to be published
        self._number = 0  # of the last folder of a single input

    def shared(self, folder: str, *, is_first: bool) -> Path | None:
        """Return the shared folder for files of a folder that is published already.

        Args:
            folder: Its name.
            is_first: Whether a new folder shall be published as a whole, so that there is none.

        Returns:
            The folder; None if there is none, or if an earlier input has a file in its place.
        """
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
        """Tell whether no earlier input used a path in a shared folder for a file of this name.

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
