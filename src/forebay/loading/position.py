"""The position of a loader: one record, and one JSON format, for every kind of loader.

    loader.state_dict()  ──  Position.to_state  ──>  {"version": 2, "epoch": 3, "batch": 17, …}
                                                       └── from_state ──  loader.load_state_dict()

A position counts the batches and samples returned, over all ranks, so it is the same on every rank.
It records the arguments of its loader; a loader with other arguments refuses it, because samples
would be lost or repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import Any

from forebay.base.formatting import counted
from forebay.errors import OptionError
from forebay.loading.messages import WorkerState
from forebay.loading.samplers import SamplerStates
from forebay.loading.sources import Start
from forebay.mixing import checked_weights
from forebay.plan import Mixture

VERSION = 2
# More than any count in practice, and less than the largest 64-bit integer.
MOST = 1 << 60
PHASES = ("before", "within", "ended")
DAMAGED = (
    "the state is damaged: {}\n  Nothing was changed. Load what state_dict() returned, unchanged."
)

# Kinds of loaders, described for messages.
KINDS = {
    "plan": "with seed=, buffer=, on_error=, backend= or world_size=, and no sampler",
    "sampler": "with seed=, buffer=, on_error=, backend= or world_size=, and a sampler",
    "torch": "with only torch's arguments",
    "iterable": "of an iterable dataset",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeWith:
    """The properties of a loader on which its positions depend.

    Attributes:
        global_batch_size: Samples of one step over all ranks; None with a batch sampler.
        length: Samples in the dataset; None if the number is not known.
        shuffle: Whether the order is random; None if a sampler of the user decides that.
    """

    kind: str
    global_batch_size: int | None = None
    drop_last: bool = False
    length: int | None = None
    num_workers: int = 0
    shuffle: bool | None = None
    sources: dict[str, int] | None = None
    in_order: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The position of a loader.

    Attributes:
        epoch: The epoch, from 0.
        seed: The seed of all batches; None by torch's rules.
        generator: By torch's rules: state of the generator before the epoch; None if the user has
            to restore it.
    """

    made_with: MadeWith
    epoch: int = 0
    batch: int = 0
    outstanding: tuple[int, ...] = ()
    sample: int = 0
    length: int | None = None
    origin: int = 0
    counts_samples: bool = False
    seed: int | None = None
    set_epoch: tuple[int | None, ...] = ()
    sampler: SamplerStates | None = None
    dataset: Any = None
    generator: str | None = None
    draws_base_seed: bool = True
    worker_states: tuple[WorkerState, ...] = ()
    next_worker: int = 0
    mixture: dict[str, Any] | None = None

    @property
    def knows_workers(self) -> bool:
        """Return whether it includes a state of any worker's copy of the dataset."""
        return any(each.dataset is not None or each.iterator for each in self.worker_states)

    @property
    def start(self) -> Start:
        """Where to begin in the epoch."""
        by_sample = self.batch > 0 and self.counts_samples
        return Start(
            *(self.epoch, self.batch, self.sample, self.length, by_sample, self.origin),
            self.outstanding,
        )

    def reweighted(self, mixture: Mixture, weights: tuple[float, ...]) -> Position:
        """Return the position after which the sources of a mixture have other weights."""
        mixture = replace(mixture, **self.mixture or {})
        if self.seed is None:  # no batch was made yet
            changed = replace(mixture, weights=weights)
        else:
            changed = mixture.changed(weights, self.seed, self.origin + self.sample)
        return replace(self, mixture=changed.state())

    def to_state(self) -> dict[str, Any]:
        """Return a dict, JSON-serializable if the states of the user's objects are."""
        state = {each.name: getattr(self, each.name) for each in fields(self)}
        state["made_with"] = asdict(self.made_with)
        state["set_epoch"], state["outstanding"] = list(self.set_epoch), list(self.outstanding)
        state["worker_states"] = [list(each) for each in self.worker_states]
        return {"version": VERSION, **state}

    @classmethod
    def from_state(cls, state: Any) -> Position:
        """Return the position from a dict that `to_state` returned."""
        version = state.get("version") if isinstance(state, Mapping) else None
        if version != VERSION:
            raise OptionError(
                f"the state has version {version!r}, and this forebay reads version {VERSION}\n"
                "  Nothing was changed. Load what state_dict() of a forebay.DataLoader returned, "
                "with the forebay that saved it."
            )
        known = {each.name for each in fields(cls)}
        values = {name: value for name, value in state.items() if name in known}
        try:
            values["made_with"] = MadeWith(**values["made_with"])
            values["set_epoch"] = tuple(values["set_epoch"])
            values["outstanding"] = tuple(values["outstanding"])
            values["worker_states"] = tuple(WorkerState(*each) for each in values["worker_states"])
            values["mixture"] = _mixture_of(values["mixture"])
            position = cls(**values)
            position._check()
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise OptionError(DAMAGED.format(f"{type(error).__name__}: {error}")) from error
        return position

    def _check(self) -> None:
        """Raise ValueError if a value has a wrong type or is impossible."""
        made: Any = self.made_with
        values: Any = self
        sources, mixture = made.sources or {}, self.mixture or {"weights": (), "counts": ()}
        counts = {name: getattr(self, name) for name in ("epoch", "batch", "sample", "origin")}
        counts |= {"next_worker": self.next_worker, "num_workers": made.num_workers}
        counts |= {"length": self.length or 0, "dataset's length": made.length or 0}
        size = made.global_batch_size
        counts |= {"global_batch_size": 1 if size is None else size}
        counts |= {f"length of {name}": length for name, length in sources.items()}
        for name, value in counts.items():
            if type(value) is not int or not 0 <= value < MOST:
                raise ValueError(f"{name} {value!r}")
        flags: tuple[Any, ...] = made.drop_last, made.shuffle or False, made.in_order
        flags += self.counts_samples, self.draws_base_seed
        outstanding = -1, *self.outstanding, self.batch + len(self.outstanding)
        samplers: Any = [] if self.sampler is None else self.sampler
        is_known = (
            made.kind in list(KINDS)
            and self.next_worker < max(made.num_workers, 1)
            and all(type(flag) is bool for flag in flags)
            and isinstance(values.generator, str | None)
            and type(values.seed) in (int, type(None))
            and all(type(number) is int for number in self.outstanding)
            and all(one < two for one, two in pairwise(outstanding))
            and len(self.set_epoch) <= 3
            and all(type(value) in (int, type(None)) for value in self.set_epoch)
            and isinstance(samplers, list)
            and all(each is None or _is_sampler_state(each) for each in samplers)
            and all(each.phase in PHASES for each in self.worker_states)
            and len(mixture["weights"]) == len(sources)
            and len(mixture["counts"]) in (0, len(sources))
        )
        if not is_known:
            raise ValueError("a value that state_dict() does not produce")
        if made.kind == "plan" and self.sample > (self.length or made.length or 0):
            raise ValueError(f"sample {self.sample:,} of an epoch of fewer")

    def fitted(
        self,
        made_with: MadeWith,
        world_size: int,
        seed: int | None,
        *,
        strict: bool,
        may_resize: bool,
    ) -> Position:
        """Return the position for a loader, after checking that the loader fits it."""
        self._check_same(made_with, seed)
        was, now, length = self.made_with, made_with, self.length
        differing = []
        if self.batch:  # a batch of the epoch was returned
            differing = [
                name
                for name in ("shuffle", "global_batch_size", "length", "drop_last")
                if None not in (old := getattr(was, name), new := getattr(now, name)) and old != new
            ]
        if "shuffle" in differing:
            raise OptionError(
                f"the state has shuffle={was.shuffle}, the loader has shuffle={now.shuffle}\n"
                f"  It was taken in epoch {self.epoch} after {self.sample} samples. Nothing was "
                "changed: the rest of the epoch would lose and repeat samples. Make the loader as "
                "it was."
            )
        if strict and differing:
            raise OptionError(self._mismatch(now, differing[0], world_size))
        if self.batch and (not was.in_order or self.outstanding):
            self._check_known(is_same=not differing)
        if "length" in differing:
            length = length or was.length or 0
            self._check_length(length, now.length or 0, may_resize)
        return replace(
            self,
            made_with=now,
            length=length,
            counts_samples=self.counts_samples or bool(differing),
            # With fewer workers it may be the turn of one that does not exist.
            next_worker=self.next_worker if was.num_workers == now.num_workers else 0,
        )

    def _check_same(self, now: MadeWith, seed: int | None) -> None:
        """Raise an error if the loader differs in what no resume can change."""
        was = self.made_with
        if was.kind != now.kind:
            raise OptionError(
                f"the state was saved by a loader {KINDS.get(was.kind, repr(was.kind))}; this one "
                f"is a loader {KINDS[now.kind]}\n"
                "  Nothing was changed. Make the loader as it was when the state was saved."
            )
        if None not in (self.seed, seed) and self.seed != seed:
            raise OptionError(
                f"the state has seed={self.seed}, the loader has seed={seed}\n"
                "  Nothing was changed. The remaining batches would differ: make the loader with "
                "the same seed, or with none."
            )
        is_split = was.kind == "iterable" or self.knows_workers
        if is_split and was.num_workers != now.num_workers and self.batch:
            raise OptionError(
                f"the state has num_workers={was.num_workers}, the loader has num_workers="
                f"{now.num_workers}\n"
                "  Nothing was changed. Each worker has its own part, or copy, of the dataset, so "
                "their number has to stay the same within an epoch."
            )
        if list((was.sources or {}).items()) != list((now.sources or {}).items()):
            raise OptionError(
                f"the state mixes {_shown(was.sources)}, the loader mixes {_shown(now.sources)}\n"
                "  Nothing was changed: the samples would come from other sources. Mix the same "
                "sources, in the same order."
            )

    def _check_length(self, was: int, now: int, may_resize: bool) -> None:
        """Raise an error if the rest of the epoch cannot be loaded with another length."""
        if now >= was and may_resize:
            return
        why = "some of its samples are gone" if now < was else "the sampler decides the order"
        raise OptionError(
            f"the state has {was} samples, the loader has {now} samples\n"
            f"  It was taken in epoch {self.epoch} after {self.sample} samples. Nothing was "
            f"changed: the rest of that epoch cannot be loaded, because {why}.\n"
            "  Make the loader with the dataset as it was, or load a state of an epoch's end."
        )

    def _check_known(self, *, is_same: bool) -> None:
        """Raise an error if the batches that are left, after others in any order, are not known."""
        refused = {
            "the loader makes other batches": not is_same,
            "the dataset has no state_dict": (
                self.made_with.kind == "iterable" and not self.knows_workers
            ),
            "the sampler has a state_dict of its own": any(
                state and "state" in state for state in self.sampler or ()
            ),
        }
        for why, is_refused in refused.items():
            if is_refused:
                raise OptionError(
                    "the state was saved with in_order=False, in the middle of an epoch\n"
                    f"  It was taken in epoch {self.epoch} after {counted(self.sample, 'sample')}. "
                    "Nothing was changed: which samples are left is not known, because "
                    f"{why}.\n"
                    "  Load a state of an epoch's end, or save one with in_order=True."
                )

    def _mismatch(self, now: MadeWith, name: str, world_size: int) -> str:
        old, new = getattr(self.made_with, name), getattr(now, name)
        words = {"global_batch_size": "global batches of {} samples", "length": "{} samples"}
        named = words.get(name, f"{name}={{}}")
        way = "Make the loader as it was"
        if name == "global_batch_size":
            fits, rest = divmod(old, world_size)
            way = (
                f"Use batch_size={fits}" + f" with world_size={world_size}" * (world_size > 1)
                if not rest
                else f"No batch_size fits world_size={world_size}; use a world size that divides "
                f"{old}: {_divisors(old)}"
            )
        batches = f"{self.batch:,} batch{'es' * (self.batch != 1)}"
        return (
            f"the state has {named.format(old)}, the loader has {named.format(new)}\n"
            f"  It was taken in epoch {self.epoch} after {batches} "
            f"({counted(self.sample, 'sample')}). Nothing was changed: the rest of the epoch would "
            "lose or repeat samples.\n"
            f"  {way}, or finish the epoch as it was begun, counted in samples: "
            "load_state_dict(state, strict=False)."
        )


def _is_sampler_state(state: Any) -> bool:
    return isinstance(state, dict) and len({"state", "generator"} & set(state)) == len(state) == 1


def _mixture_of(state: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if state is None:
        return None
    weights = checked_weights(dict(enumerate(state["weights"])), range(len(state["weights"])))
    counts, since = tuple(state["counts"]), state["since"]
    if any(type(count) is not int or not 0 <= count < MOST for count in (*counts, since)):
        raise ValueError(f"counts {counts} since {since!r}")
    return {"weights": weights, "since": since, "counts": counts}


def _shown(sources: Mapping[str, int] | None) -> str:
    shown = ", ".join(f"{name!r} ({length:,} samples)" for name, length in (sources or {}).items())
    return shown or "no sources"


def _divisors(number: int) -> str:
    found = [each for each in range(1, min(number, 4096) + 1) if number % each == 0]
    return ", ".join(map(str, found[:16])) + (", …" if len(found) > 16 else "")
