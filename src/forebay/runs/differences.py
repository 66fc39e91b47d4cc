"""How two descriptions of the user's work differ, and the message that says so."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from forebay.runs.fingerprint import WEIGHTS, Base, Fingerprint, Pairs
from forebay.runs.samples import paired
from forebay.runs.source_code import HASH

_MOST_NAMES = 8  # in one line, and lines


def difference(old: Fingerprint, new: Fingerprint) -> str:
    """Return the names of what changed, for a message; "" if nothing did.

    First the code and the values that are too large to show; then the weights; then one line for
    each other parameter. `name` and `reference` are not compared: a folder that was moved is the
    same work. A Dataset that only one of them has is a change if the other one has another instead.
    """
    compared: list[tuple[Any, Any]] = [(old, new)]
    if (both := _changed_bases(old, new)) is not None:
        compared.append(both)
    named, weights, shown = [], [], []
    for one, other in compared:
        named += [name for name, *_ in _changed(one.code, other.code)]
        for name, before, after in _changed(one.parameters, other.parameters):
            if WEIGHTS in name:
                weights.append(name.partition(WEIGHTS)[2])
            elif before.startswith(HASH) and after.startswith(HASH):
                named.append(name)
            else:
                shown.append(f"parameter {name}: {before} -> {after}")
    lines = [f"changed: {_listed(named)}"] if named else []
    lines += [f"the weights changed ({_listed(weights)})"] if weights else []
    return "\n".join([*lines, *([_listed(shown, "\n")] if shown else [])])


def _changed(old: Pairs, new: Pairs) -> Iterator[tuple[str, str, str]]:
    was, now = dict(old), dict(new)
    for name in dict.fromkeys((*now, *was)):
        pair = was.get(name, "(none)"), now.get(name, "(none)")
        if pair[0] != pair[1]:
            yield name, *pair


def changed_name(old: Fingerprint, new: Fingerprint) -> str:
    """Return what a message says has changed: the work, or a Dataset that it is done with."""
    both = _changed_bases(old, new)
    if both is None or difference(replace(old, bases=()), replace(new, bases=())):
        return new.name
    return f"the dataset {both[1].name}"


def _changed_bases(old: Fingerprint, new: Fingerprint) -> tuple[Base, Base] | None:
    """Return a Dataset as it was and as it is, or another one in its place; None if none changed.

    One pair tells enough: of one class, if there are such.
    """
    pairs = paired(old.bases, new.bases, accepts=False)
    gained = [each for each, at in zip(new.bases, pairs, strict=True) if at is None]
    lost = [each for at, each in enumerate(old.bases) if at not in {*pairs}]
    if not (gained and lost):
        return None
    both = ((one, other) for one in lost for other in gained if one.name == other.name)
    return next(both, (lost[0], gained[0]))


def _listed(names: list[str], between: str = ", ") -> str:
    left = len(names) - _MOST_NAMES
    return between.join(names[:_MOST_NAMES]) + (f" and {left:,} more" if left > 0 else "")


def words_of_change(
    name: str, changes: str, output: str, new_version: str | None, *, has_samples: bool
) -> str:
    """Return the message for a call whose outputs would not go with those of earlier ones.

    Args:
        changes: What `difference` returned.
        new_version: The version of the call, if the earlier run had none.
        has_samples: Whether the inputs are samples of Datasets.
    """
    only = ", if every sample has the name or index that it had" if has_samples else ""
    first = ""
    if new_version is not None:
        first = f"  The earlier run had no version to compare with version={new_version!r}.\n"
    return (
        f"{name} changed since the earlier run: {output!r} would mix two versions\n"
        f"{textwrap.indent(changes.rstrip(), '  ')}\n"
        f"{first}  Nothing was started, and nothing is lost. Choose one:\n"
        "  - start over, removing the earlier outputs: redo='*', or --redo '*';\n"
        f"  - keep what is done and use the new code for the rest{only}: accept_changes=True, "
        "or --accept-changes;\n"
        "  - another output folder."
    )
