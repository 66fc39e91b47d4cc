"""The same call in several processes: one of them works, the others wait and find it done.

    rank 0   takes the folder ── works ──> ends
    rank 1   the same call: waits ───────> takes the folder, and finds all done

Which call a process makes is in the record of its lock, so any process that sees the folder can
tell, also on another node. Another call ends with a BusyError. If the process that works dies, one
that waits takes the folder, and continues the work.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from forebay.base.files import is_url, location_text
from forebay.errors import BusyError, ForebayError
from forebay.inputs.listing import Listing
from forebay.ledger.ledger import Ledger
from forebay.ledger.lock import Holder
from forebay.options import PreprocessOptions
from forebay.outputs.folder import OutputFolder
from forebay.outputs.places import snapshot_of
from forebay.pools.job_loading import is_worker
from forebay.runs.fingerprint import Fingerprint

# How often to try to take the folder, and one in a bucket, for which requests are paid.
PAUSE_S, BUCKET_PAUSE_S = 0.1, 2.0
# After how long to say what is waited for, and how often again.
FIRST_SAID_S, SAID_EVERY_S = 1.0, 60.0
# So many inputs of a list are enough to tell two calls apart: the ledger compares them all later.
_COMPARED, _MOST_CHARACTERS = 100, 10_000


def call_id(verb: str, described: Fingerprint, options: PreprocessOptions, inputs: str) -> str:
    """Return a hash of what a call does: two equal calls have the same one, in any process.

    Args:
        inputs: Tells them from the inputs of other calls.
    """
    given: list[Any] = [options.version, options.accept_changes, options.limit]
    given += [options.resume, options.redone, options.metadata]
    text = "\n".join([verb, described.to_json(), json.dumps(given), inputs])
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:32]


def inputs_text(inputs: Any, listing: Listing) -> str:
    """Return a string that tells inputs from others."""
    if isinstance(inputs, str | os.PathLike):
        return location_text(inputs)
    if listing.samples is not None:
        return ""  # the description of the work has the Datasets
    if isinstance(inputs, set | frozenset):
        inputs = sorted(inputs, key=str)
    if isinstance(inputs, Sequence):
        return f"{len(inputs)} {[*map(str, inputs[:_COMPARED])]}"
    shown = "" if isinstance(inputs, Iterator) else repr(inputs)[:_MOST_CHARACTERS]
    return f"{listing.total} {listing.columns} {shown}"


@dataclass(slots=True)
class TakenFolder:
    """An output folder that this process has, perhaps after waiting for others.

    Attributes:
        earlier: The processes that made the same call, and that were waited for.
    """

    ledger: Ledger
    earlier: list[Holder] = field(default_factory=list)

    @property
    def is_begun(self) -> bool:
        """Return whether one of them got as far as its inputs: then nothing is started over."""
        with suppress(ValueError, TypeError, AttributeError):
            run = json.loads(self.ledger.get_meta("run") or "{}")
            return run.get("pid") in {each.pid for each in self.earlier}
        return False


def take_folder(
    stack: ExitStack, folder: OutputFolder, call: str, output: str, say: Callable[[str], None]
) -> TakenFolder:
    """Take the folder; wait for a process that has it and makes the same call.

    Args:
        say: Shows what is waited for.

    Raises:
        BusyError: A process has it that makes another call, or that could wait for this one.
    """
    earlier, due = list[Holder](), time.monotonic() + FIRST_SAID_S
    while True:
        try:
            return TakenFolder(stack.enter_context(folder.ledger(call=call)), earlier)
        except BusyError as error:
            holder = error.holder
            if holder is None or holder.call != call or _may_wait_for_this(holder):
                raise
        if holder not in earlier:
            earlier.append(holder)
        if time.monotonic() >= due:
            due = time.monotonic() + SAID_EVERY_S
            say(f"the same call is running: {holder}; waiting for its end{_progress(output)}")
        time.sleep(BUCKET_PAUSE_S if is_url(output) else PAUSE_S)


def _may_wait_for_this(holder: Holder) -> bool:
    """Return whether a holder may be waiting: for its worker, or for this thread's own caller."""
    return is_worker() or (holder.is_visible and holder.pid == os.getpid())


def _progress(output: str) -> str:
    with suppress(ForebayError):  # it has only begun, or is ending
        counts = snapshot_of(output).counts
        return f" ({counts.done:,} of {counts.total:,} done, {counts.failed:,} failed so far)"
    return ""
