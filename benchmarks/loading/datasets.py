"""The datasets: samples that take almost no time, JPEGs, and samples that sleep."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance
from torch.utils.data import Dataset, TensorDataset

IMAGE = (3, 224, 224)
Record = dict[str, Any]
ENDLESS = 1_000_000  # samples in an epoch, more than any run loads


class Same(Dataset[Any]):
    """The same sample for every index, so that the overhead of the loader is measured."""

    def __init__(self, sample: Any, length: int = ENDLESS) -> None:
        self._sample, self._length = sample, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._sample


class Tiny(Dataset[Any]):
    """A small tuple of Python numbers, made on request."""

    def __len__(self) -> int:
        return 10 * ENDLESS

    def __getitem__(self, index: int) -> tuple[int, int, int, float, float]:
        return index, index % 10, index % 100, index * 0.5, index * 0.25


class Images(Dataset[Any]):
    """JPEGs, decoded and augmented at random each time, as for training on ImageNet."""

    def __init__(self, folder: Path) -> None:
        self._paths = sorted(folder.glob("*.jpg"))

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = Image.open(self._paths[index % len(self._paths)]).convert("RGB")
        side = random.randint(256, 480)
        scale = side / min(image.size)
        image = image.resize(
            (round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR
        )
        left, top = random.randint(0, image.width - 224), random.randint(0, image.height - 224)
        image = image.crop((left, top, left + 224, top + 224))
        for change in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
            image = change(image).enhance(random.uniform(0.6, 1.4))
        pixels = torch.from_numpy(np.asarray(image).copy())
        return pixels.permute(2, 0, 1).to(torch.float32).div_(255), index


class Large(Dataset[Any]):
    """200 MB to send to a spawned worker: arrays, and a list of short strings."""

    def __init__(self) -> None:
        self._arrays = [np.full((8, 1_000_000), at, np.float32) for at in range(5)]  # 160 MB
        self._names = [f"name-{at:09}" for at in range(600_000)]  # 40 MB

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> Any:
        return self._arrays[index % 5][:, index], len(self._names[index])


class Names(Dataset[int]):
    """Many small Python objects; reading one writes to its memory page (the reference count)."""

    def __init__(self, count: int, kept_in: Callable[[Iterable[str]], Sequence[str]]) -> None:
        self._names = kept_in(f"name-{at:09}" for at in range(count))

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> int:
        return len(self._names[index])


class Indices(Dataset[int]):
    """Any number of samples, each equal to its index: the loader has only the order to make."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index


class Records(Dataset[int]):
    """Dicts of strings, numbers and a tuple; a sample reads all objects of one of them."""

    def __init__(self, count: int, kept_in: Callable[[Iterable[Record]], Sequence[Record]]) -> None:
        self._records = kept_in(map(record, range(count)))

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> int:
        """Return a number that is the same for every record."""
        found = self._records[index]
        first, second = found["words"]
        size = len(found["name"]) + len(first) + len(second)
        return size + (found["label"] >= 0) + (found["score"] >= 0)


def record(at: int) -> Record:
    """Return a record that shares no object with another one."""
    words = (f"first-{at:09}", f"second-{at:09}")
    # CPython shares the integers below 257.
    return {"name": f"name-{at:09}", "words": words, "label": at + 1000, "score": at * 0.5}


def record_bytes() -> int:
    """Return the memory of one record in a list: its objects, and the list's reference to it."""
    found = record(0)
    objects = (found, *found.values(), *found["words"])
    return 8 + sum(-(-sys.getsizeof(each) // 16) * 16 for each in objects)


class Sleeper(Dataset[torch.Tensor]):
    """Samples that sleep, so that two cores suffice for any number of workers."""

    def __init__(self, costs: list[float], batch_size: int) -> None:
        self._costs, self._batch_size = costs, batch_size
        self._sample = torch.zeros(3, 64, 64)

    def __len__(self) -> int:
        return len(self._costs) * self._batch_size

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._costs[index // self._batch_size])
        return self._sample


def image(_: Path) -> Same:
    return Same(torch.rand(IMAGE, generator=torch.Generator().manual_seed(0)))


def pair(_: Path) -> Same:
    return Same((torch.arange(16.0), torch.tensor(3)))


def fields(_: Path) -> Same:
    return Same({f"field{at}": torch.full((16,), float(at)) for at in range(50)})


def array(_: Path) -> Same:
    return Same(np.random.default_rng(0).random(IMAGE, np.float32))


def tiny(_: Path) -> Tiny:
    return Tiny()


def tensors(_: Path) -> TensorDataset:
    rows = 1024 * 1000
    return TensorDataset(torch.arange(rows * 16.0).view(rows, 16), torch.arange(rows))


def jpegs(folder: Path) -> Images:
    return Images(folder)


def stack(samples: list[np.ndarray]) -> np.ndarray:
    """Collate without tensors."""
    return np.stack(samples)


def draw_jpegs(folder: Path, count: int) -> None:
    """Write JPEGs of 500x400 that look like clouds and are as large as photographs, 117 kB."""
    noise = np.random.default_rng(0)
    for at in range(count):
        coarse = Image.fromarray(noise.integers(0, 256, (20, 25, 3), np.uint8))
        smooth = np.asarray(coarse.resize((500, 400), Image.Resampling.BICUBIC), np.int16)
        grain = noise.integers(-16, 17, smooth.shape, np.int16)
        picture = Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8))
        picture.save(folder / f"{at:04}.jpg", quality=95)
