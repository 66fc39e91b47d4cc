"""Four nodes, of which one is lost and one more joins: nothing is lost, doubled or different."""

from __future__ import annotations

from collections import Counter

import pytest
from clusters import until
from driving import calls, make_inputs, published, staged
from test_ray_deaths import Threaded, add_node, cluster_of, last_of, raylet_of

from runs import attempts, run, table

# What is lost with a node, test_ray_deaths shows on two.
pytestmark = [pytest.mark.full, pytest.mark.usefixtures("no_cluster")]
COUNT, HELD = 120, 40


def gated(folder):
    """Return a work that copies its input; those from number HELD on wait for "go"."""
    path = str(folder)

    def work(source, out):
        import os
        import time
        from pathlib import Path

        file = os.open(Path(path, "calls"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{source.name}\n".encode())
        os.close(file)
        if raylet := os.environ.get("RAY_RAYLET_PID"):
            Path(path, f"at {raylet}").touch()
        body = source.read_bytes()
        out.file(source.name).write_bytes(body)
        while int(source.stem) >= HELD and not Path(path, "go").exists():
            time.sleep(0.01)
        return {"bytes": len(body)}

    return work


def run_with_a_loss(folder, work):
    """Run on four nodes; kill one that has inputs under way, and add one, which gets some."""
    with cluster_of(4) as cluster:
        call = Threaded(lambda: run(work, folder / "in", folder / "ray", retries=0))
        until(lambda: len(calls(folder)) >= HELD + 4)  # each of the four holds one
        cluster.remove_node(last_of(cluster), allow_graceful=False)
        joined = raylet_of(add_node(cluster))
        until((folder / f"at {joined}").exists)
        (folder / "go").touch()
        report = call.end()
    called = Counter(calls(folder))
    assert (report.done, report.failed) == (COUNT, 0)
    assert len(called) == COUNT
    assert set(attempts(folder / "ray").values()) == {1}
    assert any(count > 1 for count in called.values()), "what the lost node had is done again"
    assert not staged(folder / "ray")


def test_files_and_table_are_those_of_a_local_run(tmp_path):
    """To the last byte, though one of four nodes was killed and another one joined."""
    inputs = make_inputs(tmp_path / "in", COUNT, lines=2)
    run_with_a_loss(tmp_path, gated(tmp_path))
    run(gated(tmp_path), inputs, tmp_path / "here", backend="process", num_workers=2)
    assert published(tmp_path / "ray") == published(tmp_path / "here")
    assert table(tmp_path / "ray") == table(tmp_path / "here")
