"""The limits of the flow, as one frozen record. PURE."""

from __future__ import annotations

from dataclasses import dataclass

# If a task has run for this long, the tasks behind it are given to other workers, and its worker
# gets no new ones until it has returned them. It is longer than GIVE_BACK_S, so that the worker's
# own clock makes it return them.
RECLAIM_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of the flow.

    Attributes:
        num_workers: Workers kept alive while there is work for them; at least 1.
        slots: The most results being made, ready or held by the consumer. Tasks that only one
            worker may run need a slot each: one worker's task could otherwise wait for another's.
        max_bytes: The most bytes of results being made, ready or delivered; None for no limit.
            One task may always run, whatever its size.
        refill_below: Once full, wait until fewer than this many results are being made, ready
            or delivered before making more: a number, or a share of the number when it was full.
            None refills at once.
        in_order: Deliver in the order of the source.
        retries: How often a failed task is tried again.
        timeout_s: Seconds that one attempt may take; None for no limit.
        group_s: Seconds of work to send in one message to a worker, approximately; 0 sends tasks
            one by one.
        max_group: The most tasks in one message.
        lookahead: Tasks to take from the source in advance; 0 to take none.
        all_workers: Start every worker at once, even if there is little work.
        failure_ends_worker: Whether a final failure also fails the later tasks that only the same
            worker may run: it reads a stream, and cannot continue after that point.
        max_suspects: How many suspects may wait before each is tried alone.
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
