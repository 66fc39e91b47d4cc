"""Functions that pack their outputs, and what tests find in shards."""

from __future__ import annotations

import os
import tarfile
import time
from pathlib import Path
from typing import Any

import forebay


def pack_lines(source: Path, out: Any) -> None:
    """Pack each line of a text file, with a pause where `WORK_PAUSE_S` says so."""
    for number, line in enumerate(source.read_text().splitlines()):
        out.pack(f"{source.stem}/{number}.txt", line.encode(), number=number)
        time.sleep(float(os.environ.get("WORK_PAUSE_S", "0")))


def pack_unless_bad(source: Path, out: Any) -> dict[str, int]:
    """Pack the text of a file, then fail if it is "bad"."""
    text = source.read_text()
    out.pack(source.name, text.encode() * 200_000 if "large" in text else text.encode())
    if "bad" in text:
        raise ValueError("a bad one")
    return {"size": len(text)}


def members(output: Path, *, was_killed: bool = False) -> dict[str, bytes]:
    """Return name and data of each member of all shards, read as streams; no name comes twice.

    After a kill, a shard may still be there beside its copy.
    """
    found: dict[str, bytes] = {}
    for path in sorted((output / "packed").glob("*.tar")):
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r|") as tar:
            for member in tar:
                assert member.isreg()
                assert was_killed or member.name not in found
                data = tar.extractfile(member)
                assert data is not None
                found[member.name] = data.read()
            assert file.read().strip(b"\0") == b"", "nothing follows the end"
        assert path.stat().st_size % 512 == 0
        assert path.read_bytes().endswith(bytes(1024))
    return found


def opened(output: Path, names: Any) -> dict[str, bytes]:
    """Return what `open_output` reads, by the same names."""
    found = {}
    for name in names:
        with forebay.open_output(output / "packed" / name) as file:
            found[name] = file.read()
    return found


def shards(output: Path) -> list[str]:
    """Return the names of the published shards."""
    return sorted(path.name for path in (output / "packed").glob("*.tar"))
