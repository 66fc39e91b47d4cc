"""The picture in the docs is the table in the code."""

from __future__ import annotations

from pathlib import Path

from forebay.engine.commands import MEANING, diagram

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "flow.md"


def test_the_diagram_in_the_docs_is_drawn_from_the_table() -> None:
    """Table and picture cannot drift apart."""
    assert diagram() in PAGE.read_text(), "run forebay.engine.commands.diagram() and paste it"


def test_every_state_is_explained() -> None:
    """Each state has its sentence on the page."""
    text = PAGE.read_text()
    assert all(f"| `{state.value}` | {meaning} |" in text for state, meaning in MEANING.items())
