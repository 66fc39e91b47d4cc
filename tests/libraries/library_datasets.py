"""Datasets whose samples are made by one library each; they import it when they need it.

Computing     uses the library in `__getitem__`
Reading       opens a file in `__init__`, which the workers inherit, and reads from it
Augmenting    draws from generators that the library owns
"""

from __future__ import annotations

import io
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

COUNT = 12


class OfLibrary(Dataset[Any]):
    """Samples that a library makes.

    Args:
        folder: An empty folder.
    """

    def __init__(self, folder: Path) -> None:
        """Open what the samples are read from."""

    def __len__(self) -> int:
        return COUNT


def noise(index: int, *shape: int) -> np.ndarray[Any, Any]:
    """Return random numbers that depend on the index alone."""
    return np.random.default_rng(index).random(shape)


def tensor(values: Any) -> torch.Tensor:
    """Return a copy of an array."""
    return torch.tensor(np.ascontiguousarray(values))


# ---- computing ---------------------------------------------------------------------------------


class Numpy(OfLibrary):
    def __getitem__(self, index: int) -> torch.Tensor:
        values = noise(index, 150, 150)
        return tensor(np.linalg.eigvalsh(values @ values.T))


class Scipy(OfLibrary):
    def __getitem__(self, index: int) -> torch.Tensor:
        from scipy import fft, linalg, signal

        values = noise(index, 150, 150)
        smooth = signal.fftconvolve(values, noise(0, 5, 5), mode="same")
        return tensor(linalg.svdvals(smooth) + abs(fft.rfft(values[0], 298)))


class Librosa(OfLibrary):
    def __getitem__(self, index: int) -> torch.Tensor:
        import librosa

        sound = noise(index, 22050).astype(np.float32)
        return tensor(librosa.feature.mfcc(y=librosa.effects.preemphasis(sound), sr=22050))


class OpenCV(OfLibrary):
    def __getitem__(self, index: int) -> torch.Tensor:
        import cv2

        image = (noise(index, 600, 600, 3) * 255).astype(np.uint8)
        turned = cv2.warpAffine(image, cv2.getRotationMatrix2D((300, 300), index, 1), (600, 600))
        return tensor(cv2.resize(cv2.GaussianBlur(turned, (7, 7), 0), (100, 100)))


class Pillow(OfLibrary):
    def __getitem__(self, index: int) -> torch.Tensor:
        from PIL import Image

        file = io.BytesIO()
        Image.fromarray((noise(index, 60, 60, 3) * 255).astype(np.uint8)).save(file, "jpeg")
        return tensor(Image.open(file).rotate(index).resize((20, 20), Image.Resampling.LANCZOS))


class Pandas(OfLibrary):
    def __getitem__(self, index: int) -> torch.Tensor:
        import pandas as pd

        frame = pd.DataFrame({"key": np.arange(5000) % 7, "value": noise(index, 5000)})
        return tensor(frame.groupby("key")["value"].agg(["sum", "std", "median"]))


class Polars(OfLibrary):
    def __getitem__(self, index: int) -> torch.Tensor:
        import polars as pl

        frame = pl.DataFrame({"key": np.arange(50_000) % 7, "value": noise(index, 50_000)})
        value = pl.col("value")
        return tensor(frame.group_by("key").agg(value.sum(), b=value.std()).sort("key"))


class Arrow(OfLibrary):
    def __getitem__(self, index: int) -> torch.Tensor:
        import pyarrow as pa

        table = pa.table({"key": np.arange(5000) % 7, "value": (noise(index, 5000) * 99).round()})
        sums = table.group_by("key").aggregate([("value", "sum")]).sort_by("key")
        return tensor(sums["value_sum"].to_numpy())


class ScikitLearn(OfLibrary):
    def __getitem__(self, index: int) -> torch.Tensor:
        from sklearn.cluster import KMeans
        from sklearn.decomposition import PCA

        values = PCA(5).fit_transform(noise(index, 400, 60))
        return tensor(KMeans(3, n_init=1, random_state=index).fit(values).cluster_centers_)


class ScikitImage(OfLibrary):
    def __getitem__(self, index: int) -> torch.Tensor:
        from skimage import filters, transform

        turned = transform.rotate(noise(index, 100, 100), index)
        return tensor(transform.resize(filters.gaussian(turned, 2), (30, 30), anti_aliasing=True))


COMPUTING = {
    "numpy": Numpy,
    "scipy": Scipy,
    "librosa": Librosa,
    "cv2": OpenCV,
    "PIL": Pillow,
    "pandas": Pandas,
    "polars": Polars,
    "pyarrow": Arrow,
    "sklearn": ScikitLearn,
    "skimage": ScikitImage,
}


# ---- reading -----------------------------------------------------------------------------------


class H5py(OfLibrary):
    def __init__(self, folder: Path) -> None:
        import h5py

        with h5py.File(folder / "file.h5", "w") as file:
            values = noise(1, COUNT, 5000)
            file.create_dataset("values", data=values, chunks=(1, 500), compression="gzip")
        self.file = h5py.File(folder / "file.h5")

    def __getitem__(self, index: int) -> torch.Tensor:
        return tensor(self.file["values"][index])


class Lmdb(OfLibrary):
    def __init__(self, folder: Path) -> None:
        import lmdb

        path = str(folder / "lmdb")
        with lmdb.open(path) as environment, environment.begin(write=True) as transaction:
            for index in range(COUNT):
                transaction.put(b"%d" % index, noise(index, 5000).tobytes())
        self.environment = lmdb.open(path, readonly=True, lock=False)

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.environment.begin() as transaction:
            return tensor(np.frombuffer(transaction.get(b"%d" % index)))


class Zarr(OfLibrary):
    def __init__(self, folder: Path) -> None:
        import zarr

        path = folder / "array.zarr"
        array = zarr.create_array(path, shape=(COUNT, 5000), chunks=(1, 500), dtype="f8")
        array[:] = noise(1, COUNT, 5000)
        self.array = zarr.open_array(path, mode="r")

    def __getitem__(self, index: int) -> torch.Tensor:
        return tensor(self.array[index])


class Sqlite(OfLibrary):
    def __init__(self, folder: Path) -> None:
        self.connection = sqlite3.connect(folder / "samples.db")
        with self.connection:
            self.connection.execute("create table samples (number integer primary key, bytes blob)")
            rows = [(index, noise(index, 5000).tobytes()) for index in range(COUNT)]
            self.connection.executemany("insert into samples values (?, ?)", rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        query = "select bytes from samples where number = ?"
        return tensor(np.frombuffer(self.connection.execute(query, (index,)).fetchone()[0]))


class Tokenizers(OfLibrary):
    """A tokenizer that was used, with the threads of its library."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        self.lines = [f"the {word} of {index}" for index in range(COUNT) for word in ("sum", "end")]
        self.tokenizer = Tokenizer(models.BPE())
        self.tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        self.tokenizer.train_from_iterator(self.lines, trainers.BpeTrainer(vocab_size=60))
        self.tokenizer.enable_padding(length=20)
        self.tokenizer.encode_batch(self.lines * 50)

    def __getitem__(self, index: int) -> torch.Tensor:
        lines = [self.lines[index], *self.lines * 20]
        return torch.tensor([each.ids for each in self.tokenizer.encode_batch(lines)])


class Soundfile(OfLibrary):
    """A file is opened for each sample: an open one has a position, which workers would share."""

    def __init__(self, folder: Path) -> None:
        import soundfile

        self.path = str(folder / "sound.flac")
        soundfile.write(self.path, noise(1, COUNT * 1000), 16_000)

    def __getitem__(self, index: int) -> torch.Tensor:
        import soundfile

        return tensor(soundfile.read(self.path, start=1000 * index, frames=1000)[0])


READING = {
    "h5py": H5py,
    "lmdb": Lmdb,
    "zarr": Zarr,
    "sqlite3": Sqlite,
    "tokenizers": Tokenizers,
    "soundfile": Soundfile,
}


# ---- augmenting --------------------------------------------------------------------------------


class Albumentations(OfLibrary):
    def __init__(self, folder: Path) -> None:
        import albumentations as a

        self.transform = a.Compose(
            [
                a.RandomCrop(24, 24),
                a.HorizontalFlip(),
                a.Affine(rotate=(-30, 30), p=1),
                a.OneOf([a.GaussNoise(p=1), a.CoarseDropout(p=1)], p=1),
                a.RandomBrightnessContrast(p=1),
            ]
        )

    def __getitem__(self, index: int) -> torch.Tensor:
        image = (noise(index, 32, 32, 3) * 255).astype(np.uint8)
        return tensor(self.transform(image=image)["image"])


class Monai(OfLibrary):
    def __init__(self, folder: Path) -> None:
        from monai import transforms

        self.transform = transforms.Compose(
            [
                transforms.RandSpatialCrop((24, 24), random_size=False),
                transforms.RandFlip(0.5),
                transforms.RandRotate(0.5, prob=1),
                transforms.OneOf(
                    [transforms.RandGaussianNoise(1), transforms.RandCoarseDropout(3, 5, prob=1)]
                ),
                transforms.RandAdjustContrast(1),
            ]
        )

    def __getitem__(self, index: int) -> torch.Tensor:
        changed = self.transform(noise(index, 1, 32, 32).astype(np.float32))
        return torch.as_tensor(np.asarray(changed))


class Torchvision(OfLibrary):
    def __init__(self, folder: Path) -> None:
        from torchvision import transforms
        from torchvision.transforms import v2

        self.transforms = [
            kinds.Compose(
                [
                    kinds.RandomCrop(24),
                    kinds.RandomHorizontalFlip(),
                    kinds.RandomRotation(30),
                    kinds.ColorJitter(0.5, 0.5),
                    kinds.RandomErasing(1),
                ]
            )
            for kinds in (transforms, v2)
        ]

    def __getitem__(self, index: int) -> torch.Tensor:
        image = torch.tensor(noise(index, 3, 32, 32))
        return torch.stack([transform(image) for transform in self.transforms])


AUGMENTING = {
    "albumentations": Albumentations,
    "monai": Monai,
    "torchvision": Torchvision,
}
