"""What predictions depend on, kept with a run so that the next one can tell a difference.

The weights are described one by one, so that a message can name those that changed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from forebay.jobs.fingerprint import Fingerprint, describe, difference
from forebay.predicting.reader import RangeReader

_WEIGHTS = "weights."
_HASH = "sha256:"
# Names that one line of a message has.
_MOST_NAMED = 8


def described(model: Any, reader: RangeReader, load: Any) -> Fingerprint:
    """Return a description of the model, the dataset and the functions between them.

    A table's rows are not part of it: each part of the output has a fingerprint of its own.
    """
    parts = {"model": model}
    weights: tuple[tuple[str, str], ...] = ()
    if isinstance(model, torch.nn.Module):
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        weights = describe(_Weights(tensors)).parameters
        parts = {"model": _without_weights(model, {})}
    parts |= {"data": reader.dataset} if load is None else {"load": load}
    parts |= {} if reader.collate_fn is None else {"collate_fn": reader.collate_fn}
    code: dict[str, str] = {}
    parameters = [(_WEIGHTS + key, value) for key, value in weights]
    name = ""
    for role, part in parts.items():
        found = describe(part)
        name = name or found.name
        code.update(found.code)
        parameters += [(f"{role}.{key}", value) for key, value in found.parameters]
    return Fingerprint(name, None, tuple(code.items()), tuple(parameters))


def changes(old: Fingerprint, new: Fingerprint) -> str:
    """Return what changed, as `difference` does, with names in place of hashes."""
    was, now = dict(old.parameters), dict(new.parameters)
    changed = [key for key in {**was, **now} if was.get(key) != now.get(key)]
    weights = [key for key in changed if key.startswith(_WEIGHTS)]
    large = [
        key
        for key in changed
        if key not in weights and all(side.get(key, "").startswith(_HASH) for side in (was, now))
    ]
    lines = []
    if weights:
        lines.append(f"the weights changed ({_listed(key[len(_WEIGHTS) :] for key in weights)})")
    if large:
        lines.append(f"changed, and too large to show: {_listed(large)}")
    named = {*weights, *large}
    lines.append(difference(_without(old, named), _without(new, named)))
    return "\n".join(filter(None, lines))


class _Weights:
    """Tensors as the attributes of one object."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        vars(self).update(tensors)


def _without_weights(module: torch.nn.Module, known: dict[int, Any]) -> Any:
    """Return a copy of a module that has all of it but its tensors, which are hashed only once."""
    if id(module) in known:
        return known[id(module)]
    try:
        twin = copy.copy(module)
        inner = {
            name: child if child is None else _without_weights(child, known)
            for name, child in module._modules.items()
        }
        vars(twin).update(_parameters={}, _buffers={}, _modules=inner)
    except Exception:  # noqa: BLE001 - a module of another kind, which does as it likes
        twin = module
    known[id(module)] = twin
    return twin


def _listed(names: Iterable[str]) -> str:
    found = sorted(names)
    left = len(found) - _MOST_NAMED
    return ", ".join(found[:_MOST_NAMED]) + (f" and {left:,} more" if left > 0 else "")


def _without(fingerprint: Fingerprint, names: set[str]) -> Fingerprint:
    kept = tuple(pair for pair in fingerprint.parameters if pair[0] not in names)
    return replace(fingerprint, parameters=kept)
