"""How much a loader prefetches: `forebay.Buffer`, and the other values that `buffer=` accepts."""

from __future__ import annotations

import os
import shutil
import warnings
from dataclasses import dataclass, field, fields

from forebay.base import machine
from forebay.base.formatting import byte_size
from forebay.errors import OptionError
from forebay.options import (
    check_positive,
    depth_in_forebay,
    parse_bytes,
    plain_number,
    ranks_on_node,
)

# If only a size is given, refilling starts when less than this share of a full buffer is left.
REFILL_SHARE = 0.8
# Maximum number of batches in a buffer that is only limited in bytes.
MAX_BATCHES = 1 << 20
# A smaller size is probably a mistake, such as a number of batches.
LEAST_BUFFER_BYTES = 1 << 10


@dataclass(frozen=True, slots=True)
class Buffer:
    """How many batches a loader prefetches.

    Workers fill it to the high mark, pause, and start again below the low mark, independently of
    the training loop. Worker processes hold up to a second of work, within the high mark, so they
    continue while the loop keeps the interpreter lock for that long. When an epoch is left before
    its end, they finish what they hold.

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
        for each in fields(self):
            object.__setattr__(self, each.name, plain_number(getattr(self, each.name)))
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
    """Return the Buffer for the `buffer` argument of a loader."""
    if buffer is None or isinstance(buffer, Buffer):
        return buffer
    nbytes = parse_bytes(buffer)
    if nbytes < LEAST_BUFFER_BYTES:
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
    memory, free, ranks = machine.usable_memory(), machine.free_memory(), ranks_on_node()
    several = "" if ranks == 1 else f", in each of {ranks} ranks on this machine,"
    if memory is not None and nbytes * ranks > memory:
        room = f"the memory that this process may use, {byte_size(memory)}"
    elif free is not None and nbytes > free:  # other ranks may have filled theirs
        several, room = "", f"what is left of the memory for this process, {byte_size(free)}"
    else:
        return
    warnings.warn(
        f"a buffer of {byte_size(nbytes)}{several} is larger than {room}\n"
        "  It is created anyway; the system kills a process when memory runs out. Use "
        'buffer="50%" for half of the memory, which all ranks on a machine share, or '
        "Buffer(..., directory=) for a disk.",
        RuntimeWarning,
        stacklevel=depth_in_forebay(),
    )


def warn_of_unfilled_buffer() -> None:
    """Warn that a buffer needs workers."""
    warnings.warn(
        "buffer= has no effect with num_workers=0: no worker fills it\n"
        "  Each batch is made when it is requested. Set num_workers to 1 or more.",
        stacklevel=depth_in_forebay(),
    )
