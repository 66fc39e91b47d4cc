"""Steps of run lives about names and options: files of the user's, clashes, groups, limits."""

from __future__ import annotations

import os
import random
import select
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import run_functions
from .life import WrongError
from .run_driver import Call, Driver, Outcome, run
from .run_inputs import FOLDERS, Item, content

if TYPE_CHECKING:
    from .run_inputs import Inputs
    from .run_oracle import Oracle

# No group of the machine's, so that only a folder's bit can give it to a file.
_GROUP = 4242
STEPS = ("reorder", "fail_away", "limit", "name_version", "clash", "foreign", "group")


class MoreSteps:
    """What `History` has besides."""

    setup: dict[str, str]
    inputs: Inputs
    oracle: Oracle

    def say(self, sentence: str) -> object:
        """Say a sentence of the history."""
        raise NotImplementedError

    def call(self, **options: Any) -> Call:
        """Return the call with the inputs of now."""
        raise NotImplementedError

    def checked(self, outcome: Outcome) -> Outcome:
        """Fail if a call has raised or died."""
        raise NotImplementedError

    def _run(self, draw: random.Random) -> None:
        raise NotImplementedError

    def _mount(self, draw: random.Random) -> None:
        raise NotImplementedError

    def _prune(self, draw: random.Random) -> None:
        raise NotImplementedError

    def await_output(self, driver: Driver) -> str:
        """Wait until an output is published; the table is written next."""
        before = self._outputs()
        while not select.select([driver.watched], [], [], 0.0005)[0]:
            if self._outputs() != before:
                break
        return "once an output is there"

    def _outputs(self) -> set[tuple[str, int]]:
        """Return what lies in the output folder: names and inodes."""
        output = self.oracle.output
        try:
            with os.scandir(output) as entries:
                return {(each.name, each.inode()) for each in entries if each.name[0] != "."}
        except FileNotFoundError:
            return set()

    def _reorder(self, draw: random.Random) -> None:
        """Inputs that are listed one by one come in another order; nothing is made again."""
        self._run(draw)
        draw.shuffle(self.inputs.items)
        self.say("the inputs have another order")
        self._run(draw)

    def _fail_away(self, draw: random.Random) -> None:
        """An input that fails now is away when it is tried again; `prune` keeps its outputs."""
        self._mount(draw)
        self._run(draw)
        items = [item for item in self.inputs.movable() if not item.fails]
        if self.inputs.kind not in ("str", "path") or not items:
            return
        item = draw.choice(items)
        self._write(item, "raises")
        self._run(draw)
        self.inputs.unmount(item.folder, leaves_empty=draw.random() < 0.5)
        self._run(draw)
        self._prune(draw)
        self.inputs.mount()
        self._write(item, "")
        self.say(f"{item.path} was away when it was tried again; prune has kept its outputs")

    def _write(self, item: Item, failure: str) -> None:
        item.changes, item.fails = item.changes + 1, failure
        item.contents[0] = content(item.number, item.changes, failure)
        self.inputs.write(item)

    def _limit(self, draw: random.Random) -> None:
        """With `limit=`, inputs beyond it stay as they are."""
        self._run(draw)
        listed = self.oracle.listed()
        if any(item.fails or self.inputs.is_away(item) for item in listed):
            return
        most = 1 + draw.randrange(len(listed))
        outcome = self.checked(run(self.call(limit=most)))
        self.say(f"limit={most}: {self.oracle.finished(outcome)}")

    def _name_version(self, draw: random.Random) -> None:
        """With another `version=`, all is done again."""
        self._mount(draw)
        outcome = self.checked(run(self.call(version="a", accept_changes=True)))
        self.say(f"version='a' for what is done: {self.oracle.finished(outcome)}")
        call = self.call(version="b")
        self.oracle.begin(None)
        words = self.oracle.finished(self.checked(run(call)), restarts=True)
        self.say(f"version='b': {words}")

    def _clash(self, draw: random.Random) -> None:
        """Two inputs claim one name: both fail, and neither is kept."""
        self._mount(draw)
        self._run(draw)
        if self.setup["leaves"] == "nothing":
            return
        number = self.inputs.count
        self.inputs.count += len(FOLDERS)
        contents = [content(number, 0)] * (2 if self.inputs.kind == "rows2" else 1)
        items = [
            Item(number + at, folder, "zz", ".txt", list(contents))
            for at, folder in enumerate(FOLDERS)
        ]
        self.inputs.items += items
        for item in items:
            self.inputs.write(item)
        outcome = self.checked(run(self.call()))
        self.oracle.executions()
        keys = [self.inputs.key(item) for item in items]
        why = {source: message for source, _, message in outcome.failures}
        for item in items:
            if "claimed by two inputs" not in why.get(self.inputs.source(item), ""):
                raise WrongError(f"of two inputs of one name, {item.path} did not fail: {why}")
        if found := [name for name in self.oracle.on_disk() if name.startswith("zz")]:
            raise WrongError(f"of two inputs that claim a name, {found} is kept")
        for item in items:
            self.inputs.items.remove(item)
            for path in item.paths:
                Path(path).unlink(missing_ok=True)
        for key in keys:
            self.oracle.states.pop(key, None)
        self.say("two inputs claim a name, and both fail")

    def _foreign(self, draw: random.Random) -> None:
        """A file of the user's has the name of an output: the input fails, and the file stays."""
        self._run(draw)
        item = self.inputs.add()
        text = run_functions.text_of(item.contents, self.oracle.version)
        names = [*run_functions.files_left(self.setup["leaves"], item.stem, text)]
        if names and not item.fails:
            path = Path(self.oracle.output, names[0])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"the user's")
            outcome = self.checked(run(self.call()))
            self.oracle.executions()
            why = {source: message for source, _, message in outcome.failures}
            if "exists already" not in why.get(self.inputs.source(item), ""):
                raise WrongError(f"{names[0]} is the user's, and {item.path} did not fail: {why}")
            if path.read_bytes() != b"the user's":
                raise WrongError(f"{names[0]} was the user's, and it was replaced")
            path.unlink()
            if path.parent != Path(self.oracle.output):
                path.parent.rmdir()
            self.say(f"{names[0]} is the user's, so {item.path} fails")
        self._run(draw)

    def _group(self, draw: random.Random) -> None:
        """The output folder hands its group on: new folders in it have it, too."""
        output = Path(self.oracle.output)
        if os.geteuid() or not output.exists():
            return
        before, known = output.stat(), {*os.listdir(output)}
        os.chown(output, -1, _GROUP)
        output.chmod(before.st_mode | stat.S_ISGID)
        self.inputs.add()
        self._run(draw)
        for path in output.iterdir():
            if path.name not in known and path.is_dir():
                status = path.stat()
                if status.st_gid != _GROUP or not status.st_mode & stat.S_ISGID:
                    raise WrongError(f"{path} has not got the group of the folder that it is in")
        os.chown(output, -1, before.st_gid)
        output.chmod(before.st_mode)
        self.say("the output folder has had a group to hand on")
