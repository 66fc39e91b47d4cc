"""torchvision's datasets, transforms and tensors: batches are those of torch's DataLoader."""

from __future__ import annotations

import random
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, Subset, default_collate

import forebay

if find_spec("torchvision") is None:
    pytest.skip("needs torchvision", allow_module_level=True)
try:
    from torchvision import datasets, io, transforms, tv_tensors
    from torchvision.transforms import v2
except RuntimeError as error:  # it does not fit each build of torch
    pytest.skip(str(error), allow_module_level=True)

sys.path[:0] = [str(Path(__file__).parents[1] / "loading")]
from same import assert_same  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    # Removed from torchvision some day: then these are those of torchcodec.
    pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning"),
]

CLASSES = ("cat", "dog", "eel")
VOC = "voc/VOCdevkit/VOC2012"
OBJECT = (
    "<object><name>dog</name><bndbox><xmin>{}</xmin><ymin>{}</ymin>"
    "<xmax>{}</xmax><ymax>{}</ymax></bndbox></object>"
)
IMAGES = v2.Compose(
    [
        v2.RandomResizedCrop(32, antialias=True),
        v2.RandomHorizontalFlip(),
        v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.5] * 3, [0.2] * 3),
        v2.RandomErasing(0.5),
    ]
)
FIRST_VERSION = transforms.Compose(
    [
        transforms.RandomResizedCrop(32),
        transforms.RandAugment(),
        transforms.TrivialAugmentWide(),
        transforms.ToTensor(),
        transforms.RandomErasing(0.5),
    ]
)
OBJECTS = v2.Compose(
    [
        v2.ToImage(),
        v2.RandomPhotometricDistort(p=0.5),
        v2.RandomZoomOut(p=0.5),
        v2.RandomIoUCrop(),
        v2.RandomHorizontalFlip(),
        v2.SanitizeBoundingBoxes(),
        v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True),
    ]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make an image folder, and a set of images with objects as PASCAL VOC has them."""
    folder, drawn = tmp_path_factory.mktemp("images"), np.random.default_rng(0)

    def write(name):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shape = (*drawn.integers(50, 80, 2), 3)
        Image.fromarray(drawn.integers(0, 255, shape, dtype=np.uint8)).save(folder / name)

    for name in CLASSES:
        for number in range(6):
            write(f"classes/{name}/{number}.{'jpg' if number % 2 else 'png'}")
    (folder / VOC / "Annotations").mkdir(parents=True)
    (folder / VOC / "ImageSets" / "Main").mkdir(parents=True)
    for number in range(9):
        write(f"{VOC}/JPEGImages/{number}.jpg")
        corners = drawn.integers(0, 30, (1 + number % 4, 2))
        boxes = "".join(OBJECT.format(x, y, x + 15, y + 12) for x, y in corners)
        annotation = f"<annotation>{boxes}</annotation>"
        (folder / VOC / "Annotations" / f"{number}.xml").write_text(annotation)
    names = "".join(f"{number}\n" for number in range(9))
    (folder / VOC / "ImageSets" / "Main" / "train.txt").write_text(names)
    return folder


class Boxes(Dataset):
    """Images of one size with boxes and masks, as torchvision's own classes of tensors."""

    flip = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()])

    def __len__(self):
        return 9

    def __getitem__(self, index):
        drawn = torch.Generator().manual_seed(index)
        pixels = torch.randint(0, 255, (3, 48, 40), generator=drawn, dtype=torch.uint8)
        corners = torch.rand(2, 2, generator=drawn) * 20
        target = {
            "boxes": tv_tensors.BoundingBoxes(
                torch.cat([corners, corners + 10], 1), format="XYXY", canvas_size=(48, 40)
            ),
            "masks": tv_tensors.Mask(pixels[:2] > 100),
            "labels": torch.arange(2),
            "image_id": index,
        }
        return self.flip(tv_tensors.Image(pixels), target)


class Decoded(Dataset):
    """Files that torchvision decodes, and crops and compresses at random."""

    change = v2.Compose([v2.JPEG((50, 90)), v2.RandomCrop(24)])

    def __init__(self, folder):
        self.files = sorted((folder / "classes").rglob("*.*g"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        image = self.change(io.decode_image(str(self.files[index]), mode="RGB"))
        return {"image": image, "name": self.files[index].name}


class Mixed:
    """A `collate_fn` that mixes the images of a batch, as torchvision's pages show it."""

    def __init__(self, *kinds):
        self.mix = v2.RandomChoice([kind(num_classes=len(CLASSES)) for kind in kinds])

    def __call__(self, samples):
        return self.mix(*default_collate(samples))


def zipped(samples):
    """Return images and targets as the reference scripts for detection collate them."""
    return tuple(zip(*samples, strict=True))


def image_folder(folder, transform=IMAGES):
    """Return torchvision's dataset for a folder of classes."""
    return datasets.ImageFolder(folder / "classes", transform=transform)


def detection(folder):
    """Return images with objects, whose targets are made torchvision's own tensors."""
    found = datasets.VOCDetection(folder / "voc", "2012", "train", transforms=OBJECTS)
    return datasets.wrap_dataset_for_transforms_v2(found)


CASES = {
    "ImageFolder": (image_folder, None),
    "the first version's transforms": (lambda path: image_folder(path, FIRST_VERSION), None),
    "CutMix and MixUp": (image_folder, Mixed(v2.CutMix, v2.MixUp)),
    "detection targets": (detection, zipped),
    "tensors of images, boxes and masks": (lambda _: Boxes(), None),
    "decode_image": (Decoded, None),
    "Subset": (lambda path: Subset(image_folder(path), range(1, 18, 2)), None),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_torch(name, workers, folder):
    """Bit for bit, and of the same classes, in each of two epochs."""
    make, collate = CASES[name]
    found = []
    for kind in (TorchDataLoader, forebay.DataLoader):
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(7)
        loader = kind(make(folder), 4, shuffle=True, collate_fn=collate, num_workers=workers)
        found.append([list(loader), list(loader)])
    assert_same(*found)


@pytest.mark.parametrize("name", CASES)
def test_batches_are_functions_of_the_seed(name, folder):
    """Equal without workers, and in the rest of an epoch that another loader began."""
    make, collate = CASES[name]

    def loader(workers):
        return forebay.DataLoader(
            make(folder), 4, shuffle=True, collate_fn=collate, num_workers=workers, seed=3
        )

    with loader(2) as first:
        begun = iter(first)
        batches = [next(begun), next(begun)]
        state = first.state_dict()
    with loader(1) as second:
        second.load_state_dict(state)
        batches += second
    assert_same(batches, list(loader(0)))
