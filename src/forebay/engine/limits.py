"""What the flow may do, as one frozen record. PURE."""

from __future__ import annotations

from dataclasses import dataclass

# A worker whose task took longer than this returns the tasks it holds after that one.
GIVE_BACK_S = 0.2
# A worker whose task has run for this long loses what it holds behind it to the others, and gets
# nothing new until it has given that back. It must be longer than GIVE_BACK_S, so that the worker
# knows by its own clock that it has to.
RECLAIM_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the flow may do.

    Attributes:
        num_workers: Workers kept alive while there is work for them; at least 1.
        slots: Results being made, ready or held by the consumer, at most. Tasks that only one
            worker may run need a slot each: one worker's task could otherwise wait for another's.
        max_bytes: Bytes of results being made, ready or delivered, at most; None for no limit.
            One task may always run, however large.
        refill_below: Once full, wait until fewer than this many results are being made, ready
            or delivered before making more: a number, or a share of what there was when it was
            full. None refills at once.
        in_order: Deliver in the order of the source.
        retries: How often a failed task is tried again.
        timeout_s: Seconds one try may take; None for no limit.
        group_s: Seconds of work to aim at in one message to a worker; 0 sends tasks singly.
        max_group: Tasks in one message, at most.
        lookahead: Tasks to hold queued, taken from the source in advance; 0 to ask for none.
        all_workers: Start every worker at once, however little work there is.
        failure_ends_worker: Whether a task that fails for good takes along the tasks behind it that
            only the same worker may run: it reads a stream, and cannot get past that point.
        max_suspects: How many suspects may wait before they are tried, alone.
    """

    num_workers: int
    slots: int
    max_bytes: int | None = None
    refill_below: int | float | None = None
    in_order: bool = False
    retries: int = 0
    timeout_s: float | None = None
    group_s: float = 0.0
    max_group: int = 1
    lookahead: int = 1
    all_workers: bool = False
    failure_ends_worker: bool = False
    max_suspects: int = 64
