"""forebay's DataLoader; the table keeps the dataset's names in a `forebay.PackedSequence`."""

from __future__ import annotations

from benchmarks.loading.peers.forebay import loader

__all__ = ["loader"]
