"""`ray.shutdown()`, called by the user while a loader is fed from there."""

from __future__ import annotations

import pytest
from clusters import STORE_BYTES, start_cluster, start_driver, stop_cluster, until, zygotes
from driving import finish, make_inputs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]

LOADER = """
import threading, time
from pathlib import Path
import ray, torch, forebay

here = Path(__file__).parent
ray.init(log_to_driver=False)

class Held(torch.utils.data.Dataset):
    "From some sample on they wait until they are let go."
    def __len__(self): return 400
    def __getitem__(self, index):
        while index >= 40 and not (here / "go").exists():
            (here / "held").touch()
            time.sleep(0.01)
        return torch.full((3000,), float(index))

loader = forebay.DataLoader(Held(), 4, num_workers=2, backend="ray", seed=1, buffer=buffer)
"""

BETWEEN = """
batches = 0
try:
    for batch in loader:
        batches += 1
        if batches == 4:
            ray.shutdown()
            (here / "go").touch()
except forebay.WorkerDiedError as error:
    print(error)
    print(ray.is_initialized(), 4 <= batches < 100)
loader.close()
"""

WAITING = """
def leave():
    while not (here / "held").exists():
        time.sleep(0.01)
    ray.shutdown()

threading.Thread(target=leave).start()
try:
    print(len(list(loader)))
except forebay.WorkerDiedError as error:
    print(error)
    print(ray.is_initialized(), True)
(here / "go").touch()
loader.close()
"""

AGAIN = """
state = loader.state_dict()
loader = forebay.DataLoader(Held(), 4, num_workers=2, backend="process", seed=1)
loader.load_state_dict(state)
print(state["batch"], len(list(loader)))
"""


@pytest.mark.parametrize("buffer", [None, "1MB"], ids=["no buffer", "buffer"])
@pytest.mark.parametrize("when", [BETWEEN, WAITING], ids=["between batches", "while waiting"])
def test_leaving_the_cluster_ends_the_loader(cluster, when, buffer, tmp_path):
    """With an error that says so; nothing hangs or joins it again, and the rest is made here."""
    source = f"buffer = {buffer!r}\n" + LOADER + when + AGAIN
    code, out, err = finish(start_driver(cluster, source, tmp_path))
    assert code == 0, err
    first, *advice, state, rest = out.splitlines()
    assert first == "the Ray cluster is gone: Ray was shut down"
    assert "Make the same call again, on a cluster or on this machine." in advice[-1]
    assert state == "False True"
    made, left = map(int, rest.split())
    assert made + left == 100
    until(lambda: not zygotes())


MANY = """
import threading, time
from pathlib import Path
import ray, forebay

def work(source, out):
    out.file(source.name).write_bytes(source.read_bytes())

here = Path(__file__).parent
for turn in range(6):
    output = here / f"out{turn}"
    ray.init(log_to_driver=False)
    def leave():
        while not any(output.glob("*.txt")):
            time.sleep(0.001)
        ray.shutdown()
    leaving = threading.Thread(target=leave)
    leaving.start()
    try:
        forebay.preprocess(work, here / "in", output, backend="ray", progress=False)
    except forebay.WorkerDiedError as error:
        print(str(error).splitlines()[0])
    leaving.join()
"""


def test_the_process_outlives_leaving_the_cluster(cluster, tmp_path):
    """However much is under way: what asks something of Ray just then would end the process."""
    make_inputs(tmp_path / "in", 10_000)
    code, out, err = finish(start_driver(cluster, MANY, tmp_path))
    assert code == 0, err
    assert out.splitlines() == 6 * ["the Ray cluster is gone: Ray was shut down"]
    until(lambda: not zygotes())


JOINED = """
import os, threading, time
from pathlib import Path
import ray, forebay

here = Path(__file__).parent
ray.init(log_to_driver=False)

class Numbers:
    "On a node that joins later it takes until it is let go to load them."
    def __len__(self): return 400
    def __getitem__(self, index): return index
    def __getstate__(self): return {"here": here}
    def __setstate__(self, state):
        seen = state["here"] / os.environ["RAY_RAYLET_PID"]
        if (state["here"] / "begun").exists() and not seen.exists():
            (state["here"] / "checked").touch()
            while not (state["here"] / "go").exists():
                time.sleep(0.01)
        seen.touch()

loader = forebay.DataLoader(Numbers(), 4, num_workers=1, backend="ray")
batches = iter(loader)
next(batches)
(here / "begun").touch()
monitor = next(each for each in threading.enumerate() if each.name == "forebay-monitor")
while not (here / "checked").exists():
    time.sleep(0.01)
loader.close()
ray.shutdown()
monitor.join()
print(ray.is_initialized())
(here / "go").touch()
"""


def test_no_check_of_a_node_joins_the_cluster_again(tmp_path, shared):
    """A node that joins is being checked when the loader is closed, and Ray shut down."""
    shared.stop()
    own = start_cluster(1)
    try:
        driver = start_driver(own, JOINED, tmp_path)
        until((tmp_path / "begun").exists)
        own.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        code, out, err = finish(driver)
    finally:
        stop_cluster(own)
    assert (code, out, err.count("a node that joined")) == (0, "False\n", 0), err
