"""What has to be there after a call: a model of what the documents promise, of about a page.

An input is known by its name. It has a result: the content and version that it was made from. From
these follow its files and its rows. A call that was killed leaves several results possible, each
whole; the next one that ends must have one of them, without making again what can be seen.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import run_functions
from .life import WrongError
from .run_driver import Outcome
from .run_inputs import FOUND, Inputs, Item

# Files in the output folder that forebay did not make.
THEIRS = {"keep.txt": b"not forebay's", "theirs/keep.bin": b"nor this"}
TABLES = ("metadata.parquet",)
KINDS_OF_LINES = ("missing", "altered", "orphan")


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
        item: The input as it was listed last.
        result: The result that is recorded; None if there is none.
        possible: Those that an interrupted call may have recorded instead.
        files: Its files that are on the disk. Those of an earlier result stay if it fails.
        again: Whether it has to be done again though nothing changed: "no", "maybe", "yes".
        is_optional: Its files may be gone: pruned by a call of which this is not known.
        is_unsure: Its files are those of any result that is possible.
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


class Oracle:
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
        if self.call == "cache":
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
            part = self.needs if self._makes_parts() else self.failed()
            self.needs |= {stem: "maybe" for stem in part if self.needs[stem] == "no"}

    def _makes_parts(self) -> bool:
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

    def doubt(self) -> None:
        """Take in that a file of several inputs was changed or removed by hand."""
        for state in self.states.values():
            if self.call != "preprocess" and state.again == "no":
                state.again = "maybe"

    def is_of_one_version(self) -> bool:
        """Return whether every result is of the version of now."""
        results = [self.state(item).result for item in self.listed()]
        return all(each is not None and each.version == self.version for each in results)

    def executions(self) -> Counter[str]:
        """Return how often each input was worked on since the last time."""
        path = Path(run_functions.LOG)
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        new, self.log = lines[self.log :], len(lines)
        return Counter(new)

    # ---- after a call

    def interrupted(self) -> None:
        """Take in a call that did not end."""
        counts = self.executions()
        listed = self.listed()
        for item in listed:
            redo = self.redone is None or item.stem in self.redone
            state, need = self.state(item), self.needs[item.stem]
            if need == "no":
                if counts[item.stem]:
                    raise WrongError(f"{state.source} was made again, and it was done")
                continue
            fresh = self.fresh(item)
            if fresh not in [state.result, *state.possible]:
                state.possible.append(fresh)
            elif need == "yes" and state.result == fresh and state.again == "no":
                state.again = "maybe"
            if redo:
                state.again = "maybe"
            state.is_unsure = True
            self._pass_names(state, fresh, surely=False)
        self.listings.append([self.inputs.key(item) for item in listed])
        self.is_sure = False
        self.check_disk(between=True)
        self._see_what_is_done(listed)

    def _see_what_is_done(self, listed: list[Item]) -> None:
        """Take results for certain whose files are there: they are published once recorded."""
        before = [*self.states.values()]
        for item in listed:
            state, fresh = self.state(item), self.fresh(item)
            if self.inputs.is_away(item) or fresh not in state.possible or not fresh.is_ok:
                continue
            files = self.files_of(state, fresh)
            if not files or any(files.items() <= one.files.items() for one in before):
                continue  # as before: they say nothing
            others = [self.files_of(state, each) for each in state.possible if each != fresh]
            if all(self._has(name, data) for name, data in files.items()) and files not in others:
                state.result, state.possible, state.again = fresh, [], "no"
                state.is_unsure = False
                gone = state.files.keys() - files.keys()
                state.files = dict(files)
                state.is_optional = bool(gone)

    def finished(
        self,
        outcome: Outcome,
        *,
        more: int = 0,
        restarts: bool = False,
    ) -> str:
        """Compare what a call has done with what it had to do; return that in words.

        Args:
            more: How often an input may be made beyond what is needed: its worker was killed.
            restarts: Whether it began anew: what is not replaced goes.
        """
        counts, listed = self.executions(), self.listed()
        done, failed, made = 0, [], 0
        position, found = 0, outcome.rows
        owned: dict[str, bytes] = {}
        for place, item in enumerate(listed):
            state, count = self.state(item), counts.pop(item.stem, 0)
            need, fresh = self.needs[item.stem], self.fresh(item)
            if self.call == "index_shards":  # it runs no function of the user's
                count = int(need != "no" and fresh.is_ok)
            else:
                self._check_executions(item, need, count, more)
            if self.inputs.is_away(item) and (state.result is None or not state.result.is_ok):
                failed.append(item)
                if self.call == "predict":  # this is not tried again by itself
                    state.result = Result(tuple(item.contents), self.version, is_ok=False)
                    state.possible, state.again = [], "maybe"
                continue
            candidates = [fresh] if count else [state.result, *state.possible]
            result = self._chosen(state, candidates, found[position:], place, is_made=count > 0)
            rows = self.rows_of(state, result, place)
            position += len(rows)
            if result is not None and result.is_ok:
                done += 1
                made += bool(count)
                if count or result != state.result:
                    state.files = dict(self.files_of(state, result))
                owned |= state.files
            else:
                failed.append(item)
                state.is_optional = state.is_optional or restarts
            if count or result != state.result:
                state.again = "no"
                self._pass_names(state, result, surely=True)
            state.result, state.possible, state.is_unsure = result, [], False
            if result is not None and result.is_ok:
                state.is_optional = False
        if counts:
            raise WrongError(f"{[*counts]} were worked on, and are not listed")
        if position < len(found):
            raise WrongError(f"there is a row too many: {found[position]}")
        self._check_counts(outcome, done, failed, made, is_killed=more > 0)
        keys = [self.inputs.key(item) for item in listed]
        self.listings, self.is_sure, self.has_finished = [keys], True, True
        self._settle({*keys}, owned)
        if restarts:
            self.states = {key: state for key, state in self.states.items() if key in keys}
        self.check_disk()
        return f"{done} done, {len(failed)} failed, {made} made"

    def _check_executions(self, item: Item, need: str, count: int, more: int) -> None:
        """Compare how often an input was worked on with what it needed."""
        state = self.state(item)
        tries = 1 if self.call == "predict" else item.tries
        expected = tries if need != "no" else 0
        least = max(expected - more, min(expected, 1)) if need == "yes" else 0
        if self.call == "cache":
            more += 2  # the first, the middle and the last are read for their types
        if self.call == "predict" and self.inputs.failure != "no":
            more += 9  # its batch is halved, and others of it are loaded again
        if not least <= count <= expected + (more if expected else 0):
            raise WrongError(
                f"{state.source} was made {count} times, and not {expected} (needed: {need})"
            )

    def _settle(self, listed: set[str], owned: dict[str, bytes]) -> None:
        """Find out which files there are of inputs that are no longer listed."""
        for key, state in self.states.items():
            if key in listed or not state.is_unsure:
                continue
            state.is_unsure = False
            results = [each for each in [state.result, *state.possible] if each is not None]
            choices = [self.files_of(state, each) for each in results] + [{}, state.files]
            choices = [
                {name: data for name, data in each.items() if name not in owned} for each in choices
            ]
            fits = [one for one in choices if all(self._has(*each) for each in one.items())]
            state.files = max(fits, key=len)

    def _chosen(
        self,
        state: State,
        candidates: list[Result | None],
        found: list[Any],
        place: int,
        *,
        is_made: bool,
    ) -> Result | None:
        """Return the result that fits the next rows of the table, and what is on the disk."""
        problem = ""
        for result in [*reversed(candidates)]:
            rows = self.rows_of(state, result, place)
            here = found[: len(rows)]
            if here != rows:
                problem = f"{state.source}: its rows are {here}, and not {rows}"
                continue
            if result is None or not result.is_ok:
                return result
            is_kept = result == state.result and not is_made
            files = state.files if is_kept else self.files_of(state, result)
            wrong = [name for name, data in files.items() if not self._has(name, data)]
            if not wrong:
                return result
            problem = f"{state.source}: its output {self._shown(wrong[0])}"
        raise WrongError(problem)

    def _check_counts(
        self, outcome: Outcome, done: int, failed: list[Item], made: int, *, is_killed: bool
    ) -> None:
        if outcome.left:
            raise WrongError(f"the call left in its process: {outcome.left}")
        if self.call == "cache":
            return
        if (outcome.done, outcome.failed) != (done, len(failed)):
            raise WrongError(
                f"the report says {outcome.done} done, {outcome.failed} failed "
                f"({outcome.failures[:2]}), and there are {done} and {len(failed)}"
            )
        maybe = sum(need == "maybe" for need in self.needs.values())
        slack = maybe if self.call in ("index_shards", "predict") else 0
        if self.call == "predict":  # it counts those that were left out, too
            slack += len(failed)
        if not done - made <= outcome.resumed <= done - made + slack:
            raise WrongError(f"the report says {outcome.resumed} resumed, not {done - made}")
        for item, (source, error, message) in zip(failed, outcome.failures, strict=True):
            if not (is_killed and error == "WorkerDiedError"):
                self._check_reason(item, source, error, message)

    def _check_reason(self, item: Item, source: str, error: str, message: str) -> None:
        if self.inputs.kind != "shards" and str(source) != str(self.inputs.source(item)):
            raise WrongError(f"{source} is recorded as failed, and it is {item.path} that is bad")
        reasons = {
            "raises": f"bad input {item.stem}",
            "odd": "odd",
            "dies": "",
            "broken": "instead of a JSON object",
            "open": "still open",
            "model": "the model fails",
        }
        is_away = self.inputs.is_away(item)
        wanted = "No such file" if is_away else reasons.get(item.fails, "No such file")
        dies = (error == "WorkerDiedError") != (item.fails == "dies" and not is_away)
        if wanted not in message or dies:
            raise WrongError(f"{source} failed as {error}: {message!r}, and not as {wanted!r}")

    def _pass_names(self, to: State, result: Result | None, *, surely: bool) -> None:
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

    # ---- commands

    def retried(self, rows: list[dict[str, Any]]) -> str:
        """Compare what `retry` has done: it tries what failed, as it was listed, and no more."""
        counts, expected, failed = self.executions(), list[dict[str, Any]](), 0
        items = {self.inputs.key(item): item for item in self.inputs.items}
        for key in self.listings[-1]:
            state, item = self.states[key], items.get(key)
            is_here = item is not None and not self.inputs.is_away(item)
            count, least = counts.pop(state.stem, 0), 0
            if (state.result is None or not state.result.is_ok) and item and is_here:
                fresh = self.fresh(item)
                least = item.tries
                # What the ledger knows of the file is of before.
                is_same = state.result is not None and state.result.contents == fresh.contents
                state.again = "no" if is_same and state.again == "no" else "maybe"
                state.result = fresh
                if fresh.is_ok:
                    self._pass_names(state, fresh, surely=True)
                    state.files = dict(self.files_of(state, fresh))
            if count != least:
                raise WrongError(f"{state.source} was made {count} times by retry, not {least}")
            failed += state.result is None or not state.result.is_ok
            expected += self.rows_of(state, state.result)
        if counts:
            raise WrongError(f"retry worked on {[*counts]}")
        if rows != expected:
            raise WrongError(f"after retry the table is {rows}, not {expected}")
        self.check_disk()
        return f"{failed} failed"

    def verified(self, code: int, text: str) -> str:
        """Compare what `verify` says with what is on the disk."""
        found = self.on_disk()
        lines = [line.split(None, 1) for line in text.splitlines() if "  " in line]
        said = {kind: [name for each, name in lines if each == kind] for kind in KINDS_OF_LINES}
        altered = {name.partition(": ")[0] for name in said["altered"]}
        orphans = {name.partition(": ")[0] for name in said["orphan"]}
        listed = {key for listing in self.listings for key in listing}
        mine, rows = dict[str, bytes](), set[str]()
        for key, state in self.states.items():
            mine |= state.files
            if key in listed and state.result is not None and state.result.is_ok:
                rows |= state.files.keys()
            for name in state.files:
                if key in listed and (name not in found or name in altered):
                    state.again = "yes" if self.is_sure else "maybe"
        if not self.is_sure or self.call != "preprocess":
            return f"exit code {code}"
        missing = {name for name in rows if name not in found}
        changed = {name for name in rows if name in found and len(found[name]) != self.size(name)}
        left = found.keys() - rows - {*TABLES}
        wanted = (missing, changed, left)
        got = ({*said["missing"]}, altered, orphans)
        if wanted != got:
            raise WrongError(f"verify says missing, altered, orphans {got}, and there are {wanted}")
        if code != (3 if any(wanted) else 0):
            raise WrongError(f"verify exits with {code}: {text}")
        return ", ".join(f"{len(each)}" for each in wanted)

    def size(self, name: str) -> int:
        """Return how large an output was when it was made."""
        for state in self.states.values():
            if name in state.files and state.result is not None:
                return len(self.files_of(state, state.result).get(name, b""))
        return -1

    def pruned(self) -> str:
        """Compare what `prune` has left: what no row has, and forebay has made, goes."""
        kept = 0
        for key, state in [*self.states.items()]:
            if any(key in listing for listing in self.listings):
                is_gone = all(key not in listing for listing in self.listings)
                if state.result is None or not state.result.is_ok:
                    if self.is_sure:
                        state.files = {}
                    state.is_optional = not self.is_sure
                state.is_optional |= not all(key in each for each in self.listings)
                kept += not is_gone
            else:
                del self.states[key]
        self.check_disk(between=not self.is_sure)
        return f"{kept} inputs are known"

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

    def _has(self, name: str, data: bytes) -> bool:
        path = Path(self.output, name)
        return path.is_file() and run_functions.is_as_expected(name, path.read_bytes(), data)

    def _shown(self, name: str) -> str:
        path = Path(self.output, name)
        return f"{name} has {path.read_bytes()[:200]!r}" if path.exists() else f"{name} is gone"
