"""Outputs that hold paths of the folder in which they are staged, as lists of files do.

The folder's part of such a path is taken out: what is left is the path that the file will have.

    /data/out/.forebay/staging/1f2e-0-7/a.wav  ──>  /data/out/a.wav
"""

from __future__ import annotations

import os
import re
from functools import cached_property

from forebay.base.output_names import worker_folder
from forebay.errors import OutputError

# Longer files, and those with such endings, are no lists of files.
MOST_BYTES = 4 << 20
_HEAD_BYTES = 1 << 12
_BINARY = frozenset(
    {
        *("wav", "flac", "mp3", "ogg", "opus", "m4a", "jpg", "jpeg", "png", "webp", "gif", "tif"),
        *("tiff", "bmp", "mp4", "mkv", "webm", "avi", "npy", "npz", "pt", "pth", "safetensors"),
        *("parquet", "arrow", "feather", "h5", "hdf5", "zip", "gz", "zst", "xz", "bz2", "tar"),
        *("nii", "dcm", "pkl", "bin"),
    }
)


class SelfReferences:
    """Finds the paths of one worker's staging folders in files."""

    def __init__(self, run: str, worker: int) -> None:
        self._mark = f"/{worker_folder(run, worker, '')}".encode()

    @cached_property
    def _paths(self) -> re.Pattern[bytes]:
        return re.compile(re.escape(self._mark) + rb"[.-]\d+")

    def are_in(self, path: str, size: int, descriptor: int) -> bool:
        """Return whether a text file, which is open for reading, holds such a path."""
        if size > MOST_BYTES or path.rpartition(".")[2].lower() in _BINARY:
            return False
        data = os.read(descriptor, _HEAD_BYTES)
        if b"\0" in data:
            return False
        if size > len(data):
            data += os.read(descriptor, size)
        return self._mark in data

    def mend(self, path: str, name: str, *, can_be: bool) -> int:
        """Take the staging folder out of the paths in a file; return its new size.

        Args:
            can_be: Whether what is left is a path that leads to the file.
        """
        with open(path, "rb") as file:
            data = file.read()
        is_text = b"\0" not in data and not data.startswith(b"%PDF")
        if not (can_be and is_text and os.access(path, os.W_OK)):
            raise OutputError(
                f"the output {name!r} holds the path of the folder in which it is staged, which "
                "is removed\n"
                "  Nothing of this input was kept. Write out.final('a.wav') into the file, the "
                "path that an output will have, where it has out / 'a.wav'."
            )
        mended = self._paths.sub(b"", data)
        with open(path, "r+b") as file:
            file.write(mended)
            file.truncate()
        return len(mended)
