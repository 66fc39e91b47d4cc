"""Usable cores, pressure and storage: of made-up folders of the system, and of this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.base import machine
from forebay.base.machine import pressure, usable_cores
from kit.control_groups import memory_group

ALL = len(os.sched_getaffinity(0))


def system(folder, groups, files):
    """Create the files that describe a process's control groups; return the two folders."""
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "self" / "cgroup").write_text(groups)
    for name, text in files.items():
        path = folder / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "proc", folder / "groups"


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 0.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, ALL),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "25000 100000"}, 0.25),
        # What a container sees as the root is another group than its path says.
        ("0::/elsewhere\n", {"cpu.max": "50000 100000\n"}, 0.5),
        (
            "3:cpuset:/\n2:cpu,cpuacct:/a\n",
            {
                "cpu,cpuacct/a/cpu.cfs_quota_us": "50000\n",
                "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        ("1:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1\n"}, ALL),
        ("1:cpu:/a\n", {}, ALL),
        ("", {}, ALL),
        ("1:memory:/a\n", {"cpu.max": "1000 100000"}, ALL),
    ],
)
def test_quotas_of_control_groups_count(tmp_path, groups, files, cores):
    """Of versions 1 and 2, of the process's group and those above it."""
    assert usable_cores(*system(tmp_path, groups, files)) == cores


def test_a_system_without_control_groups_has_its_affinity(tmp_path):
    """Nothing is readable."""
    assert usable_cores(tmp_path / "proc", tmp_path / "groups") == ALL


def test_pressure_is_reported_where_it_is(tmp_path):
    """A share of the last ten seconds; nothing without the file, or with an odd one."""
    assert pressure(tmp_path) == {}
    folder = tmp_path / "pressure"
    folder.mkdir()
    (folder / "cpu").write_text("some avg10=12.50 avg60=1.00 avg300=0.00 total=1\n")
    (folder / "io").write_text("odd\n")
    assert pressure(tmp_path) == {"pressure_cpu": 0.125}


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/\n", {"io.max": "8:0 rbps=2000 wbps=max riops=max wiops=max\n"}, 2000),
        ("0::/\n", {"io.max": "8:0 rbps=max wbps=500 riops=max wiops=max\n"}, None),
        ("0::/a\n", {"a/io.max": "8:0 rbps=max\n8:16 rbps=9\n", "io.max": "8:0 rbps=8\n"}, 8),
        ("4:blkio:/a\n", {"blkio/a/blkio.throttle.read_bps_device": "8:0 70\n8:16 60\n"}, 60),
        ("4:blkio:/a\n", {"blkio/a/blkio.throttle.read_bps_device": ""}, None),
        ("0::/\n", {"io.max": "odd\n"}, None),
        ("", {}, None),
    ],
)
def test_limits_for_reading_are_the_lowest_of_the_control_groups(tmp_path, groups, files, limit):
    """Of versions 1 and 2, and of any disk."""
    assert machine.read_limit(*system(tmp_path, groups, files)) == limit


MIB = 1 << 20
# Of a group that limits its processes to 200 MiB and has used 90, 20 of them for files.
V2 = {"memory.max": f"{200 * MIB}", "memory.current": f"{90 * MIB}"}
V2["memory.stat"] = f"anon {70 * MIB}\nfile {25 * MIB}\nshmem {5 * MIB}\n"
V1 = {"memory.limit_in_bytes": f"{200 * MIB}", "memory.usage_in_bytes": f"{90 * MIB}"}
V1["memory.stat"] = f"cache 1\ntotal_cache {25 * MIB}\ntotal_shmem {5 * MIB}\n"
NO_LIMIT = {"memory.limit_in_bytes": str(2**63 - 4096)}


def within(folder, files):
    return {f"{folder}{name}": text for name, text in files.items()}


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/\n", V2),
        ("0::/job/step\n", {**within("job/", V2), "job/step/memory.max": "max"}),
        ("0::/elsewhere\n", V2),
        ("4:memory:/slurm/job_1\n", {**within("memory/slurm/job_1/", V1)}),
        ("4:memory:/slurm/step\n", {**within("memory/slurm/", V1), **within("memory/", NO_LIMIT)}),
    ],
)
def test_the_memory_of_control_groups_counts(tmp_path, groups, files):
    """Of both versions, nested, and as a container sees its own; cached files do not count."""
    folders = system(tmp_path, groups, files)
    (folders[0] / "meminfo").write_text(f"MemAvailable: {1 << 40} kB\n")
    assert machine.usable_memory(*folders) == 200 * MIB
    assert machine.free_memory(*folders) == 130 * MIB


def test_without_a_limit_the_memory_is_the_machines(tmp_path):
    """An unlimited group, and a system without any."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    unlimited = system(tmp_path / "a", "4:memory:/\n", within("memory/", NO_LIMIT))
    assert machine.usable_memory(*unlimited) == whole
    none = system(tmp_path / "b", "", {})
    assert machine.usable_memory(*none) == whole
    assert machine.free_memory(*none) is None


@pytest.fixture
def small_group():
    """A real control group of 256 MiB, as its file that takes processes."""
    with memory_group(256 * MIB) as processes:
        yield processes


HALF = """
import os, sys
open(sys.argv[1], "w").write(str(os.getpid()))
from forebay.buffer import buffer_of
print(buffer_of("50%").nbytes)
buffer_of("200MB")
buffer_of("300MB")
"""


def test_half_of_the_memory_is_half_of_the_control_groups(small_group):
    """In a real one, which is not the root; a buffer that cannot fit is warned of at once."""
    command = [sys.executable, "-c", HALF, str(small_group)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout == f"{128 * MIB}\n"
    assert run.stderr.count("RuntimeWarning") == 1
    assert (
        "a buffer of 300 MB is larger than the memory that this process may use, 268 MB"
        in run.stderr
    )


def test_memory_for_files_is_what_is_available(tmp_path):
    """Nothing without the file."""
    assert machine.memory_for_files(tmp_path) is None
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  3 kB\n")
    assert machine.memory_for_files(tmp_path) == 3072


def test_what_this_thread_reads_from_storage_is_counted(tmp_path):
    """As the system counts it for the process; files in memory are not read from storage."""

    def of_process():
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["read_bytes"])

    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before, process_before = machine.read_bytes(), of_process()
    path.read_bytes()
    read = machine.read_bytes() - before
    if of_process() - process_before < 1 << 20:
        pytest.skip("this file system keeps files in memory")
    assert read >= 1 << 20
    path.read_bytes()
    assert machine.read_bytes() - before == read


def test_the_time_that_cores_are_idle_only_grows():
    """By less than a second each second."""
    first = machine.cores_idle_s()
    assert first is not None
    assert first <= machine.cores_idle_s()
