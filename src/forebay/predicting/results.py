"""Bring the model's outputs to host memory while it works on the next batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from forebay import trees
from forebay.failures import Failure
from forebay.predicting.bisection import Predicted

Wait = Callable[[], None]


def copy_from_gpu(outputs: Any) -> tuple[Any, Wait] | None:
    """Start to copy outputs that are on a GPU to page-locked memory; None if none are."""
    device = next((each.device for each in trees.leaves(outputs) if _is_on_gpu(each)), None)
    if device is None:
        return None
    copies = trees.mapped(_copied, outputs)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return copies, event.synchronize


def _is_on_gpu(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_cuda


def _copied(leaf: Any) -> Any:
    if not _is_on_gpu(leaf) or leaf.layout is not torch.strided or leaf.is_nested:
        return leaf
    return leaf.detach().to("cpu", non_blocking=True)


def in_host_memory(
    outcomes: Iterator[Predicted | Failure],
    start: Callable[[Any], tuple[Any, Wait] | None] = copy_from_gpu,
) -> Iterator[Predicted | Failure]:
    """Yield outcomes in their order, with outputs on a GPU copied to host memory.

    Such a copy is started, without waiting, when the model has been called, and awaited after the
    model was called for the next batch. Other outcomes are yielded as they come.

    Args:
        outcomes: The outcomes of a part.
        start: Starts to copy outputs; returns the copy and how to wait for it, or None if they are
            in host memory.
    """
    started: tuple[Predicted, Wait] | None = None
    for outcome in outcomes:
        before, started = started, None
        if isinstance(outcome, Predicted) and (copy := start(outcome.outputs)) is not None:
            outputs, wait = copy
            started = outcome._replace(outputs=outputs), wait
        if before is not None:
            yield _awaited(*before)
        if started is None:
            yield outcome
    if started is not None:
        yield _awaited(*started)


def _awaited(outcome: Predicted, wait: Wait) -> Predicted:
    wait()
    return outcome
