"""Real control groups, for tests that run where they can be made: as root, mostly."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest

GROUPS = Path("/sys/fs/cgroup")
PATIENCE_S = 60.0


@contextmanager
def control_group(controller: str, limits: tuple[str, ...], value: int) -> Iterator[Path]:
    """Make a control group with one limit; skip the test where none can be made.

    Args:
        controller: Its folder in version 1, such as "memory".
        limits: What the file of the limit may be called; the first that there is counts.
        value: The limit.

    Yields:
        The file that takes processes.
    """
    folder = _made(controller, limits, value)
    if folder is None:
        pytest.skip("no control group can be made here")
    try:
        yield folder / "cgroup.procs"
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a control group; what was killed in it may take a moment to be gone."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            folder.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def _made(controller: str, limits: tuple[str, ...], value: int) -> Path | None:
    """Return the folder of a new control group; None if the machine allows none."""
    for root in (GROUPS / controller, GROUPS):
        folder = root / f"forebay-{uuid.uuid4().hex}"
        with suppress(OSError):
            folder.mkdir()
            try:
                there = [folder / each for each in limits if (folder / each).exists()]
                (there or [folder / limits[-1]])[0].write_text(str(value))
                if controller == "memory" and (swap := folder / "memory.swap.max").exists():
                    swap.write_text("0")
            except OSError:
                folder.rmdir()
                continue
            return folder
    return None


def memory_group(nbytes: int) -> AbstractContextManager[Path]:
    """Make a control group that may use so much memory, without swap; see `control_group`."""
    return control_group("memory", ("memory.limit_in_bytes", "memory.max"), nbytes)
