"""Workarounds for what other libraries do to loaders."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from torch.utils.data import DataLoader


def torch_init() -> Any:
    """Return the original `torch.utils.data.DataLoader.__init__`.

    While Lightning calls a hook, it replaces the `__init__` of every loader class with one that
    records the arguments, to create the loader again. If forebay is first imported in that hook,
    the replacement of torch's `__init__` would record the arguments that forebay passes to torch.
    """
    init: Any = DataLoader.__init__
    while "lightning" in getattr(init, "__globals__", {}).get("__name__", ""):
        init = init.__wrapped__
    return init


def warn_if_stock_loader() -> None:
    """Warn if a plain torch DataLoader iterates a sampler of forebay; called by the sampler."""
    frame = sys._getframe(2)
    for _ in range(6):
        if frame.f_back is None:
            return
        frame = frame.f_back
        owner = frame.f_locals.get("self")
        if frame.f_globals.get("__name__") == "torch.utils.data.dataloader":
            if owner is not None and type(owner).__module__.startswith("forebay."):
                return
            warnings.warn(
                "a plain torch DataLoader was made with the sampler of a forebay.DataLoader, so "
                "buffer=, seed=, world_size= and the state are lost; to keep them, pass "
                "world_size='auto' and do not hand the loader to the library's prepare() "
                "(docs/how-to/frameworks.md)",
                stacklevel=2,
            )
            return
