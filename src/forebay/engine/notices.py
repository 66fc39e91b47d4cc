"""What to say of workers from which nothing has come for long, and of memory that ran out.

Loaded only when there is something to say.
"""

from __future__ import annotations

import os
import re
import sysconfig
import warnings
from collections.abc import Sequence
from typing import NamedTuple

from forebay.base.formatting import byte_size, counted, duration
from forebay.engine.commands import LowerHighMark
from forebay.errors import printable, without_credentials

_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]|^<frozen ")
# Lines of a stack that are shown.
MOST_LINES = 12


class StuckWorker(NamedTuple):
    """A worker that is busy, while nothing came from any for long.

    Attributes:
        task: What it runs, such as "epoch 0, batch 3"; None while it starts.
        seconds: For how long.
        silent_s: For how long nothing came.
        others: How many other workers run a task, or start.
        stacks: Of its threads, in the form of `faulthandler`, or why it waits, in words; "" if it
            could not be asked.
    """

    worker_id: int
    task: str | None
    seconds: float
    silent_s: float
    others: int
    stacks: str


def warn_of_stuck_worker(found: StuckWorker, advice: Sequence[str]) -> None:
    """Warn that nothing comes, and say where the user's code is.

    Args:
        advice: What to do, as lines.
    """
    frames = _frames(found.stacks)
    at = next(filter(_is_users, frames), frames[0] if frames else None)
    what = "not started" if found.task is None else f"been running {found.task}"
    where = found.stacks or "it did not say where it is"
    if at is not None:
        where = f'it is at "{at[0]}", line {at[1]}, in {at[2]}'
    others = "No other worker is busy"
    if found.others:
        be = "is" if found.others == 1 else "are"
        others = f"{counted(found.others, 'other worker')} {be} busy"
    lines = [
        f"no result has come for {duration(found.silent_s)}: worker {found.worker_id} has {what} "
        f"for {duration(found.seconds)}; {where}",
        f"  {others}. forebay goes on waiting, and does not repeat this.",
        *(f"  {line}" for line in advice),
    ]
    stack = [f'    File "{file}", line {line} in {name}' for file, line, name in frames]
    if len(stack) > MOST_LINES:
        stack[MOST_LINES:] = [f"    and {len(stack) - MOST_LINES} outer calls"]
    if stack:
        lines += ["  Its calls, the innermost first:", *stack]
    text = "\n".join(printable(line) for line in "\n".join(lines).splitlines())
    warnings.warn(without_credentials(text), RuntimeWarning, stacklevel=2)


def _frames(stacks: str) -> list[tuple[str, int, str]]:
    """Return file, line and function of each call of the thread that runs the task.

    It is the one that was asked, unless only another thread runs code of the user's: a worker may
    run several tasks at once.
    """
    threads: list[list[tuple[str, int, str]]] = []
    asked = 0
    for line in stacks.splitlines():
        if found := _FRAME.fullmatch(line):
            file, number, name = found.groups()
            if threads and not file.startswith(_OWN):
                threads[-1].append((file, int(number), name))
        elif line.endswith("(most recent call first):"):
            asked = len(threads) if line.startswith("Current thread") else asked
            threads.append([])
    if not threads:
        return []
    ordered = [threads[asked], *threads[:asked], *threads[asked + 1 :]]
    return next((each for each in ordered if any(map(_is_users, each))), ordered[0])


def _is_users(frame: tuple[str, int, str]) -> bool:
    file = frame[0]
    library = sysconfig.get_paths()["stdlib"] + os.sep
    return not (file.startswith(library) or _INSTALLED.search(file))


# ---- full memory ---------------------------------------------------------------------------------
# Memory runs out because of the results that wait to be consumed.


def warn_of_full_memory(found: LowerHighMark) -> None:
    """Warn that a buffer is too large for the memory, and that less is buffered from now on."""
    did = (
        f"No batch failed and none is lost: at most {byte_size(found.most)} of batches are "
        "buffered from now on, and no worker starts until the rest was taken."
    )
    warnings.warn(full_memory(found, did), RuntimeWarning, stacklevel=2)


def full_memory(found: LowerHighMark, did: str) -> str:
    """Return the message.

    Args:
        did: What forebay did, as a sentence.
    """
    return (
        f"memory ran out, and a worker was killed: batches that are ready or in use take "
        f"{byte_size(found.held)} of the {byte_size(found.memory)} that this program may use\n"
        f"  {did}\n"
        f'  Set a smaller buffer, such as buffer="{found.most >> 20}MiB", or with directory= one '
        "on a disk; lower num_workers or prefetch_factor; or raise the limit of the container or "
        "job (memory.max, --memory, --mem)."
    )
