"""Limits of the flow: of workers, slots, bytes, attempts and time. PURE."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.failures import Failure

# How often in a row workers may be lost, with no answer and no suspect, before the flow gives up.
# Workers that die together count once.
MAX_DEATHS_IN_A_ROW = 10
# How often the worker of a task may end by a signal to all processes before the task is blamed.
MAX_SIGNALLED = 5
# The most tasks that a worker holds to have work for `ahead_s`: each takes memory of its own.
MOST_AHEAD = 1024
# The share of all memory from which on held results are why it runs out.
LARGE_SHARE = 1 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of the flow.

    Attributes:
        num_workers: Workers kept alive while there is work for them; at least 1.
        at_once: Tasks that each worker runs at the same time: the first of those that it holds.
        is_batched: Whether those tasks share one call, so that any of them may be why it ends.
        max_bytes: The most bytes of results being made, ready or delivered; None for no limit.
            One task may always run, whatever its size.
        refill_below: Once full, wait until fewer than this many results are being made, ready
            or delivered before making more: a number, or a share of the number when it was full.
            None refills at once.
        in_memory: Whether results that are held take memory of this machine.
        timeout_s: Seconds that one attempt may take; None for no limit.
        group_s: Seconds of work in one message, if tasks are short.
        ahead_s: Seconds of work that each worker holds, so that it has something to do while this
            process cannot send more; 0 for half of `group_s`, or more.
    """

    num_workers: int
    slots: int
    at_once: int = 1
    is_batched: bool = False
    max_bytes: int | None = None
    refill_below: int | float | None = None
    in_memory: bool = True
    in_order: bool = False
    retries: int = 0
    timeout_s: float | None = None
    group_s: float = 0.0
    ahead_s: float = 0.0
    max_group: int = 1
    lookahead: int = 1
    all_workers: bool = False
    failure_ends_worker: bool = False
    max_suspects: int = 64

    def low_mark(self, most: int) -> int:
        """Return below how many results to make more, of a buffer that holds `most` when full."""
        low = self.refill_below
        return low if isinstance(low, int) else max(int((low or 1.0) * most), 1)

    def timeout_failure(self, stacks: str) -> Failure:
        """Return the failure of a task that exceeded the time limit."""
        words = f"ran past timeout={self.timeout_s:g} s; its worker was killed"
        return Failure("timeout", "SampleTimeoutError", words, stacks)

    def are_filled(self, held_bytes: int, memory: int) -> bool:
        """Return whether held results, and no task, are why a worker was killed for memory.

        Args:
            memory: Bytes that this program may use; 0 if the worker died otherwise.
        """
        return self.in_memory and memory > 0 and held_bytes >= LARGE_SHARE * memory
