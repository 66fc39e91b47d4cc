"""`device="cuda"` on a real GPU: what `test_device.py` tests with a device that copies late."""

from __future__ import annotations

import gc
import mmap
import os
from typing import Any

import pytest
import torch
from test_device import SETTINGS, Pictures, doubled, loader_of

from forebay import Buffer, DataLoader, predict

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


NAMES = "pixels", "label"


@pytest.fixture(scope="module", autouse=True)
def context():
    """What CUDA opens for as long as the process lives is there before a test is watched."""
    torch.ones(1, device="cuda").sum().item()
    torch.empty(1, pin_memory=True)


def is_right(batch: Any, first: int) -> bool:
    expected = torch.arange(first, first + 4, device="cuda")
    pixels = (batch["pixels"] == (expected % 251).to(torch.uint8)[:, None]).all()
    return bool(pixels & (batch["label"] == expected).all())


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_batch_is_right(settings, tmp_path):
    """Two epochs, whatever makes the batches."""
    if settings.get("buffer") == "disk":
        settings = settings | {"buffer": Buffer(max_bytes=8_000_000, directory=tmp_path)}
    arguments = {"batch_size": 4, "num_workers": 2, "device": "cuda"} | settings
    with DataLoader(Pictures(64), **arguments) as loader:
        for _ in range(2):
            assert all(is_right(batch, 4 * number) for number, batch in enumerate(loader))


def test_kept_batches_stay_right_and_their_memory_comes_back():
    """A list of all batches; afterwards torch's allocator has everything back."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    with loader_of("cuda", seed=1, buffer="8MB") as loader:
        batches = list(loader)
        assert all(is_right(batch, 4 * number) for number, batch in enumerate(batches))
        assert loader.statistics().copied_batches >= 16
    last = batches.pop()["pixels"].detach()[1:]
    del batches
    gc.collect()
    torch.cuda.synchronize()
    assert bool((last == torch.tensor([61, 62, 63], device="cuda")[:, None]).all())
    del last
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_no_batch_is_overwritten_while_kernels_read_it():
    """The corruption of side streams: each batch is dropped while its work is still queued."""
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    busy = torch.rand(2048, 2048, device="cuda")
    count = 4000
    with loader_of("cuda", count, seed=1, buffer="40MB") as loader:
        for _ in range(3):
            for batch in loader:
                torch.mm(busy, busy)
                expected = (batch["label"] % 251).to(torch.uint8)[:, None]
                wrong += (batch["pixels"] != expected).sum()
                del batch, expected
    assert int(wrong) == 0


def test_slots_are_page_locked_or_the_statistics_say_why():
    """The driver takes the slab's memory, a memfd; a refusal would be no error."""
    with loader_of("cuda", 400, seed=1, buffer="4MB") as loader:
        list(loader)
        statistics = loader.statistics()
    assert statistics.pinned_bytes > 0 or statistics.pinned_reason
    assert statistics.copy_s > 0


def test_a_refusal_of_the_driver_leaves_no_error_behind():
    """Registering a range twice is refused in words, and the next kernel runs."""
    import numpy as np

    from forebay.devices.device import CudaDevice

    device = CudaDevice(torch.device("cuda"))
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 1 << 20)
    memory = mmap.mmap(descriptor, 1 << 20)
    os.close(descriptor)
    array = np.frombuffer(memory, np.uint8)
    array[:] = 7
    address = array.ctypes.data
    assert device.register(address, 1 << 20) is None
    assert torch.from_numpy(array).is_pinned()
    refused = device.register(address, 1 << 20)
    assert refused is not None
    assert "CUDA_ERROR" in refused
    assert torch.ones(3, device="cuda").sum().item() == 3
    device.unregister(address)
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_pinned_batches_are_pinned_before_they_are_taken():
    """`pin_memory=True` gives page-locked tensors that torch copies without waiting."""
    with DataLoader(
        Pictures(64), 4, num_workers=2, pin_memory=True, seed=1, buffer="8MB"
    ) as loader:
        for number, batch in enumerate(loader):
            assert batch["pixels"].is_pinned()
            assert batch["label"].is_pinned()
            moved = {name: batch[name].to("cuda", non_blocking=True) for name in NAMES}
            del batch
            assert is_right(moved, 4 * number)


def test_transforms_run_on_the_device():
    """With a generator of the device, or the global ones seeded; the trainer's are untouched."""

    def drawing(batch: Any, generator: torch.Generator | None = None) -> torch.Tensor:
        return torch.rand(3, device="cuda", generator=generator)

    def drawing_by_default(batch: Any) -> torch.Tensor:
        return torch.rand(3, device="cuda")

    with loader_of("cuda", seed=1, device_transform=doubled) as loader:
        for number, batch in enumerate(loader):
            assert bool((batch["pixels"][1] == 2 * (4 * number + 1)).all())
    state = torch.cuda.get_rng_state()
    for transform in (drawing, drawing_by_default):
        with loader_of("cuda", seed=1, device_transform=transform) as loader:
            first, second = list(loader), loader.replay(epoch=0, batch=3)
            assert torch.equal(first[3], second)
            assert not torch.equal(first[3], first[2])
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_predictions_on_the_device(tmp_path):
    """The same rows as on the CPU; the results are fetched one batch later."""
    import pyarrow.dataset

    def model(batch: Any) -> Any:
        return batch["pixels"].float().mean(1), batch["label"]

    rows = []
    for device in ("cpu", "cuda"):
        folder = tmp_path / device
        predict(
            model, Pictures(50), folder, device=device, num_workers=2, batch_size=8, progress=False
        )
        table = pyarrow.dataset.dataset(folder, exclude_invalid_files=True).to_table()
        rows.append(table.to_pylist())
    assert rows[0] == rows[1]
