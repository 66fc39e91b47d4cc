"""Reports on disk: written through a temporary file, and read as untrusted data."""

from __future__ import annotations

import errno
import json
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from forebay.errors import InputError, OptionError
from forebay.reports.html_page import DATA_BEGIN, DATA_END, MARKER

# forebay's own reports stay below 300 KB.
MAX_BYTES = 4_000_000


def write_report(html: str, path: str | os.PathLike[str]) -> Path:
    """Write a report, replacing an earlier one.

    Args:
        html: The report.
        path: Where; a link is followed.

    Returns:
        The path, absolute.

    Raises:
        OptionError: There is something else, which was left as it is.
        OSError: The file cannot be written.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not _may_be_replaced(target):
        raise OptionError(
            f"{os.fspath(path)!r} exists and is not a report made by forebay\n"
            "  Nothing was written, and it was left as it is. Name another file, or remove it."
        )
    if not target.parent.is_dir():
        reason = "the folder of the report does not exist"
        raise FileNotFoundError(errno.ENOENT, reason, str(target.parent))
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}")
    try:
        # A name or a message may hold bytes that are not UTF-8, as lone surrogates.
        with open(temporary, "x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(html)
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    return target


def read_report(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the summary in a report. Nothing in the file is executed.

    Raises:
        InputError: It is not a report, damaged, or of a later format.
        OSError: It cannot be read.
    """
    with open(path, "rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise _unusable(path, f"it has more than {MAX_BYTES:,} bytes")
    text = content.decode("utf-8", "replace")
    begin = text.rfind(DATA_BEGIN)
    end = text.find(DATA_END, begin)
    if not text.startswith(MARKER) or begin < 0 or end < 0:
        raise _unusable(path, "it has no data of a report")
    try:
        summary = json.loads(text[begin + len(DATA_BEGIN) : end])
    except (ValueError, RecursionError) as error:
        raise _unusable(path, f"its data is damaged ({type(error).__name__})") from None
    if not isinstance(summary, dict) or summary.get("format") != 1:
        raise _unusable(path, "its data has another format; it may be from a later forebay")
    return summary


def _may_be_replaced(target: Path) -> bool:
    """Tell whether a path is a report, or an empty file."""
    if not target.is_file():
        return False
    with target.open("rb") as file:
        return file.read(len(MARKER)) in (b"", MARKER.encode())


def _unusable(path: str | os.PathLike[str], reason: str) -> InputError:
    return InputError(
        f"{os.fspath(path)!r} cannot be used as a report: {reason}\n"
        "  Name a file written by loader.report() or by the report.save() of a run."
    )
