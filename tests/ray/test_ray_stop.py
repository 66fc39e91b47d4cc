"""`ray stop` on the machine of the program, while it works on the cluster that runs there.

Each test has processes, a network and a head of its own, since `ray stop` ends all clusters of a
machine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile

import pytest
from driving import SOURCE

pytestmark = pytest.mark.slow
pytest.importorskip("ray", reason="needs forebay[ray]")

# Starts a cluster and a program, stops the cluster in the midst, and does that once more without.
MACHINE = """
import fcntl, json, os, socket, struct, subprocess, sys, time
from pathlib import Path

here, *stop = sys.argv[1:]
here, ray = Path(here), Path(sys.executable).with_name("ray")
with socket.socket() as any_socket:  # the loopback interface of a new network is down
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 1))

def order(*words):
    done = subprocess.run([ray, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

def lines():
    return len((here / "calls").read_text().split()) if (here / "calls").exists() else 0

codes, called, files = [], [], []
for is_first in (True, False):
    order(
        "start", "--head", "--node-ip-address=127.0.0.1", "--num-cpus=2",
        "--include-dashboard=false", "--object-store-memory=100000000",
    )
    with open(here / "printed", "a") as printed:
        program = subprocess.Popen(
            [sys.executable, here / "program.py"],
            stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, cwd=here,
        )
    if is_first:
        while lines() < 40 and program.poll() is None:
            time.sleep(0.01)
        order("stop", *stop)
    codes.append(program.wait())
    order("stop", "--force")
    called.append(lines())
    files.append(sorted(os.listdir(here / "out")) if (here / "out").exists() else [])
print(json.dumps([codes, called, files]))
"""

WORK = """
import os, sys, time
from pathlib import Path
import forebay

here = str(Path(__file__).parent)

def work(source, out):
    file = os.open(os.path.join(here, "calls"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{source.name}\\n".encode())
    os.close(file)
    time.sleep(0.05)
    out.file(source.name).write_bytes(source.read_bytes())

def run():
    inputs, output = Path(here, "in"), Path(here, "out")
    return forebay.preprocess(work, inputs, output, backend="ray", progress=False)

try:
    print("done:", run().done)
except forebay.WorkerDiedError as error:
    print(error, *error.__notes__, sep="\\n")
    try:
        run()
    except forebay.WorkerDiedError as error:
        print("again:", error, sep="\\n")
    sys.stdout.flush()
    os._exit(7)
"""

LOAD = """
import json, os, sys, time
from pathlib import Path
import torch, forebay

here = Path(__file__).parent

class Squares(torch.utils.data.Dataset):
    "Is larger than what Ray sends with a call."
    def __init__(self):
        self.ballast = bytes(1 << 20)
    def __len__(self):
        return 400
    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.tensor(index ** 2)

loader = forebay.DataLoader(
    Squares(), 4, shuffle=True, seed=0, num_workers=2, backend="ray", buffer="1MB"
)
saved = here / "state.json"
samples = []
if saved.exists():
    samples, state = json.loads(saved.read_text())
    loader.load_state_dict(state)
try:
    for batch in loader:
        samples += batch.tolist()
        (here / "calls").write_text("x\\n" * len(samples))
except forebay.WorkerDiedError as error:
    saved.write_text(json.dumps([samples, loader.state_dict()]))
    print(error)
    sys.stdout.flush()
    os._exit(7)
print("done:", json.dumps(samples))
"""

GONE = (
    "the Ray cluster is gone: Ray was stopped on this machine, or its raylet died, and raylet.out "
    "says why"
)


@pytest.fixture
def stopped(tmp_path):
    """Run a program on a cluster that is stopped, then again on another one.

    It returns the exit statuses, how many lines the file `calls` had after each, the files in the
    folder `out`, and what both printed.
    """
    spaces = ["unshare", "--map-root-user", "--pid", "--fork", "--mount-proc", "--net"]
    if subprocess.run([*spaces, "true"], capture_output=True).returncode:
        pytest.skip("no namespace of processes can be made here")
    # As a user has it who has once called ray.init() with Ray 2.60 or later.
    token = tmp_path / "home" / ".ray" / "auth_token"
    token.parent.mkdir(parents=True)
    token.write_text(64 * "0")

    rays_folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # sockets need a short path

    def stopped(program, *stop):
        (tmp_path / "program.py").write_text(program)
        (tmp_path / "machine.py").write_text(MACHINE)
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("RAY_")
        }
        # The shell waits for those whose parents have ended.
        command = [*spaces, "bash", "-c", '"$@"; exit $?', "_", sys.executable]
        done = subprocess.run(
            [*command, tmp_path / "machine.py", tmp_path, *stop],
            env={
                **environment,
                "HOME": str(token.parents[1]),
                "PYTHONPATH": SOURCE,
                "RAY_TMPDIR": rays_folder,
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_memory_monitor_refresh_ms": "0",
            },
            capture_output=True,
            text=True,
        )
        printed = (tmp_path / "printed").read_text() if (tmp_path / "printed").exists() else ""
        assert done.returncode == 0, done.stderr + printed
        return *json.loads(done.stdout.splitlines()[-1]), printed

    yield stopped
    shutil.rmtree(rays_folder)


@pytest.mark.parametrize("how", [("--grace-period=2",), ("--force",)], ids=["stop", "force"])
def test_a_cluster_that_is_stopped_ends_the_run_in_words(stopped, tmp_path, how):
    """What is done stays and is not done again; another call of the program is refused at once."""
    (tmp_path / "in").mkdir()
    for number in range(300):
        (tmp_path / "in" / f"{number:03}").write_text(f"{number}")
    codes, called, files, printed = stopped(WORK, *how)
    assert codes == [7, 0], printed
    first, again, rest = printed.partition("again:\n")
    assert GONE in first
    assert "Ray cannot connect this program again" in first
    assert "of 300 inputs are done and stay" in first
    assert again
    assert f"{GONE}\n  Nothing was started." in rest
    assert "done: 300" in rest
    assert 0 < len(files[0]) < len(files[1])
    names = (tmp_path / "calls").read_text().split()
    # What was committed is not done again: only what workers had then may be.
    done = {each for each in files[0] if each in names}
    assert not done & set(names[called[0] :])
    assert all((tmp_path / "out" / each).read_text() == f"{int(each)}" for each in set(names))


def test_a_cluster_that_is_stopped_ends_the_loader_in_words(stopped):
    """The program can save the loader's state, and the rest comes from another cluster."""
    codes, _, _, printed = stopped(LOAD, "--grace-period=2")
    assert codes == [7, 0], printed
    assert GONE in printed
    samples = json.loads(printed.rpartition("done: ")[2].splitlines()[0])
    assert sorted(samples) == [number**2 for number in range(400)]
