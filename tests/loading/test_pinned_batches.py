"""`pin_memory=True`: an object with a `pin_memory` method is pinned by that, as in torch.

Without a GPU there is no page-locked memory, so a device of ordinary memory is in its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from forebay import DataLoader
from forebay.base.batches import pinned
from kit.fake_device import FakeDevice


class HostMemory(FakeDevice):
    """As `forebay.devices.device.PinnedMemory`, in memory that is not page-locked."""

    reuses = False

    def moved(self, batch: Any) -> Any:
        return pinned(batch)


class Plain:
    """A batch of an unknown class."""

    def __init__(self, data):
        self.data, self.is_pinned = data, False

    def pin_memory(self):
        self.is_pinned = True
        return self


@dataclass
class Record:
    """A batch of a class whose fields are known."""

    data: torch.Tensor
    is_pinned: bool = False

    def pin_memory(self):
        return Record(self.data, is_pinned=True)


def plain(samples):
    return Plain(torch.stack([torch.full((10_000,), float(x)) for x in samples]))


def record(samples):
    return Record(plain(samples).data)


@pytest.mark.parametrize("collate", [plain, record], ids=["object", "dataclass"])
def test_an_object_is_pinned_by_its_own_method(collate):
    """Also where the memory of a batch is pinned before it is taken."""
    with DataLoader(
        range(8), batch_size=4, num_workers=1, collate_fn=collate, device=HostMemory()
    ) as loader:
        batches = list(loader)
    assert [batch.is_pinned for batch in batches] == [True, True]
    assert [batch.data[:, -1].tolist() for batch in batches] == [
        [float(at) for at in which] for which in (range(4), range(4, 8))
    ]
