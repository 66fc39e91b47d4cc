"""Datasets as people have them; `common_datasets.py NAME DIRECTORY` caches one and is killed."""

from __future__ import annotations

import os
import signal
import sys
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
from cached import DRIVER, KILLED_AT
from PIL import Image

import forebay


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


def image_folder(index: int) -> Any:
    """As ImageFolder without a transform."""
    return picture(index), index % 10


def hugging_face(index: int) -> Any:
    """A dict with optional keys, as rows of a Hugging Face dataset are."""
    extra = {"caption": f"image {index}"} if index % 2 else {}
    answers = {"text": ["a"] * (index % 3), "answer_start": [*range(index % 3)]}
    rare = {"context": None if index % 5 else "c"} if index % 3 == 0 else {}
    pixels = torch.full((2, 2), index)
    return {"id": str(index), "pixels": pixels, **extra, **rare, "answers": answers}


def text_spans(index: int) -> Any:
    """A text with its spans, and its words as dataclasses."""
    spans = [Span(at, at + 3, "PER") for at in range(index % 3)]
    words = [Token("Ada", "NAME"), Token("runs")][: index % 3]
    return {"text": "Ada runs " * (index % 4), "spans": spans, "words": words, "tags": ["B", "I"]}


def audio(index: int) -> Any:
    """A waveform, its rate, and a dict of strings."""
    about = OrderedDict(speaker=f"s{index % 3}", transcript="so " * (index % 5), split="train")
    return torch.arange(1 + index % 50, dtype=torch.float32)[None], 16_000, about


def graph(index: int) -> Any:
    """Nodes, ragged edges, and a label that is a number or a word."""
    neighbours = [[*range(node % 3)] for node in range(index % 6)]
    edges = np.arange(2 * (index % 5)).reshape(2, -1)
    label = index if index % 2 else "unknown"
    nodes = {"x": torch.ones(index % 6, 3), "neighbours": neighbours}
    never = {"no_faces": np.zeros((0, 3)), "no_names": torch.zeros(2, 0)}
    return {**nodes, **never, "edges": edges, "label": label, "cycles": {frozenset({1, index})}}


def time_series(index: int) -> Any:
    """Values with their times."""
    first = datetime(2024, 1, 1, tzinfo=UTC) + timedelta(minutes=index)
    times = [first + timedelta(seconds=at) for at in range(index % 4)]
    stamps = np.datetime64("2024-01-01") + np.arange(index % 4)
    return {"start": first, "times": times, "stamps": stamps, "values": [0.5] * (index % 4)}


def tables(index: int) -> Any:
    """Object arrays of strings, as pandas has columns, and an int here and a string there."""
    names = np.array([f"n{at}" for at in range(index % 3)] + [None], object)
    return {"names": names, "value": index if index % 3 else "missing"}


def counts(index: int) -> Any:
    """Counts of words, which are keys, and of numbers."""
    return {"words": {f"word {at}": at for at in range(index % 90)}, "frames": {index: [index]}}


DATASETS = {
    each.__name__: each
    for each in (
        *(coco, voc, image_folder, hugging_face, text_spans, audio, graph, time_series),
        *(tables, counts),
    )
}


class Common:
    """One of these datasets; the driver is killed on the way, if the environment has it."""

    def __init__(self, name: str, count: int = 1000) -> None:
        self.name, self.count = name, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if index == KILLED_AT and DRIVER in os.environ:
            os.kill(int(os.environ[DRIVER]), signal.SIGKILL)
        return DATASETS[self.name](index)


if __name__ == "__main__":
    os.environ[DRIVER] = str(os.getpid())
    forebay.cache(Common(sys.argv[1]), sys.argv[2], num_workers=0, progress=False)
