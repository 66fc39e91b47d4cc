"""A loader in Lightning, which counts epochs itself, and may take each batch one step early.

    FitLoop.setup_data ── iter(loader) ──> counted_epoch: which epoch begins
    fetcher of loaders without a length ── next(iterator) ──> takes_early: is it a step ahead

Lightning calls `set_epoch` after `iter(loader)`. Of loaders that have no length together it has
taken a batch by then, and takes each one while it trains on the one before, to know the last.
"""

from __future__ import annotations

from typing import Any

from forebay.base.torch_internals import library_call

# Calls between a loader and one of Lightning's functions.
_DEPTH = 16


def counted_epoch() -> tuple[int, bool] | None:
    """Return the epoch that Lightning begins to train now; None if it does not.

    Returns:
        The epoch; and whether its checkpoint was of the last step of the one before.
    """
    if _caller("utilities.combined_loader", "__iter__") is None:
        return None
    begins = _caller("loops.fit_loop", "setup_data")
    begins = begins or _caller("loops.training_epoch_loop", "on_run_start")
    if begins is None:
        return None
    loop = begins.trainer.fit_loop
    epochs, batches = loop.epoch_progress.current, loop.epoch_loop.batch_progress
    # That step is saved before the epoch is counted.
    is_over = loop.restarting and batches.is_last_batch and epochs.started > epochs.processed
    return epochs.processed + is_over, is_over


def takes_early() -> bool:
    """Return whether Lightning asks for a batch, and will return the one before it first."""
    fetcher = _caller("loops.fetchers", "__next__")
    return getattr(fetcher, "prefetch_batches", 0) > 0 and fetcher.length is None


def _caller(module: str, function: str) -> Any:
    """Return whose method calls, under either name of the package; None if none does."""
    names = f"lightning.pytorch.{module}", f"pytorch_lightning.{module}"
    call = library_call(names, function, _DEPTH)
    return None if call is None else call["self"]
