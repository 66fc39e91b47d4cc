"""Which rank this process is, how many share its cores, and whether all load the same."""

from __future__ import annotations

import os
import socket
import threading
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.distributed as dist

from forebay.errors import OptionError
from forebay.options import check_positive, ranks_on_node

# Environment variables with the number of processes and the rank: torchrun and accelerate, srun,
# Open MPI, MPICH.
LAUNCHERS = (
    ("WORLD_SIZE", "RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
)

# After so many seconds, a rank that waits for the others to compare settings says so.
PATIENCE_S = 60.0


class Ranks(NamedTuple):
    """The number of ranks that share the batches, and the rank of this process."""

    world_size: int
    rank: int


def process_group() -> Ranks:
    """Return the ranks of the default process group; a single rank without one."""
    if dist.is_available() and dist.is_initialized():
        return Ranks(dist.get_world_size(), dist.get_rank())
    return Ranks(1, 0)


def ranks_of(
    world_size: int | str | None, rank: int | None, environment: Mapping[str, str] = os.environ
) -> Ranks | None:
    """Return the ranks for a loader's arguments; None without ranks.

    Args:
        world_size: A count; "auto" for the process group's, or else the launcher's; or None.
        rank: From 0 to world_size - 1; None for the process group's, or the launcher's.
    """
    if world_size is None:
        if rank is not None:
            raise OptionError(
                f"rank={rank!r} requires world_size\n"
                "  Nothing was started. Pass world_size= too, or world_size='auto' alone."
            )
        return None
    found = process_group()
    if found.world_size == 1:
        found = _launched(environment) or found
    if world_size == "auto":
        if rank is not None:
            raise OptionError(
                f"rank={rank!r} with world_size='auto', which finds the rank automatically\n"
                "  Nothing was started. Leave rank out, or pass both as numbers."
            )
        return found
    check_positive("world_size", world_size, ", 'auto' or None")
    assert isinstance(world_size, int)
    if rank is None:
        if world_size not in (1, found.world_size):
            raise OptionError(
                f"world_size={world_size} without rank, and this process is one of "
                f"{found.world_size}\n"
                "  Nothing was started. Pass rank=, from 0 to "
                f"{world_size - 1}, or world_size='auto'."
            )
        rank = found.rank if world_size == found.world_size else 0
    if type(rank) is not int or not 0 <= rank < world_size:
        raise OptionError(
            f"rank={rank!r} is not valid with world_size={world_size}; it must be 0 to "
            f"{world_size - 1}"
        )
    return Ranks(world_size, rank)


def _launched(environment: Mapping[str, str]) -> Ranks | None:
    for size_name, rank_name in LAUNCHERS:
        size, rank = environment.get(size_name), environment.get(rank_name)
        if size is None or rank is None:
            continue
        try:
            found = Ranks(int(size), int(rank))
        except ValueError:
            found = Ranks(0, 0)
        if not 0 <= found.rank < found.world_size:
            raise OptionError(
                f"the environment says {size_name}={size!r} and {rank_name}={rank!r}, which is not "
                "a rank\n  Nothing was started. Pass world_size= and rank= as numbers."
            )
        return found
    return None


def ranks_sharing_cores(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks share the cores that this process may use.

    It is one if this process may not use all cores of the machine: the launcher may have divided
    them already.
    """
    is_bound = len(os.sched_getaffinity(0)) < (os.cpu_count() or 1)
    return 1 if is_bound else ranks_on_node(environment)


def check_agreement(ranks: Ranks, facts: Mapping[str, Any]) -> bool:
    """Compare the settings of all ranks over the process group; return whether there is one.

    It costs one all-gather of a few hundred bytes. Where the group has more processes than there
    are ranks (tensor parallelism), each rank must appear equally often.
    """
    group = process_group()
    if group.world_size == 1:
        return False
    mine = (group.rank, f"{socket.gethostname()}:{os.getpid()}", ranks.rank, dict(facts))
    everyone: list[Any] = [None] * group.world_size
    timer = threading.Timer(PATIENCE_S, _warn_of_wait, [group])
    timer.daemon = True
    timer.start()
    try:
        dist.all_gather_object(everyone, mine)
    finally:
        timer.cancel()
        timer.join()  # workers are forked next
    for name, value in facts.items():
        for number, process, _, others in everyone:
            if others.get(name) != value:
                raise OptionError(
                    f"the ranks do not use the same plan: {name}={value!r} here, and "
                    f"{name}={others.get(name)!r} in process {number} ({process})\n"
                    f"  This is process {group.rank} ({mine[1]}). No batch was returned. Make "
                    "the loader with the same arguments on all ranks, and load the same state."
                )
    times = Counter(rank for _, _, rank, _ in everyone)
    wanted, rest = divmod(group.world_size, ranks.world_size)
    wrong = [rank for rank in range(ranks.world_size) if times[rank] != wanted]
    if rest or wrong:
        shown = ", ".join(
            f"process {number} ({process}) has rank {rank}" for number, process, rank, _ in everyone
        )
        raise OptionError(
            f"the {group.world_size} processes are not the {ranks.world_size} ranks of the loader: "
            f"rank {wrong[0] if wrong else 0} appears {times[wrong[0] if wrong else 0]} times\n"
            f"  {shown}.\n"
            "  No batch was returned: some samples would come twice, and others not at all. "
            "Pass each process its own rank, or world_size='auto'."
        )
    return True


def _warn_of_wait(group: Ranks) -> None:
    warnings.warn(
        f"process {group.rank} of {group.world_size} has waited {PATIENCE_S:g} s for the others at "
        "the first batch of a DataLoader with world_size=: all of them have to iterate it. If only "
        "some do, make it there without world_size=; if the others are late, nothing is wrong.",
        stacklevel=2,
    )
