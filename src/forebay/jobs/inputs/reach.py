"""Whether workers, other processes and perhaps on other nodes, can reach what a run names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from forebay.errors import OptionError
from forebay.jobs.ledger.records import Input
from forebay.jobs.outputs.output_places import local_path
from forebay.options import PreprocessOptions


def local_inputs(inputs: Any) -> tuple[str, ...]:
    """Return local paths that every node must see: one of the inputs, or their folder.

    Both are checked, since an unmounted folder exists but is empty.
    """
    first = inputs
    if isinstance(inputs, list | tuple) and inputs:
        first = inputs[0]
    if not isinstance(first, str | os.PathLike):
        return ()
    text = local_path(first)
    if "://" in text or (first is inputs and not os.path.isdir(text)):
        return ()  # a manifest or a glob is read here
    path = os.path.abspath(text)
    if first is inputs:
        with suppress(OSError):  # the listing reports it
            path = min((each.path for each in os.scandir(path)), default=path)
    return (path,)


def check_in_reach(text: str, options: PreprocessOptions) -> None:
    """Check that the workers can reach a path or URL.

    Raises:
        OptionError: It is in this process's own memory, and the workers are other processes.
    """
    if options.workers == 0 or options.backend == "thread":
        return
    if any(part.startswith("memory://") for part in text.split("::")):
        raise OptionError(
            f"{text} is in the memory of this process, but workers are other processes\n"
            "  Nothing was started. Use num_workers=0, or backend='thread' if the call takes it."
        )


def in_reach(listed: Iterable[Input], options: PreprocessOptions) -> Iterator[Input]:
    """Yield the inputs after checking that the workers can read them."""
    for each in listed:
        if "://" in each.source:
            check_in_reach(each.source, options)
        yield each
