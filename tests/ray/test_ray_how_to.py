"""The how-to about clusters is true: its code runs on one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from documents import program

ROOT = Path(__file__).parents[2]
HOW_TO = ROOT / "docs" / "how-to" / "cluster.md"


@pytest.mark.slow
@pytest.mark.usefixtures("no_cluster")
def test_the_demo_on_a_cluster_finds_nothing_different(tmp_path):
    """The command of `make demo-ray`; no other cluster is there meanwhile."""
    done = subprocess.run(
        [sys.executable, "examples/demo_ray.py", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "metadata.parquet: identical, byte for byte" in done.stdout
    local, there = (tmp_path / name / "metadata.parquet" for name in ("local", "ray"))
    assert local.read_bytes() == there.read_bytes()


@pytest.mark.slow
def test_the_code_of_the_how_to_runs_on_a_cluster(cluster, tmp_path):
    """Every Python block runs, in order, as a script of its own on a cluster of two nodes."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    script = tmp_path / "cluster_md.py"
    script.write_text(program(HOW_TO.read_text(encoding="utf-8")), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "10 done, 0 failed" in done.stdout
    assert "was started on this machine" not in done.stderr
    assert len(list((tmp_path / "both").glob("*.flac"))) == 24
