"""What the user's work is, in text: kept with a run, so that the next one can tell a difference.

    work ──> code: source of the function and, recursively, of what it refers to
         └─> parameters: defaults, partial's arguments, closures, a Dataset's attributes

`survey.py` collects the two in one walk, and asks `sources.py` where code lives and what it says.

Guarantees: two processes describe equal work equally (no addresses, no order of sets, no line
numbers), nothing of the user's is called but its pickling protocol, and nothing raises.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from difflib import unified_diff

from forebay.errors import LedgerError
from forebay.jobs.sources import reference_of, type_name
from forebay.jobs.survey import Survey

_LONGEST_DIFFERENCE = 60  # lines


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A description of the user's work; compare two of them with `difference`.

    Attributes:
        name: For messages, such as "split.py:split_audio".
        reference: Where to find it again, "/there/split.py:split_audio" or
            "package.module:split_audio"; None for what has no place of its own: a lambda, a local
            function, a partial, a Dataset or other object, a notebook's function.
        code: Pairs of a label ("split.py:windows") and a text: source, or a hash without it.
        parameters: Pairs of a name and a JSON value, or "sha256:..." of a large or opaque one.
    """

    name: str
    reference: str | None
    code: tuple[tuple[str, str], ...]
    parameters: tuple[tuple[str, str], ...]

    def to_json(self) -> str:
        """Return it as ASCII text for the ledger."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Fingerprint:
        """Return what `to_json` wrote.

        Raises:
            LedgerError: The text is damaged.
        """
        try:
            found = json.loads(text)
            code, parameters = (
                tuple((str(key), str(value)) for key, value in found[part])
                for part in ("code", "parameters")
            )
            return cls(found["name"], found["reference"], code, parameters)
        except (ValueError, KeyError, TypeError) as error:
            what = "the ledger's description of the work is damaged"
            raise LedgerError(f"{what}: {error!r}\n  Start over with resume=False.") from error


def describe(work: object) -> Fingerprint:
    """Describe a function, a callable object, or a map-style Dataset.

    Code of the user's own is followed: from globals, within the same module, folder or top-level
    package; from closures and attributes, anywhere outside the standard library and site-packages.
    Comments count, indentation of the whole and trailing blanks do not. An import within a
    function is not followed. What `__getstate__` leaves out is no parameter: leave a cache out
    there, or it makes a used object differ from a new one. Arrays are hashed, at about 1 GB/s.
    """
    survey = Survey()
    try:
        name = survey.add_work(work)
    except Exception:  # noqa: BLE001 - odd objects raise anything; what was found until then counts
        name = type_name(work)
        survey.add_code(name, "(it cannot be looked into)")
    try:
        reference = reference_of(work)
    except Exception:  # noqa: BLE001
        reference = None
    parameters = tuple(sorted(survey.parameters.items()))
    return Fingerprint(name, reference, tuple(survey.code.items()), parameters)


def difference(old: Fingerprint, new: Fingerprint) -> str:
    """Return what changed as text for a message, "" if nothing did.

    Changed code comes as a unified diff, in which comments count, then one line for each changed
    parameter. `name` and `reference` are not compared: a folder that was moved is the same work.
    """
    was, now = dict(old.code), dict(new.code)
    lines: list[str] = []
    for label in dict.fromkeys((*now, *was)):
        before, after = was.get(label, ""), now.get(label, "")
        if before != after:
            pair = before.splitlines(), after.splitlines()
            lines += unified_diff(*pair, f"{label} (before)", f"{label} (now)", "", "", 2, "")
    changes = []
    was, now = dict(old.parameters), dict(new.parameters)
    for name in sorted({*was, *now}):
        if was.get(name) != now.get(name):
            before, after = was.get(name, "(none)"), now.get(name, "(none)")
            changes.append(f"parameter {name}: {before} -> {after}")
    return "\n".join(_capped(lines) + _capped(changes))


def _capped(lines: list[str]) -> list[str]:
    left = len(lines) - _LONGEST_DIFFERENCE
    if left <= 0:
        return lines
    return [*lines[:_LONGEST_DIFFERENCE], f"... {left} more line{'s' * (left != 1)}"]
