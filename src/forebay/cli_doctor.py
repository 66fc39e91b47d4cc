"""`forebay doctor`: what a bug report needs, in one screen.

It names no host, user, path or variable, and each line stands for itself: a check that fails is a
line that says so.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import click

from forebay.base.formatting import byte_size, counted, duration, short_number
from forebay.base.machine import PROC, free_memory, process_limits
from forebay.base.process import memory_file
from forebay.errors import message_of, one_line
from forebay.options import whole_cores
from forebay.show.report import environment, installed_version

DONE, FAILURES = 0, 3
# Where shared memory of other loaders is.
SHARED = "/dev/shm"  # noqa: S108 - only its size is looked at
# What forebay may use if it is installed.
OPTIONAL = (
    *("cloudpickle", "fsspec", "obstore", "s3fs", "ray", "pandas", "polars", "soundfile"),
    *("torchvision", "lightning", "accelerate", "transformers"),
)
# Samples of a batch, numbers in a sample, and workers of the loaders that are compared.
SAMPLES, NUMBERS, MOST_WORKERS = 32, 20_000, 4
LONGEST_VALUE, NAME_WIDTH = 240, 14
# What may be a path, which may hold the name of a user.
_PATH = re.compile(r"""[^\s'"()\[\],:;]*/[^\s'"()\[\],:;]*""")


@click.command("doctor", short_help="Show what a bug report needs.")
@click.argument("folder", type=click.Path(exists=True, file_okay=False), default=".")
@click.option(
    "--seconds",
    type=click.FloatRange(0),
    default=5.0,
    show_default=True,
    help="How long loaders are compared; 0 leaves that out.",
)
def doctor_command(folder: str, seconds: float) -> int:
    """Show versions, what this process may use of the machine, and how fast a loader is here.

    It is a table in Markdown, to be pasted into a bug report. FOLDER is where your data or outputs
    are, by default the working folder. No host, user, path or variable is named.
    """
    has_failed = False
    click.echo(table_row("forebay doctor", "") + "\n" + table_row(":---", ":---"))
    for name, check in checks(folder, seconds):
        value, is_right = answer_of(check)
        has_failed |= not is_right
        click.echo(table_row(name, value))
    return FAILURES if has_failed else DONE


# ---- the table, PURE -----------------------------------------------------------------------------


def table_row(name: str, value: str) -> str:
    """Return a row of a table in Markdown, which is aligned on a terminal, too."""
    first, second = (one_line(each, LONGEST_VALUE).replace("|", "\\|") for each in (name, value))
    return f"| {first:<{NAME_WIDTH}} | {second} |"


def answer_of(check: Callable[[], str]) -> tuple[str, bool]:
    """Return what a check says, or how it failed; and whether it did not fail."""
    try:
        return check(), True
    except Exception as error:  # noqa: BLE001 - whatever is wrong here is what is looked for
        said = (isinstance(error, OSError) and error.strerror) or message_of(error)
        return f"FAILED: {type(error).__name__}: {without_paths(said)}".rstrip(": "), False


def without_paths(text: str) -> str:
    """Return the first line of a message without what may be a path."""
    return _PATH.sub("<path>", text.partition("\n")[0])


# ---- checks --------------------------------------------------------------------------------------


def checks(folder: str, seconds: float) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the name of each line, and what returns its value."""
    known = environment()
    for name in known:
        if name not in ("cores", "memory"):
            yield name, partial(known.__getitem__, name)
    yield "torch's build", _torch
    yield "also installed", _optional
    yield "interpreter", _interpreter
    yield "cores", partial(known.__getitem__, "cores")
    yield "memory", lambda: f"{known.get('memory', 'unknown')}, {_size(free_memory())} free"
    yield "limits", lambda: "; ".join(process_limits())
    yield SHARED, lambda: _space(SHARED) if os.path.isdir(SHARED) else "missing"
    yield "file in memory", _memory_file
    yield "the folder", lambda: f"{kind_of_file_system(folder)}, {_space(folder)}"
    if seconds:
        yield "a worker", _worker_start
        yield "loaders", lambda: _compared(seconds)


def _size(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else byte_size(nbytes)


def _torch() -> str:
    import torch

    if not torch.cuda.is_available():
        return f"CUDA {torch.version.cuda or 'none'}, no GPU"
    count = torch.cuda.device_count()
    return f"CUDA {torch.version.cuda}, {count} x {torch.cuda.get_device_name(0)}"


def _optional() -> str:
    """Return the versions that are installed, without an import."""
    found = {name: installed_version(name) for name in OPTIONAL}
    return ", ".join(f"{name} {number}" for name, number in found.items() if number) or "nothing"


def _interpreter() -> str:
    import multiprocessing
    import sqlite3

    library = " ".join(platform.libc_ver()).strip() or "an unknown C library"
    given = f", flags {' '.join(flags)}" if (flags := _flags()) else ""
    starts = multiprocessing.get_all_start_methods()[0]
    name, number = platform.python_implementation(), sqlite3.sqlite_version
    return f"{name}, {library}, SQLite {number}, {starts} by default{given}"


def _flags() -> list[str]:
    names = ("isolated", "optimize", "no_site", "safe_path", "dev_mode")
    return [name for name in names if getattr(sys.flags, name, False)]


def _space(path: str) -> str:
    found = os.statvfs(path)
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    writable = "" if os.access(path, os.W_OK) else ", not writable"
    return f"{byte_size(free)} free of {byte_size(size)}{writable}"


def _memory_file() -> str:
    descriptor = memory_file("forebay")
    try:
        # Only files in memory are in a file system without a size.
        is_plain = os.fstatvfs(descriptor).f_blocks == 0
    finally:
        os.close(descriptor)
    return "possible (memfd_create)" if is_plain else "refused: an unlinked file serves instead"


def kind_of_file_system(folder: str) -> str:
    """Return the kind of file system that a folder is on, such as "ext4"."""
    path, best, kind = os.path.realpath(folder), -1, "unknown file system"
    try:
        lines = (PROC / "self" / "mounts").read_text(errors="replace").splitlines()
    except OSError:
        return kind
    for line in lines:
        # Spaces and some others are written in octal.
        _, mounted, name, *_ = line.split()
        mounted = re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), mounted)
        is_above = path == mounted or path.startswith(mounted.rstrip("/") + "/")
        if is_above and len(mounted) >= best:
            best, kind = len(mounted), name
    return kind


# ---- loaders -------------------------------------------------------------------------------------


class _Waves:
    """Samples that take a processor some tenths of a millisecond."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Any:
        import numpy as np

        return np.sin(np.arange(index, index + NUMBERS, dtype=np.float32))


def _worker_start() -> str:
    from forebay.loader import DataLoader

    began = time.perf_counter()
    dataset: Any = _Waves()
    with DataLoader(dataset, num_workers=1) as loader:
        next(iter(loader))
        took_s = time.perf_counter() - began
    return f"first batch of one worker after {duration(took_s)}"


def _compared(seconds: float) -> str:
    """Return how many batches per second two loaders make, and after what time the first.

    They take turns, and the best of two turns counts: a machine may have other things to do.
    """
    from torch.utils.data import DataLoader as TorchLoader

    from forebay.loader import DataLoader

    workers = min(whole_cores(), MOST_WORKERS)
    classes: tuple[Any, ...] = (DataLoader, TorchLoader) * 2
    turns = [_turn(each, workers, seconds / len(classes)) for each in classes]
    (ours, mine), (others, theirs) = (
        (max(rate for rate, _ in each), min(first for _, first in each))
        for each in (turns[::2], turns[1::2])
    )
    return (
        f"{short_number(ours)} batches/s of {byte_size(SAMPLES * NUMBERS * 4)} with "
        f"{counted(workers, 'worker')}, torch's {short_number(others)}; first batch after "
        f"{duration(mine)}, torch's {duration(theirs)}"
    )


def _turn(made: Any, workers: int, seconds: float) -> tuple[float, float]:
    """Return batches per second of a new loader, and the seconds until its first batch."""
    began = time.perf_counter()
    batches = iter(made(_Waves(), SAMPLES, num_workers=workers))
    next(batches)
    first, taken = time.perf_counter(), 0
    for _ in batches:
        taken += 1
        if time.perf_counter() >= first + seconds:
            break
    return taken / (time.perf_counter() - first), first - began
