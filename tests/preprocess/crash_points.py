"""The command line, with a SIGKILL to itself at a point of its work: `crash_points.py POINT ...`.

What a random kill meets once in a thousand times is met here every time. Where POINT is "never",
it is not killed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from forebay.cli import main
from forebay.ledger.ledger import Ledger
from forebay.outputs import folder, publishing
from forebay.outputs.folder import OutputFolder
from forebay.runs import metadata_table as write


def die() -> None:
    """Be killed here."""
    os.kill(os.getpid(), signal.SIGKILL)


def before(place: Any, name: str, when: Callable[..., bool] = lambda *_: True) -> None:
    """Die when a function is called in this process; not in the workers, which are forked later."""
    original, driver = getattr(place, name), os.getpid()

    def killed(*arguments: Any, **options: Any) -> Any:
        if os.getpid() == driver and when(*arguments):
            die()
        return original(*arguments, **options)

    setattr(place, name, killed)


def after(place: Any, name: str, when: Callable[..., bool] = lambda *_: True) -> None:
    """Die when a function has returned."""
    original = getattr(place, name)

    def killed(*arguments: Any, **options: Any) -> Any:
        original(*arguments, **options)
        if when(*arguments):
            die()

    setattr(place, name, killed)


def is_table(_: Any, target: Any) -> bool:
    """Return whether a rename is that of the table."""
    return Path(target).name.startswith("metadata.")


class Third:
    """True for the third output that is published."""

    def __init__(self) -> None:
        """Start to count."""
        self.left = 3

    def __call__(self, _: Any, target: Any) -> bool:
        """Count one."""
        self.left -= not is_table(_, target)
        return self.left == 0


def within_perform(parts: int | None) -> None:
    """Die when so many renames of a commit are done, or all (None), and the ledger knows none."""
    original = OutputFolder.perform

    def killed(self: OutputFolder, file_changes: Any) -> Iterator[Any]:
        yield from islice(original(self, file_changes), parts)
        if file_changes:
            die()

    publishing.PUBLISHED_AT_ONCE = 1
    OutputFolder.perform = killed  # type: ignore[method-assign]


POINTS: dict[str, Callable[[], object]] = {
    "before the flush": lambda: before(OutputFolder, "flush"),
    "before the record": lambda: before(Ledger, "record"),
    "after the record": lambda: after(Ledger, "record"),
    "in the midst of publishing": lambda: before(publishing, "rename_new", Third()),
    "between two parts of a commit": lambda: within_perform(1),
    "after publishing": lambda: within_perform(None),
    "before the file changes are forgotten": lambda: before(Ledger, "clear_file_changes"),
    "before the table": lambda: before(write, "write_metadata"),
    "before the table has its name": lambda: before(folder, "rename_new", is_table),
    "after the table": lambda: after(OutputFolder, "write_table"),
}

if __name__ == "__main__":
    POINTS.get(sys.argv.pop(1), int)()
    main()
