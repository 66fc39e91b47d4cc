"""One life of a loader: its steps, one after the other, each judged."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import time
from pathlib import Path
from typing import Any

from . import left, loader_sets
from .life import Life, Say, Step, WrongError
from .loader_more import MoreSteps
from .loader_oracle import (
    STREAMS,
    TOLD,
    Oracle,
    Position,
    is_drawn_again,
    is_plain,
    is_seeded,
    steps_of,
)
from .loader_plans import Plan
from .loader_trainer import DiedError, Raised, Taken, Took, Trainer

_ALL = 1000
# Of torch's generator, where the order follows from it.
_MANUAL = 5
_REFUSED = "OptionError"


def _send(processes: list[int], number: int) -> None:
    """Send a signal to processes, some of which may have ended."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


class History(MoreSteps):
    """A trainer, its oracle and what was saved."""

    def __init__(self, life: Life, folder: Path, say: Say) -> None:
        self.setup, self.folder, self.say = dict(life.setup), folder, say
        self.first = dict(life.setup)
        self.oracle = Oracle()
        self.saved: tuple[str, Position, dict[str, str]] | None = None
        self.trainer: Trainer | None = None
        self.bucket: loader_sets.Bucket | None = None
        self.saved_untouched = False  # whether the state is of a loader that gave no batch
        self.is_open = False  # whether an epoch has begun and not ended
        self.was_left = False  # whether the last epoch was left
        self.kills = 0  # of workers, since a batch has come
        self.all_kills = 0
        self.branches = 0

    def __enter__(self) -> History:
        (self.folder / "pids").mkdir()
        kind, place = self.setup["data"], self.setup["place"]
        if kind in loader_sets.STORED:
            loader_sets.store(kind, place, self.folder / "data" / "set")
        if loader_sets.is_remote(place):
            self.bucket = loader_sets.Bucket(self.folder)
            os.environ.update(self.bucket.environment)
        self._begin(None)
        return self

    def __exit__(self, *_: object) -> None:
        if self.trainer:
            self.trainer.end()
        if self.bucket:
            self.bucket.close()

    def take_step(self, step: Step) -> None:
        """Do a step, whatever came before."""
        self.say(f"{step.name}({step.draw}), at {self._at()}")
        getattr(self, f"_{step.name}")(step.draw)

    def end(self) -> None:
        """Judge what is left of the loaders, and compare with ones that are made plainly."""
        self._take_most(1)
        trainer = self._trainer()
        if self.setup["failing"] == "skip":
            self._judge_failures(trainer.ask("failures"))
        self._right(trainer.ask("close"))
        if found := self._right(trainer.ask("is_clean")):
            raise WrongError(f"closed loaders leave behind {found}")
        if is_plain(self.first):
            self._compare_with_torch()
        elif is_seeded(self.first) and self.first["data"] not in STREAMS:
            self._compare_with_plain()

    def modules(self) -> list[str]:
        """Return the modules that the trainer has imported."""
        return self._trainer().ask("modules")

    # --- beginnings

    def _begin(self, saved: tuple[str, Position, dict[str, str]] | None) -> None:
        """Start a trainer; with a state, it continues from there."""
        self.trainer = self.trainer or Trainer()
        self.is_open = self.was_left = False
        if saved is None:
            told = self.oracle.at.told
            branch = self.oracle.at.branch
            self.oracle.at = Position(told=told, version=self.oracle.at.version)
            if not is_seeded(self.setup) and self._trainings():
                branch = self._branch()
            self.oracle.at.branch = "0" if is_seeded(self.setup) else branch
            self.oracle.at.is_clean = not self._trainings()
        else:
            self.oracle.at = saved[1]
        at = self.oracle.at
        at.first, at.began = at.batch, len(at.seen)
        state = saved and saved[0]
        said = {"told": at.told, "version": at.version, "order": at.order}
        plan = Plan(self.setup, self.folder, **said, is_resumed=bool(state))
        self._began = True
        answer = self.trainer.ask("open", plan, state, None if self._manual() else _MANUAL)
        self._right(answer)

    def _manual(self) -> bool:
        return not self.oracle.at.is_clean

    def _trainings(self) -> bool:
        return hasattr(self, "_began")

    def _branch(self) -> str:
        self.branches += 1
        return str(self.branches)

    def _restart(self) -> None:
        """Start a trainer again after it died, from the last state."""
        self.trainer = None
        if self.saved:
            state, position, setup = self.saved
            self.setup = dict(setup)
            self.say(f"a new trainer continues at epoch {position.epoch}, batch {position.batch}")
            position = copy.deepcopy(position)
            position.is_clean = False
            self._continue_unseeded(position)
            self._begin((state, position, setup))
        else:
            self.setup = dict(self.first)
            self.say("a new trainer begins anew")
            self._begin(None)
        self.oracle.at.is_clean = False

    # --- taking

    def _take(self, draw: int) -> None:
        self._take_most((1 + draw % 3) * (4 if self.setup["batch"] == "raw" else 1))

    def _rest(self, draw: int) -> None:
        self._take_most(_ALL)

    def _take_most(self, most: int) -> None:
        self._judge_took(self._trainer().ask("take", most))

    def _judge_took(self, took: Took | Raised, allowed: str = "") -> None:
        took = self._right(took)
        for batch in took.batches:
            self.oracle.got(self.setup, batch)
        if took.batches:
            self.is_open, self.was_left, self.kills = True, False, 0
        self.say(f"  took {len(took.batches)} batches{', to the end' if took.ended else ''}")
        if took.ended:
            self.oracle.ended(self.setup)
            self.is_open = False
        if took.raised:
            if allowed not in took.raised.kinds:
                raise WrongError(f"the loader raised\n{took.raised.text}")
            self.say(f"  {took.raised.kinds[0]}: {took.raised.message.splitlines()[0]}")
            return
        at = self.oracle.at
        if not self.oracle.may_be_epoch(self.setup, took.epoch):
            raise WrongError(f"the loader's epoch is {took.epoch} instead of {at.epoch}")

    def _leave(self, draw: int) -> None:
        if self.is_open:
            self._judge_left(self._right(self._trainer().ask("leave")))

    def _judge_left(self, epoch: int) -> None:
        if self.oracle.left(self.setup, epoch) and is_drawn_again(self.setup):
            self.oracle.at.branch = self._branch()
        self.oracle.at.is_clean = False
        self.is_open, self.was_left = False, True

    # --- states

    def _state(self, draw: int) -> None:
        if self.was_left:
            return
        state = self._right(self._trainer().ask("state"))
        self.saved = state, self.oracle.saved(self.setup), dict(self.setup)
        at = self.oracle.at
        self.saved_untouched = (at.epoch, at.batch) == (0, 0)

    def _resume(self, draw: int) -> None:
        """Continue in another process, or in this one, with a loader that is made the same."""
        self._continue(dict(self.setup) if not self.saved else dict(self.saved[2]), draw)

    def _elsewhere(self, draw: int) -> None:
        """Continue with other workers, ranks, buffer and backend."""
        setup = dict(self.setup) if not self.saved else dict(self.saved[2])
        draws = draw // 2
        for axis, values in self._choices(setup).items():
            draws, number = divmod(draws, len(values))
            setup[axis] = values[number]
        if setup["workers"] == "0":
            setup["keep"] = "usual"
        if setup["world"] == "1" and setup["tail"] in ("uneven", "fill"):
            setup["tail"] = "repeat"
        self._continue(setup, draw)

    def _choices(self, setup: dict[str, str]) -> dict[str, tuple[str, ...]]:
        workers = ("0", "1", "3")
        if setup["data"] in STREAMS:
            return {"buffer": ("none", "bytes")} if setup["seed"] != "none" else {}
        if is_plain(setup):
            return {"workers": workers}
        choices: dict[str, tuple[str, ...]] = {"workers": workers}
        if not is_seeded(setup) and setup["workers"] == "auto":
            choices = {}  # nothing else may make it a loader with torch's arguments alone
        is_divisible = setup["batch"] != "raw" and setup["sampler"] not in (
            *("batches", "state", "distributed"),
        )
        if is_divisible and setup["seed"] != "none":
            choices["world"] = ("1", "2", "3")
        if is_seeded(setup):
            choices["buffer"] = ("none", "bytes", "batches")
        if is_seeded(setup) and setup["world"] == "1" and setup["buffer"] != "disk":
            choices["backend"] = ("process", "thread")
        return choices

    def _continue(self, setup: dict[str, str], draw: int) -> None:
        if not self.saved:
            self._state(draw)
        if not self.saved:
            return
        state, position, before = self.saved
        changed = {axis: setup[axis] for axis in setup if setup[axis] != before[axis]}
        self.say(f"  resumes at epoch {position.epoch}, batch {position.batch}, with {changed}")
        if draw % 2:
            trainer = self._trainer()
            self._right(trainer.ask("close"))
            trainer.finish()
            self.trainer = None
        self.setup = setup
        position = copy.deepcopy(position)
        position.is_clean = False
        self._continue_unseeded(position)
        self._begin((state, position, setup))

    def _continue_unseeded(self, position: Position) -> None:
        """Later epochs follow from torch's generator; the rest of this one has the same order."""
        if not is_plain(self.setup):
            if not is_seeded(self.setup) and self.saved_untouched:
                position.branch = self._branch()  # its seed was not drawn yet
            return
        branch = self._branch()
        for key, ids in list(self.oracle.orders.items()):
            if key[:2] == (position.branch, position.epoch):
                self.oracle.orders[branch, *key[1:]] = ids
        position.branch = branch

    # --- other steps

    def _replay(self, draw: int) -> None:
        at = self.oracle.at
        epoch = draw % (at.epoch + 1)
        batch = draw // 7 % 3
        answer = self._trainer().ask("replay", epoch, batch)
        if isinstance(answer, Raised):
            is_fine = self.setup["data"] in STREAMS or not is_seeded(self.setup)
            # Samplers of the user's cannot always go back.
            is_fine = is_fine or self.setup["sampler"] in (
                *("told", "state", "batches", "fixed"),
                *("distributed", "drawn"),
            )
            if _REFUSED in answer.kinds and is_fine:
                return
            steps = steps_of(self.setup)
            if "IndexError" in answer.kinds and (steps is None or batch >= steps):
                return
            self._right(answer)
        if self.setup["data"] != "mix" or at.branch == "0":
            self.oracle.replayed(self.setup, epoch, batch, answer)

    def _check(self, draw: int) -> None:
        answer = self._trainer().ask("check", 1 + draw % 3)
        if self.setup["data"] in STREAMS:
            self._refused(answer)
            return
        if isinstance(answer, Raised) and "BrokenSampleError" in answer.kinds:
            return
        found, text = self._right(answer)
        draws, holder = self.setup["draws"], self.setup["holder"]
        is_random = draws != "nothing" and holder not in ("collate", "sampler")
        if not is_plain(self.setup) and not is_seeded(self.setup):
            return  # its seed may have been drawn, or not yet
        if found != (is_seeded(self.setup) or not is_random):
            raise WrongError(f"check() says: {text}")

    def _set_epoch(self, draw: int) -> None:
        if self.is_open:
            return
        epoch, at = draw % 4, self.oracle.at
        if self.setup["sampler"] == "distributed":
            # What its `set_epoch` says is the loader's epoch, too.
            at.told += 1 + draw % 3
            self._right(self._trainer().ask("set_epoch", at.told))
            at.moved_to(at.told)
            self.was_left = False
        elif self.setup["data"] in TOLD or self.setup["sampler"] == "told":
            self._right(self._trainer().ask("set_epoch", epoch))
            self.oracle.at.told = epoch
        elif self._has_own_sampler() and is_seeded(self.setup):
            self._right(self._trainer().ask("set_own_epoch", epoch))
            self.oracle.at.moved_to(epoch)
            self.was_left = False

    def _has_own_sampler(self) -> bool:
        is_made = self.setup["sampler"] in ("sequence", "shuffle")
        return is_made and self.setup["data"] not in (*STREAMS, "mix")

    def _weights(self, draw: int) -> None:
        weights = {"a": 1.0 + draw % 3, "b": float(draw % 2)}
        self._right(self._trainer().ask("set_weights", weights))
        self.oracle.at.branch += f" {self.oracle.at.epoch}.{self.oracle.at.batch}:{weights}"

    def _refresh(self, draw: int) -> None:
        # Workers that persist are replaced, which torch's class does not know.
        self.oracle.at.is_clean &= self.setup["keep"] != "persistent"
        self._right(self._trainer().ask("refresh"))

    def _change(self, draw: int) -> None:
        if self.is_open:
            return
        at = self.oracle.at
        deep = bool(draw % 2) or self.setup["data"] in ("mix", "packed", "grouped", *STREAMS)
        deep = deep or self.setup["backend"] == "thread" or self.setup["keep"] == "persistent"
        self._right(self._trainer().ask("change", at.version + 1, deep))
        at.version += 1
        at.is_clean = False

    def _fork(self, draw: int) -> None:
        self._right(self._trainer().ask("fork", bool(draw % 2)))

    def _ask_forked(self, draw: int) -> None:
        self._right(self._trainer().ask("ask_forked"))

    # --- what happens to a program

    def _alarm(self, draw: int) -> None:
        """A signal's handler raises while batches are taken, or after the epoch."""
        if not self.is_open:
            self._take_most(1)
        took = self._right(self._trainer().ask("take", _ALL, 0.0005 * (1 + draw % 40)))
        for batch in took.batches:
            self.oracle.got(self.setup, batch)
        if took.raised and "AlarmError" not in took.raised.kinds:
            raise WrongError(f"instead of a handler's exception came\n{took.raised.text}")
        self.say(f"  took {len(took.batches)} batches{', to the end' if took.ended else ''}")
        self.oracle.at.is_clean = False
        self.is_open = not took.ended
        if took.ended:
            self.oracle.ended(self.setup)
        if took.ended or not took.raised:  # Python ignores what a handler raises in a finalizer
            return
        # Only when it goes on does a loader say whether it takes this for a look at one batch:
        # a batch may be lost that the trainer never got.
        self._judge_left(self._right(self._trainer().ask("begin")))
        self.is_open, self.was_left = True, False

    def _kill_worker(self, draw: int) -> None:
        """Kill a process that has made samples."""
        trainer = self._trainer()
        alive = set(left.descendants(trainer.process))
        workers = [int(each.name) for each in sorted((self.folder / "pids").iterdir())]
        workers = [each for each in workers if each in alive]
        if not workers or self.kills:
            return
        self.kills += 1
        self.all_kills += 1
        self.oracle.at.is_clean = False
        # Those that are stopped first are sent work, which one has when it is killed.
        stopped = workers if draw // 3 % 2 else []
        _send(stopped, signal.SIGSTOP)
        trainer.begin("take", 1 + draw % 3)
        time.sleep(0.05 * bool(stopped))
        os.kill(workers[draw % len(workers)], signal.SIGKILL)
        _send(stopped, signal.SIGCONT)
        took = trainer.answer()
        # The same batch may have killed two.
        is_fine = self.setup["data"] in STREAMS or self.all_kills > 1
        self._judge_took(took, "WorkerDiedError" if is_fine else "")
        if took.raised:
            self._right(trainer.ask("close"))
            trainer.finish()
            self._restart()

    def _kill(self, draw: int) -> None:
        """End the trainer, while it takes batches or not, and start it again."""
        trainer = self._trainer()
        if draw % 2:
            trainer.begin("take", 1 + draw % 3)
            time.sleep(0.001 * (draw % 20))
        trainer.end((signal.SIGKILL, signal.SIGTERM)[draw // 2 % 2])
        self._restart()

    def _freeze(self, draw: int) -> None:
        """Stop the trainer with all its processes, or these alone, and let them go on."""
        trainer = self._trainer()
        trainer.begin("take", 1 + draw % 3)
        time.sleep(0.001 * (draw % 10))
        frozen = left.descendants(trainer.process)
        if draw % 2:
            frozen.append(trainer.process)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in frozen:
                try:
                    os.kill(process, number)
                except ProcessLookupError:
                    continue
            time.sleep(0.03)
        self._judge_took(trainer.answer())

    def _cut(self, draw: int) -> None:
        """The next answers of the bucket are broken."""
        kind = ("cut", "reset", "slowdown", "error", "short")[draw % 5]
        self._bucket().fault(kind, 1 + draw // 5 % 3, 0.0)
        self._take_most(2)

    def _silence(self, draw: int) -> None:
        """The next answers of the bucket stop in the middle for a moment, or for seconds."""
        self._bucket().fault("stall", 1 + draw % 2, 4.0 if draw // 2 % 4 == 1 else 0.2)
        self._take_most(2)

    # --- comparisons

    def _compare_with_plain(self) -> None:
        """Take the same epochs from loaders that are made as simply as possible."""
        setup = {
            **self.first,
            "workers": "0",
            "buffer": "none",
            "backend": "process",
            "keep": "usual",
        }
        if setup["seed"] != "none":
            setup["world"] = "1"
        if setup["world"] == "1" and setup["tail"] != "drop":
            setup["tail"] = "repeat"
        self.say("compares with a loader without workers")
        self.setup = setup
        self.oracle.at = Position()
        plan = Plan(setup, self.folder)
        self._right(self._trainer().ask("open", plan, None, None))
        last = self.oracle.last_epoch
        while self.oracle.at.epoch <= last:
            self._take_most(_ALL)
        self._right(self._trainer().ask("close"))

    def _compare_with_torch(self) -> None:
        """Take the same batches from torch's class, as far as nothing else was done before."""
        clean = self.oracle.clean
        if not clean:
            return
        self.say("compares with torch's class")
        plan = Plan(self.first, self.folder, is_torch=True)
        trainer = self._trainer()
        self._right(trainer.ask("open", plan, None, _MANUAL))
        draws_alike = not self.first["draws"].startswith("own-")
        for epoch in range(max(clean)[0] + 1):
            told = [each[2] for (number, _), each in clean.items() if number == epoch]
            self._right(trainer.ask("set_epoch", (told or [0])[0]))
            took = self._right(trainer.ask("take", _ALL))
            if took.raised:
                raise WrongError(f"torch's class raised\n{took.raised.text}")
            for number, batch in enumerate(took.batches):
                self._same_as_torch(
                    f"epoch {epoch}, batch {number}",
                    clean.get((epoch, number)),
                    batch,
                    draws_alike=draws_alike,
                )

    def _same_as_torch(
        self, name: str, ours: tuple[Any, ...] | None, theirs: Taken, *, draws_alike: bool
    ) -> None:
        if ours is None:
            return
        ids = [[each.id for each in records] for records in (ours[0], theirs.records())]
        if ids[0] != ids[1]:
            raise WrongError(f"{name} has samples {ids[0]} instead of torch's {ids[1]}")
        if draws_alike and ours[1] != theirs.digests:
            raise WrongError(
                f"{name} is {ours[0]} instead of {theirs.records()} with torch's class"
            )

    def _judge_failures(self, answer: Any) -> None:
        for failures in self._right(answer):
            if any(each != failures[0] for each in failures):
                raise WrongError(f"samples {failures} failed")

    # --- answers

    def _right(self, answer: Any) -> Any:
        if isinstance(answer, Raised):
            raise WrongError(f"the trainer raised\n{answer.text}")
        return answer

    def _refused(self, answer: Any) -> None:
        if not isinstance(answer, Raised):
            raise WrongError(f"what the documents refuse was done: {answer}")
        if _REFUSED not in answer.kinds:
            self._right(answer)

    def _trainer(self) -> Trainer:
        if not self.trainer:
            raise DiedError("there is no trainer")
        return self.trainer

    def _bucket(self) -> loader_sets.Bucket:
        if not self.bucket:
            raise DiedError("there is no bucket")
        return self.bucket

    def _at(self) -> str:
        at = self.oracle.at
        return f"epoch {at.epoch}, batch {at.batch}"
