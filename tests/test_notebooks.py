"""The notebooks run from an empty folder, and print what is stored in them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from documents import END, ENVIRONMENT, HANG_S

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
# As a kernel does it: cells are no files, but their source can be looked up; `__main__` is no file.
RUNNER = f"""
import json, linecache, sys
for number, source in enumerate(json.load(sys.stdin)):
    name = f"<cell {{number}}>"
    linecache.cache[name] = len(source), None, source.splitlines(True), name
    exec(compile(source, name, "exec"))
    print({END!r}, flush=True)
"""


def cells(notebook: Path, kind: str) -> list[dict[str, object]]:
    found = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == kind]


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_is_stored_in_it(notebook: Path, tmp_path: Path) -> None:
    """Every cell runs, in order, where Jupyter would run it."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    folder = tmp_path / "docs" / "notebooks"
    folder.mkdir(parents=True)
    code = cells(notebook, "code")
    done = subprocess.run(
        [sys.executable, "-u", "-c", RUNNER],
        input=json.dumps(["".join(cell["source"]) for cell in code]),
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    stored = ["".join(line for each in cell["outputs"] for line in each["text"]) for cell in code]
    assert done.stdout.split(f"{END}\n")[:-1] == stored


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_links_of_a_notebook_lead_somewhere(notebook: Path) -> None:
    """Notebooks link to each other and to the tutorials."""
    found = [
        target
        for cell in cells(notebook, "markdown")
        for target in re.findall(r"\]\(([^)#]+)\)", "".join(cell["source"]))
    ]
    assert found
    assert [target for target in found if not (notebook.parent / target).exists()] == []


def test_there_is_one_for_each_job() -> None:
    """Preprocess, train, predict."""
    assert [path.stem for path in NOTEBOOKS] == ["predict", "preprocess", "train"]
