"""How much to prefetch: `forebay.Buffer`, and the other values that `buffer=` accepts."""

from __future__ import annotations

import os
import re
import shutil
import sys
import warnings
from dataclasses import dataclass, field

from forebay.errors import OptionError
from forebay.options import check_positive, ranks_on_node, usable_memory
from forebay.units import byte_size

# If only a size is given, refilling starts when less than this share of a full buffer is left.
REFILL_SHARE = 0.8

# Maximum number of batches in a buffer that is only limited in bytes.
MAX_BATCHES = 1 << 20

# A smaller size is probably a mistake, such as a number of batches.
LEAST_BYTES = 1 << 10
# Sizes of files and of memory are smaller on every system.
MOST_BYTES = 1 << 63

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*|%)\s*", re.ASCII)
_UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)},
}


@dataclass(frozen=True, slots=True)
class Buffer:
    """How many batches a loader prefetches.

    Workers fill it to the high mark, pause, and start again below the low mark, independently of
    the training loop.

    Attributes:
        max_bytes: High mark: bytes of batches that are ready or being made, as a number, a string
            such as "30GB" (10^9) or "30GiB" (2^30), or a share of the memory that this process may
            use, such as "50%", for all ranks that torchrun started on this machine together. A
            batch counts as 1 KiB at least. None: no limit by bytes.
        max_batches: High mark: batches that are ready or being made. None: no limit by number.
        refill_below: Low mark: once full, pause until fewer batches than this are ready or being
            made. None: 80 % of the batches that it held when full.
        directory: A folder on whose disk the buffer is kept, in one file without a name; None
            keeps it in memory. Batches of up to 16 KiB stay in memory, and so does everything
            except tensors, arrays and other large blocks of bytes.

    Raises:
        OptionError: A mark is impossible, or both high marks are missing.
    """

    max_bytes: float | str | None = None
    max_batches: int | None = field(default=None, kw_only=True)
    refill_below: int | None = field(default=None, kw_only=True)
    directory: str | os.PathLike[str] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Check the marks."""
        if self.max_bytes is None and self.max_batches is None:
            raise OptionError("Buffer() needs max_bytes or max_batches: neither was given")
        if self.max_bytes is not None:
            object.__setattr__(self, "max_bytes", parse_bytes(self.max_bytes))
        for name in ("max_batches", "refill_below"):
            if (value := getattr(self, name)) is not None:
                check_positive(name, value, " or None")
        if None not in (self.max_batches, self.refill_below) and (
            self.refill_below > self.max_batches  # type: ignore[operator]
        ):
            raise OptionError(
                f"refill_below={self.refill_below} is above max_batches={self.max_batches}\n"
                "  Refilling must start below the full size, such as at 800 of 1000."
            )
        if self.directory is not None and not os.path.isdir(self.directory):
            raise OptionError(
                f"directory={os.fspath(self.directory)!r} is not a folder\n"
                "  Nothing was started. Create it first, on a disk with space for the buffer."
            )
        if self.directory is None and self.nbytes is not None:
            _warn_of_little_memory(self.nbytes)

    @property
    def nbytes(self) -> int | None:
        """The high mark in bytes; None without one."""
        return None if self.max_bytes is None else int(self.max_bytes)


def buffer_of(buffer: float | str | Buffer | None) -> Buffer | None:
    """Return the Buffer for the `buffer` argument of a loader.

    Raises:
        OptionError: It is not a size, or too small to be intended.
    """
    if buffer is None or isinstance(buffer, Buffer):
        return buffer
    nbytes = parse_bytes(buffer)
    if nbytes < LEAST_BYTES:
        raise OptionError(
            f"buffer={buffer!r} is {nbytes:,} bytes, too few for a batch\n"
            f"  Nothing was started. Did you mean '{nbytes}GB'? To count batches, use "
            f"forebay.Buffer(max_batches={nbytes})."
        )
    return Buffer(nbytes)


def low_mark_of(buffer: Buffer) -> int | float:
    """Return the low mark of a buffer: a number of batches, or a share of the full buffer."""
    return REFILL_SHARE if buffer.refill_below is None else buffer.refill_below


def capacity_shown(buffer: Buffer) -> str:
    """Return the high marks for a loader's `repr`, such as "30 GB or 1,000 batches"."""
    marks = [] if buffer.nbytes is None else [byte_size(buffer.nbytes)]
    marks += [] if buffer.max_batches is None else [f"{buffer.max_batches:,} batches"]
    return " or ".join(marks)


def warn_of_full_disk(directory: str | os.PathLike[str], reason: str, nbytes: int) -> None:
    """Warn that a batch did not fit on the buffer's disk."""
    folder = os.fspath(directory)
    try:
        free = f"{shutil.disk_usage(folder).free:,} bytes are free there"
    except OSError as error:
        free = str(error)
    warnings.warn(
        f"the buffer's disk is full: directory={folder!r}, {reason}\n"
        f"  A batch of {nbytes:,} bytes did not fit; {free} now.\n"
        "  It was kept in memory instead, as will be every later batch that does not fit; no batch "
        "is lost, and this warning is not repeated.\n"
        "  Free some space, name a larger disk as directory=, or lower max_bytes=.",
        RuntimeWarning,
        stacklevel=3,
    )


def _warn_of_little_memory(nbytes: int) -> None:
    memory, ranks = usable_memory(), ranks_on_node()
    if memory is None or nbytes * ranks <= memory:
        return
    several = "" if ranks == 1 else f", in each of {ranks} ranks on this machine,"
    warnings.warn(
        f"a buffer of {byte_size(nbytes)}{several} is larger than the memory that this process may "
        f"use, {byte_size(memory)}\n"
        "  It is created anyway; the system kills a process when memory runs out. Use "
        'buffer="50%" for half of the memory, which all ranks on a machine share, or '
        "Buffer(..., directory=) for a disk.",
        RuntimeWarning,
        stacklevel=_depth_in_forebay(),
    )


def _depth_in_forebay() -> int:
    """Return the `stacklevel` that makes a warning of the caller point to the user's code."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("forebay."):
        frame, depth = frame.f_back, depth + 1
    return depth


def parse_bytes(size: float | str) -> int:
    """Return a number of bytes written as a number, or as a string such as "30GB" or "50%".

    Raises:
        OptionError: It is neither, below one byte, or 2**63 bytes or more.
    """
    value = -1.0
    if isinstance(size, int | float) and not isinstance(size, bool):
        value = size if size % 1 == 0 else -1.0  # 30e9 is a whole number, too
    elif isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match and match[2] == "%":
            value = float(match[1]) / 100 * _memory_for(size) / ranks_on_node()
        elif match and match[2].upper() in _UNITS:
            value = float(match[1]) * _UNITS[match[2].upper()]
    if not 1 <= value < MOST_BYTES:
        raise OptionError(
            f"buffer={size!r} is not a size; it must be a whole number of bytes, or a string such "
            "as '800MB', '30GB', '30GiB' or '50%'"
        )
    return int(value)


def _memory_for(size: str) -> int:
    memory = usable_memory()
    if memory is None:
        raise OptionError(
            f"buffer={size!r}: the system does not report how much memory it has\n"
            "  Give a size, such as '30GB'."
        )
    return memory
