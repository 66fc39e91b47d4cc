"""Faults of loaders that are known: lives that have them are left out until they are fixed."""

from __future__ import annotations

from .life import Excluded

_OWN = "own-python own-numpy own-torch"
_NOT_SEEDED = "a generator that a module holds is not seeded"
_PROCESSES = "1 3 auto"
_SAMPLER = "a sampler's own generator is not taken back: another order after a resume, or a replay"
_VIEWS = "views of one tensor come from workers as copies"

KNOWN = (
    Excluded(_NOT_SEEDED, {"draws": _OWN, "holder": "global module helper", "seed": "known"}),
    Excluded(_NOT_SEEDED, {"draws": _OWN, "holder": "global module helper", "world": "2 3"}),
    Excluded(_VIEWS, {"batch": "views", "workers": _PROCESSES, "backend": "process concurrent"}),
    Excluded(_VIEWS, {"batch": "views", "backend": "process concurrent"}, "elsewhere"),
    Excluded("check() makes a loader that is refused", {"data": "grouped mix"}, "check"),
    Excluded(_SAMPLER, {"holder": "sampler"}, "resume"),
    Excluded(_SAMPLER, {"holder": "sampler"}, "elsewhere"),
    Excluded(_SAMPLER, {"holder": "sampler"}, "replay"),
    Excluded(_SAMPLER, {"holder": "sampler"}, "kill"),
)
