"""The transitions in the docs are those in the code."""

from __future__ import annotations

from pathlib import Path

from forebay.engine.tasks import TRANSITIONS, State

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "flow.md"


def transitions() -> str:
    """Return the table of the code as one of the page."""
    lines = ["| from | to | when |", "| --- | --- | --- |"]
    lines += [
        f"| `{before.value}` | `{after.value}` | {move.value} |"
        for (before, move), after in TRANSITIONS.items()
    ]
    return "\n".join(lines) + "\n"


def test_the_transitions_in_the_docs_are_those_of_the_code() -> None:
    """The two tables cannot drift apart."""
    assert transitions() in PAGE.read_text(), f"paste this:\n{transitions()}"


def test_every_state_is_explained() -> None:
    """Each state has its sentence on the page."""
    text = PAGE.read_text()
    assert all(f"| `{state.value}` | " in text for state in State)
