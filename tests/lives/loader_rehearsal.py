"""Import what trainers import, once, in the process that is forked for each life."""

from __future__ import annotations

import contextlib
import gc
import importlib
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from .life import Life, Step, WrongError
from .loader_history import History


def rehearse(axes: Mapping[str, Sequence[str]]) -> None:
    """Import what trainers import: once, in the process that is forked for each life."""
    known: set[str] = set()
    simplest = {axis: values[0] for axis, values in axes.items()} | {"seed": "known"}
    for kind in ("map", "parquet", "cache"):
        folder = Path(tempfile.mkdtemp(prefix="rehearsal-"))
        setup = {**simplest, "data": kind, "buffer": "bytes", "workers": str(int(kind == "map"))}
        life = Life("loader", "", setup, [])
        # What is wrong is found by the lives themselves.
        with contextlib.suppress(WrongError), History(life, folder, _silent) as history:
            for name in ("rest", "check", "replay") if kind == "map" else ("rest",):
                history.take_step(Step(name))
            known |= set(history.modules())
        shutil.rmtree(folder)
    for name in sorted(known - set(sys.modules)):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _silent(_: str) -> None:
    """Say nothing."""
