"""What every node has to prove before it gets work, with one that sees other folders.

That node runs in a mount namespace of its own, where an empty file system lies over some folders,
and one is read-only.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from clusters import STORE_BYTES, ray, until
from driving import make_inputs, published
from works import copy

import forebay
from forebay.errors import OptionError, OutputError
from forebay.pools import ray_nodes
from forebay.pools.ray_cluster import Node
from forebay.pools.ray_nodes import NodeCheck, NodeFacts
from runs import run


def may_mount():
    """Return whether this machine lets us have a mount namespace."""
    words = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    try:
        return subprocess.run(words, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


needs_mounts = pytest.mark.skipif(not may_mount(), reason="needs the right to mount")


class OddNode:
    """A node of the cluster that does not see some folders, and may not write to others."""

    def __init__(self, cluster, hidden=(), read_only=()):
        lines = [f"mount -t tmpfs none '{each}'" for each in hidden]
        for each in read_only:
            lines += [f"mount --bind '{each}' '{each}'", f"mount -o remount,ro,bind '{each}'"]
        start = (
            f"exec '{sys.executable}' -m ray.scripts.scripts start --address={cluster.address} "
            f"--num-cpus=1 --object-store-memory={STORE_BYTES} --block"
        )
        before = nodes()
        self._process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-ec", "\n".join([*lines, start])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        (self.id,) = until(lambda: nodes() - before)
        self.mark = f"({self.id[:8]})"

    def end(self):
        os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait(180)
        until(lambda: self.id not in nodes())


def nodes():
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders with inputs, outputs and code; the odd node sees some of them."""
    root = tmp_path_factory.mktemp("folders")
    for name in ("own", "read_only", "site-packages"):
        (root / name).mkdir()
    make_inputs(root / "in", 4)
    make_inputs(root / "hidden", 4)
    (root / "site-packages" / "toolbox_of_tests.py").write_text(
        "def copy(source, out):\n    out.file(source.name).write_bytes(source.read_bytes())\n"
    )
    return root


@pytest.fixture(scope="module")
def odd(cluster, folders):
    """The odd node, for the tests that need it."""
    hidden = [folders / name for name in ("own", "hidden", "site-packages")]
    node = OddNode(cluster, hidden, [folders / "read_only"])
    yield node
    node.end()


def refusal(kind, work, inputs, output):
    """Return what a run is refused with; nothing may have been made."""
    with pytest.raises(kind) as caught:
        run(work, inputs, output)
    assert not published(output)
    assert not list(output.rglob("node-check-*"))
    return str(caught.value)


@pytest.mark.slow
@needs_mounts
def test_an_output_folder_of_a_nodes_own_is_refused(folders, odd):
    """It names the node, and says what to use."""
    text = refusal(OutputError, copy, folders / "in", folders / "own" / "out")
    first, rest = text.split("\n", 1)
    assert re.match(r"node .* does not see the output folder '.*/own/out/\.forebay'$", first)
    assert odd.mark in first
    assert "(NFS, Lustre, …) at the same path, or a bucket: output='s3://bucket/folder'." in rest


@pytest.mark.slow
@needs_mounts
def test_an_output_folder_that_a_node_may_not_write_to_is_refused(folders, odd):
    """With what the node's system said."""
    text = refusal(OutputError, copy, folders / "in", folders / "read_only" / "out")
    assert odd.mark in text.splitlines()[0]
    assert "cannot write to the output folder" in text
    assert "Read-only file system" in text


@pytest.mark.slow
@needs_mounts
def test_inputs_that_a_node_does_not_see_are_refused(folders, odd):
    """A folder, and a list of files."""
    for inputs in (folders / "hidden", sorted((folders / "hidden").iterdir())):
        text = refusal(OptionError, copy, inputs, folders / "out of hidden")
        assert odd.mark in text.splitlines()[0]
        assert re.search(r"does not see the inputs: '.*/hidden.*' is not there", text)


@pytest.mark.slow
@needs_mounts
def test_a_package_that_a_node_lacks_is_refused(folders, odd, monkeypatch):
    """It is installed here, so it travels by name, and is not to be found there."""
    monkeypatch.syspath_prepend(folders / "site-packages")
    import toolbox_of_tests

    text = refusal(OptionError, toolbox_of_tests.copy, folders / "in", folders / "out of box")
    assert odd.mark in text.splitlines()[0]
    assert "ModuleNotFoundError: No module named 'toolbox_of_tests'" in text
    assert "runtime_env={'py_modules': ['folder']}" in text


@pytest.mark.slow
@needs_mounts
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_loader_asks_for_no_folder(folders, odd):
    """Its batches need none: the odd node works like any other."""
    loader = forebay.DataLoader(range(12), 2, num_workers=3, backend="ray", seed=1)
    with loader:
        assert [batch.tolist() for batch in loader] == [[n, n + 1] for n in range(0, 12, 2)]


@pytest.mark.slow
@needs_mounts
def test_a_node_that_joins_and_proves_nothing_is_left_out(cluster, tmp_path, capsys):
    """It is said once, and the run goes on with the others."""
    inputs = make_inputs(tmp_path / "in", 20)
    go, output = tmp_path / "go", tmp_path / "out"
    said = []

    def wait_for(source, out):
        import time

        while not go.exists():
            time.sleep(0.01)
        out.file(source.name).write_bytes(source.read_bytes())

    def join():
        until((output / ".forebay").exists)
        said.append(OddNode(cluster, [output]))
        until(lambda: "a node that joined is not used" in heard())
        go.touch()

    def heard():
        said.append(capsys.readouterr().err)
        return "".join(text for text in said if isinstance(text, str))

    import threading

    joining = threading.Thread(target=join)
    joining.start()
    try:
        report = forebay.preprocess(wait_for, inputs, output, backend="ray")
    finally:
        joining.join()
        node = next(each for each in said if isinstance(each, OddNode))
        node.end()
    assert report.done == 20
    text = heard()
    assert text.count("a node that joined is not used") == 1
    assert f"{node.mark} does not see the output folder" in text


# ---- verdicts, of what a node might say ---------------------------------------------------------

NODE = Node("f00dfeed" * 7, "10.0.0.7 (f00dfeed)", {"CPU": 1.0}, {"CPU": 1.0})


def verdict(answer, folder=None):
    """Return what the driver makes of a node's answer, or of the error instead of one."""

    def get(_, timeout):
        if isinstance(answer, Exception):
            raise answer
        return answer

    fake = SimpleNamespace(get=get, exceptions=ray.exceptions)
    return ray_nodes._verdict(fake, NODE, None, NodeCheck(b"", folder), "nonce")


def seen(**changes):
    fine = {
        "versions": ray_nodes.versions(),
        "unloadable": "",
        "folder": "",
        "missing": (),
        "unreachable": "",
    }
    return NodeFacts(**fine | changes)


def test_a_node_with_the_same_of_everything_is_fine():
    """Nothing is said."""
    assert verdict(seen()) is None


@pytest.mark.parametrize("package", ["Python", "forebay", "torch"])
def test_other_versions_are_refused(package):
    """Both are named, and why it matters."""
    ours = ray_nodes.versions()
    error = verdict(seen(versions=ours | {package: "0.1"}))
    assert isinstance(error, OptionError)
    first, rest = str(error).split("\n", 1)
    assert first == (
        f"node 10.0.0.7 (f00dfeed) has other versions: {package} 0.1 there and {ours[package]} here"
    )
    assert "Install the same versions on every node" in rest


def test_a_folder_that_does_not_bring_back_what_a_node_writes_is_refused(tmp_path):
    """Such as one that each node overlays with its own."""
    error = verdict(seen(), str(tmp_path))
    assert isinstance(error, OutputError)
    assert "does not appear on this machine" in str(error)


WITHOUT_ANSWER = {
    "late": (ray.exceptions.GetTimeoutError("late"), "did not answer within 120 s"),
    "no forebay": (
        ImportError("traceback\nModuleNotFoundError: No module named 'forebay'"),
        "cannot run forebay: ModuleNotFoundError: No module named 'forebay'\n  Install",
    ),
    "no words": (ConnectionError(), "cannot run forebay: ConnectionError\n  Install"),
}


@pytest.mark.parametrize(("error", "words"), WITHOUT_ANSWER.values(), ids=WITHOUT_ANSWER)
def test_a_node_without_an_answer_is_refused(error, words):
    """By name."""
    text = str(verdict(error))
    assert text.startswith("node 10.0.0.7 (f00dfeed) ")
    assert words in text


def test_no_answer_is_waited_for_longer_than_that():
    """The limit that the text names is the one that is kept."""
    assert ray_nodes.PATIENCE_S == 120.0
