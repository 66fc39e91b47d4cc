"""The how-to about reports and `forebay top` is true: its programs and commands run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from documents import blocks, commands, disagreements, program

pytestmark = pytest.mark.full

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "watch.md"


@pytest.mark.slow
def test_the_how_to_runs(tmp_path) -> None:
    """The Python blocks are one program; then the commands, beside the files that it wrote."""
    text = PAGE.read_text(encoding="utf-8")
    script = tmp_path / "watch.py"
    script.write_text(program(text, announced=True), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-u", script.name], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert list(disagreements(text, done.stdout)) == []
    found = [words for block in blocks(text) for words in commands(block)]
    assert [words[1] for words in found] == ["top"]
    for words in found:
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    wanted = {"0-workers.html", "2-workers.html", "run.html"}
    assert wanted <= {path.name for path in tmp_path.iterdir()}
