"""Runs of several loaders in turns (A B C A B C), each in a separate process."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.call import Call
from benchmarks.loading.peers import title
from benchmarks.measure import Ground, Missing
from benchmarks.preprocess import show

# A run that takes longer has hung. None of them takes a quarter of it.
LIMIT_S = 120.0
# The reference of all ratios.
BASE = "torch"

Found = dict[str, Any]


class Failed(Exception):  # noqa: N818 - the result of a peer, shown in its row
    """A loader that failed in a table; the message says why in a few words."""


def start(what: str, peer: str, name: str, ground: Ground, amount: float) -> Call:
    """Start one run; `answer` waits for its end."""
    return Call("benchmarks.loading.run", what, peer, name, str(ground.root), str(amount))


def answer(call: Call) -> Found:
    """Wait for a run's end and return its result.

    Raises:
        Missing: The peer's library is not installed.
        Failed: It raised, or hung.
    """
    try:
        found = dict(json.loads(call.answer(LIMIT_S)))
    except RuntimeError as error:
        errors = re.findall(r"^[\w.]+: .+", str(error), re.MULTILINE)
        raise Failed(errors[-1] if errors else str(error).splitlines()[-1]) from error
    if "missing" in found:
        raise Missing(found["missing"])
    return found


def once(what: str, peer: str, name: str, ground: Ground, amount: float) -> Found:
    """Do one run."""
    with start(what, peer, name, ground, amount) as call:
        return answer(call)


class Turns:
    """The runs of a table: the results of each peer, or why it has none."""

    def __init__(self, ground: Ground, name: str, amount: float) -> None:
        self.found: dict[str, list[Found]] = {}
        self._words: dict[str, str] = {}
        self._notes: list[str] = []
        self._ground, self._name, self._amount = ground, name, amount

    def run(self, what: str, rounds: dict[str, int]) -> None:
        """Run peers several times each, in turns."""
        for turn in range(max(rounds.values())):
            for peer, times in rounds.items():
                if turn < times:
                    self.add(what, peer)

    def add(self, what: str, peer: str, watched: Callable[[Call], Found] = answer) -> None:
        """Do one run of one peer, unless an earlier one failed."""
        if peer in self._words:
            return
        try:
            with start(what, peer, self._name, self._ground, self._amount) as call:
                found = watched(call)
        except Missing:
            self._words[peer] = "not installed"
        except Failed as failure:
            if peer == BASE:
                raise
            self._words[peer] = "fails"
            self._notes.append(f"{title(peer)} fails: {failure}"[:200])
        else:
            self.found.setdefault(peer, []).append(found)
            self._same_work(peer, found)

    def median(self, peer: str, key: str) -> float:
        """Return the median of the results of a peer's runs."""
        return statistics.median(found[key] for found in self.found[peer])

    def show(
        self,
        columns: tuple[str, ...],
        peers: Iterable[str],
        cells: Callable[[str], tuple[str, ...]],
        above: Iterable[tuple[str, ...]] = (),
    ) -> None:
        """Print the table; `cells` makes the row of a peer with results."""
        rows = list(above)
        for peer in peers:
            words = self._words.get(peer)
            rows.append((title(peer), words) if words else (title(peer), *cells(peer)))
        show(columns, rows)
        for note in self._notes:
            print(note)

    def _same_work(self, peer: str, found: Found) -> None:
        """Check that a run loaded the same as torch's: bytes per batch, sum of the first batch."""
        base = self.found.get(BASE, [found])[0]
        same = found["bytes"] * base["batches"] == base["bytes"] * found["batches"]
        if not same or found["first"] != base["first"]:
            raise RuntimeError(f"{peer} moved other batches than {BASE}: {found}, not {base}")
