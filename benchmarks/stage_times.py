"""Processor time by stage: functions of forebay are wrapped, in the driver and in each worker.

A stage's time leaves out the stages called from it. What the wrapping itself costs is measured and
subtracted.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

# Where each process writes its times when it ends.
FOLDER = "BENCHMARK_STAGES"
REST = "rest"
# The clock: processor time of the calling thread, in nanoseconds. Wall time would count what other
# programs do with the cores.
_clock = time.thread_time_ns


class Stages:
    """The times of one thread, by stage.

    Attributes:
        spent: Nanoseconds by stage.
        calls: Measured calls by stage.
        nested: Measured calls of other stages, by the stage that they were made from.
    """

    def __init__(self) -> None:
        self.spent: dict[str, int] = {}
        self.calls: dict[str, int] = {}
        self.nested: dict[str, int] = {}
        self._current = REST
        self._since = _clock()

    def enter(self, stage: str) -> str:
        """Begin a stage; return the one to go back to."""
        now, before = _clock(), self._current
        self.spent[before] = self.spent.get(before, 0) + now - self._since
        self.calls[stage] = self.calls.get(stage, 0) + 1
        self.nested[before] = self.nested.get(before, 0) + 1
        self._current, self._since = stage, now
        return before

    def leave(self, before: str) -> None:
        """Go back to the stage that `enter` returned."""
        now, stage = _clock(), self._current
        self.spent[stage] = self.spent.get(stage, 0) + now - self._since
        self._current, self._since = before, now


_threads = threading.local()


def current() -> Stages:
    """Return the times of this thread."""
    try:
        found: Stages = _threads.stages
    except AttributeError:
        found = _threads.stages = Stages()
    return found


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as a stage."""

    @functools.wraps(function)
    def call(*args: Any, **settings: Any) -> Any:
        stages = current()
        before = stages.enter(name)
        try:
            return function(*args, **settings)
        finally:
            stages.leave(before)

    return call


def install(table: dict[str, tuple[str, ...]]) -> None:
    """Wrap functions, wherever a module has imported them.

    Args:
        table: By stage, functions as "module:name" or "module:class.name".
    """
    for name, places in table.items():
        for place in places:
            module_name, _, path = place.partition(":")
            module = importlib.import_module(module_name)
            owner, _, attribute = path.rpartition(".")
            if owner:
                holder = getattr(module, owner)
                setattr(holder, attribute, timed(name, getattr(holder, attribute)))
                continue
            function = getattr(module, attribute)
            wrapped = timed(name, function)
            for each in [*sys.modules.values()]:
                if getattr(each, attribute, None) is function:
                    setattr(each, attribute, wrapped)


def cost_ns() -> tuple[float, float]:
    """Return what wrapping adds to a call: within the stage, and to the stage around it."""
    rounds = 2_000  # few, since each worker measures it
    stages = Stages()
    _threads.stages = stages
    nothing = timed("inner", lambda: None)
    before = stages.enter("outer")
    for _ in range(rounds):
        nothing()
    stages.leave(before)
    del _threads.stages
    return stages.spent["inner"] / rounds, stages.spent["outer"] / rounds


def begin() -> None:
    """Forget what this thread did so far, such as in the process it was forked from."""
    _threads.stages = Stages()


def save(role: str) -> None:
    """Write this thread's times to the folder that the environment names."""
    stages = current()
    stages.leave(stages.enter(REST))  # so that the present stage is complete
    inner, outer = cost_ns()
    _threads.stages = stages
    spent = {
        name: max(ns - stages.calls.get(name, 0) * inner - stages.nested.get(name, 0) * outer, 0.0)
        for name, ns in stages.spent.items()
    }
    record = {"role": role, "spent": spent, "calls": stages.calls}
    path = os.path.join(os.environ[FOLDER], f"{role}-{os.getpid()}.json")
    with open(path, "w") as file:
        json.dump(record, file)
