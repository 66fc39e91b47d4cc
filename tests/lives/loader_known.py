"""Faults of loaders that are known: lives that have them are left out until they are fixed."""

from __future__ import annotations

from .life import Excluded

_OWN = "own-python own-numpy own-torch"
_NOT_SEEDED = "a generator that a module holds is not seeded"
_PROCESSES = "1 3 auto"
_SAMPLER = "a sampler's own generator is not taken back: another order after a resume, or a replay"
_VIEWS = "views of one tensor come from workers as copies"

_STREAMS = "stream stream-shuffled stream-state stream-epoch stream-state-epoch"

_ENDS = "a handler's exception while workers end leaves pipes or threads of theirs"

KNOWN = (
    Excluded(_ENDS, {"workers": _PROCESSES, "buffer": "none", "keep": "usual"}, "alarm"),
    Excluded(_ENDS, {"backend": "thread concurrent"}, "alarm"),
    *(
        Excluded(
            "new workers of a stream draw the random numbers of its first epoch again",
            {"data": _STREAMS, "draws": "python numpy torch", "seed": "none", **kept},
            step,
        )
        for step in ("refresh", "change")
        for kept in ({"keep": "persistent"}, {"buffer": "bytes batches disk"})
    ),
    Excluded(_NOT_SEEDED, {"draws": _OWN, "holder": "global module helper", "seed": "known"}),
    Excluded(_NOT_SEEDED, {"draws": _OWN, "holder": "global module helper", "world": "2 3"}),
    Excluded(_VIEWS, {"batch": "views", "workers": _PROCESSES, "backend": "process concurrent"}),
    Excluded(_VIEWS, {"batch": "views", "backend": "process concurrent"}, "elsewhere"),
    Excluded("check() makes a loader that is refused", {"data": "grouped mix"}, "check"),
    *(
        Excluded(_SAMPLER, {"holder": "sampler"}, step)
        for step in ("resume", "elsewhere", "replay", "kill", "refresh", "change")
    ),
    *(
        Excluded(
            "a stream with a state draws the first random numbers of the epoch again",
            {"data": "stream-state stream-state-epoch", "draws": "python numpy torch"},
            step,
        )
        for step in ("resume", "elsewhere", "kill", "kill_worker")
    ),
    Excluded(
        "each epoch of a stream that is told it draws the same random numbers",
        {
            "data": "stream-epoch stream-state-epoch",
            "draws": "python numpy torch",
            "buffer": "bytes batches disk",
            "seed": "none",
        },
    ),
    Excluded(
        "workers take parts of different orders: samples are missing",
        {"data": "stream-shuffled", "workers": "3", "seed": "known"},
    ),
    Excluded(
        "workers take parts of different orders: samples are missing",
        {"data": "stream-shuffled", "workers": "3", "buffer": "bytes batches disk"},
    ),
)
