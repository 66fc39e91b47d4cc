"""Storage as the cause of waits: a bucket, a disk, or what control groups allow. PURE."""

from __future__ import annotations

import math
from dataclasses import replace

from forebay.base.formatting import byte_size, short_number
from forebay.observe.measurements import Fetched
from forebay.observe.recorded_work import SHARED_RATE
from forebay.observe.simulated_loader import (
    BUSY_CORES,
    GAIN,
    Change,
    Claim,
    Finding,
    SimulatedLoader,
)
from forebay.observe.simulation import SimulationResult

# A batch is much longer than others if it takes so many times what they take on average.
MUCH_LONGER = 3.0
# A limit for reading is reached at this share of it: files are opened and decoded in between.
AT_LIMIT = 0.85
# A dataset fits into memory if it takes no more than this share of what is free.
FITTING = 0.8
# A bucket is the limit if requests are under way for so large a share of the time.
BUSY_BUCKET = 0.8


def slow_bucket(simulated: SimulatedLoader, bucket: Fetched) -> Finding | None:
    """Handle a bucket that gives blocks slower than training takes them."""
    recorded, setup = simulated.recorded, simulated.setup
    if bucket.busy_s < BUSY_BUCKET * bucket.elapsed_s:
        return None
    if not (setup.samples and setup.batch_size and bucket.total and recorded.step_s > 0.0):
        return None
    step = bucket.total / setup.samples * setup.batch_size * bucket.readers / recorded.step_s
    now, needed = bucket.on_disk / bucket.total, 1.0 - bucket.rate / step
    size = math.ceil(needed * bucket.total / 1e9)
    result = SimulationResult(1.0 / recorded.step_s, 0.0, 0.0)
    return Finding(
        "storage",
        f"The bucket gives {byte_size(bucket.rate)}/s, and {setup.consumer} could use "
        f"{byte_size(step * (1.0 - now))}/s, with {now:.0%} of the dataset on disk.",
        Change({}, result, setup.num_workers),
        f"Keep {math.ceil(needed * 100)}% or more of it there, from the second epoch on: "
        f'open it with disk="{size}GB", directory=...',
        claims=(Claim(step * (1.0 - now), bucket.rate), Claim(needed, now)),
    )


def fixed_storage(simulated: SimulatedLoader) -> Finding | None:
    """Handle storage that gives no more, whatever the number of workers is."""
    recorded = simulated.recorded
    reason = _reason_of_fixed_rate(simulated)
    if reason is None:
        return None
    why = (
        f"Workers wait for storage {recorded.storage_share:.0%} of the time that they spend on "
        f"batches, and more of them would not help: {reason}."
    )
    return Finding("storage", f"{why}{read_rates(simulated)}", remedy=_faster_storage(simulated))


def uneven_storage(simulated: SimulatedLoader) -> Finding | None:
    """Handle storage whose rate changes, for example as the page cache fills."""
    recorded, longest = simulated.recorded, max(simulated.recorded.work.batch_s)
    why = (
        f"Workers wait for storage {recorded.storage_share:.0%} of the time that they spend on "
        f"batches, and some batches much longer than others.{read_rates(simulated)}"
    )
    usual = max(MUCH_LONGER * recorded.batch_s, recorded.step_s)
    found = Finding("storage", why, is_expected=False, claims=(Claim(longest, usual),))
    change = simulated.more_workers()
    if (
        change is None
        or _reason_of_fixed_rate(simulated) is not None
        or simulated.setup.most_workers is not None
    ):
        return replace(found, remedy=_faster_storage(simulated))
    return replace(found, change=simulated.tried_out(change))


def _reason_of_fixed_rate(simulated: SimulatedLoader) -> str | None:
    """Return why more workers would get no more from storage; None if that is not known."""
    recorded, setup = simulated.recorded, simulated.setup
    if recorded.waits_for_storage and (simulated.slowdown or 0.0) >= SHARED_RATE:
        return "the more of them wait, the longer each takes, so it gives a fixed rate"
    limit = setup.read_limit
    if limit is not None and recorded.is_reading and recorded.read_rate >= AT_LIMIT * limit:
        return f"a control group limits reading to {byte_size(limit)}/s"
    now = max(recorded.rate, setup.tried.get(setup.num_workers, 0.0))
    more = {count: rate for count, rate in setup.tried.items() if count > setup.num_workers}
    if more and max(more.values()) < GAIN * now:
        count = max(more)
        return (
            f"{count} were tried, and made {short_number(more[count])} batches/s instead of "
            f"{short_number(now)}"
        )
    used_s = recorded.cpu_s + simulated.trainer_cpu_s
    is_limit = BUSY_CORES * (setup.cores or math.inf) < GAIN * recorded.rate * used_s
    if recorded.is_reading and is_limit:
        return f"reading takes processor time, and the {simulated.cores} allow hardly more"
    return None


def read_rates(simulated: SimulatedLoader) -> str:
    """Return what is read from disks, and what training needs, as a sentence or nothing."""
    recorded = simulated.recorded
    if not recorded.is_reading:
        return ""
    needed, given = recorded.read_bytes / max(recorded.step_s, 1e-9), recorded.read_rate
    if not Claim(needed, given).holds:
        return ""
    rates = f"{byte_size(given)}/s, and {simulated.setup.consumer} could use {byte_size(needed)}/s"
    return f" Storage gives {rates}."


def _faster_storage(simulated: SimulatedLoader) -> str:
    recorded, setup = simulated.recorded, simulated.setup
    remedy = "Read less, or from faster storage: forebay.cache() on a local disk, for example"
    if not recorded.is_reading or None in (
        setup.samples,
        setup.batch_size,
        setup.free_memory,
    ):
        return remedy
    nbytes = recorded.read_bytes / setup.batch_size * setup.samples  # type: ignore[operator]
    size, free = byte_size(nbytes), byte_size(setup.free_memory or 0)
    if nbytes <= FITTING * (setup.free_memory or 0):
        return (
            f"All samples together are about {size} and fit into the {free} of free memory, "
            "from which the next epochs are read. For the first one: "
            f"{remedy[:1].lower()}{remedy[1:]}"
        )
    if not Claim(nbytes, setup.free_memory or 0).holds:
        return remedy
    return (
        f"All samples together are about {size}, and {free} of memory are free, so they are "
        f"read again in each epoch. {remedy}, with samples that are smaller"
    )
