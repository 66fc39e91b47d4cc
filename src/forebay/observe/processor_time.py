"""What the processor time of workers is spent on, and what helps. PURE.

page faults     memory that is taken from the system, which clears it first; mapped files
system calls    reading from the page cache, opening files, starting programs
threads         of libraries, beside the one that runs the user's code
"""

from __future__ import annotations

from forebay.base.formatting import duration

# The system is the cause if it takes this share of the processor time.
SYSTEM_SHARE = 0.5
# A page fault takes less: 1 to 8 us were measured, and pages of 2 MiB take longer. Where there are
# fewer faults, the system does something else.
LONGEST_FAULT_S = 200e-6


def system_time(
    system_s: float, cpu_s: float, faults: float, *, of: str, keeps_freed: bool
) -> tuple[str, str] | None:
    """Return what the system did in most of workers' processor time, and a remedy, or None."""
    if system_s < SYSTEM_SHARE * cpu_s or cpu_s <= 0.0:
        return None
    took = (
        f"The system takes {min(system_s / cpu_s, 1.0):.0%} of the workers' processor time, "
        f"{duration(system_s)} {of}"
    )
    if system_s > LONGEST_FAULT_S * faults:
        return (
            f"{took}, for calls such as reading and opening files or starting programs.",
            "Read fewer and larger parts, and keep files open; forebay.cache() has samples in "
            "large files that are mapped",
        )
    why = (
        f"{took}, for {faults:,.0f} page faults: memory that was given back to the system is taken "
        "and cleared again, or a mapped file is read."
    )
    if keeps_freed:
        return (
            why,
            "Reuse arrays, for example with out=, or make each smaller than 32 MiB: a worker keeps "
            "the memory of those for the next ones, unless LD_PRELOAD loads another allocator",
        )
    return (
        why,
        "Use workers that are processes: they keep the memory of arrays below 32 MiB for the next "
        "ones. Or reuse arrays, for example with out=",
    )
