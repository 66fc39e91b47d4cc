"""What an address finds, where the cluster that Ray remembers is gone.

Ray notes the last cluster of a machine in a folder of its own, and forgets it only when told to.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
from functools import cache
from pathlib import Path

import pytest
from clusters import start_driver
from driving import finish, make_inputs
from ray._private import services

from forebay.errors import OptionError
from forebay.pools import ray_cluster

pytestmark = pytest.mark.usefixtures("no_cluster")


@pytest.fixture
def nobody():
    """Hold an address of this machine where nothing answers."""
    with socket.socket() as held:
        held.bind(("", 0))
        yield f"{services.get_node_ip_address()}:{held.getsockname()[1]}"


@pytest.fixture
def rays_folder(monkeypatch, nobody):
    """Have Ray keep its notes apart from those of others, with that address in them."""
    root = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets need a short path
    (root / "ray").mkdir()
    (root / "ray" / "ray_current_cluster").write_text(nobody)
    monkeypatch.setenv("RAY_TMPDIR", str(root))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield root / "ray"
    shutil.rmtree(root)


@pytest.fixture
def alone(monkeypatch):
    """Hide the clusters that others run on this machine."""
    monkeypatch.setattr(services, "find_gcs_addresses", cache(frozenset))


def joined(address):
    with pytest.raises(OptionError) as caught:
        ray_cluster.join_cluster(address, print)
    return str(caught.value).split("\n")


def test_the_cluster_that_ray_remembers_is_gone(rays_folder, alone, nobody):
    """With "auto" that is said at once; Ray itself would ask there for minutes."""
    first, advice = joined("auto")
    assert first.startswith(f"no Ray cluster answers at {nobody!r}, the address of the last one ")
    assert "on this machine: [Errno 111] Connection refused" in first
    assert "Nothing was started. On the cluster's first node: ray start --head" in advice


def test_there_never_was_a_cluster(rays_folder, alone):
    """With "auto" there has to be one."""
    (rays_folder / "ray_current_cluster").unlink()
    first, advice = joined("auto")
    assert first == "no Ray cluster runs on this machine: address='auto'"
    assert "ray start --head" in advice


@pytest.mark.parametrize("address", [None, "auto"])
def test_the_environment_names_a_cluster_that_is_gone(monkeypatch, alone, nobody, address):
    """No other one is started instead: that one was requested."""
    monkeypatch.setenv("RAY_ADDRESS", nobody)
    first, advice = joined(address)
    assert first.startswith(f"no Ray cluster answers at {nobody!r}, which RAY_ADDRESS names: ")
    assert "Nothing was started" in advice


def test_an_address_that_is_none_says_so(monkeypatch):
    """In Ray's words, with what works without one."""
    first, advice = joined("nonsense")
    assert first.startswith("the Ray cluster at 'nonsense' cannot be joined: ")
    assert "forebay.Ray(address='local') works on this machine alone" in advice


WITHOUT_TOKEN = """
import socket
import forebay

with socket.create_server(("127.0.0.1", 0)) as listening:
    address = "127.0.0.1:%d" % listening.getsockname()[1]
    try:
        forebay.preprocess(print, ["a"], "out", backend=forebay.Ray(address=address))
    except forebay.OptionError as error:
        print(error)
"""


def test_a_missing_token_is_said(tmp_path):
    """Ray's error has no base class in common with its others."""
    setting = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "", "HOME": str(tmp_path)}
    code, out, err = finish(start_driver(None, WITHOUT_TOKEN, tmp_path, **setting))
    assert code == 0, err
    first, advice, _ = out.split("\n")
    assert "cannot be joined: Token authentication is enabled but no authentication token" in first
    assert "the cluster's RAY_AUTH_TOKEN" in advice


ALONE = """
from functools import cache
from pathlib import Path
from ray._private import services
import forebay

services.find_gcs_addresses = cache(frozenset)  # as if no other program ran Ray on this machine

def work(source, out):
    out.file(source.name).write_bytes(source.read_bytes())

here = Path(__file__).parent
print(forebay.preprocess(work, here / "in", here / "out", backend="ray").done)
"""


@pytest.mark.slow
def test_one_is_started_where_the_last_one_is_gone(rays_folder, nobody, tmp_path):
    """As promised, and it is said why."""
    make_inputs(tmp_path / "in", 4)
    code, out, err = finish(start_driver(None, ALONE, tmp_path))
    assert (code, out) == (0, "4\n"), err
    assert (
        f"forebay: no Ray cluster answers at {nobody!r}, the address of the last one on this "
        "machine, "
        "so one was started on this machine: " in err
    )


SHARED = """
from functools import cache
import threading
import time
from ray._private import services
import forebay
import ray

services.find_gcs_addresses = cache(frozenset)  # as if no other program ran Ray on this machine
where = forebay.Ray(address="local", num_cpus=0.25)
counts = []

def one_after_the_other():
    "The first one started the cluster, and ends before the second."
    first, second = (
        forebay.DataLoader(range(count), 4, num_workers=1, backend=where) for count in (8, 400)
    )
    with second:
        with first:
            batches, others = iter(first), iter(second)
            next(others)
            list(batches)
        counts.append(len(list(others)))

def at_the_same_time():
    def load():
        with forebay.DataLoader(range(40), 4, num_workers=1, backend=where) as loader:
            counts.append(len(list(loader)))

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

for load in (one_after_the_other, at_the_same_time):
    load()
    while ray.is_initialized():  # a thread of the last loader's shuts it down
        time.sleep(0.01)
print(counts)
"""


@pytest.mark.slow
def test_a_cluster_that_was_started_ends_with_its_last_loader(tmp_path):
    """The loader that started it may end before others that use it, or start beside them."""
    code, out, err = finish(start_driver(None, SHARED, tmp_path))
    assert (code, out) == (0, "[99, 10, 10, 10]\n"), err
    assert err.count("so one was started on this machine") == 2
