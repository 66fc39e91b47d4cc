"""Batches on the GPU: the rate of copies, gaps before steps, corruption, other libraries.

`python -m benchmarks gpu` prints the GPU and five tables. Without a GPU it says so, and measures
that `device="cpu"` costs nothing: the processor time of the trainer with and without it, in pairs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

import forebay
from benchmarks.measure import Ground
from benchmarks.preprocess import show

WORKERS = 8
IMAGES = 256, 3, 224, 224  # 38.5 MB as uint8
STEPS, QUICK_STEPS = 400, 20
CHECKED, QUICK_CHECKED = 20_000, 2_000
PAIRS, QUICK_PAIRS = 9, 2


class Ready(Dataset[Any]):
    """Whole batches that take no time to make, so that only their way is measured."""

    def __init__(self, count: int, batch: dict[str, torch.Tensor]) -> None:
        self.count, self.batch = count, batch

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.batch["index"].fill_(index)
        return self.batch


def images() -> dict[str, torch.Tensor]:
    return {"x": torch.randint(0, 255, IMAGES, dtype=torch.uint8), "index": torch.zeros(1)}


def fifty() -> dict[str, torch.Tensor]:
    return {f"x{at}": torch.rand(64, 256) for at in range(49)} | {"index": torch.zeros(1)}


def small() -> dict[str, torch.Tensor]:
    return {"x": torch.zeros(32_768, dtype=torch.uint8), "index": torch.zeros(1)}


def gpu(_: Ground, quick: bool) -> None:
    """Print the tables of this machine."""
    if not torch.cuda.is_available():
        print("gpu: torch finds no CUDA device here, so nothing of the GPU was measured.\n")
        show(("num_workers, batch", "CPU us without", 'CPU us, device="cpu"'), list(_cpu(quick)))
        return
    properties = torch.cuda.get_device_properties(0)
    memory = f"{properties.total_memory >> 30} GiB, CUDA {torch.version.cuda}"
    print(f"gpu        {properties.name}, {memory}")
    steps = QUICK_STEPS if quick else STEPS
    show(("copies", "GB/s"), list(_rates(steps)))
    show(("50 tensors", "p50 us", "p99 us", "max us"), [_gaps(steps * 5)])
    show(("batches checked on a busy GPU", "wrong"), [_checked(quick)])
    show(("loader", "batches/s", "GPU idle"), list(_peers(steps)))


# ---- without a GPU -------------------------------------------------------------------------------


def _cpu(quick: bool) -> Iterator[tuple[str, ...]]:
    """Yield the processor time of the trainer for a batch, the median over pairs."""
    count = 200 if quick else 4000
    for name, batch in (("small", small()), ("50 tensors", fifty())):
        for workers in (0, 2):
            spent: dict[str | None, list[float]] = {None: [], "cpu": []}
            for _ in range(QUICK_PAIRS if quick else PAIRS):
                for device, seconds in spent.items():
                    loader = forebay.DataLoader(
                        Ready(count, batch), None, num_workers=workers, seed=0, device=device
                    )
                    began = time.process_time()
                    for _batch in loader:
                        pass
                    seconds.append((time.process_time() - began) / count)
                    loader.close()
            medians = [f"{statistics.median(each) * 1e6:.1f}" for each in spent.values()]
            yield (f"{workers}, {name}", *medians)


# ---- on a GPU ------------------------------------------------------------------------------------


def _loader(batch: dict[str, torch.Tensor], count: int, **settings: Any) -> Any:
    arguments = {"seed": 0, "buffer": "4GB", "device": "cuda"} | settings
    return forebay.DataLoader(Ready(count, batch), None, num_workers=WORKERS, **arguments)


def _step(busy: torch.Tensor, times: int) -> Callable[[Any], None]:
    def step(_: Any) -> None:
        for _time in range(times):
            torch.mm(busy, busy)

    return step


def _rates(steps: int) -> Iterator[tuple[str, ...]]:
    """Yield the rate of the link, and that of forebay's copies while a matmul runs."""
    nbytes = 1 << 30
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        began.record()
        there.copy_(host, non_blocking=True)
        ended.record()
        ended.synchronize()
    yield "the link, 1 GiB page-locked", f"{nbytes / began.elapsed_time(ended) / 1e6:.1f}"
    step = _step(torch.rand(8192, 8192, device="cuda", dtype=torch.bfloat16), 8)
    with _loader(images(), steps) as loader:
        for batch in loader:
            step(batch)
        torch.cuda.synchronize()
        for _ in loader:  # every slot is page-locked by now
            before = loader.statistics()
            break
        for batch in loader:
            step(batch)
        torch.cuda.synchronize()
        now = loader.statistics()
    rate = (now.copied_bytes - before.copied_bytes) / max(now.copy_s - before.copy_s, 1e-9) / 1e9
    yield "forebay's, while a matmul runs", f"{rate:.1f}"
    share = (now.staged_bytes - before.staged_bytes) / (now.copied_bytes - before.copied_bytes)
    yield f"  of these staged: {share:.0%}; {now.pinned_reason}", ""


def _gaps(steps: int) -> tuple[str, ...]:
    """Return how long `next` takes in a loop that waits for the GPU in each step."""
    step = _step(torch.rand(2048, 2048, device="cuda"), 4)
    gaps = []
    with _loader(fifty(), steps) as loader:
        iterator = iter(loader)
        for _ in range(steps):
            began = time.perf_counter()
            batch = next(iterator)
            gaps.append((time.perf_counter() - began) * 1e6)
            step(batch)
            torch.cuda.synchronize()
    gaps = sorted(gaps[10:])
    places = (len(gaps) // 2, int(len(gaps) * 0.99), -1)
    return ("time in next()", *(f"{gaps[place]:.0f}" for place in places))


def _checked(quick: bool) -> tuple[str, ...]:
    """Check every batch on the GPU, after other work, and drop it before that has run."""
    count = QUICK_CHECKED if quick else CHECKED
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    busy, numbers = torch.rand(512, 512, device="cuda"), torch.arange(count, device="cuda")
    with _loader(small(), count) as loader:
        for number, batch in enumerate(loader):
            torch.mm(busy, busy)
            wrong += (batch["index"] != numbers[number]).sum()
            wrong += (batch["x"] != 0).sum()
            del batch
    return f"{count:,}", str(int(wrong))


def _peers(steps: int) -> Iterator[tuple[str, ...]]:
    """Yield the rate of loops with the same step, and the share of time without one."""
    step = _step(torch.rand(8192, 8192, device="cuda", dtype=torch.bfloat16), 16)
    step(None)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step(None)
    torch.cuda.synchronize()
    alone = time.perf_counter() - began
    batch = images()
    peers: dict[str, Callable[[], Iterable[Any]]] = {
        'forebay, device="cuda"': lambda: _loader(batch, steps),
        "torch, pin_memory and a prefetcher": lambda: _prefetched(
            TorchDataLoader(Ready(steps, batch), None, num_workers=WORKERS, pin_memory=True)
        ),
        "SPDL, transfer_tensor": lambda: _spdl(steps, batch),
    }
    for name, make in peers.items():
        try:
            loader = make()
        except ModuleNotFoundError as error:
            yield name, f"not installed: {error.name}", ""
            continue
        began, count = 0.0, 0
        for each in loader:
            if not began:
                torch.cuda.synchronize()
                began = time.perf_counter()
            step(each)
            count += 1
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        idle = max(1 - alone * count / steps / seconds, 0.0)
        yield name, f"{count / seconds:.1f}", f"{idle:.1%}"


def _prefetched(loader: Iterable[Any]) -> Iterator[Any]:
    """Copy one batch ahead on another stream, as NVIDIA's apex does."""
    stream, ahead = torch.cuda.Stream(), None
    for batch in loader:
        with torch.cuda.stream(stream):
            copied = {name: each.to("cuda", non_blocking=True) for name, each in batch.items()}
        if ahead is not None:
            yield ahead
        torch.cuda.current_stream().wait_stream(stream)
        for each in copied.values():
            each.record_stream(torch.cuda.current_stream())
        ahead = copied
    if ahead is not None:
        yield ahead


def _spdl(steps: int, batch: dict[str, torch.Tensor]) -> Iterable[Any]:
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    def make(_: int) -> dict[str, torch.Tensor]:
        return {name: each.clone() for name, each in batch.items()}

    builder = PipelineBuilder().add_source(range(steps)).pipe(make, concurrency=WORKERS)
    pipeline = builder.pipe(spdl.io.transfer_tensor).add_sink(2).build(num_threads=WORKERS)

    def iterate() -> Iterator[Any]:
        with pipeline.auto_stop():
            yield from pipeline

    return iterate()
