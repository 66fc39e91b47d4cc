"""A process that trains: one loader for each rank, side by side, and what a life asks of it."""

from __future__ import annotations

import gc
import hashlib
import json
import multiprocessing.connection
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch

from . import left, loader_data, loader_draws, loader_sets
from .life import WrongError
from .loader_plans import Plan, dataset_of, loader_of

# What a trainer has that is closed ends within this time, on a loaded machine.
_ENDING_S = 10.0


@dataclass(frozen=True)
class Taken:
    """What came of one step of training, on all ranks.

    Attributes:
        ranks: What each rank's batch says of its samples, and of which of them counts.
        digests: The content of each rank's batch.
    """

    ranks: tuple[tuple[tuple[loader_data.Record, bool], ...], ...]
    digests: tuple[str, ...]

    def records(self) -> list[loader_data.Record]:
        """Return the samples of the global batch, in order, without repeated ones."""
        return [record for rank in self.ranks for record, counts in rank if counts]


@dataclass(frozen=True)
class Raised:
    """An exception of the trainer."""

    kinds: tuple[str, ...]
    message: str
    text: str = field(compare=False, default="")


@dataclass(frozen=True)
class Took:
    """What came of several steps.

    Attributes:
        ended: Whether the epoch ended.
        raised: What was raised after these batches, if anything.
        epoch: The loader's epoch after that.
    """

    batches: tuple[Taken, ...]
    ended: bool
    epoch: int
    raised: Raised | None = None


class AlarmError(Exception):
    """A signal's handler raised."""


def raised_by(error: BaseException) -> Raised:
    """Describe an exception."""
    kinds = tuple(each.__name__ for each in type(error).__mro__)
    return Raised(kinds, str(error), "".join(traceback.format_exception(error)))


def digest_of(value: Any) -> str:
    """Return a hash of a batch: its structure, types and bits."""
    digest = hashlib.sha256()
    _feed(digest.update, value)
    return digest.hexdigest()


def _feed(update: Callable[[bytes], None], value: Any) -> None:
    update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray):
        update(f"{value.dtype} {value.shape}".encode())
        update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, dict):
        for key, each in value.items():
            update(repr(key).encode())
            _feed(update, each)
    elif isinstance(value, list | tuple):
        for each in value:
            _feed(update, each)
    else:
        update(repr(value).encode())


class _Child:
    """The trainer itself, in its process."""

    def __init__(self) -> None:
        self.plan: Plan
        self.loaders: list[Any] = []
        self.datasets: list[Any] = []
        self.makers: list[loader_data.Maker] = []
        self.iterators: list[Any] = []
        self.held: list[tuple[Any, str]] = []
        self.forked: tuple[int, Any, Any] | None = None
        self.before: dict[int, str] = {}
        self.shallow = 0  # the dataset's own version; that of its maker is added to it

    def serve(self, pipe: multiprocessing.connection.Connection) -> None:
        """Do what is asked until the pipe ends."""
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        loader_draws.begin()
        signal.signal(signal.SIGALRM, _alarm)
        self.before = left.descriptors()
        while True:
            try:
                name, arguments = pipe.recv()
            except EOFError:
                return
            try:
                answer = getattr(self, name)(*arguments)
            except Exception as error:  # noqa: BLE001 - the life judges it
                answer = raised_by(error)
            pipe.send(answer)

    def open(self, plan: Plan, state: str | None, manual: int | None, strict: bool = True) -> int:
        """Make the loaders of all ranks; return their epoch."""
        self.close()
        self.plan, self.shallow = plan, plan.version
        if manual is not None:
            torch.manual_seed(manual)
            random.seed(manual)
            np.random.seed(manual)
        made = [dataset_of(plan) for _ in range(plan.world)]
        self.datasets, self.makers = [each[0] for each in made], [each[1] for each in made]
        self.loaders = [
            loader_of(plan, dataset, rank) for rank, dataset in enumerate(self.datasets)
        ]
        if state is not None:
            for loader in self.loaders:
                loader.load_state_dict(json.loads(state), strict=strict)
        return self._epoch()

    def take(self, most: int, alarm_s: float = 0.0) -> Took:
        """Take batches; begin an epoch if none has begun."""
        batches: list[Taken] = []
        ended, raised = False, None
        if alarm_s:
            signal.setitimer(signal.ITIMER_REAL, alarm_s)
        try:
            if not self.iterators:
                self.iterators = [iter(loader) for loader in self.loaders]
            while len(batches) < most and not ended:
                taken = self._step()
                if taken is None:
                    ended = True
                    self.iterators = []
                else:
                    batches.append(taken)
            end = time.monotonic() + _ENDING_S
            while alarm_s and time.monotonic() < end:
                time.sleep(0.01)
        except Exception as error:  # noqa: BLE001 - the life judges it
            raised = raised_by(error)
            self.iterators = []
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return Took(tuple(batches), ended, self._epoch(), raised)

    def begin(self) -> int:
        """Begin to iterate; return the epoch."""
        self.iterators = [iter(loader) for loader in self.loaders]
        return self._epoch()

    def _step(self) -> Taken | None:
        ended, ranks, digests = [], [], []
        form, is_raw = self.plan.setup["batch"], self.plan.setup["batch"] == "raw"
        for loader, iterator in zip(self.loaders, self.iterators, strict=True):
            try:
                batch = next(iterator)
            except StopIteration:
                ended.append(True)
                continue
            ended.append(False)
            records = loader_data.records_of(batch, form, is_raw=is_raw)
            ranks.append(tuple(zip(records, self._mask(loader, len(records)), strict=True)))
            digests.append(digest_of(batch))
            self.held.append((batch, digests[-1]))
        if all(ended):
            return None
        if any(ended) and self.plan.setup["tail"] != "uneven":
            raise WrongError(f"some ranks have ended, and others not: {ended}")
        self._look_at_held()
        return Taken(tuple(ranks), tuple(digests))

    def _mask(self, loader: Any, count: int) -> list[bool]:
        if self.plan.world == 1 or self.plan.setup["data"] in ("packed", "grouped"):
            return [True] * count
        return loader.mask.tolist()

    def _look_at_held(self) -> None:
        """Compare what batches of before hold with what they held when they came."""
        for batch, digest in self.held:
            if digest_of(batch) != digest:
                raise WrongError("a batch that the trainer holds has changed")
        if len(self.held) > 5:
            del self.held[0], self.held[1]  # some live long, some short

    def leave(self) -> int:
        """Leave the epoch, as `break` does."""
        self.iterators = []
        return self._epoch()

    def state(self) -> str:
        """Return the state, which is the same on all ranks, as JSON."""
        states = [json.dumps(loader.state_dict(), sort_keys=True) for loader in self.loaders]
        if len(set(states)) > 1 and self.plan.setup["holder"] != "sampler":
            raise WrongError(f"the state differs between ranks: {states}")
        return states[0]

    def replay(self, epoch: int, batch: int) -> Taken:
        """Make a batch again."""
        made = [loader.replay(epoch=epoch, batch=batch) for loader in self.loaders]
        form, is_raw = self.plan.setup["batch"], self.plan.setup["batch"] == "raw"
        ranks = [loader_data.records_of(each, form, is_raw=is_raw) for each in made]
        return Taken(
            tuple(tuple((record, True) for record in rank) for rank in ranks),
            tuple(digest_of(each) for each in made),
        )

    def check(self, samples: int) -> tuple[bool, str]:
        """Have a loader check some samples."""
        found = self.loaders[0].check(samples)
        return bool(found), str(found)

    def set_epoch(self, epoch: int) -> None:
        """Tell datasets and samplers the epoch."""
        for loader, dataset in zip(self.loaders, self.datasets, strict=True):
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(epoch)
            if self.plan.setup["sampler"] in ("told", "distributed"):
                loader.sampler.set_epoch(epoch)

    def set_order(self, order: int) -> None:
        """Give samplers another order."""
        for loader in self.loaders:
            loader.sampler.order = order

    def set_own_epoch(self, epoch: int) -> None:
        """Tell the loader's own sampler the epoch."""
        for loader in self.loaders:
            loader.sampler.set_epoch(epoch)

    def set_weights(self, weights: dict[str, float]) -> None:
        """Change the weights of a mixture."""
        for loader in self.loaders:
            loader.set_weights(weights)

    def refresh(self) -> None:
        """Have the loaders begin anew with the next epoch."""
        for loader in self.loaders:
            loader.refresh()

    def change(self, version: int, deep: bool) -> None:
        """Make another version of the dataset, between epochs."""
        for loader, dataset, maker in zip(self.loaders, self.datasets, self.makers, strict=True):
            if deep:
                maker.version = version - self.shallow
                loader.refresh()
            elif self.plan.setup["data"] in loader_sets.STORED:
                self.shallow = version - maker.version
                layout = dataset.transform.layout
                dataset.transform = loader_data.Decode(maker, self.shallow, layout)
            else:
                self.shallow = dataset.version = version - maker.version

    def fork(self, is_careless: bool) -> None:
        """Fork a child that holds the last batch, if none is there yet."""
        if self.forked or not self.held:
            return
        batch, digest = self.held[-1]
        ask, tell = multiprocessing.connection.Pipe()
        child = os.fork()
        if child:
            tell.close()
            self.forked = child, ask, digest
            del self.held[-1]  # only the child uses it now
            return
        status = 1
        try:
            ask.close()
            if is_careless:
                self.loaders, self.iterators, self.datasets, self.held = [], [], [], []
                gc.collect()
            try:
                tell.recv()
            except EOFError:
                os._exit(0)
            tell.send(digest_of(batch))
            status = 0
        finally:
            os._exit(status)

    def ask_forked(self) -> None:
        """Ask the forked child what its batch holds."""
        if not self.forked:
            return
        child, ask, digest = self.forked
        self.forked = None
        ask.send("look")
        found = ask.recv()
        ask.close()
        if os.waitpid(child, 0)[1]:
            raise WrongError("a process forked from the trainer failed")
        if found != digest:
            raise WrongError("the batch of a process forked from the trainer has changed")

    def failures(self) -> list[tuple[str, ...]]:
        """Return which samples each loader left out."""
        return [tuple(str(each.source) for each in loader.failures) for loader in self.loaders]

    def close(self) -> None:
        """Close the loaders and drop them."""
        self._look_at_held()
        self.ask_forked()
        self.iterators = []
        for loader in self.loaders:
            if hasattr(loader, "close"):
                loader.close()
        self.loaders, self.datasets, self.held = [], [], []
        gc.collect()

    def modules(self) -> list[str]:
        """Return the modules that were imported here."""
        return sorted(sys.modules)

    def is_clean(self) -> str:
        """Return what is left of closed loaders: nothing, if it is empty."""
        end = time.monotonic() + _ENDING_S
        while (found := self._left()) and time.monotonic() < end:
            time.sleep(0.02)
        return found

    def _left(self) -> str:
        processes = [left.command(each) for each in left.descendants(os.getpid())]
        threads = [each.name for each in threading.enumerate() if each.name != "MainThread"]
        now = left.descriptors()
        files = sorted(now[each] for each in now.keys() - self.before.keys())
        if loader_sets.is_remote(self.plan.setup["place"]):
            # Connections of fsspec's, which keeps them and their thread.
            threads = [each for each in threads if not each.startswith(("fsspec", "asyncio"))]
            files = [each for each in files if not each.startswith(("socket:", "anon_inode:"))]
        found = {"processes": processes, "threads": threads, "files": files}
        return "; ".join(f"{name}: {each}" for name, each in found.items() if each)

    def _epoch(self) -> int:
        return getattr(self.loaders[0], "epoch", -1)


def _alarm(*_: object) -> NoReturn:
    raise AlarmError("the handler of a signal raises")


class DiedError(Exception):
    """A trainer died."""


class Trainer:
    """A trainer as the life sees it: it asks, and gets answers or exceptions described."""

    def __init__(self) -> None:
        self._pipe, other = multiprocessing.connection.Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.process = os.fork()
        if not self.process:
            self._pipe.close()
            try:
                _Child().serve(other)
            except BaseException:  # noqa: BLE001 - the process ends
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(0)
        other.close()

    def begin(self, name: str, *arguments: Any) -> None:
        """Ask for something, without waiting for the answer."""
        self._pipe.send((name, arguments))

    def answer(self) -> Any:
        """Wait for an answer: it may be a `Raised`."""
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise DiedError("the trainer died") from error

    def ask(self, name: str, *arguments: Any) -> Any:
        """Ask for something and wait for it."""
        self.begin(name, *arguments)
        return self.answer()

    def end(self, number: int = signal.SIGKILL) -> None:
        """Send a signal that ends the trainer, and wait for that."""
        os.kill(self.process, number)
        os.waitpid(self.process, 0)
        self._pipe.close()

    def finish(self) -> None:
        """Let the trainer end as a program does."""
        self._pipe.close()
        os.waitpid(self.process, 0)
