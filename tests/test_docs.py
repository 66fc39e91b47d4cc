"""The documents are true: their code runs, their commands and links exist.

The Python blocks of a file are one program, run as a person would run it: as a script of its own,
in a folder with the examples in it. Its lines stand where they stand in the document, so that a
traceback points there.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TUTORIALS = [ROOT / "README.md", *sorted((ROOT / "docs" / "tutorial").glob("*.md"))]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
# What test_three_jobs.py runs, and looks at what it leaves.
RUN_ELSEWHERE = ROOT / "docs" / "tutorial" / "three-jobs.md"
NOT_RUN = re.compile(r"<!-- not run: (?P<reason>\S.*) -->")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language, its first line's number, its lines, and why it is not run."""

    language: str
    start: int
    lines: tuple[str, ...]
    excuse: str | None


def blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a document."""
    lines = text.splitlines()
    fences = [number for number, line in enumerate(lines) if line.startswith("```")]
    assert len(fences) % 2 == 0, "a fence is left open"
    for opening, closing in zip(fences[::2], fences[1::2], strict=True):
        before = next((line for line in reversed(lines[:opening]) if line.strip()), "")
        excuse = NOT_RUN.fullmatch(before.strip())
        yield Block(
            lines[opening].removeprefix("```").strip(),
            opening + 1,
            tuple(lines[opening + 1 : closing]),
            excuse["reason"] if excuse else None,
        )


def program(text: str) -> str:
    """Return the Python blocks of a document as one program, each line at its place."""
    lines = [""] * len(text.splitlines())
    for block in blocks(text):
        if block.language == "python" and block.excuse is None:
            lines[block.start : block.start + len(block.lines)] = block.lines
    return "\n".join(lines) + "\n"


def commands(text: str) -> list[list[str]]:
    """Return the words of each `forebay` command in a document's shell blocks."""
    shell = [block for block in blocks(text) if block.language in ("shell", "bash", "console")]
    lines = [
        line for block in shell for line in "\n".join(block.lines).replace("\\\n", "").split("\n")
    ]
    words = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
    return [line for line in words if line[:1] == ["forebay"]]


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=110
    )


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize(
    "document", [each for each in TUTORIALS if each != RUN_ELSEWHERE], ids=relative
)
def test_the_code_runs(document: Path, tmp_path: Path) -> None:
    """Every Python block runs, in order, from an empty folder with the examples in it."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    code = program(document.read_text(encoding="utf-8"))
    assert code.strip(), "there is nothing to run"
    script = tmp_path / f"{document.stem.lower()}_md.py"
    script.write_text(code, encoding="utf-8")
    done = run(script.name, cwd=tmp_path)
    assert done.returncode == 0, f"{relative(document)}:\n{done.stdout}\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_the_commands_exist(document: Path, tmp_path: Path) -> None:
    """Every `forebay` command in a shell block exists, and so do its options."""
    helps: dict[str, str] = {}
    for _, name, *arguments in commands(document.read_text(encoding="utf-8")):
        if name not in helps:
            done = run("-m", "forebay", name, "--help", cwd=tmp_path)
            assert done.returncode == 0, f"forebay {name}: {done.stderr}"
            helps[name] = done.stdout
        for option in (word.partition("=")[0] for word in arguments if word.startswith("--")):
            assert re.search(rf"{option}\b", helps[name]), f"forebay {name} has no {option}"


@pytest.mark.slow
@pytest.mark.parametrize("document", TUTORIALS, ids=relative)
def test_the_commands_run(document: Path, tmp_path: Path) -> None:
    """The shell blocks' `forebay` commands work, in order, beside the examples."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    found = commands(document.read_text(encoding="utf-8"))
    assert found, "there is nothing to run"
    for words in found:
        done = run("-m", *words, cwd=tmp_path)
        assert done.returncode == 0, f"{shlex.join(words)}:\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_make_knows_its_targets(document: Path) -> None:
    """Every `make` line in a shell block names targets of the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    for block in blocks(document.read_text(encoding="utf-8")):
        for line in block.lines if block.language == "shell" else ():
            words = shlex.split(line, comments=True)
            if words[:1] == ["make"]:
                assert set(words[1:]) <= targets, line


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_links_lead_somewhere(document: Path) -> None:
    """Every link to a file of the repository finds it."""
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if not target.startswith(("http://", "https://")):
            assert (document.parent / target).exists(), target


def test_ci_runs_what_the_readme_says() -> None:
    """`.ci/run` does nothing but the README's test command."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    lines = [line for line in script.splitlines() if line and not line.startswith("#")]
    assert lines == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "make test"]
    assert "make test" in (ROOT / "README.md").read_text(encoding="utf-8")


# ---- the tests of the tests ---------------------------------------------------------------------

SAMPLE = """\
Text.
```python
x = 1
```
<!-- not run: needs a cluster -->

```python
1 / 0
```
```shell
$ forebay status here/   # look
other preprocess
```
```python
print(x)
```
"""


def test_a_program_keeps_its_lines_and_leaves_out_what_is_excused() -> None:
    """Blocks with a reason are left out; the rest stand where they stood."""
    lines = program(SAMPLE).splitlines()
    assert {number: line for number, line in enumerate(lines, 1) if line} == {
        3: "x = 1",
        15: "print(x)",
    }


def test_an_excuse_needs_a_reason() -> None:
    """A bare "not run" is no reason."""
    bare = SAMPLE.replace("<!-- not run: needs a cluster -->", "<!-- not run: -->")
    assert "1 / 0" in program(bare)


def test_commands_are_found() -> None:
    """The prompt and the comment are not part of a command."""
    assert commands(SAMPLE) == [["forebay", "status", "here/"]]
