"""Lives use forebay as its users do, so that they outlive a redesign."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay

FILES = sorted(Path(__file__).parent.glob("*.py"))
PUBLIC = {*dir(forebay)}
# Modules beside the tests that import internals, and what changes a module from outside.
REFUSED = {"kit", "conftest", "monkeypatch", "mock"}


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield each module that is imported, with each name of it; "" for the module itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.module or "", alias.name) for alias in node.names)


def used(tree: ast.AST) -> Iterator[str]:
    """Yield each attribute of `forebay` that is used."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        if node.value.id == "forebay":
            yield node.attr


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_lives_use_public_names_and_files_alone(path):
    """No file of the lives imports a part of forebay, or of the tests that know its parts."""
    tree = ast.parse(path.read_text())
    modules = [(module, name) for module, name in imported(tree)]
    inside = [module for module, _ in modules if module.startswith("forebay.")]
    names = {name for module, name in modules if module == "forebay"} | {*used(tree)}
    assert not inside, f"it imports {inside}"
    assert not {name for name in names if name} - PUBLIC - {"__version__", "__file__"}
    assert not REFUSED & {module.partition(".")[0] for module, _ in modules}
    assert "monkeypatch" not in path.read_text() or path == Path(__file__)
