"""How much to make ahead: `forebay.Buffer`, and what `buffer=` may be instead of one."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from dataclasses import dataclass

from forebay.errors import OptionError

# Where only a size is given, refilling begins when this share of a full buffer is left.
REFILL_SHARE = 0.8

# A buffer that is bounded by bytes alone holds no more batches than this.
MOST_BATCHES = 1 << 20

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """How many batches a loader makes ahead of the trainer.

    Workers fill it to the high mark, rest, and begin again below the low mark; the trainer does not
    take part in that.

    Attributes:
        max_bytes: High mark: bytes of batches that are ready or being made, as a number or a text
            such as "30GB" (10^9) or "30GiB" (2^30). None: no limit by bytes.
        max_batches: High mark: batches that are ready or being made. None: no limit by number.
        refill_below: Low mark: once full, rest until fewer batches than this are ready or being
            made. None: 80 % of what there was when it was full.
        directory: A folder on whose disk the buffer is kept, in one file without a name; None
            keeps it in memory. Batches of up to 16 KiB stay in memory, and so does what is no
            tensor, array or other large block of bytes.

    Raises:
        OptionError: A mark is impossible, or both high marks are missing.
    """

    max_bytes: int | str | None = None
    max_batches: int | None = None
    refill_below: int | None = None
    directory: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        """Check the marks."""
        if self.max_bytes is None and self.max_batches is None:
            raise OptionError("Buffer() needs max_bytes or max_batches: how much is it to hold?")
        if self.max_bytes is not None:
            object.__setattr__(self, "max_bytes", parse_bytes(self.max_bytes))
        for name in ("max_batches", "refill_below"):
            value = getattr(self, name)
            if value is not None and not (type(value) is int and value > 0):
                raise OptionError(f"{name}={value!r} is not possible; it takes 1, 2, 3, … or None")
        if None not in (self.max_batches, self.refill_below) and (
            self.refill_below > self.max_batches  # type: ignore[operator]
        ):
            raise OptionError(
                f"refill_below={self.refill_below} is above max_batches={self.max_batches}\n"
                "  The low mark has to be below the high mark, such as 800 below 1000."
            )
        if self.directory is not None and not os.path.isdir(self.directory):
            raise OptionError(
                f"directory={os.fspath(self.directory)!r} is no folder\n"
                "  Nothing was started. Make it first, on a disk with room for the buffer."
            )

    def low_mark(self) -> int | float:
        """Return the low mark: a number of batches, or a share of what there was when full."""
        return REFILL_SHARE if self.refill_below is None else self.refill_below

    @classmethod
    def of(cls, buffer: int | str | Buffer | None) -> Buffer | None:
        """Return what the `buffer` argument means."""
        if buffer is None or isinstance(buffer, Buffer):
            return buffer
        return cls(max_bytes=buffer)


def warn_of_full_disk(directory: str | os.PathLike[str], reason: str, nbytes: int) -> None:
    """Tell the user that a batch did not fit on the buffer's disk."""
    folder = os.fspath(directory)
    try:
        free = f"{shutil.disk_usage(folder).free:,} bytes are free there"
    except OSError as error:
        free = str(error)
    warnings.warn(
        f"the buffer's disk has no room: directory={folder!r}, {reason}\n"
        f"  A batch of {nbytes:,} bytes did not fit; {free} now.\n"
        "  It was kept in memory instead, and so is every further one that does not fit; no batch "
        "is lost, and this is said once.\n"
        "  Make room, name a larger disk as directory=, or lower max_bytes=.",
        RuntimeWarning,
        stacklevel=3,
    )


def parse_bytes(size: int | str) -> int:
    """Return a number of bytes written as a number, or as a text such as "30GB".

    Raises:
        OptionError: It is neither, or not above zero.
    """
    value = -1.0
    if isinstance(size, int) and not isinstance(size, bool):
        value = size
    elif isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        if match and match[2].upper() in _UNITS:
            value = float(match[1]) * _UNITS[match[2].upper()]
    if value < 1:
        raise OptionError(
            f"buffer={size!r} is no size; it takes bytes as a number, or a text such as "
            "'800MB', '30GB' or '30GiB'"
        )
    return int(value)
