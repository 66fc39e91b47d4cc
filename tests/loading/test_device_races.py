"""Batches on a device under random orders of everything: arrivals, copies, steps, drops, ends."""

from __future__ import annotations

import ctypes
import gc
import random
from typing import Any

import pytest
import torch

from forebay.loading.device_batches import DeviceBatches
from forebay.loading.messages import BatchRequest, BatchResult
from forebay.loading.workers import BatchSlots
from forebay.memory.packing import Packer
from forebay.observe.measurements import Transfers
from kit.fake_device import FakeDevice

ROWS = 3000


class Consumer:
    """A feed with a worker, and a consumer whose steps are done by the device when it likes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.device = FakeDevice(seed, defers=True, refuses="no" if seed % 3 == 0 else None)
        self.slots = BatchSlots(None)
        self.batches = DeviceBatches(self.device, self.slots, Transfers())
        self.packer = Packer(self.slots.slab)
        self.results: dict[int, BatchResult] = {}  # that arrived, and were not taken
        self.kept: dict[int, Any] = {}
        self.count = self.steps = 0
        self.wrong: list[str] = []

    def arrive(self) -> None:
        """A worker makes a batch in a slot, as small as one message or larger."""
        task, self.count = self.count, self.count + 1
        columns = self.random.randint(1, 8)
        request = self.slots.prepare(task, BatchRequest([0], 0, task))
        self.packer.begin(request.slot)
        batch = {"x": torch.full((ROWS, columns), float(task)), "n": torch.tensor([task] * 7)}
        self.results[task] = BatchResult(self.packer.pack(batch))
        self.batches.settle(task, self.results[task])

    def advance(self) -> None:
        self.batches.advance()

    def take(self) -> None:
        """The next batch is handed out, a step on it is given to the device, and it is dropped."""
        if not self.results:
            return
        task = min(self.results)
        result = self.batches.open(task, self.results.pop(task))
        assert result.is_moved and result.refused is None
        batch = result.batch
        assert self.device.holds(batch["x"]) and self.device.holds(batch["n"])
        self.step(task, batch)
        if self.random.random() < 0.3:
            self.kept[task] = batch

    def step(self, task: int, batch: Any) -> None:
        """Read a batch later, by its address: as a kernel does, without a reference."""
        where = [(each.data_ptr(), each.nbytes, each.dtype) for each in batch.values()]

        def read() -> None:
            self.steps -= 1
            for address, nbytes, dtype in where:
                memory = bytearray(ctypes.string_at(address, nbytes))
                if not bool((torch.frombuffer(memory, dtype=dtype) == task).all()):
                    self.wrong.append(f"batch {task} was overwritten before it was read")

        self.steps += 1
        self.device.launch(read)

    def drop_kept(self) -> None:
        if self.kept:
            task = self.random.choice(sorted(self.kept))
            self.step(task, self.kept.pop(task))

    def forget(self) -> None:
        """A batch that was requested is not needed, as when a sampler changes."""
        if self.results:
            task = self.random.choice(sorted(self.results))
            del self.results[task]
            self.batches.free(task)

    def synchronize(self) -> None:
        self.device.synchronize()

    def end(self) -> None:
        """Close, while batches wait and others are kept."""
        self.batches.close()
        while self.kept:
            self.step(*self.kept.popitem())
        self.device.synchronize()
        assert self.device.registered == {}
        gc.collect()
        assert self.device.allocated == 0
        assert self.slots.slab.out == 0, "every slot of the host came back"
        self.slots.slab.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_no_batch_is_overwritten_and_no_memory_is_lost(seed):
    """Whatever happens in whatever order, each step reads its own batch, and all memory is freed.

    Batches are dropped while the device has not read them, are kept, grow, and are forgotten.
    """
    consumer = Consumer(seed)
    actions = [
        *(consumer.arrive, consumer.arrive, consumer.advance, consumer.advance),
        *(consumer.take, consumer.take, consumer.drop_kept, consumer.forget, consumer.synchronize),
    ]
    for _ in range(60):
        consumer.random.choice(actions)()
        assert consumer.wrong == []
    consumer.end()
    assert consumer.wrong == []
    assert consumer.steps == 0, "the steps that were left were done, too"
