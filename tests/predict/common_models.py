"""Models as people have them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from models import Numbers
from torch import Tensor

import forebay

COUNT = 60


class ModelOutput(OrderedDict):
    """As that of transformers: a dict whose items are attributes, too, and None is left out."""

    def __init__(self, **given: Any) -> None:
        super().__init__((name, value) for name, value in given.items() if value is not None)
        self.__dict__.update(self)


class Box(NamedTuple):
    """Where something is, and how sure that is."""

    corner: list[int]
    score: float


@dataclass
class Caption:
    """What a captioner says of an image."""

    text: str
    beams: list[str]
    score: float | None = None


def numbers(batch: Tensor) -> list[int]:
    return [int(each) for each in batch[:, 0]]


def detector(batch: Tensor) -> Any:
    """As torchvision's: a dict of tensors for each image, with another number of boxes."""
    return [
        {
            "boxes": torch.ones(k % 4, 4) * k,
            "labels": torch.arange(k % 4),
            "scores": torch.ones(k % 4),
        }
        for k in numbers(batch)
    ]


def segmentation(batch: Tensor) -> Any:
    """As torchvision's: an OrderedDict of masks for the batch."""
    return OrderedDict(out=batch[:, None, None, :].expand(-1, 2, 3, 4), aux=batch)


def classification(batch: Tensor) -> Any:
    return batch.softmax(1)


def transcripts(batch: Tensor) -> Any:
    """As a captioner or an ASR has them: a string for each sample, or none."""
    return [None if k % 7 == 0 else f"so {'said ' * (k % 3)}{k}" for k in numbers(batch)]


def token_tags(batch: Tensor) -> Any:
    """A list of tokens with their tags, of any length."""
    return {"tags": [[(f"w{at}", "NOUN") for at in range(k % 4)] for k in numbers(batch)]}


def embeddings(batch: Tensor) -> Any:
    """As transformers' encoders in bfloat16."""
    return ModelOutput(loss=None, pooled=batch.bfloat16(), hidden_states=(batch, batch * 2))


def scikit_learn(batch: Tensor) -> Any:
    """As predict and predict_proba: class names, and an array."""
    names = np.array(["cat", "hamster"], object)[batch[:, 0].int().numpy() % 2]
    return {"label": names, "proba": batch.numpy()}


def onnx_session(batch: Tensor) -> Any:
    """As InferenceSession.run: a list of arrays, whose first dimension is the batch."""
    return [batch.numpy(), batch[:, 0].numpy().astype(np.int64)]


def plain_function(batch: Tensor) -> Any:
    return [k if k % 2 else k / 2 for k in numbers(batch)]


def pipeline(batch: Tensor) -> Any:
    """As a pipeline of transformers: dicts, with a key that some have, or lists of dicts."""
    return [
        {"label": f"L{k % 3}", "top": [{"word": "x", "score": k / 2}] * (k % 3)}
        | ({"warning": "long"} if k > 50 else {})
        for k in numbers(batch)
    ]


def records(batch: Tensor) -> Any:
    """NamedTuples and dataclasses for each sample."""
    return {
        "box": [Box([k, k + 1], k / 2) for k in numbers(batch)],
        "caption": [
            Caption(str(k), ["a"] * (k % 3), 0.5 if k > 30 else None) for k in numbers(batch)
        ],
        "jpeg": [bytes([k]) for k in numbers(batch)],
        "crop": [np.full((k % 3, 2), k, np.uint8) for k in numbers(batch)],
    }


MODELS = {
    each.__name__: each
    for each in (
        *(detector, segmentation, classification, transcripts, token_tags, embeddings),
        *(scikit_learn, onnx_session, plain_function, pipeline, records),
    )
}


class Common:
    """One of these models."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, batch: Tensor) -> Any:
        return MODELS[self.name](batch)


def predicted(name: str, output: Any, **options: Any) -> Any:
    """Predict quietly, in small batches and parts."""
    options = {"num_workers": 0, "batch_size": 8, "part_size": 20, "progress": False} | options
    return forebay.predict(Common(name), Numbers(COUNT), output, **options)
