"""Load a state: is it whole, does it fit the loader, and restore the user's objects."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch

from forebay.base.datasets import is_mixture
from forebay.base.formatting import counted
from forebay.base.origins import content_digests
from forebay.errors import OptionError
from forebay.loading.kind import LoaderKind
from forebay.loading.position import (
    DAMAGED,
    KINDS,
    POSITION,
    VERSION,
    Position,
    checked_values,
)
from forebay.loading.samplers import (
    SamplerStates,
    chain_of,
    restore_epoch,
    sampler_states,
    set_states,
)
from forebay.loading.user_states import NO_STATE, has_state, set_generator


def loaded_position(state: Any, kind: LoaderKind, seed: int | None, *, strict: bool) -> Position:
    """Return the position of a state for a loader, after checking both.

    Args:
        seed: The argument of the loader.
    """
    position = _position_of(state, kind)
    _check_same(position, kind, seed)
    return _fitted(position, kind, strict=strict)


# ---- is it whole ---------------------------------------------------------------------------------


def _position_of(state: Any, kind: LoaderKind) -> Position:
    """Return the position from a dict that `to_state` returned."""
    version = state.get("version") if isinstance(state, Mapping) else None
    if version != VERSION:
        what = f"version {version!r}, and this forebay reads version {VERSION}"
        if version is None:
            what = "no version, so no forebay.DataLoader saved it"
        raise OptionError(
            f"the state has {what}\n"
            "  Nothing was changed. Load what state_dict() of a forebay.DataLoader returned, "
            "with the forebay that saved it."
        )
    made_with = state.get("made_with")
    was = made_with.get("kind") if isinstance(made_with, Mapping) else None
    if isinstance(was, str) and was in KINDS and was != kind.kind_name:
        raise OptionError(
            f"the state was saved by a loader {KINDS[was]}; this one is a loader "
            f"{KINDS[kind.kind_name]}\n"
            "  Nothing was changed. Make the loader as it was when the state was saved."
        )
    try:
        values = checked_values(state, POSITION)
        checks = {"made_with": kind.MADE_WITH, "kind_state": kind.STATE}
        parts = {name: checked_values(values[name], each, of=name) for name, each in checks.items()}
        position = Position(**(values | parts))
        if contradiction := _contradiction(position, kind):
            raise ValueError(contradiction)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise OptionError(DAMAGED.format(f"{type(error).__name__}: {error}")) from error
    return position


def _contradiction(position: Position, kind: LoaderKind) -> str | None:
    """Return what cannot be true together with the other values; None if all can be."""
    own, within = position.kind_state, position.batch > 0
    length, by_sample, has_begun = own.get("length"), own["counts_samples"], within
    has_begun = within or position.epoch > 0
    is_known = position.made_with.get("length") is not None
    wrong = {
        f"length {length}": length is not None and not (by_sample and is_known and within),
        f"counts_samples {by_sample}": by_sample and not within,
        f"sample {position.sample:,} after {position.batches_shown}": (
            not kind.may_have_returned(position) or (position.sample > 0 and not within)
        ),
        f"seed {position.seed}": not kind.may_have_seed(position.seed, has_begun=has_begun),
        **kind.contradictions(position),
    }
    return next((what for what, is_wrong in wrong.items() if is_wrong), None)


# ---- does it fit the loader ----------------------------------------------------------------------


def _check_same(position: Position, kind: LoaderKind, seed: int | None) -> None:
    """Raise an error if the loader differs in what no resume can change."""
    if None not in (position.seed, seed) and position.seed != seed:
        raise OptionError(
            f"the state has seed={position.seed}, the loader has seed={seed}\n"
            "  Nothing was changed. The remaining batches would differ: make the loader with "
            "the same seed, or with none."
        )
    kind.check_same(position)


def _fitted(position: Position, kind: LoaderKind, *, strict: bool) -> Position:
    """Return the position for a loader, after checking that the loader fits it."""
    was, now = position.made_with, kind.made_with()
    # The length that counts is that of the epoch, which may be from before the dataset grew.
    length = position.kind_state.get("length") or was.get("length")
    differing = []
    if position.batch:  # a batch of the epoch was returned
        pairs = {
            name: (was.get(name), now.get(name))
            for name in ("shuffle", "global_batch_size", "length", "drop_last")
        }
        pairs["length"] = length, now.get("length")
        differing = [
            name for name, (old, new) in pairs.items() if None not in (old, new) and old != new
        ]
    if "shuffle" in differing:
        raise OptionError(
            f"the state has shuffle={was['shuffle']}, the loader has shuffle={now['shuffle']}\n"
            f"  It was taken in epoch {position.epoch} after {position.sample} samples. "
            "Nothing was changed: the rest of the epoch would lose and repeat samples. Make the "
            "loader as it was."
        )
    kind.check_order(position)
    _check_content(position, kind)
    # With batch_size=None each rank takes one sample at a time.
    ignored = "global_batch_size" if kind.batch_size is None else None
    refused = [name for name in differing if name != ignored]
    if strict and refused:
        world_size = 1 if kind.ranks is None else kind.ranks.world_size
        raise OptionError(_mismatch(position, *pairs[refused[0]], refused[0], world_size))
    if "length" in differing:
        _check_length(position, length or 0, now["length"] or 0, kind.may_resize)
    return replace(
        position,
        made_with=now,
        kind_state={
            **position.kind_state,
            **({"length": length if "length" in differing else None} if "length" in was else {}),
            "counts_samples": position.kind_state["counts_samples"] or bool(differing),
            **kind.fitted_state(position, strict=strict),
        },
    )


def _check_content(position: Position, kind: LoaderKind) -> None:
    """Raise an error if samples of the epoch are others; warn if they may be."""
    was = position.made_with.get("content") if position.batch else None
    now = None if was is None else _content_now(kind, position.made_with["length"])
    if was is None or now is None or was == now:
        return
    taken = f"It was taken in epoch {position.epoch} after {position.sample} samples."
    if was.partition(":")[0] == now.partition(":")[0]:
        warnings.warn(
            "the files of the dataset were written anew, or copied, since the state was saved: as "
            "many samples, but other times, ETags or checksums\n"
            f"  {taken} If samples changed, the rest of that epoch has the new ones. Copies that "
            "keep the files' times (cp -a, rsync -t) are not warned of.",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    raise OptionError(
        "the samples of the state are not those of the loader: files of the dataset were replaced, "
        f"added in between or removed\n  {taken} Nothing was changed: the rest of the epoch would "
        "lose and repeat samples. Bring the earlier files back, or load a state of an epoch's end."
    )


def _content_now(kind: LoaderKind, samples: int) -> str | None:
    return content_digests(kind.dataset, None if is_mixture(kind.dataset) else samples)


def _check_length(position: Position, was: int, now: int, may_resize: bool) -> None:
    """Raise an error if the rest of the epoch cannot be loaded with another length."""
    if now >= was >= position.sample and may_resize:
        return
    why = "some of its samples are gone" if now < was else "the sampler decides the order"
    if was < position.sample:
        why = "more samples than that were returned"
    raise OptionError(
        f"the state has {was} samples, the loader has {now} samples\n"
        f"  It was taken in epoch {position.epoch} after {position.sample} samples. Nothing was "
        f"changed: the rest of that epoch cannot be loaded, because {why}.\n"
        "  Make the loader with the dataset as it was, or load a state of an epoch's end."
    )


def _mismatch(position: Position, old: Any, new: Any, name: str, world_size: int) -> str:
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
        f"  It was taken in epoch {position.epoch} after {position.batches_shown} "
        f"({counted(position.sample, 'sample')}). Nothing was changed: the rest of the epoch would "
        "lose or repeat samples.\n"
        f"  {way}, or finish the epoch as it was begun, counted in samples: "
        "load_state_dict(state, strict=False)."
    )


def _divisors(number: int) -> str:
    found = [each for each in range(1, min(number, 4096) + 1) if number % each == 0]
    return ", ".join(map(str, found[:16])) + (", …" if len(found) > 16 else "")


# ---- restore -------------------------------------------------------------------------------------


def restore_states(kind: LoaderKind, position: Position) -> None:
    """Restore the states of the dataset and the samplers of this process from a position."""
    dataset, sampler, own = kind.dataset, kind.index_sampler, position.kind_state
    given, generator, state = own.get("sampler") or [], own.get("generator"), own["dataset"]
    states = [state, *(each[0] for each in own.get("worker_states", ()))]
    if not has_state(dataset) and any(each is not None for each in states):
        raise OptionError(NO_STATE.format("dataset", type(dataset).__name__))
    known = sampler_states(sampler) or []
    for each, has, saved in zip_longest(chain_of(sampler), known, given):
        if saved and _parts(saved) != _parts(has):
            raise OptionError(NO_STATE.format("sampler", type(each).__name__))
        if has and not saved and position.batch:
            raise OptionError(DAMAGED.format(f"it has no state of the {type(each).__name__}"))
    if position.batch and generator is None and kind.orders_by_draws:
        raise OptionError(DAMAGED.format("it has no state of torch's generator"))
    try:
        if generator is not None:
            set_generator(torch.Generator(), generator)
        _set_generators(sampler, given)
    except Exception as error:
        _set_generators(sampler, known)
        raise OptionError(DAMAGED.format("the state of a generator")) from error
    if state is not None and not kind.has_already(state):
        dataset.load_state_dict(copy.deepcopy(state))
    set_states(sampler, own.get("sampler"))
    restore_epoch(sampler, own.get("set_epoch"))


def _parts(state: Mapping[str, Any] | None) -> list[str]:
    """Return what the state of a sampler consists of."""
    return [] if state is None else [*state, *state.get("generators", ())]


def _set_generators(sampler: Any, states: SamplerStates) -> None:
    """Set the generators of samplers, and nothing else of their states."""
    set_states(sampler, [each if each and "generators" in each else None for each in states])
