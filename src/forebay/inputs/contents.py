"""Hashes of the contents of files: what was only copied or touched need not be done again.

A worker hashes the file that it has just read, where that takes little beside the work. A listing
that finds the size of before and another time compares the hash.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Iterator
from itertools import islice

from forebay.base.files import is_url, open_regular
from forebay.inputs.row_paths import files_named, path_in
from forebay.ledger.identity import with_content
from forebay.ledger.records import Input

# A hash is made if the work took at least so many times as long as that takes at this rate.
_TIMES, _BYTES_PER_S = 20, 1e9
_THREADS, _PAGE, _CHUNK = 8, 256, 1 << 20


def content_identity(
    source: str, row: str | None, folder: str | None, took_s: float = math.inf
) -> str:
    """Return the identity of the file that an input names, with a hash of its content.

    Args:
        folder: Where the relative paths of a row may start.
        took_s: How long the work on the file took; "" is returned if a hash is not worth it.
    """
    if not source or is_url(source):
        return ""
    column = ""
    if row is not None and row[:1] == "{":
        column = path_in(json.loads(row))[1] or "path"  # any but `destination`: see `file_columns`
    for path in files_named(source, column, folder):
        try:
            with open_regular(path) as file:
                status = os.fstat(file.fileno())
                if took_s < _TIMES * status.st_size / _BYTES_PER_S:
                    return ""
                digest = hashlib.sha256()
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
                after = os.fstat(file.fileno())
        except (OSError, ValueError):  # ValueError: a NUL in the name
            continue
        if (after.st_size, after.st_mtime_ns) != (status.st_size, status.st_mtime_ns):
            return ""
        text = urlsafe_b64encode(digest.digest()[:18]).decode()
        return with_content(f"{status.st_size}:{status.st_mtime_ns}", text)
    return ""


def same_contents(folder: str | None, inputs: Iterable[tuple[int, Input, str]]) -> Iterator[int]:
    """Yield the numbers of those inputs whose files have the content of the hash beside them.

    Args:
        folder: Where the relative paths of rows may start.
    """
    from concurrent.futures import ThreadPoolExecutor

    def is_same(each: tuple[int, Input, str]) -> bool:
        _, one, content = each
        found = content_identity(one.source, one.row, folder)
        return found == with_content(one.identity, content)

    rest = iter(inputs)
    with ThreadPoolExecutor(_THREADS, "forebay-contents") as pool:
        while page := [*islice(rest, _PAGE)]:
            for each, same in zip(page, pool.map(is_same, page), strict=True):
                if same:
                    yield each[0]
