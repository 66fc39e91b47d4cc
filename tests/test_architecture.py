"""Rules for the source: what may import what, how long files are, and what they are called.

The checker reads source text, so its own tests hand it made-up files that break each rule.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "forebay"

# Decisions only: what happened goes in, what to do comes out.
PURE = (
    "engine/flow",
    "engine/events",
    "engine/commands",
    "engine/states",
    "engine/limits",
    "plan",
    "engine/memory/slab_layout",
    "devices/transfer_flow",
    *(f"observe/{name}" for name in ("simulation", "recorded_work", "loader_setup")),
    *(f"observe/{name}" for name in ("changes_to_try", "causes", "diagnosis")),
    "tuning",
    "units",
)
IMPURE_IMPORTS = frozenset(
    [
        *("asyncio", "concurrent", "multiprocessing", "threading", "subprocess"),
        *("os", "select", "selectors", "signal", "socket", "time"),
        *("fsspec", "pyarrow", "ray", "torch"),
    ]
)
# Parts that do not know each other; whatever joins them is named in JOINING.
SEPARATE = ("engine/pools", "engine/memory", "devices", "plan", "jobs", "caching")
# What a user calls, each of them by itself.
ENTRY_POINTS = ("loader", "preprocess", "predict", "cache")
COMMAND_LINE = ("cli", "cli_look", "cli_options")
JOINING = ("engine/engine", "run", "session", "__init__", "__main__", *COMMAND_LINE, *ENTRY_POINTS)
# They stand on all other parts, as entry points do: what the loader, predict and cache are made of.
UPPER = ("loading", "collating", "items", "mixing", "predicting", "sample_ranges")
# The public tests look everywhere, and nothing looks at them.
TESTING = ("testing",)
RAY = ("engine/pools/ray",)

LONG, HEAD = 600, 30
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


def is_in(place: str, parts: tuple[str, ...]) -> bool:
    """Whether a module, written "engine/flow", is one of these or lies in one of them."""
    return any(place == part or place.startswith(part + "/") for part in parts)


def part_of(place: str) -> str | None:
    return next((part for part in SEPARATE if is_in(place, (part,))), None)


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
        yield from (f"{path}: {rule}" for rule in _library_rules(place, taken))
        yield from (f"{path}: {rule}" for rule in _import_rules(place, ours))
        yield from (f"{path}: {rule}" for rule in _file_rules(path, source))


def _library_rules(place: str, taken: set[str]) -> Iterator[str]:
    roots = {module.partition(".")[0] for module in taken}
    if is_in(place, PURE):
        yield from (f"is pure and imports {root}" for root in sorted(roots & IMPURE_IMPORTS))
    if "ray" in roots and not is_in(place, RAY):
        yield "imports ray, which engine/pools/ray alone may"


def _import_rules(place: str, ours: set[str]) -> Iterator[str]:
    part, is_entry = part_of(place), place in ENTRY_POINTS
    joins = place in JOINING or is_in(place, (*TESTING, *UPPER))
    if place == "errors" and ours:
        yield "is imported by all and imports something of forebay"
    for other in sorted(ours):
        if is_in(other, COMMAND_LINE) and place not in (*COMMAND_LINE, "__main__"):
            yield f"imports {other}, which is the command line's own"
        if is_in(other, TESTING) and not is_in(place, TESTING):
            yield f"imports {other}, which is for tests"
        if is_entry and is_in(other, ENTRY_POINTS) and not is_in(other, (place,)):
            yield f"is an entry point and imports another, {other}"
        if is_in(place, PURE) and part_of(other) not in (None, part):
            yield f"is pure and imports {other}"
        elif part is not None and part_of(other) not in (None, part):
            yield f"belongs to {part} and imports {other}"
        elif not joins and part is None and part_of(other) is not None:
            yield f"joins parts, which only {', '.join(JOINING)} may: imports {other}"
        if not joins and is_in(other, JOINING):
            yield f"imports upwards: {other}"


def _file_rules(path: str, source: str) -> Iterator[str]:
    lines, name = source.splitlines(), PurePosixPath(path).stem
    if len(lines) > LONG and not any("Long because" in line for line in lines[:HEAD]):
        yield f"has {len(lines)} lines and does not say 'Long because' at its top"
    if name in BAD_NAMES or any(part in name for part in BAD_PARTS):
        yield "has a name that says nothing"
    if not ast.get_docstring(ast.parse(source)):
        yield "has no docstring"


def test_every_file_of_the_tests_has_its_own_name() -> None:
    """pytest imports them by name alone, so two of one name cannot run in one process."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("*.py"))
    assert [name for name, count in names.items() if count > 1 and name != "conftest.py"] == []


def test_the_source_follows_the_rules() -> None:
    """No file of the package breaks a rule."""
    sources = {str(path.relative_to(SOURCE)): path.read_text() for path in SOURCE.rglob("*.py")}
    assert "errors.py" in sources
    assert list(violations(sources)) == []


BROKEN = {
    "a thread in a pure module": (
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
        "engine/memory/slab_layout.py",
        "import torch.utils.data",
        "is pure and imports torch",
    ),
    "a pool in a pure module": (
        "engine/flow.py",
        "from forebay.engine import pools",
        "is pure and imports engine/pools",
    ),
    "a part that knows another": (
        "jobs/preprocess_job.py",
        "from forebay.engine.pools.base import Pool",
        "belongs to jobs and imports engine/pools/base",
    ),
    "a relative import of another part": (
        "engine/pools/worker.py",
        "from ..memory import slab",
        "belongs to engine/pools and imports engine/memory",
    ),
    "a module that joins parts and may not": (
        "observe/progress.py",
        "import forebay.jobs.ledger.ledger",
        "joins parts",
    ),
    "a part that imports upwards": (
        "jobs/ledger/ledger.py",
        "from forebay.preprocess import preprocess",
        "imports upwards: preprocess",
    ),
    "a pool that imports the engine": (
        "engine/pools/threads.py",
        "from forebay.engine.engine import Engine",
        "imports upwards: engine/engine",
    ),
    "an entry point that uses another": (
        "cache.py",
        "from forebay import preprocess",
        "is an entry point and imports another, preprocess",
    ),
    "ray outside its package": ("engine/engine.py", "import ray", "imports ray"),
    "errors that stand on something": (
        "errors.py",
        "from forebay.options import X",
        "is imported by all and imports something",
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
    "a long file": ("jobs/ledger/ledger.py", "\n" * LONG, "does not say 'Long because'"),
    "a file of odds and ends": ("jobs/utils.py", "", "has a name that says nothing"),
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
    "the engine joins parts": (
        "engine/engine.py",
        "from forebay.engine.pools.threads import ThreadPool\nfrom forebay.engine.flow import Flow",
    ),
    "ray in its package": ("engine/pools/ray.py", "import ray"),
    "a part imports the engine's records": (
        "jobs/preprocess_job.py",
        "from forebay.engine.job import Assignment\nfrom . import records",
    ),
    "a long file with a reason": (
        "engine/flow.py",
        "# Long because it is one table." + "\n" * LONG,
    ),
    "the other way to start the command line": ("__main__.py", "from forebay.cli import main"),
}


@pytest.mark.parametrize(("path", "source"), ALLOWED.values(), ids=ALLOWED)
def test_what_is_allowed_is_not_found(path: str, source: str) -> None:
    """No rule is found broken where none is."""
    assert list(violations({path: f'"""A file."""\n{source}\n'})) == []
