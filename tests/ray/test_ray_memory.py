"""An input that takes all of a node's memory, and Ray's memory monitor, which kills for it."""

from __future__ import annotations

from pathlib import Path

import clusters
import pytest
from clusters import STORE_BYTES, ray, start_cluster, stop_cluster
from driving import calls, make_inputs, published, staged
from ray._private.utils import get_system_memory, get_used_memory

from runs import attempts, run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_cluster")]

# What the input may take before Ray steps in. Other programs of the machine come and go meanwhile,
# so it is much more than they do.
ROOM = 4 << 30
# What it would take at most; the machine has to have that.
MOST = 2 * ROOM


@pytest.fixture
def watched_cluster(monkeypatch):
    """A node of three CPUs, whose memory is soon used up; Ray looks ten times a second."""
    used, total = get_used_memory(), get_system_memory()
    if total - used < MOST + ROOM:
        pytest.skip(f"needs {(MOST + ROOM) >> 30} GB of free memory")
    monitor = {
        "RAY_memory_monitor_refresh_ms": "100",
        "RAY_memory_usage_threshold": f"{(used + ROOM) / total:.4f}",
    }
    for name, value in monitor.items():
        monkeypatch.setenv(name, value)
        monkeypatch.setitem(clusters.QUICK_DEATHS, name, value)
    cluster = start_cluster(0)
    try:
        cluster.add_node(num_cpus=3, object_store_memory=STORE_BYTES)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        stop_cluster(cluster)


def one_is_greedy(folder):
    """Return a work whose first input takes memory until it is killed, while two others run."""
    path, piece = str(folder), 64 << 20

    def work(source, out):
        import os
        import time
        from pathlib import Path

        folder = Path(path)
        file = os.open(folder / "calls", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{source.name}\n".encode())
        os.close(file)
        first = folder / "first"
        if source.stem == "0000":
            while not first.exists():
                if len((folder / "calls").read_text().split()) == 3:
                    (folder / "written").write_text(str(os.getpid()))
                    (folder / "written").rename(first)
                time.sleep(0.01)
            kept = [bytearray(b"x") * piece for _ in range(MOST // piece)]
            raise MemoryError(f"nobody minds {len(kept)} pieces")
        while not first.exists() or Path("/proc", first.read_text()).exists():
            time.sleep(0.01)
        out.file(source.name).write_bytes(source.read_bytes())

    return work


def test_an_input_that_takes_all_memory_is_blamed_and_no_other(watched_cluster, tmp_path):
    """Ray kills its neighbours with it; they are done all the same, and lose no try by it."""
    inputs = make_inputs(tmp_path / "in", 12)
    report = run(one_is_greedy(tmp_path), inputs, tmp_path / "out", retries=0)
    (failure,) = report.failures
    assert Path(failure.source).name == "0000.txt"
    assert failure.message.startswith("Ray killed it because memory ran out: ")
    assert "forebay.Ray(num_cpus=2)" in failure.message
    assert calls(tmp_path).count("0000.txt") == 2, "with others, and alone"
    assert report.done == 11
    assert set(attempts(tmp_path / "out").values()) == {1}
    others = {path.name: path.read_bytes() for path in inputs.iterdir() if path.stem != "0000"}
    assert published(tmp_path / "out") == others
    assert not staged(tmp_path / "out")


def test_one_worker_alone_is_blamed_at_once(watched_cluster, tmp_path):
    """No other worker could have used the memory."""
    inputs = make_inputs(tmp_path / "in", 3)
    (tmp_path / "first").write_text("0")
    report = run(one_is_greedy(tmp_path), inputs, tmp_path / "out", retries=0, num_workers=1)
    assert [Path(each.source).name for each in report.failures] == ["0000.txt"]
    assert sorted(calls(tmp_path)) == ["0000.txt", "0001.txt", "0002.txt"]
    assert ray.is_initialized()
