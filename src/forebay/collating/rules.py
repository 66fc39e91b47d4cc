"""A rule collates one field of the samples, and what it raises names the field.

    Collation.collate(samples, path)     pad and by_field: they know where they are
    default(samples)                     torch's, with misfits named
    any function of a list               the user's, with a note

All of them are collate_fn objects as well. `collated` is how a loader calls any.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import default_collate

from forebay.collating.misfits import Misfit, Path, find, refusal, shown

Rule = Callable[[list[Any]], Any]


class Collation(ABC):
    """A collate_fn that knows where in the samples it is used."""

    def __call__(self, samples: list[Any]) -> Any:
        """Collate whole samples, as a `collate_fn`."""
        return self.collate(samples, ())

    @abstractmethod
    def collate(self, samples: Sequence[Any], path: Path) -> Any:
        """Collate what the samples have at this path."""


def default(samples: list[Any]) -> Any:
    """Do what torch's default_collate does, but name the sample that does not fit.

    Raises:
        InputError: A sample, or a field of it, is not like the others, or nothing stacks it.
    """
    return _default(samples, ())


def collated(collate_fn: Rule, samples: Any) -> Any:
    """Call a loader's `collate_fn`; what torch's default raises gains a note on what does not fit.

    Its type and words stay torch's.
    """
    try:
        return collate_fn(samples)
    except Exception as error:
        misfit = find(samples) if collate_fn is default_collate and samples else None
        if misfit is not None:
            error.add_note(f"forebay: {refusal(misfit, len(samples), _advice(misfit))}")
        raise


def applied(rule: Rule, values: list[Any], path: Path) -> Any:
    """Collate a field, so that what is raised names it."""
    if isinstance(rule, Collation):
        return rule.collate(values, path)
    if rule is default:
        return _default(values, path)
    try:
        return rule(values)
    except Exception as error:
        error.add_note(f"forebay.collate: it was raised by the rule for field {shown(path)}")
        raise


def _default(samples: Sequence[Any], path: Path) -> Any:
    try:
        return default_collate(list(samples))
    except Exception as error:
        misfit = find(samples) if samples else None
        if misfit is None:
            if path:
                error.add_note(f"forebay.collate: it was raised for field {shown(path)}")
            raise
        misfit = misfit._replace(path=(*path, *misfit.path))
        raise refusal(misfit, len(samples), _advice(misfit)) from error


def _advice(misfit: Misfit) -> str:
    rules = {"as_list": "to keep a list"}
    if misfit.place is not None and misfit.what.startswith(("a tensor", "an array", "a list")):
        rules = {"pad()": "to pad to the largest shape", **rules}
    ways = " or ".join(f"{_rule_at(misfit.path, rule)} {why}" for rule, why in rules.items())
    return f"Use collate_fn={ways}; these are in forebay.collate."


def _rule_at(path: Path, rule: str) -> str:
    """Return the collate_fn that has this rule at this path, as one would write it."""
    for part in reversed(path):
        is_name = isinstance(part, str) and part.isidentifier()
        rule = f"by_field({part}={rule})" if is_name else f"by_field({{{part!r}: {rule}}})"
    return rule
