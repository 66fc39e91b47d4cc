"""Lives use nothing of forebay but its public names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay

FILES = sorted(Path(__file__).parent.glob("*.py"))
# What a file of lives may import of the tests' own kit: these import no part of forebay.
KIT = ("kit.mds_writer", "kit.range_connections", "kit.range_faults", "kit.range_server")


def modules_of(tree: ast.Module) -> Iterator[str]:
    """Yield the full names of what a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""
            yield from (f"{node.module}.{each.name}" for each in node.names)


def attributes_of(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a file takes from `forebay`, dotted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts = ast.unparse(node).split(".")
            if parts[0] == "forebay" and parts[1] != "__all__":
                yield parts[1]


def is_public(name: str) -> bool:
    """Return whether a module or a name of a module is what users may import."""
    first, *rest = name.split(".")
    return first != "forebay" or not rest or rest[0] in (*forebay.__all__, "errors")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_lives_import_public_names_alone(path: Path) -> None:
    """So that they survive any redesign, and see what users see."""
    tree = ast.parse(path.read_text())
    imported = list(modules_of(tree))
    assert [name for name in imported if not is_public(name)] == []
    assert [name for name in attributes_of(tree) if not is_public(f"forebay.{name}")] == []
    kit = {name for name in imported if name.startswith("kit.")}
    assert [name for name in kit if not name.startswith(KIT)] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_lives_change_nothing_of_forebay(path: Path) -> None:
    """Nothing is patched."""
    names = {
        node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)
    }
    assert not names & {"monkeypatch", "mock", "setattr"}
