"""The rules of the house: what may import what, how long files are, and what they are called.

The checker reads source text, so its own tests hand it made-up files that break each rule.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "forebay"

# Decisions only: what happened goes in, what to do comes out.
PURE = (
    "engine/flow",
    "engine/events",
    "engine/states",
    "engine/limits",
    "plan",
    "engine/memory/layout",
)
IMPURE_IMPORTS = frozenset(
    [
        *("asyncio", "concurrent", "multiprocessing", "threading", "subprocess"),
        *("os", "select", "selectors", "signal", "socket", "time"),
        *("fsspec", "pyarrow", "ray", "torch"),
    ]
)
# Rooms do not know each other; whoever introduces them is named here.
ROOMS = ("engine/pools", "engine/memory", "plan", "jobs", "caching")
VERBS = ("loader", "preprocess", "predict", "cache")
HOSTS = ("engine/engine", "run", "session", "cli", "__init__", "__main__", *VERBS)
# The public tests look everywhere, and nothing looks at them.
OUTSIDE = ("testing",)
# The loader's own rooms stand on all others, as verbs do; so do what collates for it, and datasets;
# and predict's, which read through the loader.
UPSTAIRS = ("loading", "collating", "items", "predicting")
RAY = ("engine/pools/ray",)

LONG, HEAD = 350, 30
BAD_NAMES = ("utils", "helpers")
BAD_PARTS = ("manager", "handler")


def imports(path: str, source: str) -> set[str]:
    """Return every module that a file imports anywhere in it, and every name it takes from one."""
    package = ["forebay", *PurePosixPath(path).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            found.add(module)
            # `from forebay.engine import pools` takes a module too.
            found.update(f"{module}.{alias.name}" for alias in node.names)
    return found


def is_in(place: str, rooms: tuple[str, ...]) -> bool:
    """Whether a module, written "engine/flow", is one of these or lies in one of them."""
    return any(place == room or place.startswith(room + "/") for room in rooms)


def room_of(place: str) -> str | None:
    return next((room for room in ROOMS if is_in(place, (room,))), None)


def violations(sources: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each rule that a file breaks; paths are relative to the package."""
    for path, source in sorted(sources.items()):
        place = path.removesuffix(".py").removesuffix("/__init__")
        taken = imports(path, source)
        ours = {
            module.removeprefix("forebay.").replace(".", "/")
            for module in taken
            if module.startswith("forebay.")
        }
        yield from (f"{path}: {rule}" for rule in _foreign_rules(place, taken))
        yield from (f"{path}: {rule}" for rule in _house_rules(place, ours))
        yield from (f"{path}: {rule}" for rule in _file_rules(path, source))


def _foreign_rules(place: str, taken: set[str]) -> Iterator[str]:
    roots = {module.partition(".")[0] for module in taken}
    if is_in(place, PURE):
        yield from (f"is pure and imports {root}" for root in sorted(roots & IMPURE_IMPORTS))
    if "ray" in roots and not is_in(place, RAY):
        yield "imports ray, which engine/pools/ray.py alone may"


def _house_rules(place: str, ours: set[str]) -> Iterator[str]:
    room, verb = room_of(place), place in VERBS
    is_host = place in HOSTS or is_in(place, (*OUTSIDE, *UPSTAIRS))
    if place == "errors" and ours:
        yield "is the ground and imports something of forebay"
    for other in sorted(ours):
        if is_in(other, ("cli",)) and place not in ("cli", "__main__"):
            yield f"imports {other}, which is the command line's own"
        if is_in(other, OUTSIDE) and not is_in(place, OUTSIDE):
            yield f"imports {other}, which is for tests"
        if verb and is_in(other, VERBS) and not is_in(other, (place,)):
            yield f"is a verb and imports another, {other}"
        if is_in(place, PURE) and room_of(other) not in (None, room):
            yield f"is pure and imports {other}"
        elif room is not None and room_of(other) not in (None, room):
            yield f"is of the room {room} and imports {other}"
        elif not is_host and room is None and room_of(other) is not None:
            yield f"introduces rooms, which only {', '.join(HOSTS)} may: imports {other}"
        if not is_host and is_in(other, HOSTS):
            yield f"looks up: imports {other}"


def _file_rules(path: str, source: str) -> Iterator[str]:
    lines, name = source.splitlines(), PurePosixPath(path).stem
    if len(lines) > LONG and not any("Long because" in line for line in lines[:HEAD]):
        yield f"has {len(lines)} lines and does not say 'Long because' at its top"
    if name in BAD_NAMES or any(part in name for part in BAD_PARTS):
        yield "has a name that says nothing"
    if not ast.get_docstring(ast.parse(source)):
        yield "has no docstring"


def test_the_house_is_as_it_was_planned() -> None:
    """No file of the package breaks a rule."""
    sources = {str(path.relative_to(SOURCE)): path.read_text() for path in SOURCE.rglob("*.py")}
    assert "errors.py" in sources
    assert list(violations(sources)) == []


BROKEN = {
    "a thread in the machine": (
        "engine/flow.py",
        "import threading",
        "is pure and imports threading",
    ),
    "a clock in a function of the plan": (
        "plan/epoch.py",
        "def f():\n    from time import monotonic",
        "is pure and imports time",
    ),
    "torch in the layout": (
        "engine/memory/layout.py",
        "import torch.utils.data",
        "is pure and imports torch",
    ),
    "a pool in the machine": (
        "engine/flow.py",
        "from forebay.engine import pools",
        "is pure and imports engine/pools",
    ),
    "a room that knows another": (
        "jobs/work.py",
        "from forebay.engine.pools.base import Pool",
        "is of the room jobs and imports engine/pools/base",
    ),
    "a relative way to another room": (
        "engine/pools/worker.py",
        "from ..memory import slab",
        "is of the room engine/pools and imports engine/memory",
    ),
    "a stranger who introduces rooms": (
        "observe/progress.py",
        "import forebay.jobs.ledger",
        "introduces rooms",
    ),
    "a room that looks up": (
        "jobs/ledger.py",
        "from forebay.preprocess import preprocess",
        "looks up: imports preprocess",
    ),
    "a room that drives": (
        "engine/pools/threads.py",
        "from forebay.engine.engine import Engine",
        "looks up: imports engine/engine",
    ),
    "a verb that uses another": (
        "cache.py",
        "from forebay import preprocess",
        "is a verb and imports another, preprocess",
    ),
    "ray at large": ("engine/engine.py", "import ray", "imports ray"),
    "errors that stand on something": (
        "errors.py",
        "from forebay.options import X",
        "is the ground and imports something",
    ),
    "a library that calls its command line": (
        "preprocess.py",
        "from forebay.cli import main",
        "imports cli",
    ),
    "a library that leans on its tests": (
        "run.py",
        "from forebay.testing import leaks",
        "imports testing",
    ),
    "a long file": ("jobs/ledger.py", "\n" * LONG, "does not say 'Long because'"),
    "a drawer": ("jobs/utils.py", "", "has a name that says nothing"),
    "a manager": ("jobs/worker_manager.py", "", "has a name that says nothing"),
}


@pytest.mark.parametrize(("path", "source", "rule"), BROKEN.values(), ids=BROKEN)
def test_a_broken_rule_is_found(path: str, source: str, rule: str) -> None:
    """A made-up file that breaks one rule is named, with the rule."""
    found = list(violations({path: f'"""A file."""\n{source}\n'}))
    assert found
    assert all(line.startswith(f"{path}: ") for line in found)
    assert any(rule in line for line in found)


def test_a_file_without_a_docstring_is_found() -> None:
    """Every module says what it is for."""
    assert list(violations({"run.py": "x = 1\n"})) == ["run.py: has no docstring"]


ALLOWED = {
    "the engine introduces rooms": (
        "engine/engine.py",
        "from forebay.engine.pools.threads import ThreadPool\nfrom forebay.engine.flow import Flow",
    ),
    "ray's own room": ("engine/pools/ray.py", "import ray"),
    "a room speaks the engine's words": (
        "jobs/work.py",
        "from forebay.engine.job import Assignment\nfrom . import records",
    ),
    "a long file with a reason": (
        "engine/flow.py",
        "# Long because it is one table." + "\n" * LONG,
    ),
    "the other door": ("__main__.py", "from forebay.cli import main"),
}


@pytest.mark.parametrize(("path", "source"), ALLOWED.values(), ids=ALLOWED)
def test_what_is_allowed_is_not_found(path: str, source: str) -> None:
    """The checker does not cry wolf."""
    assert list(violations({path: f'"""A file."""\n{source}\n'})) == []
