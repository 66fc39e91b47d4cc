"""Packed rows for torchtitan, whose trainer counts steps and saves the loader with the model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset
from torchtitan.components.dataloader import BaseDataLoader

from forebay.collate import sequences
from forebay.errors import OptionError
from forebay.lengths import pack_sequences
from forebay.loader import DataLoader

# What torchtitan leaves out of the loss.
IGNORED = -100


class PackedLoader(BaseDataLoader):
    """Yield packed rows of tokens in random order, epoch after epoch, as torchtitan takes them.

    A batch is `({"input": tokens, "positions": positions}, labels)`, each an int64 tensor of shape
    (batch, seq_len). Positions begin again with each text; a label is the next token of the same
    text, or -100. The tensors are the caller's.

    The state is the same on every rank, so that it can be loaded by another number of ranks if
    `global_batch_size` stays.

    Args:
        dataset: A map-style dataset of 1-D tensors of tokens.
        lengths: How many tokens each sample has, or the name of a column with that, as in
            `forebay.pack_sequences`.
        seq_len: Tokens in a row.
        global_batch_size: Rows in a batch of all ranks.
        dp_world_size: Ranks that read different batches.
        dp_rank: Which of them this process is.
        seed: Of the order.
        options: Other arguments of `forebay.DataLoader`, such as `num_workers=` and `buffer=`.

    Raises:
        OptionError: `global_batch_size` cannot be divided by `dp_world_size`.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sequence[Any],
        lengths: Any,
        *,
        seq_len: int,
        global_batch_size: int,
        dp_world_size: int,
        dp_rank: int,
        seed: int = 0,
        **options: Any,
    ) -> None:
        if global_batch_size % dp_world_size:
            raise OptionError(
                f"global_batch_size={global_batch_size} cannot be divided by "
                f"dp_world_size={dp_world_size}\n  Choose a multiple: ranks have equal batches."
            )
        self._loader = DataLoader(
            pack_sequences(dataset, lengths, size=seq_len),
            batch_size=global_batch_size // dp_world_size,
            shuffle=True,
            seed=seed,
            drop_last=True,
            world_size=dp_world_size,
            rank=dp_rank,
            collate_fn=sequences(size=seq_len),
            **options,
        )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield batches without end: torchtitan counts steps, not epochs."""
        while True:
            for batch in self._loader:
                tokens, ids = batch["tokens"], batch["sequence_ids"]
                labels = torch.full_like(tokens, IGNORED)
                same = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] > 0)
                labels[:, :-1][same] = tokens[:, 1:][same]
                yield {"input": tokens, "positions": batch["position_ids"]}, labels

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch, as a string that a checkpoint keeps whole."""
        return {"forebay": json.dumps(self._loader.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state; an empty one, of a checkpoint without a loader, is none."""
        if state_dict:
            self._loader.load_state_dict(json.loads(state_dict["forebay"]))

    def close(self) -> None:
        """End the workers."""
        self._loader.close()
