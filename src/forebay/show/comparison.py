"""`forebay.compare`: what differs between two reports.

The files may come from anybody: their data is read, never executed, and every value is checked.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from forebay.errors import OptionError, one_line
from forebay.observe.figures import LONGEST_TEXT, checked_number, checked_text, figures_of, percent
from forebay.show.html import REPORT_FORMAT, read_report, write_report

_MAX_SETTINGS = 100
# A ratio closer to 1 does not count as a difference: rates vary as much from run to run.
_LEAST_CHANGE = 0.02


class ReportDifference(NamedTuple):
    """One thing that differs: its values in the first report and in the second."""

    name: str
    first: str
    second: str
    change: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """What differs between two reports; its `str` says it line by line.

    Attributes:
        first: Title of the first report.
        second: Title of the second.
        verdicts: The verdict of each; "" where there is none.
        figures: Rates, waits and counts that differ.
        settings: Arguments that differ.
        environment: Versions and machines that differ.
    """

    first: str
    second: str
    verdicts: tuple[str, str]
    figures: tuple[ReportDifference, ...]
    settings: tuple[ReportDifference, ...]
    environment: tuple[ReportDifference, ...]

    def __str__(self) -> str:
        """Return the differences, one a line."""
        lines = [f"first   {self.first}", f"second  {self.second}"]
        for name, found in self._parts().items():
            if not found:
                lines.append(f"{name}: no difference")
                continue
            lines.append(name)
            width = max(len(each.name) for each in found)
            for each in found:
                change = f" ({each.change})" if each.change else ""
                values = f"{each.first or 'none'} → {each.second or 'none'}"
                lines.append(f"  {each.name:<{width}}  {values}{change}")
        for name, verdict in zip(("first", "second"), self.verdicts, strict=True):
            if verdict:
                lines.append(f"verdict of the {name}: {verdict}")
        return "\n".join(lines)

    __repr__ = __str__

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the comparison to a self-contained HTML file; see `DataLoader.report`."""
        names = ("", "first", "second", "change")
        rows = [("first", self.first, self.verdicts[0]), ("second", self.second, self.verdicts[1])]
        shown = 3 if any(self.verdicts) else 2
        titles = {
            "names": ("", "report", "verdict")[:shown],
            "rows": [each[:shown] for each in rows],
        }
        sections = {"reports": ("table", titles)} | {
            name: ("table", {"names": names, "rows": found})
            if found
            else ("text", {"text": "No difference."})
            for name, found in self._parts().items()
        }
        report = {
            "format": REPORT_FORMAT,
            "kind": "comparison",
            "title": "What differs between two reports",
            "subtitle": "forebay compare",
            "sections": [(name.capitalize(), [part]) for name, part in sections.items()],
        }
        return write_report(report, path)

    def _parts(self) -> dict[str, tuple[ReportDifference, ...]]:
        names = ("figures", "settings", "environment")
        return {name: getattr(self, name) for name in names}


def compare(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> Comparison:
    """Say what differs between two reports: rate, waits, settings, environment, verdict.

    Args:
        first: A file written by `loader.report()`, or by the `report.save()` of a run.
        second: Another of the same kind.

    Returns:
        The comparison, which prints as text and has `save(path)` for HTML.

    Raises:
        InputError: A file is not a report, or damaged.
        OptionError: One is of a loader and the other of a run.
        OSError: A file cannot be read.
    """
    one, two = read_report(first), read_report(second)
    kinds = [_kind(each) for each in (one, two)]
    if kinds[0] != kinds[1] or "comparison" in kinds:
        raise OptionError(
            f"{os.fspath(first)!r} is the report of a {kinds[0]} and {os.fspath(second)!r} that of "
            f"a {kinds[1]}\n  Nothing was compared. Name two reports of loaders, or two of runs."
        )
    return Comparison(
        first=_title(one, first),
        second=_title(two, second),
        verdicts=(checked_text(one.get("verdict")), checked_text(two.get("verdict"))),
        figures=tuple(_figures(one, two, kinds[0])),
        settings=tuple(_texts(_mapping(one, "settings"), _mapping(two, "settings"))),
        environment=tuple(_texts(_mapping(one, "environment"), _mapping(two, "environment"))),
    )


def _kind(summary: Mapping[str, Any]) -> str:
    kind = summary.get("kind")
    return str(kind) if kind in ("loader", "comparison") else "run"


def _title(summary: Mapping[str, Any], path: str | os.PathLike[str]) -> str:
    name = one_line(os.path.basename(os.fspath(path)), LONGEST_TEXT)
    return f"{name}: {checked_text(summary.get('title'))}"


def _figures(one: Mapping[str, Any], two: Mapping[str, Any], kind: str) -> list[ReportDifference]:
    found, units = [], {checked_text(each.get("unit")) for each in (one, two)}
    unit = units.pop() if len(units) == 1 else ""
    totals = _mapping(one, "totals"), _mapping(two, "totals")
    for figure in figures_of(kind):
        before, after = (checked_number(each.get(figure.key)) for each in totals)
        if before is None or after is None or before == after:
            continue
        change = after / before - 1 if before else math.inf
        if abs(change) < _LEAST_CHANGE:
            continue
        # The percentage of a percentage only confuses.
        said = f"{change:+.0%}" if before and figure.shown is not percent else ""
        name = figure.name(math.inf, unit or "input")
        found.append(ReportDifference(name, figure.shown(before), figure.shown(after), said))
    return found


def _texts(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[ReportDifference]:
    names = list(dict.fromkeys([*one, *two]))[:_MAX_SETTINGS]
    found = [
        ReportDifference(*map(checked_text, (name, one.get(name), two.get(name)))) for name in names
    ]
    return [each for each in found if each.first != each.second]


def _mapping(summary: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = summary.get(name)
    return value if isinstance(value, dict) else {}
