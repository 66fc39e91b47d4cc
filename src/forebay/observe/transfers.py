"""Counts of the batches that were copied to a device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Transfers:
    """What was copied so far. One thread at a time changes it.

    Attributes:
        batches: Number of batches whose copy was started.
        nbytes: Bytes of these.
        seconds: Seconds that the copies took on the device.
        staged_bytes: Bytes that were first copied to page-locked memory.
        pinned_bytes: Bytes of the batches' own memory that are page-locked now.
        refused: Batches for which the device had no memory.
        reason: Why not all of the batches' memory is page-locked, if something refused it.
    """

    batches: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    staged_bytes: int = 0
    pinned_bytes: int = 0
    refused: int = 0
    reason: str | None = None
