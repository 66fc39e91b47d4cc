"""What has to be there after a call: a model of what the documents promise, of about a page.

An input is known by its name. It has a result: the content and version that it was made from. From
these follow its files and its rows. A call that was killed leaves several results possible, each
whole; the next one that ends must have one of them, without making again what can be seen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import run_functions
from .life import WrongError
from .run_driver import Outcome
from .run_inputs import Item
from .run_model import TABLES, Model, Result, State

KINDS_OF_LINES = ("missing", "altered", "orphan")


class Oracle(Model):
    """Compares what calls and commands have done with what they had to do."""

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
            elif need == "yes" and state.result == fresh and counts[item.stem]:
                state.again = "maybe"
            if redo:
                state.again = "maybe"
            state.is_unsure = True
            self.pass_names(state, fresh, surely=False)
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
            if all(self.has(name, data) for name, data in files.items()) and files not in others:
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
                state.was_away = True
                if self.call == "predict":  # this is not tried again by itself
                    state.result = Result(tuple(item.contents), self.version, is_ok=False)
                    state.possible, state.again = [], "maybe"
                continue
            candidates: list[Result | None] = [state.result, *state.possible]
            if count:
                candidates = [fresh]
            elif self.inputs.is_away(item) and state.is_unsure:
                # The interrupted call saw a change, so it is tried now.
                candidates.insert(0, replace(fresh, is_ok=False))
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
                state.was_away = self.inputs.is_away(item)
            if count or result != state.result:
                # A prediction that failed because its file was away is not tried again by itself.
                state.again = "maybe" if self.inputs.is_away(item) else "no"
                self.pass_names(state, result, surely=True)
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
            fits = [one for one in choices if all(self.has(*each) for each in one.items())]
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
            wrong = [name for name, data in files.items() if not self.has(name, data)]
            if not wrong:
                return result
            problem = f"{state.source}: its output {self.shown(wrong[0])}"
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
            state, reason = self.state(item), (error, message)
            # Predictions that have failed are not tried again: the reason is that of before.
            is_as_before = self.call == "predict" and reason == state.reason
            if not (is_as_before or (is_killed and error == "WorkerDiedError")):
                self._check_reason(item, source, error, message)
            state.reason = reason

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
                    self.pass_names(state, fresh, surely=True)
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

    def verified(self, code: int, text: str, *, redoes: bool = False) -> str:
        """Compare what `verify` says with what is on the disk.

        Args:
            redoes: Whether what was altered is made again, besides what is missing.
        """
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
                if key in listed and (name not in found or (redoes and name in altered)):
                    state.again = "yes" if self.is_sure else "maybe"
        if not self.is_sure or self.call != "preprocess":
            return f"exit code {code}"
        missing = {name for name in rows if name not in found}
        changed = {name for name in rows & found.keys() if self.is_altered(name, found[name])}
        left = found.keys() - rows - {*TABLES}
        wanted = (missing, changed, left)
        got = ({*said["missing"]}, altered, orphans)
        if wanted != got:
            raise WrongError(f"verify says missing, altered, orphans {got}, and there are {wanted}")
        if code != (3 if any(wanted) else 0):
            raise WrongError(f"verify exits with {code}: {text}")
        return ", ".join(f"{len(each)}" for each in wanted)

    def is_altered(self, name: str, data: bytes) -> bool:
        """Return whether an output has another size than when it was made."""
        for state in self.states.values():
            if name in state.files and state.result is not None:
                made = self.files_of(state, state.result).get(name, b"")
                return run_functions.is_altered(name, data, made)
        return True

    def pruned(self) -> str:
        """Compare what `prune` has left: what no row has, and forebay has made, goes."""
        kept = 0
        for key, state in [*self.states.items()]:
            if any(key in listing for listing in self.listings):
                is_gone = all(key not in listing for listing in self.listings)
                if state.result is None or not state.result.is_ok:
                    if self.is_sure and not state.was_away:
                        state.files = {}
                    state.is_optional = not self.is_sure
                state.is_optional |= not all(key in each for each in self.listings)
                kept += not is_gone
            else:
                del self.states[key]
        self.check_disk(between=not self.is_sure)
        return f"{kept} inputs are known"
