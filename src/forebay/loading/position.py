"""The position of a loader: one record, and one JSON format, for every kind of loader.

    loader.state_dict()  ──  Position.to_state  ──>  {"version": 4, "epoch": 3, "batch": 17, …}
                                                       └── `restoring` ──  loader.load_state_dict()

A position counts the batches and samples returned, over all ranks, so it is the same on every rank.
It records what its loader was made with; a loader made with something else refuses it, because
samples would be lost or repeated. What only one kind of loader needs is in the kind's own state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from forebay.errors import shortened
from forebay.loading.user_states import check_known

VERSION = 4
# More than any count in practice, and less than the largest 64-bit integer.
MOST = 1 << 60
DAMAGED = (
    "the state is damaged: {}\n  Nothing was changed. Load what state_dict() returned, unchanged."
)
BEFORE_CHANGE = (
    "epoch {}, batch {} was made before the weights, or the batch size, changed\n"
    "  Nothing was changed. What was made before the first change is replayed by a new loader with "
    "the first weights and batch size; what was made between two changes, by one that has loaded a "
    "state from between them."
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
    "ranges": "of ranges of samples",
    "torch": "with only torch's arguments",
    "iterable": "of an iterable dataset",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The position of a loader.

    Attributes:
        made_with: The fingerprint of the loader: what its positions depend on, by name.
        epoch: The epoch, from 0.
        batch: Batches of it that were returned.
        sample: Samples of it that were returned, over all ranks.
        seed: The seed of all batches; None by torch's rules.
        kind_state: What `LoaderKind.state` returned.
    """

    made_with: Mapping[str, Any] = field(default_factory=dict)
    epoch: int = 0
    batch: int = 0
    sample: int = 0
    seed: int | None = None
    kind_state: Mapping[str, Any] = field(default_factory=dict)

    def to_state(self) -> dict[str, Any]:
        """Return a dict, JSON-serializable if the states of the user's objects are."""
        values = {name: getattr(self, name) for name in POSITION}
        check_known(values["kind_state"])
        return {"version": VERSION, **values}

    @property
    def batches_shown(self) -> str:
        """The number of batches, in words."""
        return f"{self.batch:,} batch{'es' * (self.batch != 1)}"


# ---- what each value may be ----------------------------------------------------------------------


def is_count(value: Any) -> bool:
    """Return whether a value is a number of things, from 0."""
    return type(value) is int and 0 <= value < MOST


def is_size(value: Any) -> bool:
    """Return whether a value is a number of things, from 1."""
    return is_count(value) and value > 0


def is_list_of(value: Any, of: Callable[[Any], bool]) -> bool:
    """Return whether a value is a list of such items."""
    return isinstance(value, list | tuple) and all(map(of, value))


def is_epoch(value: Any) -> bool:
    """Return whether a value is an argument of `set_epoch`."""
    return type(value) is int and abs(value) < MOST


def is_sampler_state(value: Any) -> bool:
    """Return whether a value is an item of `sampler_states`."""
    if not isinstance(value, dict):
        return value is None
    return list(value) == ["state"] or (
        list(value) == ["generators"] and isinstance(value["generators"], dict)
    )


# Whether a value may be None; the type of any other value, or what is true of it.
Checks = Mapping[str, tuple[bool, type | Callable[[Any], bool]]]
POSITION: Checks = {
    "epoch": (False, is_count),
    "batch": (False, is_count),
    "sample": (False, is_count),
    "seed": (True, lambda value: type(value) is int),
    "made_with": (False, Mapping),
    "kind_state": (False, Mapping),
}


def checked_values(values: Any, checks: Checks, *, of: str = "") -> dict[str, Any]:
    """Return the values of a state, if there are all that have a check, and each is valid.

    Args:
        of: The part of the state whose values they are: there may be no others in it.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"{shortened(values)} is not a dict")
    for name, (may_be_none, check) in checks.items():
        if name not in values:
            raise ValueError(f"there is no {name}")
        value = values[name]
        fits = isinstance(value, check) if isinstance(check, type) else check(value)
        if not (may_be_none if value is None else fits):
            raise ValueError(f"{name} {shortened(value)}")
    if of and (unknown := [name for name in values if name not in checks]):
        raise ValueError(f"{of} has {shortened(unknown)}, which is for other loaders")
    return {name: values[name] for name in checks}
