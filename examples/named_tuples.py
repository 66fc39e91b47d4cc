"""Samples with named fields: a nested NamedTuple with strings in it becomes a batch.

    python examples/named_tuples.py

A batch is the same NamedTuple as a sample, with what `torch.utils.data.default_collate` makes of
each field: tensors are stacked, numbers become a tensor, and strings become a list.
"""

from typing import NamedTuple

import torch
from torch.utils.data import Dataset

import forebay


class Box(NamedTuple):
    """Where something is in an image, and what it is."""

    corners: torch.Tensor  # left, top, right, bottom
    label: str


class Sample(NamedTuple):
    """An image with something in it."""

    image: torch.Tensor
    box: Box
    source: str
    weight: float


class Boxes(Dataset):
    """Maps a number to a small image with a bright box in it."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        left, top, size = index % 4, index // 2, 3
        image = torch.zeros(3, 8, 8)
        image[:, top : top + size, left : left + size] = 1
        return Sample(
            image=image,
            box=Box(torch.tensor([left, top, left + size, top + size]), f"box-{index}"),
            source=f"image-{index}.jpg",
            weight=1 / (index + 1),
        )


def main():
    """Show the first batch, field by field."""
    with forebay.DataLoader(Boxes(), batch_size=4, num_workers=2) as loader:
        batch = next(iter(loader))
    print("batch            ", type(batch).__name__)
    print("batch.image      ", tuple(batch.image.shape), batch.image.dtype)
    print("batch.box        ", type(batch.box).__name__)
    print("batch.box.corners", batch.box.corners.tolist())
    print("batch.box.label  ", batch.box.label)
    print("batch.source     ", batch.source)
    print("batch.weight     ", tuple(batch.weight.shape), batch.weight.dtype)


if __name__ == "__main__":
    main()
