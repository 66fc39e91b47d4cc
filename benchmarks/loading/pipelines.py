"""Three real pipelines as datasets: NumPy, images by albumentations, audio as spectrograms.

Each sample is a function of its index, so that every loader returns the same batches. Spawned
workers import this file, so it imports nothing heavy by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

# More than any run loads, so that no run starts its workers twice.
SAMPLES = 1_000_000
FILES = 64


class Products:
    """Products of 500x500 matrices in NumPy, and of each the means of its columns."""

    def __init__(self, _: Path) -> None:
        import numpy as np

        self._matrices = np.random.default_rng(0).standard_normal((16, 500, 500))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        left, right = self._matrices[index % 16], self._matrices[index * 7 % 16]
        return (left @ right).mean(axis=0)


class Images:
    """JPEGs, decoded by OpenCV and augmented by albumentations.

    The transforms are seeded with the index, so that each loader makes the same samples, and are
    separate in each thread, because two threads would use each other's seeds.
    """

    def __init__(self, folder: Path) -> None:
        self._paths = sorted(map(str, folder.glob("*.jpg")))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        import cv2

        image = cv2.imread(self._paths[index % len(self._paths)])
        transform = _transform()
        transform.set_random_seed(index)
        return transform(image=cv2.cvtColor(image, cv2.COLOR_BGR2RGB))["image"]


_OWN = threading.local()


def _transform() -> Any:
    """Return this thread's transforms."""
    if not hasattr(_OWN, "transform"):
        import albumentations
        from albumentations.pytorch import ToTensorV2

        _OWN.transform = albumentations.Compose(
            [
                albumentations.RandomResizedCrop((224, 224)),
                albumentations.HorizontalFlip(p=0.5),
                albumentations.ColorJitter(p=1.0),
                albumentations.Normalize(),
                ToTensorV2(),
            ]
        )
    return _OWN.transform


class Recordings:
    """FLAC files of four seconds, resampled from 48 to 16 kHz, as log-mel spectrograms."""

    def __init__(self, folder: Path) -> None:
        import numpy as np

        self._paths = sorted(map(str, folder.glob("*.flac")))
        self._window = np.hanning(400).astype(np.float32)
        # The weights of the bands matter little; their number, 80 of 201, is that of Whisper.
        self._bands = np.random.default_rng(0).random((201, 80), np.float32)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        import numpy as np
        import soundfile
        from scipy.signal import resample_poly

        audio, _ = soundfile.read(self._paths[index % len(self._paths)], dtype="float32")
        audio = resample_poly(audio, 1, 3)
        frames = np.lib.stride_tricks.sliding_window_view(audio, 400)[::160]
        power = np.abs(np.fft.rfft(frames * self._window)) ** 2
        return np.log10(np.maximum(power @ self._bands, 1e-10)).T


PIPELINES: dict[str, Callable[[Path], Any]] = {
    "NumPy, products of 500x500": Products,
    "JPEG, OpenCV, albumentations": Images,
    "FLAC, SciPy resampling, log-mel": Recordings,
}


def write(folder: Path) -> None:
    """Write the files of the images and the recordings."""
    import numpy as np
    import soundfile

    from benchmarks.loading.datasets import draw_jpegs

    folder.mkdir()
    draw_jpegs(folder, FILES)
    noise = np.random.default_rng(0)
    for at in range(FILES):
        audio = np.cumsum(noise.standard_normal(4 * 48_000)) / 500
        soundfile.write(folder / f"{at:04}.flac", np.clip(audio, -1, 1), 48_000)
