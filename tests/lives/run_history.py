"""The steps of a run life: what happens to inputs, outputs and processes."""

from __future__ import annotations

import contextlib
import io
import os
import random
import select
import signal
import time
from pathlib import Path
from typing import Any

from pyarrow import parquet

from . import left, run_functions
from .life import Life, Say, Step, WrongError
from .run_driver import Call, Driver, Outcome, run
from .run_inputs import FOLDERS, Inputs
from .run_model import TABLES, THEIRS
from .run_more import MoreSteps
from .run_oracle import Oracle

_FIRST = 6  # inputs at the beginning
_MOST = 10
# After this time the workers of a driver that was killed should have ended.
_ENDING_S = 20.0


class History(MoreSteps):
    """A life under way."""

    def __init__(self, life: Life, say: Say) -> None:
        self.setup, self.say = dict(life.setup), say  # type: ignore[method-assign]
        self.inputs = Inputs(self.setup["inputs"], self.setup["failing"], self.setup["call"])
        for each in FOLDERS:
            os.makedirs(each)
        for _ in range(3 * _FIRST if self.setup["failing"] == "slow" else _FIRST):
            self.inputs.add()
        self.oracle = Oracle(self.setup, self.inputs)
        self.took_s = 0.1
        self.was_cut_short = False
        self.write_script()

    def do(self, step: Step) -> None:
        """Do one step."""
        getattr(self, f"_{step.name}")(random.Random(step.draw))

    def write_script(self) -> None:
        """Write the script of this version."""
        texts = run_functions.files_of_script(
            self.setup, self.oracle.version, os.path.abspath(run_functions.LOG)
        )
        for name, text in texts.items():
            Path(name).write_text(text)

    # ---- calls

    def call(self, **options: Any) -> Call:
        """Return the call with the inputs of now."""
        redo = options.get("redo", "")
        if redo == "*":
            self.oracle.begin(None)
        elif redo == "failed":
            self.oracle.begin(self.oracle.failed())
        else:
            items = self.inputs.items
            self.oracle.begin([each.stem for each in items if redo == self.inputs.name(each)])
        return Call(
            self.setup["call"],
            self.inputs.kind,
            self.inputs.argument(),
            self.oracle.output,
            self.setup["leaves"] != "nothing",
            {
                "num_workers": int(self.setup["workers"]),
                "backend": self.setup["backend"],
                **options,
            },
        )

    def plain_call(self, **options: Any) -> Outcome:
        """Make a call."""
        outcome = run(self.call(**options))
        self.took_s = outcome.seconds
        return outcome

    def judged(self, outcome: Outcome, **how: Any) -> str:
        """Compare what a call has done with what it had to; return that in words."""
        if self.setup["call"] == "cache" and outcome.error == "FailuresError":
            bad = [item.stem for item in self.oracle.listed() if self.oracle.is_bad(item)]
            if self.inputs.kind in ("subset", "shards"):  # they are known by numbers
                bad = [f"{len(bad)} of {len(self.oracle.listed())} samples"]
            if not any(stem in outcome.text for stem in bad):
                raise WrongError(f"{bad} are bad, and it says {outcome.text}")
            self.oracle.interrupted()
            return "there is no cache, because of bad samples"
        return self.oracle.finished(self.checked(outcome), **how)

    def checked(self, outcome: Outcome) -> Outcome:
        """Fail if a call has raised or died."""
        if self.inputs.kind == "shards" and self.setup["call"] in ("preprocess", "predict"):
            for row in outcome.rows:
                row.pop("source", None)
        if outcome.kind != "report":
            raise WrongError(f"the call ended as {outcome.kind}: {outcome.error} {outcome.text}")
        return outcome

    def _run(self, draw: random.Random) -> None:
        self.say(f"calls: {self.judged(self.plain_call())}")

    def _redo(self, draw: random.Random) -> None:
        items = [each for each in self.oracle.listed() if not self.inputs.is_away(each)]
        item = draw.choice(items)
        outcome = self.plain_call(redo=self.inputs.name(item))
        self.say(f"redo={item.stem}: {self.judged(outcome)}")

    def _restart_unmounted(self, draw: random.Random) -> None:
        self._mount(draw)
        self._unmount(draw)
        self._restart_now()
        self._mount(draw)

    def _restart(self, draw: random.Random) -> None:
        self._mount(draw)
        self._restart_now()

    def _restart_now(self) -> None:
        outcome = self.plain_call(redo="*")
        self.say(f"starts over: {self.judged(outcome, restarts=True)}")

    def _version(self, draw: random.Random) -> None:
        before, self.oracle.version = self.oracle.version, str(int(self.oracle.version) + 1)
        self.write_script()
        way = draw.choice(["accept", "accept", "restart", "nothing"])
        if way == "nothing" and not self.oracle.is_sure:
            way = "accept"
        if way == "nothing":
            outcome = run(self.call())
            if outcome.error != "ChangedError":
                raise WrongError(f"another version ended as {outcome.kind} {outcome.error}")
            self.oracle.version = before
            self.write_script()
            self.say("another version is refused; the one of before is back")
            return
        restarts = way == "restart"
        if restarts:
            self._mount(draw)
        options = {"redo": "*"} if restarts else {"accept_changes": True}
        if draw.random() < 0.5:
            self._cut_short(draw, signal.SIGKILL, **options)
        outcome = self.plain_call(**options)
        words = self.judged(outcome, restarts=restarts)
        self.say(f"version {self.oracle.version}, {way}: {words}")

    def _cut_short(self, draw: random.Random, number: int, **options: Any) -> None:
        """Make a call and send its driver a signal at a random moment."""
        driver = Driver(self.call(**options))
        self.was_cut_short = True
        when = self._await_moment(draw, driver)
        is_over = bool(select.select([driver.watched], [], [], 0)[0])
        if not is_over:
            driver.send(number, group=number == signal.SIGINT)
        outcome = driver.wait()
        if outcome.kind == "report":
            words = self.judged(outcome, restarts=options.get("redo") == "*")
            self.say(f"signal {number} {when}, too late: {words}")
            return
        if outcome.kind == "error" and outcome.error != "KeyboardInterrupt":
            raise WrongError(f"interrupted, it ended as {outcome.error}: {outcome.text}")
        if outcome.left:
            raise WrongError(f"the interrupted call left in its process: {outcome.left}")
        self._await_none()
        self.oracle.interrupted()
        self.say(f"signal {number} {when}")

    def _await_moment(self, draw: random.Random, driver: Driver) -> str:
        """Wait until so many inputs were begun, or for a part of the time that a call takes."""
        if draw.random() < 0.2:
            return self.await_output(driver)
        if draw.random() < 0.5:
            lines = draw.randrange(len(self.inputs.items) + 1)
            size = self.oracle.log + lines
            log = Path(run_functions.LOG)
            while not select.select([driver.watched], [], [], 0.0005)[0]:
                if log.exists() and log.read_bytes().count(b"\n") >= size:
                    break
            return f"after {lines} inputs"
        part = draw.random()
        select.select([driver.watched], [], [], part * self.took_s)
        return f"at {part:.0%} of a call"

    def _await_none(self) -> None:
        """Wait until the workers of a driver that was killed have ended."""
        end = time.monotonic() + _ENDING_S
        while alive := left.descendants(os.getpid()):
            if time.monotonic() > end:
                names = "; ".join(left.command(each) for each in alive)
                raise WrongError(f"workers outlive their driver: {names}")
            time.sleep(0.002)

    def _kill(self, draw: random.Random) -> None:
        self._cut_short(draw, signal.SIGKILL)

    def _interrupt(self, draw: random.Random) -> None:
        self._cut_short(draw, signal.SIGINT)

    def _kill_worker(self, draw: random.Random) -> None:
        driver = Driver(self.call())
        when = self._await_moment(draw, driver)
        workers = left.descendants(driver.process)
        if workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(draw.choice(workers), signal.SIGKILL)
        words = self.judged(driver.wait(), more=1)
        self.say(f"a worker of {len(workers)} is killed {when}: {words}")

    def _twice(self, draw: random.Random) -> None:
        drivers = [Driver(self.call()), Driver(self.call())]
        outcomes = [driver.wait() for driver in drivers]
        if {one.error for one in outcomes} != {"FailuresError"}:
            outcomes = [self.checked(one) for one in outcomes]
        tables = [one.rows for one in outcomes]
        if tables[0] != tables[1]:
            raise WrongError(f"of two calls at once one returns {tables[0]}, one {tables[1]}")
        first = max(outcomes, key=lambda one: one.done - one.resumed)
        self.say(f"two calls at once: {self.judged(first, more=1)}")

    def _full(self, draw: random.Random) -> None:
        call = self.call()
        call.limit = draw.choice([20, 100, 5_000, 50_000, 100_000])
        outcome = run(call)
        if outcome.kind == "killed" or outcome.left:
            raise WrongError(f"with full disk: {outcome}")
        self.oracle.interrupted()
        self.say(f"files of at most {call.limit} bytes: {outcome.kind} {outcome.error}")

    # ---- commands

    def command(self, *words: str) -> Outcome:
        """Run a command."""
        outcome = run(Call(command=[*words]))
        if outcome.kind != "command":
            raise WrongError(f"forebay {words} ended as {outcome}")
        return outcome

    def _has_run(self) -> bool:
        return Path(self.oracle.output, ".forebay", "ledger.sqlite").exists()

    def _status(self, draw: random.Random) -> None:
        if not self._has_run():
            return
        outcome = self.command("status", self.oracle.output)
        if self.oracle.is_sure and outcome.code not in (0, 3):
            raise WrongError(f"status exits with {outcome.code}: {outcome.text}")
        self.say("status")

    def _retry(self, draw: random.Random) -> None:
        if not self._has_run():
            return
        if self.setup["call"] == "predict":
            outcome = self.plain_call(redo="failed")
            self.say(f"redo=failed: {self.judged(outcome)}")
            return
        words = ["--num-workers", self.setup["workers"], "--backend", self.setup["backend"]]
        self.oracle.begin()
        outcome = self.command("retry", self.oracle.output, "jobs.py:work", *words, "--quiet")
        if self.oracle.is_sure:
            if outcome.code not in (0, 3):
                raise WrongError(f"retry exits with {outcome.code}: {outcome.text}")
            self.say(f"retry: {self.oracle.retried(self._table())}")
        else:
            self.oracle.interrupted()
            self.say(f"retry, after a call that did not end: {outcome.code}")

    def _table(self) -> list[dict[str, Any]]:
        data = Path(self.oracle.output, "metadata.parquet").read_bytes()
        rows: list[dict[str, Any]] = parquet.read_table(
            io.BytesIO(data), use_threads=False
        ).to_pylist()
        return rows

    def _verify(self, draw: random.Random) -> None:
        if self._has_run():
            redoes = draw.random() < 0.5
            words = ["--altered", "redo"] if redoes else []
            outcome = self.command("verify", self.oracle.output, *words)
            said = self.oracle.verified(outcome.code, outcome.text, redoes=redoes)
            self.say(f"verify{', altered ones again' * redoes}: {said}")

    def _prune(self, draw: random.Random) -> None:
        if self._has_run():
            outcome = self.command("prune", self.oracle.output)
            if outcome.code and self.oracle.has_finished:
                raise WrongError(f"prune exits with {outcome.code}: {outcome.text}")
            self.say(f"prune: {self.oracle.pruned()}")

    # ---- inputs

    def _add(self, draw: random.Random) -> None:
        if self.inputs.kind == "subset" and self.inputs.away:
            return  # a number says which folder its file is in
        if len(self.inputs.items) < _MOST:
            self.say(f"adds {self.inputs.add().path}")

    def _change(self, draw: random.Random) -> None:
        for item in draw.sample(self.inputs.movable(alone=False), k=1):
            self.inputs.change(item, draw.randrange(2), heals=draw.random() < 0.5)
            self.say(f"changes {item.path}: {item.contents}")

    def _touch(self, draw: random.Random) -> None:
        item = draw.choice(self.inputs.movable(alone=False))
        self.inputs.touch(item)
        state = self.oracle.state(item)
        state.again = "maybe" if state.again == "no" else state.again
        self.say(f"touches {item.path}")

    def _remove(self, draw: random.Random) -> None:
        if items := self.inputs.movable():
            item = draw.choice(items)
            self.inputs.remove(item)
            self.say(f"removes {item.path}")

    def _rename(self, draw: random.Random) -> None:
        if items := self.inputs.movable():
            item = draw.choice(items)
            before = item.path
            self.inputs.rename(item)
            self.say(f"renames {before} to {item.path}")

    def _relocate(self, draw: random.Random) -> None:
        if not self.inputs.away and (items := self.inputs.movable()):
            item = draw.choice(items)
            before = item.path
            self.inputs.relocate(item)
            self.say(f"moves {before} to {item.path}")

    def _unmount(self, draw: random.Random) -> None:
        if self.oracle.deleted:
            self._run(draw)  # what lost an output is made again before it is away
        if not self.inputs.away:
            folder = draw.choice(FOLDERS)
            leaves_empty = draw.random() < 0.5
            self.inputs.unmount(folder, leaves_empty=leaves_empty)
            self.say(f"unmounts {folder}{', and leaves it empty' * leaves_empty}")

    def _mount(self, draw: random.Random) -> None:
        if self.inputs.away:
            self.say(f"mounts {self.inputs.away}")
            self.inputs.mount()

    # ---- outputs

    def _delete_output_unmounted(self, draw: random.Random) -> None:
        self._unmount(draw)
        self._delete_output_now(draw)
        self._run(draw)

    def _delete_output(self, draw: random.Random) -> None:
        self._mount(draw)
        self._delete_output_now(draw)

    def _delete_output_now(self, draw: random.Random) -> None:
        names = [name for name in self.oracle.on_disk() if name not in THEIRS]
        if names:
            name = draw.choice(sorted(names))
            Path(self.oracle.output, name).unlink()
            self.oracle.deleted.add(name)
            self.oracle.doubt()
            self.say(f"deletes the output {name}")

    def _change_output(self, draw: random.Random) -> None:
        if self.setup["call"] != "preprocess":
            names = sorted(self.oracle.on_disk().keys() - {*THEIRS, *TABLES})
            if names:
                with Path(self.oracle.output, draw.choice(names)).open("ab") as file:
                    file.write(b" by hand")
                self.oracle.doubt()
                self.say("appends to an output")
            return
        states = {
            name: state
            for state in self.oracle.states.values()
            for name in state.files
            if Path(self.oracle.output, name).exists() and not state.is_unsure
        }
        names = sorted(states.keys() - self.oracle.claimed())
        if names:
            name = draw.choice(names)
            path = Path(self.oracle.output, name)
            path.write_bytes(path.read_bytes() + b" by hand")
            states[name].files[name] = path.read_bytes()
            if states[name].again == "no":
                states[name].again = "maybe"
            self.say(f"appends to the output {name}")

    def _move_outputs(self, draw: random.Random) -> None:
        new = f"out{len(self.oracle.output)}"
        os.rename(self.oracle.output, new)
        self.oracle.output = new
        self.say(f"moves the outputs to {new}")

    # ---- the end

    def end(self) -> None:
        """Make the call, and once more; compare with a run that nothing has interrupted."""
        self.inputs.mount()
        if self.setup["call"] == "cache":
            for item in self.inputs.items:
                if item.fails:
                    self.inputs.change(item, heals=True)
        self._run(random.Random(0))
        self.say(f"the same again: {self.judged(self.plain_call())}")
        if self.was_cut_short and self.oracle.is_as_fresh():
            self._compare_with_fresh()

    def _compare_with_fresh(self) -> None:
        """Compare with a run that nothing has interrupted, bit by bit."""
        before, self.oracle.output = self.oracle.output, "fresh"
        outcome = run(self.call())
        self.checked(outcome)
        suffixes = (".parquet", ".arrow")
        for path in sorted(Path("fresh").iterdir()):
            other = Path(before, path.name)
            if path.suffix in suffixes and path.read_bytes() != other.read_bytes():
                raise WrongError(f"{path.name} is not that of a run without interruption")
        self.say("it is the same, bit by bit, as a run that nothing has interrupted")
