"""Summaries as HTML: what a notebook shows of a report, a diagnosis, statistics or a dataset.

Each is one element without scripts, styles or references to anything outside it. All text is
escaped: a file's name, and what an exception says, may be anything.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

from forebay.errors import printable
from forebay.units import counted

# Characters of one value and of the sentences, and how many failures are listed.
MAX_LENGTH = 200
MAX_TEXT = 1000
MAX_LISTED = 10

_LEFT = ' style="text-align: left"'


def summary(
    title: str,
    facts: Mapping[str, object],
    failures: Sequence[object] = (),
    failed: int = 0,
    text: str = "",
) -> str:
    """Return a title, a text, a table of facts, and a list of failures that can be opened.

    Args:
        title: The heading.
        facts: By name, a number or anything that has a string.
        failures: The failures that are known; the first `MAX_LISTED` are shown.
        failed: The number of all failures.
        text: Sentences under the title.
    """
    rows = "".join(
        f"<tr><th{_LEFT}>{_escaped(name)}</th><td{_LEFT}>{_shown(value)}</td></tr>"
        for name, value in facts.items()
    )
    # The classes keep MathJax from typesetting a name that contains dollar signs.
    return (
        '<div class="tex2jax_ignore mathjax_ignore">'
        f"<strong>{_escaped(title)}</strong>{_paragraph(text)}<table>{rows}</table>"
        f"{_listed(failures, failed)}</div>"
    )


def _paragraph(text: str) -> str:
    return f"<div>{_escaped(text, MAX_TEXT)}</div>" if text else ""


def _listed(failures: Iterable[object], failed: int) -> str:
    shown = [f"<li>{_escaped(str(each))}</li>" for each in list(failures)[:MAX_LISTED]]
    if not shown:
        return ""
    if failed > len(shown):
        shown.append(f"<li>… and {failed - len(shown):,} more</li>")
    heading = counted(failed, "failure")
    return f"<details><summary>{heading}</summary><ul>{''.join(shown)}</ul></details>"


def _shown(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _escaped(str(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _escaped(text: str, most: int = MAX_LENGTH) -> str:
    if len(text) > most:
        text = text[:most] + "…"
    return html.escape(printable(text))
