"""Commits: results are recorded and published in parts, while the loop goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.engine.engine import Engine
from forebay.outputs.folder import OutputFolder


def published(folder: OutputFolder) -> list[str]:
    """Return the names of the published files."""
    return sorted(path.name for path in folder.path.glob("*.txt"))


def nothing(_: Any) -> None:
    """Record nothing."""


def test_a_run_whose_slots_all_wait_commits_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the caller's process nothing else runs, so it neither waits nor asks again and again."""
    steps, step = list[None](), Engine.step

    def counted(engine: Engine, *given: Any, **named: Any) -> Any:
        steps.append(None)
        return step(engine, *given, **named)

    monkeypatch.setattr(Engine, "step", counted)
    monkeypatch.setattr("forebay.runs.processing.SLOTS", 4)
    for number in range(40):
        (tmp_path / f"{number}.in").write_text("x")
    report = forebay.preprocess(
        lambda path: {"n": path.name},
        f"{tmp_path}/*.in",
        tmp_path / "out",
        num_workers=0,
        progress=False,
    )
    assert report.done == 40
    assert len(steps) <= 2 * 40
