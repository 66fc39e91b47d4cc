"""Datasets as people have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from PIL import Image


@dataclass
class Token:
    """A word of a sentence, with its tag."""

    text: str
    tag: str | None = None


class Span(NamedTuple):
    """A part of a text."""

    start: int
    end: int
    label: str


def picture(index: int, mode: str = "RGB") -> Any:
    rng = np.random.default_rng(index)
    size = 4 + index % 3, 5
    if mode == "P":  # a mask, whose palette has the colors of the classes
        image = Image.fromarray(rng.integers(0, 3, size, np.uint8)).convert("P")
        image.putpalette([0, 0, 0, 128, 0, 0, 0, 128, 0])
        return image
    return Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8))


def coco(index: int) -> Any:
    """As torchvision's CocoDetection: an image, and the annotations of its objects."""
    annotation = {
        "id": index,
        "bbox": [0.5, 1.0, 2.0, 3.5],
        "category_id": index % 7,
        "iscrowd": 0,
        "segmentation": [[1.5, 2.5, 3.5, 4.5]] * (1 + index % 2),
    }
    crowd = {**annotation, "iscrowd": 1, "segmentation": {"size": [4, 5], "counts": [1, 2, 3]}}
    return picture(index), [annotation] * (index % 4) + [crowd] * (index % 5 == 0)


def voc(index: int) -> Any:
    """As torchvision's VOC datasets: nested dicts of strings, and a mask."""
    objects = [{"name": "cat", "bndbox": {"xmin": "1", "ymin": "2"}}] * (1 + index % 3)
    if index % 4 == 0:
        objects.append({"name": "dog", "part": [{"name": "head"}], "bndbox": {"xmin": "3"}})
    found = {"folder": "VOC2012", "filename": f"{index}.jpg", "object": objects}
    return picture(index), picture(index, "P"), {"annotation": found}


def text_spans(index: int) -> Any:
    """A text with its spans, and its words as dataclasses."""
    spans = [Span(at, at + 3, "PER") for at in range(index % 3)]
    words = [Token("Ada", "NAME"), Token("runs")][: index % 3]
    return {"text": "Ada runs " * (index % 4), "spans": spans, "words": words, "tags": ["B", "I"]}


DATASETS = {each.__name__: each for each in (coco, voc, text_spans)}


class Common:
    """One of these datasets."""

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count = name, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return DATASETS[self.name](index)
