"""Batches from workers on the trainer's own node: read where they were made, without a copy."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from clusters import QUICK_DEATHS, STORE_BYTES, kill_host, ray
from driving import MARK
from loaders import COUNT, Large, batches_of, loader_of
from same import assert_same

from kit.fake_device import FakeDevice

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("node"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


@pytest.fixture(scope="module")
def node(shared: Any) -> Iterator[None]:
    """A cluster of one node, on which the trainer is."""
    shared.stop()
    os.environ.update(QUICK_DEATHS, **{MARK: str(os.getpid())})
    ray.init(
        "local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=STORE_BYTES,
        log_to_driver=False,
        configure_logging=False,
    )
    yield
    ray.shutdown()


def mapped() -> set[str]:
    """Return the shared memory of forebay's that this process has mapped, by inode."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return set(re.findall(r"(\d+)\s+/memfd:forebay", maps))


def test_they_equal_those_of_local_workers_and_lie_where_they_were_made() -> None:
    """The trainer maps its own slab, and slab and board of the host; nothing stays mapped."""
    expected = batches_of(Large(COUNT), epochs=2, backend="process")
    before = mapped()
    with loader_of(Large(COUNT), buffer="1MB") as loader:
        found = [batch for _ in range(2) for batch in loader]
        assert len(mapped() - before) == 3
    assert_same(found, expected)
    for batch in found:  # they are the trainer's
        batch[0].add_(1)
    assert [float(batch[0][0, 0, 0]) for batch in found[:2]] == [
        1 + float(batch[0][0, 0, 0]) for batch in expected[:2]
    ]
    del loader, batch, found
    assert mapped() == before


def test_memory_is_used_again() -> None:
    """Batches that the trainer drops make room: their hosts need no more of it."""
    with loader_of(Large(400), buffer="1MB") as loader:
        iterator = iter(loader)
        starts = {next(iterator)[0].data_ptr() for _ in range(100)}
    assert len(starts) < 20


def test_what_was_taken_outlives_a_host_that_is_killed() -> None:
    """SIGKILL to the host: its batches stay as they are, and the others come from a new one."""
    expected = batches_of(Large(COUNT), backend="process")
    before = mapped()
    with loader_of(Large(COUNT), buffer="1MB") as loader:
        iterator = iter(loader)
        found = [next(iterator) for _ in range(4)]
        kill_host()
        found += iterator
        assert_same(found, expected)
        assert loader.statistics().restarts == 0, "no batch is to blame"
    del loader, iterator, found
    assert mapped() == before


def test_a_device_gets_them_from_the_trainers_slab() -> None:
    """It is the memory that is pinned."""
    before = mapped()
    with loader_of(Large(COUNT), device=FakeDevice(2)) as loader:
        for number, (one, _) in enumerate(loader):
            assert bool((one == torch.arange(4.0 * number, 4.0 * number + 4)[:, None, None]).all())
        assert len(mapped() - before) == 1
