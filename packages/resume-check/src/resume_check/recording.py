"""The process of a training script, which sends each of its steps.

A step is a call of a module in training mode, with gradients, whose weights are trained: what it is
called with, and its weights. So it does not matter which loader or framework made the batch, nor
what was requested ahead of it.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from resume_check.comparison import ReceivedBatch
from resume_check.digests import digest_of, digested, not_compared
from resume_check.processes import send


class TrainingStep(NamedTuple):
    """One call of a module that is trained.

    Attributes:
        batch: What it was called with.
        module: Which module it is, in the order in which they were first called.
        weights: The digest of its weights before the call; "" if they cannot be read.
        updates: How many steps the optimizers had made.
    """

    batch: ReceivedBatch
    module: int
    weights: str
    updates: int


class StepRecorder:
    """Sends the steps of this process, and stops it after some.

    Args:
        stop_before: Before which step the process waits to be killed; negative for none.
        most: How many steps are sent at most.
    """

    def __init__(self, connection: Connection, stop_before: int, most: int) -> None:
        self._connection, self._stop_before, self._most = connection, stop_before, most
        self._count = self._updates = 0
        self._outer: list[torch.nn.Module] = []
        self._inner: set[int] = set()
        self._thread = threading.local()
        self._process = os.getpid()
        register_optimizer_step_post_hook(self._note_update)

    def _note_update(self, *_: Any) -> None:
        self._updates += 1

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `torch.nn.Module.__call__`, which notes steps before it calls."""

        def __call__(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if getattr(self._thread, "is_inside", False):
                return call(module, *args, **kwargs)
            self._note(module, args, kwargs)
            self._thread.is_inside = True
            try:
                return call(module, *args, **kwargs)
            finally:
                self._thread.is_inside = False

        return __call__

    def _note(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if os.getpid() != self._process or not (module.training and torch.is_grad_enabled()):
            return
        if id(module) in self._inner:  # called again for its gradients: activation checkpointing
            return
        trained = [each for each in module.parameters() if each.requires_grad]
        if not trained:  # a loss, or transforms
            return
        if not any(module is each for each in self._outer):
            self._outer.append(module)
            self._inner.update(id(each) for each in module.modules() if each is not module)
        # What was computed from weights is not data.
        given = [each for each in args if not _is_computed(each)]
        named = {name: each for name, each in kwargs.items() if not _is_computed(each)}
        weights = digested(trained)
        step = TrainingStep(
            ReceivedBatch(None, self._count, digested((given, named) if named else given)),
            [module is each for each in self._outer].index(True),
            "" if any(not_compared(weights)) else digest_of(repr(weights).encode()),
            self._updates,
        )
        send(self._connection, "batch", step)
        if self._count == self._stop_before:
            send(self._connection, "state", b"")
            self._connection.recv_bytes()  # nothing comes, except the end
        self._count += 1
        if self._count == self._most:
            send(self._connection, "end", "")
            self._connection.recv_bytes()


def _is_computed(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def run_script() -> None:
    """Run a script as `python SCRIPT ARGUMENTS` does; `sys.argv` has what `StepRecorder` needs."""
    _, descriptor, stop_before, most, *command = sys.argv
    connection = Connection(int(descriptor))
    recorder = StepRecorder(connection, int(stop_before), int(most))
    torch.nn.Module.__call__ = recorder.around(torch.nn.Module.__call__)  # type: ignore[method-assign]
    sys.argv = command
    sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    send(connection, "end", "")
