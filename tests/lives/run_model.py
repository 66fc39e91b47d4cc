"""What a run should have made so far: results of inputs, their rows, their files on the disk."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import run_functions
from .life import WrongError
from .run_inputs import FOUND, Inputs, Item

# Files in the output folder that forebay did not make.
THEIRS = {"keep.txt": b"not forebay's", "theirs/keep.bin": b"nor this"}
TABLES = ("metadata.parquet",)


@dataclass(frozen=True)
class Result:
    """What was made of an input, or that it failed."""

    contents: tuple[bytes, ...]
    version: str
    is_ok: bool


@dataclass
class State:
    """What is known of an input that a call has listed.

    Attributes:
        source: What the table calls it.
        columns: Its row, if inputs are rows.
        result: The result that is recorded; None if there is none.
        possible: Those that an interrupted call may have recorded instead.
        files: Its files that are on the disk. Those of an earlier result stay if it fails.
        again: Whether it has to be done again though nothing changed: "no", "maybe", "yes".
        is_optional: Its files may be gone: pruned by a call of which this is not known.
        is_unsure: Its files are those of any result that is possible.
        reason: Why it failed: the class and the message.
        was_away: It failed because its file could not be seen: `prune` keeps what it has.
    """

    source: str
    stem: str
    columns: dict[str, Any]
    result: Result | None = None
    possible: list[Result] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    again: str = "no"
    is_optional: bool = False
    is_unsure: bool = False
    reason: tuple[str, str] = ("", "")
    was_away: bool = False


class Model:
    """The model of one output folder."""

    def __init__(self, setup: Mapping[str, str], inputs: Inputs) -> None:
        self.setup, self.inputs, self.call = setup, inputs, setup["call"]
        self.output, self.version = "out", "1"
        self.states: dict[str, State] = {}
        # What the ledger may take for the last listing; one, unless a call was interrupted.
        self.listings: list[list[str]] = []
        self.is_sure, self.has_finished = True, False
        self.deleted: set[str] = set()  # outputs that were removed by hand
        self.log = 0  # how much of the log has been read
        self.needs: dict[str, str] = {}  # of the call that is made
        self.redone: Collection[str] | None = ()
        for name, data in THEIRS.items():
            path = Path(self.output, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    # ---- what a result means

    def files_of(self, state: State, result: Result) -> dict[str, bytes]:
        """Return the files of a result; those that are there stay if it is a failure."""
        if not result.is_ok or self.call != "preprocess":
            return state.files
        text = run_functions.text_of([*result.contents], result.version)
        return run_functions.files_left(self.setup["leaves"], state.stem, text)

    def rows_of(self, state: State, result: Result | None, place: int = 0) -> list[Any]:
        """Return the rows of a result.

        Args:
            place: Of its input in the listing.
        """
        if result is None or not result.is_ok:
            return []
        made_from = self.setup["returns"], [*result.contents], result.version
        if self.call == "index_shards":
            return [{"stem": state.stem, "text": result.contents[0].decode()}]
        if self.call == "cache":
            return [run_functions.sample_of(*made_from)]
        if self.call == "predict":
            columns = run_functions.prediction_of(*made_from)
            named = state.columns or {"source": state.source}
            if self.inputs.kind in ("shards", "subset"):
                named = {}
            return [{"index": place} | named | columns]
        made = run_functions.rows_of(
            self.setup["returns"],
            self.setup["leaves"],
            state.stem,
            [*result.contents],
            result.version,
        )
        source = {} if self.inputs.kind == "shards" else {"source": state.source}
        return [state.columns | source | each for each in made]

    def fresh(self, item: Item) -> Result:
        """Return what is made of an input now."""
        return Result(tuple(item.contents), self.version, not item.fails)

    # ---- before a call

    def listed(self) -> list[Item]:
        """Return the inputs that a call lists, or that it must not take for gone."""
        return [
            item
            for item in self.inputs.listed()
            if not self.inputs.is_away(item) or self._lists_away(item)
        ]

    def _lists_away(self, item: Item) -> bool:
        if self.inputs.kind not in FOUND:
            return True
        if self.call in ("cache", "index_shards"):  # they have what is there
            return False
        state = self.states.get(self.inputs.key(item))
        return state is not None and state.result is not None

    def state(self, item: Item) -> State:
        """Return the state of an input; a new one if it is new."""
        new = State(self.inputs.source(item), item.stem, self.inputs.columns(item))
        return self.states.setdefault(self.inputs.key(item), new)

    def begin(self, redone: Collection[str] | None = ()) -> None:
        """Work out what the call has to do that is made now.

        Args:
            redone: Stems of inputs that it is asked to do again; None for all.
        """
        self.redone = redone
        self.needs = {
            item.stem: self.need(item, redo=redone is None or item.stem in redone)
            for item in self.listed()
        }
        keys = [self.inputs.key(item) for item in self.listed()]
        is_changed = self.listings != [keys] or {*self.needs.values()} - {"no"}
        if self.call == "predict" and is_changed:
            # Samples without names, and those that fail, are made again with their part.
            part = self.needs if self.makes_parts() else self.failed()
            self.needs |= {stem: "maybe" for stem in part if self.needs[stem] == "no"}

    def makes_parts(self) -> bool:
        """Return whether samples without names are made again beside those that are missing."""
        return self.inputs.kind == "subset" or any(
            stem in self.failed() for stem in self.redone or ()
        )

    def need(self, item: Item, *, redo: bool = False) -> str:
        """Return whether a call has to make an input: "no", "maybe", "yes"."""
        state = self.state(item)
        if self.inputs.is_away(item):
            return "no"
        contents = tuple(item.contents)
        known = [each for each in [state.result, *state.possible] if each is not None]
        is_left = self.call == "predict" and bool(known)
        is_left = is_left and not any(each.is_ok or each.contents != contents for each in known)
        if is_left and not redo:  # it is tried again only when that is asked for
            return "no" if state.again == "no" and not state.possible else "maybe"
        if redo or not any(each.is_ok and each.contents == contents for each in known):
            return "yes"
        missing = any(not Path(self.output, name).exists() for name in state.files)
        if state.possible or state.is_optional:
            return "maybe"
        return "yes" if missing else state.again

    def is_bad(self, item: Item) -> bool:
        """Return whether an input cannot be made: it is bad, or away and not done."""
        result = self.state(item).result
        is_done = result is not None and result.is_ok
        return not is_done if self.inputs.is_away(item) else bool(item.fails)

    def failed(self) -> list[str]:
        """Return the stems of the inputs that have failed."""
        states = [self.state(item) for item in self.listed()]
        return [one.stem for one in states if one.result is not None and not one.result.is_ok]

    def claimed(self) -> set[str]:
        """Return the outputs that an interrupted call may have made, or not."""
        unsure = [state for state in self.states.values() if state.is_unsure]
        return {
            name for one in unsure for each in one.possible for name in self.files_of(one, each)
        }

    def doubt(self) -> None:
        """Take in that a file of several inputs was changed or removed by hand."""
        for state in self.states.values():
            if self.call != "preprocess" and state.again == "no":
                state.again = "maybe"

    def is_as_fresh(self) -> bool:
        """Return whether every result is what a call without a past would make now."""
        return all(self.state(item).result == self.fresh(item) for item in self.listed())

    def executions(self) -> Counter[str]:
        """Return how often each input was worked on since the last time."""
        path = Path(run_functions.LOG)
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        new, self.log = lines[self.log :], len(lines)
        return Counter(new)

    def pass_names(self, to: State, result: Result | None, *, surely: bool) -> None:
        """Let an input take the names of one that is no longer listed."""
        if result is None or not result.is_ok:
            return
        for state in self.states.values():
            if state is to:
                continue
            for name in self.files_of(to, result).keys() & state.files.keys():
                if surely:
                    del state.files[name]
                    state.again = "yes"
                else:
                    state.again = "maybe" if state.again == "no" else state.again
                    state.is_optional = True

    # ---- the disk

    def on_disk(self) -> dict[str, bytes]:
        """Return all files of the output folder but forebay's own."""
        root, found = Path(self.output), {}
        for folder, folders, names in os.walk(root):
            if folder == str(root) and ".forebay" in folders:
                folders.remove(".forebay")
            for name in names:
                path = Path(folder, name)
                found[path.relative_to(root).as_posix()] = path.read_bytes()
        return found

    def check_disk(self, *, between: bool = False) -> None:
        """Compare the output folder with what must be in it.

        Args:
            between: A call did not end: files may be those of before or of after.
        """
        found = {name: data for name, data in self.on_disk().items() if name not in TABLES}
        for name, data in THEIRS.items():
            if found.pop(name, None) != data:
                raise WrongError(f"{name} is not forebay's, and it was changed or removed")
        if self.call != "preprocess":
            if not between:
                self._check_staging()
            return
        allowed: dict[str, list[bytes]] = {}
        required: dict[str, bytes] = {}
        for state in self.states.values():
            for name, data in state.files.items():
                allowed.setdefault(name, []).append(data)
                if not (state.is_optional or state.is_unsure or between):
                    required[name] = data
            for result in state.possible if state.is_unsure else ():
                for name, data in self.files_of(state, result).items():
                    allowed.setdefault(name, []).append(data)
        for name, data in found.items():
            if not any(
                run_functions.is_as_expected(name, data, each) for each in allowed.get(name, [])
            ):
                raise WrongError(f"there is an output that should not be: {name}: {data[:80]!r}")
        self.deleted -= found.keys()
        for name in required.keys() - self.deleted:
            if name not in found:
                raise WrongError(f"the output {name} is gone")
        if not between:
            self._check_staging()
        for state in self.states.values():
            if state.is_optional and not state.is_unsure and not between:
                state.files = {name: each for name, each in state.files.items() if name in found}

    def _check_staging(self) -> None:
        for folder, folders, names in os.walk(Path(self.output, ".forebay")):
            left = [each for each in folders if each != "earlier"]
            if left == ["checkpoints"] and not os.listdir(Path(folder, "checkpoints")):
                continue
            if left:
                raise WrongError(f"a call has left {folder}/{left[0]}, with {names}")

    def has(self, name: str, data: bytes) -> bool:
        path = Path(self.output, name)
        return path.is_file() and run_functions.is_as_expected(name, path.read_bytes(), data)

    def shown(self, name: str) -> str:
        path = Path(self.output, name)
        return f"{name} has {path.read_bytes()[:200]!r}" if path.exists() else f"{name} is gone"
