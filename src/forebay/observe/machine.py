"""How many cores this process may use, and how long processes of its machine wait for resources."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def usable_cores(proc: Path = PROC, groups: Path = GROUPS) -> float:
    """Return how many cores this process may use: its affinity, and the quotas of its containers.

    Args:
        proc: Where the system describes processes.
        groups: Where it describes control groups, of version 1 or 2.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = float(len(os.sched_getaffinity(0)))
    else:
        cores = float(os.cpu_count() or 1)
    return min([cores, *_quotas(proc, groups)])


def pressure(proc: Path = PROC) -> dict[str, float]:
    """Return the share of the last 10 s in which some process waited for a core, or for a disk.

    Empty where the system does not measure it. It covers the whole machine, so it does not tell
    which process waited.
    """
    found = {}
    for name in ("cpu", "io"):
        with suppress(OSError, ValueError, IndexError):
            line = (proc / "pressure" / name).read_text().splitlines()[0]
            average = line.split("avg10=")[1].split()[0]
            found[f"pressure_{name}"] = float(average) / 100
    return found


def _quotas(proc: Path, groups: Path) -> Iterator[float]:
    """Yield the quotas of the control groups that this process is in, in cores."""
    for folder in group_folders(proc, groups, ("cpu",)):
        quota = _quota(folder)
        if quota is not None:
            yield quota


def group_folders(proc: Path, groups: Path, names: tuple[str, ...]) -> Iterator[Path]:
    """Yield the folders of the control groups that this process is in, and of those around them.

    Args:
        proc: Where the system describes processes.
        groups: Where it describes control groups, of version 1 or 2.
        names: What the controller is called in either version.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            roots = [groups]
        elif shared := set(names) & set(controllers.split(",")):
            roots = [groups / controllers, *(groups / name for name in shared)]
        else:
            continue
        path = Path(group.lstrip("/"))
        # A container sees its own group as the root, whatever the path says.
        for root in roots:
            yield from {root / path, *(root / parent for parent in path.parents), root}


def _quota(folder: Path) -> float | None:
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError):
        limit = int((folder / "cpu.cfs_quota_us").read_text())
        return None if limit <= 0 else limit / int((folder / "cpu.cfs_period_us").read_text())
    return None
