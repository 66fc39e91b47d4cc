"""What the model was called with, for an error of the user's that may come from that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from forebay.collating.rules import described_value

# Errors of code that was given another kind of batch than it takes.
_ERRORS = (TypeError, AttributeError, KeyError, IndexError)
# How many elements of a batch are described.
_SHOWN = 4


def note_on_batch(error: Exception, batch: Any) -> None:
    """Add to an exception what the batch is, and what to change, if it is no plain tensor."""
    if isinstance(error, _ERRORS) and not isinstance(batch, torch.Tensor):
        error.add_note(f"forebay: {_words_of(batch)}")


def _words_of(batch: Any) -> str:
    if isinstance(batch, Mapping):
        parts = [f"{key!r}: {described_value(value)}" for key, value in [*batch.items()][:_SHOWN]]
        advice = (
            "A batch is one argument, and is not unpacked. Pass a model that takes the dict, or "
            "return only what the model takes from the dataset, or from collate_fn."
        )
        return _sentence(batch, parts, advice)
    if not isinstance(batch, list | tuple):
        return _sentence(batch, [], _advice_on(batch))
    parts = [described_value(value) for value in batch[:_SHOWN]]
    if all(isinstance(each, str | bytes) for each in batch):
        advice = (
            "Strings stay a list of strings. Make tensors of them in collate_fn, such as with a "
            "tokenizer, or in the model."
        )
    elif isinstance(batch[0], torch.Tensor) and len(batch) > 1:
        advice = (
            "A batch of (x, y) is one argument. For a model that takes x alone, return only x from "
            "the dataset, or choose it: collate_fn=lambda samples: torch.stack([x for x, *_ in "
            "samples])."
        )
    else:
        advice = _advice_on(batch)
    return _sentence(batch, parts, advice)


def _sentence(batch: Any, parts: list[str], advice: str) -> str:
    more = ", …" if len(parts) == _SHOWN < len(batch) else ""
    shown = f": {', '.join(parts)}{more}" if parts else ""
    return f"the model was called with {described_value(batch)}{shown}\n  {advice}"


def _advice_on(batch: Any) -> str:
    if isinstance(batch, np.ndarray) and batch.dtype == object:
        return "Torch makes no tensor of objects. Give the array a dtype of numbers in the dataset."
    return "Make what the model takes in the dataset, or in collate_fn."
