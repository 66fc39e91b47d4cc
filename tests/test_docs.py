"""The documents are true: their code runs and prints what they show; commands and links exist.

The Python blocks of a file are one program, run as a person would run it: as a script of its own,
in a folder with the examples in it. Its lines stand where they stand in the document, so that a
traceback points there.
"""

from __future__ import annotations

import functools
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from documents import ENVIRONMENT, HANG_S, agrees, blocks, commands, disagreements, program
from trainers import Trainers

ROOT = Path(__file__).parents[1]
TUTORIALS = [ROOT / "README.md", *sorted((ROOT / "docs" / "tutorial").glob("*.md"))]
COMMAND_LINE = ROOT / "docs" / "reference" / "command-line.md"
WITH_COMMANDS = [
    each for each in (COMMAND_LINE, *TUTORIALS[1:]) if "\nforebay " in each.read_text("utf-8")
]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("packages/*/README.md")),
]
# Documents whose blocks need something else, or leave what is looked at, and what runs them.
RUN_ELSEWHERE = {
    ROOT / "docs" / name: ROOT / "tests" / test
    for name, test in (
        ("tutorial/three-jobs.md", "test_three_jobs.py"),
        ("how-to/cluster.md", "ray/test_ray_how_to.py"),
        ("how-to/collate.md", "collating/test_collate.py"),
        ("how-to/datasets.md", "collating/test_collate.py"),
        ("how-to/metrics.md", "collating/test_collate.py"),
        ("how-to/frameworks.md", "framework_scripts.py"),
        ("how-to/watch.md", "show/test_watching_how_to.py"),
    )
}
PROGRAMS = [
    each
    for each in DOCUMENTS
    if each not in RUN_ELSEWHERE and program(each.read_text(encoding="utf-8")).strip()
]


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("document", PROGRAMS, ids=relative)
def test_the_code_runs(document: Path, trainers: Trainers, tmp_path: Path) -> None:
    """Every Python block runs, in order, beside the examples, and prints what stands below it."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    text = document.read_text(encoding="utf-8")
    code = program(text, announced=True)
    assert code.strip(), "there is nothing to run"
    script = tmp_path / f"{document.stem.lower()}_md.py"
    script.write_text(code, encoding="utf-8")
    done = trainers.run(script, cwd=tmp_path)
    assert done.code == 0, f"{relative(document)}:\n{done.out}\n{done.err}"
    assert list(disagreements(text, done.out)) == []


@pytest.mark.parametrize("document", RUN_ELSEWHERE, ids=relative)
def test_code_that_is_not_run_here_is_run_elsewhere(document: Path) -> None:
    """So no document has a Python block that nothing runs."""
    assert document.name in RUN_ELSEWHERE[document].read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_readmes_program_does_nothing_twice(trainers: Trainers, tmp_path: Path) -> None:
    """Run again in the same folder, it says that all was done."""
    (tmp_path / "readme.py").write_text(program((ROOT / "README.md").read_text(encoding="utf-8")))
    for _ in range(2):
        done = trainers.run(tmp_path / "readme.py", cwd=tmp_path)
        assert done.code == 0, done.err
    assert "100 done (100 by earlier runs)" in done.out
    assert "(100 samples were done earlier)" in done.out


@functools.cache
def help_of(name: str) -> str:
    """Return what a command prints about itself."""
    done = run("-m", "forebay", name, "--help", cwd=ROOT)
    assert done.returncode == 0, f"forebay {name}: {done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_the_commands_exist(document: Path) -> None:
    """Every `forebay` command in a shell block exists, and so do its options."""
    found = blocks(document.read_text(encoding="utf-8"))
    for _, name, *arguments in (words for block in found for words in commands(block)):
        printed = help_of(name)
        for option in (word.partition("=")[0] for word in arguments if word.startswith("--")):
            assert re.search(rf"{option}\b", printed), f"forebay {name} has no {option}"


@pytest.mark.slow
@pytest.mark.parametrize("document", WITH_COMMANDS, ids=relative)
def test_the_commands_run(document: Path, tmp_path: Path) -> None:
    """The shell blocks' `forebay` commands work, in order, and print what stands below them."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    found = [each for each in blocks(document.read_text(encoding="utf-8")) if commands(each)]
    assert found, "there is nothing to run"
    for block in found:
        printed = ""
        for words in commands(block):
            done = run("-m", *words, cwd=tmp_path)
            assert done.returncode == 0, f"{shlex.join(words)}:\n{done.stdout}\n{done.stderr}"
            printed += done.stdout
        assert block.shown is None or agrees(block.shown, printed), printed


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_make_knows_its_targets(document: Path) -> None:
    """Every `make` line in a shell block names targets of the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    for block in blocks(document.read_text(encoding="utf-8")):
        for line in block.lines if block.language == "shell" else ():
            words = shlex.split(line.removesuffix("\\"), comments=True)  # it may go on
            if words[:1] == ["make"]:
                named = {word for word in words[1:] if "=" not in word}
                assert named <= targets, line


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_links_lead_somewhere(document: Path) -> None:
    """Every link to a file of the repository finds it, and every anchor a heading in it."""
    text = document.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", text):
        if target.startswith(("http://", "https://")):
            continue
        found = document.parent / target if target else document
        assert found.exists(), target
        assert not anchor or anchor in anchors(found.read_text(encoding="utf-8")), (target, anchor)


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_python_blocks_are_python(document: Path) -> None:
    """Every Python block can be compiled, also one that is not run."""
    for block in blocks(document.read_text(encoding="utf-8")):
        if block.language == "python":
            compile("\n".join(block.lines), f"{relative(document)}:{block.start}", "exec")


def anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


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


def test_an_excuse_needs_a_reason() -> None:
    """A bare "not run" is no reason."""
    bare = SAMPLE.replace("<!-- not run: needs a cluster -->", "<!-- not run: -->")
    assert "1 / 0" in program(bare)


@pytest.mark.parametrize(("x", "right"), [(1, True), (2, False)])
def test_what_is_printed_is_held_against_what_is_shown(
    x: int, right: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A block that prints something else is named by its line."""
    text = SAMPLE.replace("x = 1", f"x = {x}") + "\n```text\n1\n```\n"
    exec(program(text, announced=True), {})
    found = list(disagreements(text, capsys.readouterr().out))
    assert found == ([] if right else ["line 16 shows\n1\nbut\n2\n"])


def test_times_and_rates_may_differ_and_nothing_else() -> None:
    """Counts, names and sizes are compared."""
    assert agrees(
        "9 done in 0.4 s, 1,234.5 inputs/s\nfirst …", "9 done in 12 s, 3 inputs/s\nfirst 7\n"
    )
    assert agrees("in 3 min 20 s", "in 8 s")
    assert not agrees("9 done in 0.4 s", "8 done in 0.4 s")
    assert not agrees("9 done", "9 done, 1 failed")
