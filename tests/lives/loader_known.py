"""Faults of loaders that are known: lives that have them are left out until they are fixed."""

from __future__ import annotations

from .life import Excluded

_VIEWS = "views of one tensor come from workers as copies: docs/tutorial/train.md says so"

KNOWN = (
    Excluded(_VIEWS, {"batch": "views", "workers": "1 3 auto", "backend": "process concurrent"}),
    Excluded(_VIEWS, {"batch": "views", "backend": "process concurrent"}, "elsewhere"),
)
