"""How two descriptions of the user's work differ, and the message that says so."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from difflib import unified_diff
from typing import Any

from forebay.runs.fingerprint import WEIGHTS, Base, Fingerprint
from forebay.runs.samples import paired
from forebay.runs.source_code import HASH

_LONGEST_DIFFERENCE = 60  # lines
_MOST_NAMES = 8  # in one line


def difference(old: Fingerprint, new: Fingerprint) -> str:
    """Return the changes as a string for a message; "" if there are none.

    Changed code comes as a unified diff; then the names of the weights and other values that are
    too large to show; then one line for each other parameter. `name` and `reference` are not
    compared: a folder that was moved is the same work. A Dataset that only one of them has is a
    change if the other one has another instead.
    """
    compared: list[tuple[Any, Any]] = [(old, new)]
    if (both := _changed_bases(old, new)) is not None:
        compared.append(both)
    lines: list[str] = []
    shown, large, weights = [], [], []
    for one, other in compared:
        was, now = dict(one.code), dict(other.code)
        for label in dict.fromkeys((*now, *was)):
            before, after = was.get(label, ""), now.get(label, "")
            if before != after:
                pair = before.splitlines(), after.splitlines()
                lines += unified_diff(*pair, f"{label} (before)", f"{label} (now)", "", "", 2, "")
        was, now = dict(one.parameters), dict(other.parameters)
        for name in sorted({*was, *now}):
            before, after = was.get(name, "(none)"), now.get(name, "(none)")
            if before == after:
                continue
            if WEIGHTS in name:
                weights.append(name.partition(WEIGHTS)[2])
            elif before.startswith(HASH) and after.startswith(HASH):
                large.append(name)
            else:
                shown.append(f"parameter {name}: {before} -> {after}")
    lines = _capped(lines)
    if weights:
        lines.append(f"the weights changed ({_listed(weights)})")
    if large:
        lines.append(f"changed, and too large to show: {_listed(large)}")
    return "\n".join(lines + _capped(shown))


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


def _listed(names: list[str]) -> str:
    left = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {left:,} more" if left > 0 else "")


def _capped(lines: list[str]) -> list[str]:
    left = len(lines) - _LONGEST_DIFFERENCE
    more = [f"... {left} more line{'s' * (left != 1)}"] if left > 0 else []
    return lines[:_LONGEST_DIFFERENCE] + more


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
        "  - start over, removing the earlier outputs: resume=False, or --restart;\n"
        f"  - keep what is done and use the new code for the rest{only}: accept_changes=True, "
        "or --accept-changes;\n"
        "  - another output folder."
    )
