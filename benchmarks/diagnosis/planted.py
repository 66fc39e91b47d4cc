"""Training loops with one planted cause of waiting each; parameters by seed.

Samples use processor time, or sleep as if they waited for a disk. Steps sleep.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import Dataset

BATCH = 4
# A run takes about so long.
RUN_S = 2.5
# Bytes of a sample.
NUMBERS = 2500


class TokenBucket:
    """Storage with a fixed rate, which all workers share: each read waits for its turn.

    Args:
        read_s: Seconds that one read takes the storage.
    """

    def __init__(self, read_s: float) -> None:
        self._free_at = multiprocessing.Value("d", 0.0)
        self._read_s = read_s

    def read(self) -> None:
        """Wait for one read."""
        with self._free_at.get_lock():
            until = max(self._free_at.value, time.perf_counter()) + self._read_s
            self._free_at.value = until
        time.sleep(max(until - time.perf_counter(), 0.0))


@dataclass(frozen=True)
class Sample:
    """What getting a sample takes.

    Attributes:
        cpu_s: Processor time.
        sleep_s: Waiting for storage, on average.
        jitter: By what part waiting is longer or shorter, at most.
        slow_s: Waiting for one sample in a hundred instead; 0 for none.
        bucket: What each sample is read from.
    """

    cpu_s: float = 0.0
    sleep_s: float = 0.0
    jitter: float = 0.0
    slow_s: float = 0.0
    bucket: TokenBucket | None = None


class Planted(Dataset[torch.Tensor]):
    """Samples that take what they are told to."""

    def __init__(self, length: int, sample: Sample, seed: int) -> None:
        draw = random.Random(seed)
        self._sample = sample
        self._sleeps = [
            sample.sleep_s * (1 + sample.jitter * draw.uniform(-1, 1)) for _ in range(length)
        ]
        if sample.slow_s:
            for index in draw.sample(range(length), max(length // 100, 1)):
                self._sleeps[index] = sample.slow_s

    def __len__(self) -> int:
        return len(self._sleeps)

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = self._sample
        if sample.cpu_s:
            use_processor(sample.cpu_s)
        if self._sleeps[index]:
            time.sleep(self._sleeps[index])
        if sample.bucket is not None:
            sample.bucket.read()
        return torch.zeros(NUMBERS)


def use_processor(seconds: float) -> None:
    """Use so much processor time, however long it takes."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@dataclass(frozen=True)
class Planting:
    """A training loop.

    Attributes:
        cause: What `diagnose` should say.
        title: What is planted.
        sample: What samples take.
        settings: The loader's arguments.
        step_s: What a step takes.
        burst: So many steps take next to nothing, and the next one takes all their time; 0 for
            equal steps.
        epoch: Batches of an epoch; 0 for one epoch.
        strangers: Other processes that use all the processor time they can get.
        start_s: Seconds that each worker takes to start.
    """

    cause: str
    title: str
    sample: Sample
    settings: Mapping[str, Any]
    step_s: float
    burst: int = 0
    epoch: int = 0
    strangers: int = 0
    start_s: float = 0.0

    def steps(self, wait_share: float = 0.0) -> int:
        """Return for how many steps to train."""
        return max(int(RUN_S * (1 - wait_share) / self.step_s), 60)


def few_workers(draw: random.Random) -> Planting:
    step_s = draw.uniform(0.012, 0.025)
    batch_s = step_s * draw.uniform(1.3, 1.7)
    cpu = draw.uniform(0.6, 0.8)
    sample = Sample(cpu_s=batch_s * cpu / BATCH, sleep_s=batch_s * (1 - cpu) / BATCH)
    return Planting("workers", "few workers", sample, {"num_workers": 1}, step_s)


def processor(draw: random.Random) -> Planting:
    step_s = draw.uniform(0.008, 0.015)
    sample = Sample(cpu_s=step_s * draw.uniform(3, 5) / BATCH)
    settings = {"num_workers": draw.choice([2, 3, 4])}
    return Planting("cpu", "too little processor", sample, settings, step_s)


def contention(draw: random.Random) -> Planting:
    step_s = draw.uniform(0.015, 0.03)
    sample = Sample(cpu_s=step_s * draw.uniform(1.0, 1.4) / BATCH)
    strangers = draw.choice([6, 8, 10])
    settings = {"num_workers": 2}
    return Planting("contention", "strangers", sample, settings, step_s, strangers=strangers)


def storage_latency(draw: random.Random) -> Planting:
    step_s, workers = draw.uniform(0.008, 0.016), draw.choice([1, 2, 3])
    sleep_s = step_s * workers * draw.uniform(1.5, 3) / BATCH
    sample = Sample(sleep_s=sleep_s, jitter=draw.uniform(0.3, 0.9))
    settings = {"num_workers": workers, "persistent_workers": True, "shuffle": True}
    return Planting("storage", "storage latency", sample, settings, step_s, epoch=24)


def storage_rate(draw: random.Random) -> Planting:
    step_s, workers = draw.uniform(0.008, 0.016), draw.choice([2, 3, 4])
    bucket = TokenBucket(step_s * draw.uniform(1.5, 3) / BATCH)
    settings = {"num_workers": workers, "persistent_workers": True, "shuffle": True}
    return Planting("storage", "storage rate", Sample(bucket=bucket), settings, step_s, epoch=24)


def shallow_buffer(draw: random.Random) -> Planting:
    step_s, workers, burst = draw.uniform(0.01, 0.016), 2, draw.choice([12, 16, 20])
    sample = Sample(sleep_s=step_s * workers / draw.uniform(1.3, 1.8) / BATCH, jitter=0.1)
    settings = {"num_workers": workers}
    return Planting("buffer", "shallow buffer", sample, settings, step_s, burst)


def skewed(draw: random.Random) -> Planting:
    step_s, workers = draw.uniform(0.008, 0.014), draw.choice([2, 3])
    sleep_s = step_s * workers * draw.uniform(0.25, 0.4) / BATCH
    slow_s = step_s * draw.uniform(12, 18)
    sample = Sample(sleep_s=sleep_s, jitter=0.1, slow_s=slow_s)
    return Planting("skew", "skewed samples", sample, {"num_workers": workers}, step_s)


def epochs(draw: random.Random) -> Planting:
    step_s, epoch = draw.uniform(0.01, 0.02), draw.choice([8, 12, 16])
    sample = Sample(sleep_s=step_s * draw.uniform(0.5, 1.2) / BATCH, jitter=0.1)
    start_s = draw.uniform(0.1, 0.3)
    settings = {"num_workers": 2}
    return Planting(
        "startup", "epoch boundary", sample, settings, step_s, epoch=epoch, start_s=start_s
    )


def slow_consumer(draw: random.Random) -> Planting:
    step_s = draw.uniform(0.02, 0.05)
    sample = Sample(sleep_s=step_s * draw.uniform(0.1, 0.6) / BATCH, jitter=0.2)
    return Planting("consumer", "slow consumer", sample, {"num_workers": 2}, step_s)


def healthy(draw: random.Random) -> Planting:
    step_s, workers = draw.uniform(0.02, 0.04), draw.choice([2, 3])
    sleep_s = step_s * workers / draw.uniform(1.35, 1.7) / BATCH
    sample = Sample(sleep_s=sleep_s, jitter=0.1)
    return Planting("healthy", "healthy", sample, {"num_workers": workers}, step_s)


KINDS: Mapping[str, Callable[[random.Random], Planting]] = {
    "workers": few_workers,
    "cpu": processor,
    "contention": contention,
    "latency": storage_latency,
    "rate": storage_rate,
    "buffer": shallow_buffer,
    "skew": skewed,
    "epochs": epochs,
    "consumer": slow_consumer,
    "healthy": healthy,
}


@dataclass
class Measured:
    """What a run came to.

    Attributes:
        rate: Batches per second, without the first ones.
        waits: Seconds waited for each batch.
        steps: Seconds of each step.
        diagnosis: What the loader says.
        readiness: 1 less the part of the time that no batch was ready.
    """

    rate: float
    waits: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    diagnosis: Any = None
    readiness: float = 1.0
