"""Describe the machine and the versions that a table was measured with."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

LIBRARIES = (
    *("forebay", "torch", "pyarrow", "joblib", "datasets", "litdata", "webdataset", "torchdata"),
    *("spdl-core", "grain", "ray"),
)


def describe(folder: Path) -> str:
    """Return the machine, the file system under `folder`, and the versions, in a few lines."""
    load = ", ".join(f"{each:.2f}" for each in os.getloadavg())
    return "\n".join(
        [
            f"machine    {processor()}, {len(os.sched_getaffinity(0))} cores; load before: {load}",
            f"kernel     {platform.release()}; file system {_file_system(folder)}",
            f"python     {platform.python_version()}",
            "versions   "
            + ", ".join(f"{name} {version}" for name, version in versions(*LIBRARIES).items()),
        ]
    )


def versions(*names: str) -> dict[str, str]:
    """Return the installed version of each library."""
    return {name: _version(name) for name in names}


def _version(name: str) -> str:
    if name == "forebay":
        import forebay

        return forebay.__version__
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def processor() -> str:
    """Return the name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(folder: Path) -> str:
    """Return the type of the file system that a folder is on: that of the longest mount point."""
    best = ("", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split()
        if folder.resolve().is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, kind)
    return best[1]
