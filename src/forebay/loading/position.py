"""The position of a loader: one record, and one JSON format, for every kind of loader.

    loader.state_dict()  ──  Position.to_state  ──>  {"version": 2, "epoch": 3, "batch": 17, …}
                                                       └── from_state ──  loader.load_state_dict()

A position counts the batches and samples returned, over all ranks, so it is the same on every rank.
It records the arguments of its loader; a loader with other arguments refuses it, because samples
would be lost or repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from forebay.base.formatting import counted
from forebay.errors import OptionError, shortened
from forebay.loading.messages import WorkerState
from forebay.loading.samplers import SamplerStates
from forebay.loading.sources import Drawn, Start
from forebay.mixing import checked_weights
from forebay.mixture import Mixture

if TYPE_CHECKING:
    from forebay.loading.settings import Settings

VERSION = 2
# More than any count in practice, and less than the largest 64-bit integer.
MOST = 1 << 60
DAMAGED = (
    "the state is damaged: {}\n  Nothing was changed. Load what state_dict() returned, unchanged."
)
NO_ORDER = (
    "the position in an epoch is not known with in_order=False, where batches come as they are "
    "ready\n"
    "  Batches returned in epoch {epoch}: {count:,}; others before the last one may be left. No "
    "state was made, and the iteration goes on.\n"
    "  Call state_dict() before or after an epoch, or make the loader with in_order=True."
)

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
        windows: Of what samples are shuffled in: see `Windows.state`; None for an exact order.
    """

    kind: str
    global_batch_size: int | None = None
    drop_last: bool = False
    length: int | None = None
    num_workers: int = 0
    shuffle: bool | None = None
    sources: dict[str, int] | None = None
    windows: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The position of a loader.

    Attributes:
        epoch: The epoch, from 0.
        seed: The seed of all batches; None by torch's rules.
        generator: By torch's rules: state of the generator before the epoch; None if the user has
            to restore it.
        set_epoch: The argument of the last `set_epoch` of the sampler; see `epoch_of`.
    """

    made_with: MadeWith
    epoch: int = 0
    batch: int = 0
    sample: int = 0
    length: int | None = None
    origin: int = 0
    counts_samples: bool = False
    seed: int | None = None
    set_epoch: int | None = None
    sampler: SamplerStates | None = None
    drawn: Drawn | None = None
    dataset: Any = None
    generator: str | None = None
    draws_base_seed: bool = True
    worker_states: tuple[WorkerState, ...] = ()
    next_worker: int = 0
    mixture: dict[str, Any] | None = None

    @property
    def knows_workers(self) -> bool:
        """Return whether it includes a state of any worker's copy of the dataset."""
        return any(each.is_known for each in self.worker_states)

    @property
    def start(self) -> Start:
        """Where to begin in the epoch."""
        by_sample = self.batch > 0 and self.counts_samples
        place = (self.epoch, self.batch, self.sample, self.length, by_sample, self.origin)
        return Start(*place, self.drawn)

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
        state["worker_states"] = [list(each) for each in self.worker_states]
        return {"version": VERSION, **state, "drawn": self.drawn and [*self.drawn]}

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
        try:
            made: Any = _checked(state["made_with"], MADE_WITH)
            values = _checked(state, POSITION)
            made["windows"] = made["windows"] and tuple(made["windows"])
            values["made_with"] = MadeWith(**made)
            values["worker_states"] = tuple(WorkerState(*each) for each in values["worker_states"])
            values["drawn"] = values["drawn"] and Drawn(*values["drawn"])
            values["mixture"] = _mixture_of(values["mixture"])
            position = cls(**values)
            if contradiction := position._contradiction():
                raise ValueError(contradiction)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise OptionError(DAMAGED.format(f"{type(error).__name__}: {error}")) from error
        return position

    def _contradiction(self) -> str | None:
        """Return what cannot be true together with the other values; None if all can be."""
        made, within = self.made_with, self.batch > 0
        is_torchs, is_plan = made.kind in ("torch", "iterable"), made.kind == "plan"
        has_begun = within or self.epoch > 0
        workers, sources = max(made.num_workers, 1), made.sources or ()
        mixture: Any = self.mixture or {"weights": (), "counts": (), "since": 0}
        weights, counts, since = mixture["weights"], mixture["counts"], mixture["since"]
        wrong = {
            f"made_with {made}": (
                (is_plan and None in (made.length, made.shuffle, made.global_batch_size))
                or (made.kind == "iterable" and made.global_batch_size is None)
                or (made.kind == "iterable" and made.length is not None)
                or (not is_torchs and made.num_workers > 0)
                or (made.sources is not None and not is_plan)
            ),
            f"length {self.length}": self.length is not None
            and (not self.counts_samples or made.length is None or not within),
            f"counts_samples {self.counts_samples}": self.counts_samples and not within,
            f"sample {self.sample:,} after {self._batches}": (
                not self._counted() or (self.sample > 0 and not within)
            ),
            f"seed {self.seed}": (
                made.kind == "torch" if self.seed is not None else has_begun and not is_torchs
            ),
            f"generator {self.generator}": self.generator is not None and not is_torchs,
            f"draws_base_seed {self.draws_base_seed}": not (self.draws_base_seed or self.epoch > 0),
            f"worker_states of {counted(len(self.worker_states), 'worker')}": (
                len(self.worker_states) not in (0, workers if is_torchs else 0)
            ),
            "what a sampler drew": self.drawn is not None and not any(self.sampler or ()),
            "what workers read since": not all(each.fits(made.kind) for each in self.worker_states),
            f"next_worker {self.next_worker} of {workers}": self.next_worker >= workers,
            f"mixture {shortened(self.mixture)} of {len(sources)} sources": (
                len(weights) != len(sources) or len(counts) not in (0, len(sources))
            ),
            f"mixture's counts {shortened(counts)} since {since}": (
                sum(counts) != since or since > self.origin + self.sample
            ),
        }
        return next((what for what, is_wrong in wrong.items() if is_wrong), None)

    def _counted(self) -> bool:
        """Return whether so many batches may have so many samples."""
        made, size, batch = self.made_with, self.made_with.global_batch_size, self.batch
        length = self.length or made.length or 0
        if made.kind == "plan" and self.sample > length:
            return False
        if self.counts_samples or size is None:  # of several sizes
            return True
        if made.kind == "iterable":
            return self.sample == batch * size
        if made.kind == "plan":
            whole = length - length % size if made.drop_last else length
            return self.sample == min(batch * size, whole)
        # torch's own samplers yield one short batch at most, and there are none after it.
        least = batch * size if made.shuffle is not None else (batch - 1) * size + 1
        return not batch or least <= self.sample <= batch * size

    @property
    def _batches(self) -> str:
        return f"{self.batch:,} batch{'es' * (self.batch != 1)}"

    def fitted(self, settings: Settings, seed: int | None, *, strict: bool) -> Position:
        """Return the position for a loader, after checking that the loader fits it.

        Args:
            seed: The argument of the loader.
        """
        was, now = self.made_with, settings.made_with
        self._check_same(now, seed)
        # The length that counts is that of the epoch, which may be from before the dataset grew.
        length = self.length or was.length
        differing = []
        if self.batch:  # a batch of the epoch was returned
            pairs = {
                "shuffle": (was.shuffle, now.shuffle),
                "global_batch_size": (was.global_batch_size, now.global_batch_size),
                "length": (length, now.length),
                "drop_last": (was.drop_last, now.drop_last),
            }
            differing = [
                name for name, (old, new) in pairs.items() if None not in (old, new) and old != new
            ]
        if "shuffle" in differing:
            raise OptionError(
                f"the state has shuffle={was.shuffle}, the loader has shuffle={now.shuffle}\n"
                f"  It was taken in epoch {self.epoch} after {self.sample} samples. Nothing was "
                "changed: the rest of the epoch would lose and repeat samples. Make the loader as "
                "it was."
            )
        if self.batch and was.shuffle and was.windows != now.windows:
            raise OptionError(
                f"the state has samples shuffled {_shown_windows(was)}, the loader has them "
                f"shuffled {_shown_windows(now)}\n"
                f"  It was taken in epoch {self.epoch} after {self.sample} samples. Nothing was "
                "changed: the rest of the epoch would lose and repeat samples. Open the cache with "
                "the same window=, and use the same global batch size."
            )
        # With batch_size=None each rank takes one sample at a time.
        ignored = "global_batch_size" if settings.batch_size is None else None
        refused = [name for name in differing if name != ignored]
        if strict and refused:
            world_size = 1 if settings.ranks is None else settings.ranks.world_size
            raise OptionError(self._mismatch(*pairs[refused[0]], refused[0], world_size))
        if "global_batch_size" in differing and was.kind == "iterable" and not self.knows_workers:
            old, new = was.global_batch_size, now.global_batch_size
            raise OptionError(
                f"the state has batches of {old} samples, the loader has batches of {new} samples\n"
                f"  It was taken in epoch {self.epoch} after {self._batches}. "
                "Nothing was changed: an iterable dataset without state_dict is read again batch "
                "by batch, and samples would be lost or repeated.\n"
                f"  Use batch_size={old}, or load a state of an epoch's end."
            )
        if "length" in differing:
            self._check_length(length or 0, now.length or 0, settings.may_resize)
        has_same_workers = was.num_workers == now.num_workers
        return replace(
            self,
            made_with=now,
            length=length if "length" in differing else None,
            counts_samples=self.counts_samples or bool(differing),
            # With other workers, it may be the turn of one that does not exist.
            next_worker=self.next_worker if has_same_workers else 0,
            worker_states=self.worker_states if has_same_workers else (),
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
        if now >= was >= self.sample and may_resize:
            return
        why = "some of its samples are gone" if now < was else "the sampler decides the order"
        if was < self.sample:
            why = "more samples than that were returned"
        raise OptionError(
            f"the state has {was} samples, the loader has {now} samples\n"
            f"  It was taken in epoch {self.epoch} after {self.sample} samples. Nothing was "
            f"changed: the rest of that epoch cannot be loaded, because {why}.\n"
            "  Make the loader with the dataset as it was, or load a state of an epoch's end."
        )

    def _mismatch(self, old: Any, new: Any, name: str, world_size: int) -> str:
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
        return (
            f"the state has {named.format(old)}, the loader has {named.format(new)}\n"
            f"  It was taken in epoch {self.epoch} after {self._batches} "
            f"({counted(self.sample, 'sample')}). Nothing was changed: the rest of the epoch would "
            "lose or repeat samples.\n"
            f"  {way}, or finish the epoch as it was begun, counted in samples: "
            "load_state_dict(state, strict=False)."
        )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST


def _is_positive(value: Any) -> bool:
    return _is_count(value) and value > 0


def _is_list(value: Any, of: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(of, value))


def _is_sampler_state(value: Any) -> bool:
    if not isinstance(value, dict):
        return value is None
    return list(value) == ["state"] or (
        list(value) == ["generator"] and isinstance(value["generator"], str)
    )


def _is_worker_state(value: Any) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 4:
        return False
    phase, since = value[2:]
    return phase in ("before", "within", "ended") and (_is_count(since) or isinstance(since, list))


def _is_sources(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(map(_is_positive, value.values()))


# Whether a value may be None; the type of any other value, or what is true of it.
Checks = dict[str, tuple[bool, type | Callable[[Any], bool]]]
MADE_WITH: Checks = {
    "kind": (False, lambda value: isinstance(value, str) and value in KINDS),
    "global_batch_size": (True, _is_positive),
    "drop_last": (False, bool),
    "length": (True, _is_count),
    "num_workers": (False, _is_count),
    "shuffle": (True, bool),
    "sources": (True, _is_sources),
    "windows": (True, lambda value: _is_list(value, _is_positive) and len(value) == 4),
}
POSITION: Checks = {
    "made_with": (False, object),
    "epoch": (False, _is_count),
    "batch": (False, _is_count),
    "sample": (False, _is_count),
    "length": (True, _is_positive),
    "origin": (False, _is_count),
    "counts_samples": (False, bool),
    "seed": (True, lambda value: type(value) is int),
    "set_epoch": (True, lambda value: type(value) is int and abs(value) < MOST),
    "sampler": (True, lambda value: _is_list(value, _is_sampler_state)),
    "drawn": (True, Drawn.is_one),
    "dataset": (True, object),
    "generator": (True, str),
    "draws_base_seed": (False, bool),
    "worker_states": (False, lambda value: _is_list(value, _is_worker_state)),
    "next_worker": (False, _is_count),
    "mixture": (True, dict),
}


def _checked(state: Any, checks: Checks) -> dict[str, Any]:
    """Return the values of a state that have a check, if there are all and each is valid."""
    if not isinstance(state, Mapping):
        raise TypeError(f"{shortened(state)} is not a dict")
    for name, (may_be_none, check) in checks.items():
        if name not in state:
            raise ValueError(f"there is no {name}")
        value = state[name]
        fits = isinstance(value, check) if isinstance(check, type) else check(value)
        if not (may_be_none if value is None else fits):
            raise ValueError(f"{name} {shortened(value)}")
    return {name: state[name] for name in checks}


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


def _shown_windows(made: MadeWith) -> str:
    if made.windows is None:
        return "exactly"
    batch, lanes, blocks, total = made.windows
    window = counted(lanes * blocks, "block")
    return f"in windows of {window} of {total:,}, for global batches of {batch:,} samples"


def _divisors(number: int) -> str:
    found = [each for each in range(1, min(number, 4096) + 1) if number % each == 0]
    return ", ".join(map(str, found[:16])) + (", …" if len(found) > 16 else "")
