"""Rules for the source: what may import what, how long files are, and what they are called.

The checker reads source text, so its own tests hand it made-up files that break each rule.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "forebay"

# Each floor imports only from those below it, and nothing from its own.
FLOORS = (
    ("errors", "seeds"),
    ("failures", "mixture", "sample_rows", "windows"),
    ("base",),
    ("options", "packed", "plan", "devices", "memory", "columns"),
    ("observe", "pools", "collating", "buffer", "mixing", "ranks", "lengths"),
    ("engine", "ledger", "show", "collate"),
    ("caching",),
    ("loading", "outputs", "shards"),
    ("inputs", "loader"),
    ("items",),
    ("runs", "trainer", "torchtitan"),
    ("predicting", "cli_options"),
    ("cli_status", "cli_doctor"),
    ("cli", "__init__"),
    ("__main__",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# Decisions only: what happened goes in, what to do comes out.
PURE = (
    "seeds",
    "mixture",
    "plan",
    "sample_rows",
    "windows",
    "engine/flow",
    "engine/commands",
    "engine/limits",
    "engine/tasks",
    "pools/events",
    "memory/layout",
    "devices/flow",
    *(
        f"observe/{name}"
        for name in (
            *("measurements", "recorded_work", "simulation", "simulated_loader"),
            *("causes", "storage_causes", "diagnosis", "run_diagnosis"),
            *("exports", "figures", "tuner"),
        )
    ),
    *(f"base/{name}" for name in ("formatting", "store_errors")),
    "ledger/identity",
    "caching/fetch_policy",
    "caching/residency",
    "loading/snapshots",
    "loading/audit_plan",
)
IMPURE_IMPORTS = frozenset(
    [
        *("asyncio", "concurrent", "multiprocessing", "threading", "subprocess"),
        *("os", "select", "selectors", "signal", "socket", "time"),
        *("fsspec", "pyarrow", "ray", "torch"),
    ]
)
RAY = "pools/ray_"
FILES = ("base/files", "base/file_stores")

MOST_ROOMS, MOST_LINES = 18, 450
BAD_NAMES = ("utils", "helpers")
BAD_PARTS = ("manager", "handler")


@functools.cache
def parsed(source: str) -> ast.Module:
    """Return the tree of a file, which several rules look at."""
    return ast.parse(source)


@functools.cache
def imports(path: str, source: str) -> set[str]:
    """Return every module that a file imports, also for types alone, and every name of one."""
    package = ["forebay", *PurePosixPath(path).parts[:-1]]
    found = set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            found.add(module)
            # `from forebay import pools` takes a module too.
            found.update(f"{module}.{alias.name}" for alias in node.names)
    return found


def place_of(path: str) -> str:
    """Return "engine/flow" for engine/flow.py, and "engine" for engine/__init__.py."""
    return path.removesuffix(".py").removesuffix("/__init__")


def is_in(place: str, parts: tuple[str, ...]) -> bool:
    """Return whether a module, written "engine/flow", is one of these or lies in one of them."""
    return any(place == part or place.startswith(part + "/") for part in parts)


def violations(sources: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each rule that a file breaks; paths are relative to the package."""
    for path, source in sorted(sources.items()):
        place, taken = place_of(path), imports(path, source)
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
    if "ray" in roots and not place.startswith(RAY):
        yield f"imports ray, which {RAY}* alone may"
    if "fsspec" in roots and place not in FILES:
        yield f"imports fsspec, which {' and '.join(FILES)} alone may"


def _import_rules(place: str, ours: set[str]) -> Iterator[str]:
    own = place.partition("/")[0]
    for other in sorted(ours):
        room = other.partition("/")[0]
        if room == own or room not in FLOOR_OF:  # a public name of the package
            continue
        if room == "cli":
            if own != "__main__":
                yield "imports the command line, which only __main__ may"
        elif FLOOR_OF[room] >= FLOOR_OF[own]:
            yield f"imports upwards: {other}"


def circles(sources: Mapping[str, str]) -> list[list[str]]:
    """Return modules that import each other, in whatever number of steps."""
    places = {place_of(path): path for path in sources}
    below = {
        place: {
            module.removeprefix("forebay.").replace(".", "/")
            for module in imports(path, sources[path])
        }
        & places.keys() - {place}
        for place, path in places.items()
    }
    found = []
    while below:
        ends = [place for place, taken in below.items() if not taken & below.keys()]
        if not ends:  # what only imports others of the rest is no part of a circle either
            while tops := below.keys() - set().union(*below.values()):
                below = {place: taken for place, taken in below.items() if place not in tops}
            found.append(sorted(below))
            break
        below = {place: taken for place, taken in below.items() if place not in ends}
    return found


def doubled(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the public functions and classes that several files have, with these files."""
    files = defaultdict(list)
    for path, source in sorted(sources.items()):
        for node in parsed(source).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                files[node.name].append(path)
    return {name: found for name, found in files.items() if len({*found}) > 1}


def _file_rules(path: str, source: str) -> Iterator[str]:
    lines, name = source.splitlines(), PurePosixPath(path).stem
    if len(lines) > MOST_LINES:
        yield f"has {len(lines)} lines, more than {MOST_LINES}"
    if name in BAD_NAMES or any(part in name for part in BAD_PARTS):
        yield "has a name that says nothing"
    if not ast.get_docstring(parsed(source)):
        yield "has no docstring"


def test_every_file_of_the_tests_has_its_own_name() -> None:
    """pytest imports them by name alone, so two of one name cannot run in one process."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("*.py"))
    assert {name for name, count in names.items() if count > 1} <= {"conftest.py", "__init__.py"}


def package() -> dict[str, str]:
    """Return the text of every file of the package, by its path."""
    return {str(path.relative_to(SOURCE)): path.read_text() for path in SOURCE.rglob("*.py")}


@pytest.mark.slow
def test_the_source_follows_the_rules() -> None:
    """No file of the package breaks a rule."""
    sources = package()
    assert {PurePosixPath(path).parts[0].removesuffix(".py") for path in sources} == set(FLOOR_OF)
    assert list(violations(sources)) == []
    assert circles(sources) == []
    assert doubled(sources) == {}


def test_the_house_stays_small() -> None:
    """A new file needs a reason: one person holds the package in the head."""
    sources = package()
    assert len({PurePosixPath(path).parent for path in sources}) <= MOST_ROOMS


@pytest.mark.parametrize("closing", ["def f():", "if TYPE_CHECKING:"])
def test_a_circle_is_found(closing: str) -> None:
    """Also one of three modules, closed by an import in a function or for types alone."""
    first, last = "from forebay.base.b import x", f"{closing}\n    from forebay.base.a import y"
    sources = {"base/a.py": first, "base/b.py": "import forebay.base.c", "base/c.py": last}
    assert circles(sources) == [["base/a", "base/b", "base/c"]]
    assert circles({**sources, "base/c.py": "", "base/d.py": first}) == []


def test_a_name_that_two_files_have_is_found() -> None:
    """A class or function that a reader looks for is in one file; private ones may share names."""
    first, second = "class Rows: ...\ndef _own(): ...", "def Rows(): ...\ndef _own(): ..."
    assert doubled({"a.py": first, "b.py": second}) == {"Rows": ["a.py", "b.py"]}
    assert doubled({"a.py": f"{first}\n{first}", "b.py": "Rows = 1"}) == {}


BROKEN = {
    "a thread in a pure module": (
        "engine/flow.py",
        "import threading",
        "is pure and imports threading",
    ),
    "a clock in a function of the plan": (
        "plan.py",
        "def f():\n    from time import monotonic",
        "is pure and imports time",
    ),
    "torch in the layout": (
        "memory/layout.py",
        "import torch.utils.data",
        "is pure and imports torch",
    ),
    "a part that knows its neighbour": (
        "devices/slab.py",
        "from forebay.memory.slab import Slab",
        "imports upwards: memory/slab",
    ),
    "a relative import of another part": (
        "pools/worker.py",
        "from ..observe import record",
        "imports upwards: observe",
    ),
    "a part that imports upwards": (
        "ledger/ledger.py",
        "from forebay.runs.run import x",
        "imports upwards: runs/run",
    ),
    "a pool that imports the engine": (
        "pools/base.py",
        "from forebay.engine.engine import Engine",
        "imports upwards: engine/engine",
    ),
    "ray outside its package": ("engine/engine.py", "import ray", "imports ray"),
    "a second module for URLs": ("items.py", "from fsspec.core import x", "imports fsspec"),
    "errors that stand on something": (
        "errors.py",
        "from forebay.options import X",
        "imports upwards: options",
    ),
    "a library that calls its command line": (
        "loader.py",
        "from forebay.cli import main",
        "imports the command line",
    ),
    "a long file": ("ledger/records.py", "\n" * MOST_LINES, f"more than {MOST_LINES}"),
    "a file of odds and ends": ("runs/utils.py", "", "has a name that says nothing"),
    "a manager": ("runs/worker_manager.py", "", "has a name that says nothing"),
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
    assert list(violations({"loader.py": "x = 1\n"})) == ["loader.py: has no docstring"]


ALLOWED = {
    "the engine stands on pools": ("engine/engine.py", "from forebay.pools.base import ThreadPool"),
    "ray in its modules": ("pools/ray_pool.py", "import ray"),
    "a module beside it": ("runs/job.py", "from . import report"),
    "the way to start the command line": ("__main__.py", "from forebay.cli import main"),
}


@pytest.mark.parametrize(("path", "source"), ALLOWED.values(), ids=ALLOWED)
def test_what_is_allowed_is_not_found(path: str, source: str) -> None:
    """No rule is found broken where none is."""
    assert list(violations({path: f'"""A file."""\n{source}\n'})) == []
