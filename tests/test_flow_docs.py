"""The picture in the docs is the table in the code."""

from __future__ import annotations

from pathlib import Path

from forebay.engine.tasks import TRANSITIONS, State

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "flow.md"


def diagram() -> str:
    """Return the table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.QUEUED.value}"]
    lines += [
        f"    {before.value} --> {after.value}: {move.value}"
        for (before, move), after in TRANSITIONS.items()
    ]
    lines += [f"    {end.value} --> [*]" for end in (State.RELEASED, State.FAILED)]
    return "\n".join(lines) + "\n"


def test_the_diagram_in_the_docs_is_drawn_from_the_table() -> None:
    """Table and picture cannot drift apart."""
    assert diagram() in PAGE.read_text(), f"paste this:\n{diagram()}"


def test_every_state_is_explained() -> None:
    """Each state has its sentence on the page."""
    text = PAGE.read_text()
    assert all(f"| `{state.value}` | " in text for state in State)
