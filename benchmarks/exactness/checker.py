"""Decide from what was noted whether a history was exact. PURE: knows nothing of loaders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from benchmarks.exactness.histories import SAMPLES, SIGNAL_AT, SIGNAL_MORE, History, Life

# An error is a refusal if it has a sentence for a person, and a crash otherwise. These have the
# interpreter's own words, whatever their length, as those of the operating system are.
_BARE = {"AttributeError", "IndexError", "KeyError", "TypeError", "UnboundLocalError"}
_WORDS = 5


@dataclass(frozen=True, slots=True)
class Seen:
    """What one life noted.

    Attributes:
        ids: Of each rank the ids of each batch.
        bits: Of each rank the random draws of each sample of each batch.
        error: The error that ended it; empty for none.
        hangs: Whether it was ended because nothing more came.
        handlers: In how many processes the handler of a signal ran.
        end: Why it ended itself early.
    """

    ids: tuple[tuple[tuple[int, ...], ...], ...]
    bits: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...] = ()
    error: str = ""
    hangs: bool = False
    handlers: int = 0
    end: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """A verdict, and the numbers or words behind it."""

    word: str
    detail: str = ""

    def __str__(self) -> str:
        return f"**{self.word}**" if self.word in ("wrong", "hangs") else self.word


ORDER = ("hangs", "wrong", "crashed", "refused", "once each", "exact", "-")


def judge(history: History, trials: Sequence[Sequence[Seen]], whole: Seen | None) -> Cell:
    """Return the worst verdict of a history's trials.

    Args:
        history: What happened.
        trials: Of each trial what its lives noted.
        whole: What an uninterrupted run noted, in the world of the first life.
    """
    cells = [
        _trial(history, lives, seen, whole or seen[0])
        for lives, seen in zip(history.trials, trials, strict=True)
    ]
    if history.check == "bits" and all(each.word in ("exact", "once each") for each in cells):
        first = whole or trials[0][0]
        pairs = zip(history.trials, trials, strict=True)
        cells = [_bits(_joined_bits(lives, seen), _draws([first])) for lives, seen in pairs]
    worst = min(cells, key=lambda cell: ORDER.index(cell.word))
    like = [cell for cell in cells if cell.word == worst.word]
    if len(cells) > 1 and worst.word != "exact":
        detail = f"{len(like)} of {len(cells)}: {worst.detail}".rstrip(": ")
        if history.check == "signal":
            rest = Counter(each.word for each in cells if each.word != worst.word)
            detail = "; ".join([detail, *(f"{count} {word}" for word, count in rest.items())])
        return Cell(worst.word, detail)
    return worst


def _trial(history: History, lives: Sequence[Life], seen: Sequence[Seen], whole: Seen) -> Cell:
    last = seen[-1]
    if last.end and last.end != "":
        return Cell("-", last.end)
    for life, each in zip(lives, seen, strict=True):
        if each.hangs:
            return Cell("hangs", f"after {len(_steps(each))} batches")
        if each.error and life.last is None:
            if history.check == "signal":
                break
            return _failed(each.error)
    if history.check == "signal":
        return _signal(last)
    epochs = lives[0].epochs
    steps, wanted = _joined(lives, seen), _steps(whole)
    if len({life.ranks for life in lives}) > 1:  # which rank has what of a step is left open
        steps, wanted = [tuple(sorted(step)) for step in steps], [*map(tuple, map(sorted, wanted))]
    ids, expected = [*chain.from_iterable(steps)], [*chain.from_iterable(wanted)]
    if history.kind == "mixture":  # samples come more than once: only the order is promised
        return _difference(Counter(ids), Counter(expected), ids == expected)
    once = Counter(dict.fromkeys(range(SAMPLES), epochs))
    cell = _difference(Counter(ids), once, ids == expected)
    if cell.word == "wrong":
        return cell
    parts = _epochs(ids)
    if mixed := _repeated(parts):
        return Cell("wrong", f"{mixed} twice in an epoch, and as many lost")
    if history.check == "orders" and len({*map(tuple, parts)}) < len(parts):
        return Cell("wrong", "two epochs in one order")
    return cell


def _epochs(ids: list[int]) -> list[list[int]]:
    return [ids[begin : begin + SAMPLES] for begin in range(0, len(ids), SAMPLES)]


def _repeated(epochs: list[list[int]]) -> int:
    """Return how many samples came more than once in an epoch; the last one may be begun only."""
    return sum(len(each) - len({*each}) for each in epochs)


def _difference(found: Counter[int], wanted: Counter[int], same: bool) -> Cell:
    lost, more = (wanted - found).total(), (found - wanted).total()
    if lost or more:
        words = [f"{lost} lost"] * bool(lost) + [f"{more} twice"] * bool(more)
        return Cell("wrong", ", ".join(words))
    return Cell("exact" if same else "once each", "" if same else "in another order")


def _bits(
    found: dict[tuple[int, int], tuple[int, ...]], wanted: dict[tuple[int, int], tuple[int, ...]]
) -> Cell:
    names = ("random", "numpy", "torch", "a generator of its own")
    counts = [
        sum(found[key][place] != wanted[key][place] for key in found if key in wanted)
        for place in range(len(names))
    ]
    if not any(counts):
        return Cell("exact")
    words = [f"{name} {count}" for name, count in zip(names, counts, strict=True) if count]
    return Cell("wrong", f"draws that differ, of {len(found)}: {', '.join(words)}")


def _failed(error: str) -> Cell:
    name, _, words = error.partition(":")
    bare = name in _BARE or "[Errno" in words or len(words.split()) < _WORDS
    return Cell("crashed" if bare else "refused", error[:300])


def _signal(seen: Seen) -> Cell:
    steps = _steps(seen)
    more = max(len(steps) - SIGNAL_AT, 0)
    if _repeated(_epochs([*chain.from_iterable(steps)])):  # how many is not known without an end
        return Cell(
            "wrong", f"{more} of {SIGNAL_MORE} batches, and samples lost or twice in an epoch"
        )
    handlers = f"; the handler ran in {seen.handlers} processes" if seen.handlers != 1 else ""
    if more >= SIGNAL_MORE and not handlers:
        return Cell("exact", f"{more} of {SIGNAL_MORE} batches")
    error = f", then {seen.error[:200]}" if seen.error else ""
    word = "wrong" if more >= SIGNAL_MORE else _failed(seen.error).word
    return Cell(word, f"{more} of {SIGNAL_MORE} batches{error}{handlers}")


def _steps(seen: Seen) -> list[tuple[int, ...]]:
    """Return the ids of each batch of all ranks, those of rank 0 first."""
    return [tuple(chain.from_iterable(step)) for step in zip_longest(*seen.ids, fillvalue=())]


def _kept(lives: Sequence[Life], count: int) -> Iterable[tuple[int, int | None]]:
    """Yield of each life its number and how many of its batches the next one builds on."""
    for number in range(count):
        yield number, lives[number + 1].begin if number + 1 < count else None


def _joined(lives: Sequence[Life], seen: Sequence[Seen]) -> list[tuple[int, ...]]:
    """Return the batches that a training is made of: of each life those before its last state."""
    return [
        step for number, count in _kept(lives, len(seen)) for step in _steps(seen[number])[:count]
    ]


def _draws(
    seen: Sequence[Seen], counts: Sequence[int | None] = (None,)
) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return the draws of each sample, by its number of times before and its id."""
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    times: Counter[int] = Counter()
    for each, count in zip(seen, counts, strict=True):
        for ids, bits in zip(each.ids, each.bits, strict=True):
            pairs = zip(
                chain.from_iterable(ids[:count]), chain.from_iterable(bits[:count]), strict=True
            )
            for number, draws in pairs:
                found[times[number], number] = draws
                times[number] += 1
    return found


def _joined_bits(
    lives: Sequence[Life], seen: Sequence[Seen]
) -> dict[tuple[int, int], tuple[int, ...]]:
    return _draws(seen, [count for _, count in _kept(lives, len(seen))])
