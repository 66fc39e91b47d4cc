"""Batches that hosts of other nodes send to the trainer over TCP, past Ray's object store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from clusters import STORE_BYTES, kill_host, until
from datasets import Squares
from loaders import COUNT, Large, batches_of, loader_of
from same import assert_same

from forebay import DataLoader, OptionError, Ray
from forebay.loading import remote
from forebay.memory.transport import Receiver

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("cluster"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
DIRECT = Ray(direct=True)


class Huge(Squares):
    """Each sample would fill the object store of a node."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((STORE_BYTES // 4,), float(index))


class Empty(Squares):
    """Samples without a single byte."""

    def __getitem__(self, index: int) -> Any:
        return torch.empty(0, 3)


def listening() -> set[str]:
    """Return the sockets of this process that listen, by inode."""
    ours = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            ours.add(os.readlink(descriptor))
        except OSError:
            continue
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path("/proc/net", name).read_text().splitlines()[1:]
    ]
    listen = "0A"
    return {line[9] for line in lines if line[3] == listen and f"socket:[{line[9]}]" in ours}


@pytest.mark.parametrize("dataset", [Large(COUNT), Empty(COUNT)], ids=["large", "empty"])
def test_they_equal_those_of_local_workers(dataset: Any) -> None:
    """Of two workers, over two epochs, with a buffer."""
    expected = batches_of(dataset, epochs=2, backend="process")
    found = batches_of(dataset, epochs=2, backend=DIRECT, num_workers=2, buffer="1MB")
    assert_same(found, expected)


def test_the_object_store_does_not_hold_them() -> None:
    """A batch is larger than that of any node."""
    with loader_of(Huge(6), backend=DIRECT, batch_size=2) as loader:
        for number, batch in enumerate(loader):
            assert batch.nbytes > STORE_BYTES
            assert float(batch[0].min()) == float(batch[0].max()) == 2.0 * number


def test_it_listens_only_if_asked_and_until_it_is_closed() -> None:
    """On one socket, whatever the number of workers."""
    before = listening()
    for backend, count in ((Ray(), 0), (DIRECT, 1)):
        with loader_of(Large(COUNT), backend=backend, num_workers=2) as loader:
            next(iter(loader))
            assert len(listening() - before) == count
        until(lambda: listening() == before)


def test_a_host_that_is_killed_costs_no_batch() -> None:
    """SIGKILL while it sends: what had not arrived is made again, and no batch is to blame."""
    expected = batches_of(Large(400), backend="process")
    with loader_of(Large(400), backend=DIRECT, buffer="1MB") as loader:
        iterator = iter(loader)
        found = [next(iterator) for _ in range(4)]
        kill_host()
        found += iterator
        assert_same(found, expected)
        assert loader.statistics().restarts == 0


def test_a_connection_that_breaks_costs_no_batch() -> None:
    """Its host, which is alive, is replaced."""
    expected = batches_of(Large(400), backend="process")
    with loader_of(Large(400), backend=DIRECT, buffer="1MB") as loader:
        iterator = iter(loader)
        found = [next(iterator) for _ in range(4)]
        (receiver,) = _receivers(loader)
        for sender in list(receiver._connections):
            receiver.forget(sender)
        found += iterator
        assert_same(found, expected)
        assert loader.statistics().restarts == 0


def _receivers(loader: DataLoader) -> list[Receiver]:
    pipeline: Any = loader._loader_progress.pipeline
    return [pipeline.feed.pool._receiver._direct]


class Deaf(Receiver):
    """One whose machine lets no connection through."""

    def __init__(self, host: str) -> None:
        super().__init__(host)
        self.close()


def test_a_node_that_cannot_connect_is_refused_before_work(monkeypatch: Any) -> None:
    """With its name, the port, and what to do."""
    monkeypatch.setattr("forebay.loading.remote.Receiver", Deaf)
    with pytest.raises(OptionError, match="cannot connect to the trainer at") as caught:
        next(iter(loader_of(Large(COUNT), backend=DIRECT)))
    assert "Connection refused" in str(caught.value)
    assert "leave `direct` out" in str(caught.value)


def test_an_address_that_is_not_the_trainers_is_refused() -> None:
    """As where Ray was told another one, which leads to this machine from outside."""
    with pytest.raises(OptionError, match=r"cannot listen on 198\.51\.100\.1") as caught:
        remote._receiver_at("198.51.100.1")
    assert "leave `direct` out" in str(caught.value)
