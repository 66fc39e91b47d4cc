"""Usable cores and pressure, from made-up folders of the system."""

from __future__ import annotations

import os

import pytest

from forebay.observe.machine import pressure, usable_cores

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
