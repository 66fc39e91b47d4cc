"""Describing the user's work: what changes a fingerprint, what does not, and how it is shown."""

from __future__ import annotations

import ast
import collections
import decimal
import enum
import functools
import importlib.util
import json
import os
import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest
import torch

import forebay
from forebay.errors import LedgerError
from forebay.runs.differences import difference
from forebay.runs.fingerprint import Fingerprint, describe
from forebay.runs.source_code import is_library, sha256_of

SCRIPT = """
import math
from pathlib import Path

RATE = 16000
CACHE = {}

def windows(audio, seconds):
    # five seconds each
    return [audio] * int(seconds * RATE)

def split_audio(source, out, overlap=1, folder=Path("a")):
    CACHE[source] = math.floor(1.5)
    return windows(source, 5)

def unused():
    return 1
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load a script from a folder as if in a new process each time."""
    # A compiled file counts for a source of its size and of its second.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loaded = []

    def load_script(text: str, name: str = "split.py", module: str | None = None):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
        # The size and the age of a file tell linecache that it changed; the age may be too coarse.
        import linecache

        linecache.checkcache()
        linecache.cache.pop(str(path), None)
        spec = importlib.util.spec_from_file_location(module or path.stem, path)
        found = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = found
        loaded.append(spec.name)
        spec.loader.exec_module(found)
        return found

    yield load_script
    for name in loaded:
        sys.modules.pop(name, None)


def hashed(text: str) -> str:
    return sha256_of(text.encode())


def changes(load, old: str, new: str, text: str = SCRIPT, get=lambda m: m.split_audio) -> str:
    """Describe the script, edit it, and return the difference."""
    assert old in text
    before = describe(get(load(text)))
    return difference(before, describe(get(load(text.replace(old, new)))))


# ---- functions ---------------------------------------------------------------------------------


def test_the_same_script_gives_the_same_fingerprint(load):
    """Nothing depends on addresses, or on where in the file a function stands."""
    assert changes(load, "import math\n", "import math\n\n\n") == ""
    assert changes(load, "def unused():\n    return 1", "") == ""
    assert changes(load, "return windows(source, 5)\n", "return windows(source, 5)   \n") == ""


def test_a_changed_function_is_named(load):
    """With its file; its source is not in the ledger."""
    assert (
        changes(load, "windows(source, 5)", "windows(source, 6)") == "changed: split.py:split_audio"
    )
    assert "windows" not in describe(load(SCRIPT).split_audio).code[0][1]


@pytest.mark.parametrize(
    ("old", "new", "shown"),
    [
        ("# five", "# six", "changed: split.py:windows"),
        ("RATE = 16000", "RATE = 8000", "changed: split.py:RATE"),
        ("CACHE = {}", "CACHE = dict(a=1)", "changed: split.py:CACHE"),
        ("overlap=1", "overlap=2", "parameter overlap: 1 -> 2"),
        (", overlap=1", "", "parameter overlap: 1 -> (none)"),
    ],
)
def test_a_change_of_a_helper_a_constant_or_a_default_is_shown(load, old, new, shown):
    """Comments count, too: some of them matter."""
    assert shown in changes(load, old, new).splitlines()


@pytest.mark.slow
def test_where_a_file_lies_is_no_part_of_the_work(load):
    """A folder that was moved holds the same work, also where it looks for a file beside it."""
    text = "from pathlib import Path\ndef work(s, o):\n    return Path(__file__).parent, __name__\n"
    before = describe(load(text, "a/split.py").work)
    assert difference(before, describe(load(text, "b/split.py", "other").work)) == ""


def test_many_changed_parameters_are_cut(load):
    """Eight of them, and how many more there are."""
    text = f"def split_audio({', '.join(f'a{k:02}=1' for k in range(20))}): pass\n"
    shown = changes(load, "=1", "=2", text).splitlines()
    assert shown[:2] == ["changed: split.py:split_audio", "parameter a00: 1 -> 2"]
    assert shown[8:] == ["parameter a07: 1 -> 2 and 12 more"]


def test_a_closure_brings_its_cells(load):
    """A function made by a function differs by what it was made with."""
    text = """
        def helper(x):
            return x
        def make(rate, inner=helper):
            def work(source, out):
                return inner(source) * rate
            return work
    """
    module = load(text)
    old, new = describe(module.make(2)), describe(module.make(3))
    assert difference(old, new) == "parameter rate: 2 -> 3"
    assert list(dict(old.code)) == ["split.py:make.<locals>.work", "split.py:helper"]


def test_a_decorated_function_is_its_wrapper_and_what_it_wraps(load):
    """A change of either one counts, and the name is the user's."""
    text = """
        import functools
        def twice(times):
            def decorate(function):
                @functools.wraps(function)
                def wrapper(*args):
                    return [function(*args) for _ in range(times)]
                return wrapper
            return decorate
        @twice(times=2)
        def split_audio(source, out):
            return 1
        cached = functools.lru_cache(split_audio)
    """
    found = describe(load(text).split_audio)
    assert found.name == "split.py:split_audio"
    assert found.reference.endswith("split.py:split_audio")
    assert changes(load, "return 1", "return 2", text) == "changed: split.py:split_audio"
    wrapper = "changed: split.py:twice.<locals>.decorate.<locals>.wrapper"
    assert changes(load, "range(times)", "range(times + 1)", text) == wrapper
    assert "parameter times: 2 -> 3" in changes(load, "times=2", "times=3", text)
    get = lambda module: module.cached  # noqa: E731
    assert changes(load, "return 1", "return 2", text, get) == "changed: split.py:split_audio"


def test_a_lambda_is_cut_out_of_its_line(load):
    """The call it stands in may change: num_workers is no part of the work."""
    text = "a, b = (lambda s, o: (lambda: s)()), lambda s, o: [\n    s, 5]; num_workers = 1\n"
    module = load(text)
    assert describe(module.a).code == (("split.py:<lambda>", hashed("lambda s, o: (lambda: s)()")),)
    assert describe(module.a("s", 0) and module.b).code == (
        ("split.py:<lambda>", hashed("lambda s, o: [\n    s, 5]")),
    )
    assert describe(module.b).reference is None
    assert changes(load, "workers = 1", "workers = 2", text, lambda m: m.b) == ""
    assert changes(load, "s, 5", "s, 6", text, lambda m: m.b) != ""


def test_code_without_source_is_hashed(load):
    """Neither the file nor the line of it matters, the code does."""

    def compiled(text: str, file: str):
        space: dict = {"__name__": "__main__"}
        exec(compile(text, file, "exec"), space)
        return describe(space["work"])

    text = "def work(s, o):\n    return {1, 2, 3} and [f(s) for f in 'x'] in {'a', 'b'}\n"
    one = compiled(text, "<stdin>")
    assert difference(one, compiled("\n\n" + text, "<other>")) == ""
    assert difference(one, compiled(text.replace("3", "4"), "<stdin>")) != ""
    assert difference(one, compiled(text.replace("f(s)", "f(1)"), "<stdin>")) != ""


# A change of the user's own code, or of what it is given, wherever it lies: files, old, new, shown.
NOTICED = {
    "a function in a registry": (
        {
            "split.py": """
                READERS = {}
                def reader(function):
                    READERS[function.__name__] = function
                    return function
                @reader
                def wav(source):
                    return 1
                def work(source, out):
                    return READERS["wav"](source)
            """
        },
        "return 1",
        "return 2",
    ),
    "functions in a list": (
        {
            "split.py": """
                def trim(x):
                    return x + 1
                STEPS = [trim]
                def work(source, out):
                    return [step(source) for step in STEPS]
            """
        },
        "x + 1",
        "x + 2",
    ),
    "the class of a global object": (
        {
            "split.py": """
                class Reader:
                    def read(self, source):
                        return 1
                READER = Reader()
                def work(source, out):
                    return READER.read(source)
            """
        },
        "return 1",
        "return 2",
    ),
    "what a definition refers to": (
        {
            "split.py": """
                RATE = 16000
                if RATE:
                    CONFIG = {"rate": RATE}
                def work(source, out):
                    return CONFIG["rate"]
            """
        },
        "RATE = 16000",
        "RATE = 8000",
    ),
    "an imported dict": (
        {
            "config.py": "SETTINGS = {'rate': 16000}",
            "split.py": """
                from config import SETTINGS
                def work(source, out):
                    return SETTINGS["rate"]
            """,
        },
        "SETTINGS = {'rate': 16000}",
        "SETTINGS = {'rate': 8000}",
    ),
    "a function of another folder": (
        {
            "lib/mylib.py": "def clean(x):\n    return x + 1",
            "split.py": """
                from mylib import clean
                def work(source, out):
                    return clean(source)
            """,
        },
        "x + 1",
        "x + 2",
    ),
    "a base class of another folder": (
        {
            "lib/mylib.py": "class Base:\n    def clean(self, x):\n        return x + 1",
            "split.py": """
                import mylib
                class Work(mylib.Base):
                    def __call__(self, source, out):
                        return self.clean(source)
                work = Work()
            """,
        },
        "x + 1",
        "x + 2",
    ),
    "a helper that a library wraps": (
        {
            "split.py": """
                import torch
                @torch.no_grad()
                def helper(x):
                    return x + 1
                def work(source, out):
                    return helper(source)
            """
        },
        "x + 1",
        "x + 2",
    ),
    "a cached function among the attributes": (
        {
            "split.py": """
                import functools
                def helper(x):
                    return x + 1
                class Work:
                    def __init__(self):
                        self.helper = functools.lru_cache(helper)
                    def __call__(self, source, out):
                        return self.helper(source)
                work = Work()
            """
        },
        "x + 1",
        "x + 2",
    ),
    "a decorator that is a class": (
        {
            "split.py": """
                import functools
                class Twice:
                    def __init__(self, function):
                        functools.update_wrapper(self, function)
                        self.function = function
                    def __call__(self, source, out):
                        return self.function(source, out) * 2
                @Twice
                def work(source, out):
                    return 1
            """
        },
        "out) * 2",
        "out) * 3",
    ),
    "a helper of a class within a class": (
        {
            "split.py": """
                def helper(x):
                    return x + 1
                class Work:
                    class Inner:
                        def run(self, x):
                            return helper(x)
                    def __call__(self, source, out):
                        return self.Inner().run(source)
                work = Work()
            """
        },
        "x + 1",
        "x + 2",
    ),
    "a default factory of a class": (
        {
            "split.py": """
                from dataclasses import dataclass, field
                def names():
                    return ["a"]
                @dataclass
                class Work:
                    names: list = field(default_factory=names)
                    def __call__(self, source, out):
                        return self.names
                work = Work([])
            """
        },
        'return ["a"]',
        'return ["b"]',
    ),
    "a file that is named as one of Python's modules": (
        {"sched.py": "N = 1\ndef helper():\n    return N\ndef work(s, o):\n    return helper()"},
        "N = 1",
        "N = 2",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("files", "old", "new"), NOTICED.values(), ids=NOTICED)
def test_a_change_of_own_code_is_noticed(load, monkeypatch, files, old, new):
    """And shown, wherever in the user's files it is."""
    for name in files:  # two files of one module name must not meet in sys.modules
        monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)

    def described(texts):
        return describe([load(text, name) for name, text in texts.items()][-1].work)

    before = described(files)
    assert difference(before, described(files)) == ""
    changed = {name: text.replace(old, new) for name, text in files.items()}
    assert changed != files
    assert difference(before, described(changed)).startswith("changed: ")


# Scripts whose work leaves something behind in its module, which is no change of it.
QUIET = {
    "a model that another function loads": """
        MODEL = None
        class Model:
            pass
        def load():
            global MODEL
            MODEL = MODEL or Model()
        def work(source, out):
            load()
            return MODEL
    """,
    "functions made on the way": """
        CACHE = {}
        def make(rate):
            return lambda x: x * rate
        def work(source, out):
            return CACHE.setdefault(source, make(2))(1)
    """,
    "objects kept on the way": """
        CACHE = []
        class Reader:
            pass
        def work(source, out):
            CACHE.append(Reader())
    """,
    "a name that is a local one too": """
        for index in range(3):
            pass
        def work(source, out):
            global index
            index = 7
            other = [k for k in source]
            return other
    """,
}


@pytest.mark.parametrize("text", QUIET.values(), ids=QUIET)
def test_what_the_work_leaves_behind_is_no_change(load, text):
    """The same call again in the same process must not find a difference."""
    module = load(text)
    before = describe(module.work)
    module.work("a", None)
    assert difference(before, describe(module.work)) == ""


def test_a_package_installed_into_a_folder_of_any_name_is_a_library(tmp_path):
    """`pip install --target` writes which files are its own; others beside them are the user's."""
    (tmp_path / "tool").mkdir()
    info = tmp_path / "tool-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tool\nVersion: 1.0\n")
    (info / "RECORD").write_text("tool/__init__.py,,\ntool/part.py,,\nalone.py,,\n")
    for name in ("tool/__init__.py", "tool/part.py", "alone.py", "handler.py"):
        (tmp_path / name).touch()
    found = [name for name in ("tool/part.py", "alone.py") if is_library(str(tmp_path / name))]
    assert found == ["tool/part.py", "alone.py"]
    assert not is_library(str(tmp_path / "handler.py"))


def test_a_librarys_wrapper_is_no_code_of_the_users(load):
    """A new version of the library is no change of the work."""
    text = "import torch\n@torch.no_grad()\ndef work(source, out):\n    return 1\n"
    found = describe(load(text).work)
    assert [label for label, _ in found.code] == ["split.py:work"]
    assert found.name == "split.py:work"


# ---- objects -----------------------------------------------------------------------------------

WORDS = """
    import functools
    from torch.utils.data import Dataset
    SIZE = 3
    class Base:
        def clean(self, x):
            return x[:SIZE]
    class Words(Base, Dataset):
        def __init__(self, files, transform=None):
            self.files, self.transform = files, transform
        def __len__(self):
            return len(self.files)
        def __getitem__(self, k):
            return self.clean(self.files[k])
        __call__ = __getitem__
        def split(self, source, out):
            return 1
        def merge(self, source, out):
            return 2
        @classmethod
        def built(cls, source, out):
            return 3
    class Slim:
        __slots__ = ("rate", "lock")
        def __call__(self, source, out):
            return self.rate
    class Secret(Words):
        def __getstate__(self):
            return {"files": self.files}
    def shout(x):
        return x.upper()
"""


def test_slots_and_getstate_are_respected(load):
    """What an object does not pickle is no parameter of its work."""
    module = load(WORDS)
    slim = module.Slim()
    slim.rate, slim.lock = 7, threading.Lock()
    assert dict(describe(slim).parameters) == {"rate": "7", "lock": '"_thread.lock"'}
    assert dict(describe(module.Secret(["a"], 5)).parameters) == {"files": '["a"]'}


def test_bound_methods_differ_by_method_and_by_object(load):
    """`obj.split` and `obj.merge` are different work on the same parameters."""
    module = load(WORDS)
    words = module.Words([1])
    split = describe(words.split)
    assert (split.name, split.reference) == ("split.py:Words.split", None)
    assert dict(split.parameters) == {"files": "[1]", "transform": "null"}
    assert difference(split, describe(words.merge)) != ""
    assert difference(split, describe(module.Words([2]).split)) == "parameter files: [1] -> [2]"
    assert describe(module.Words.built).reference.endswith("split.py:Words.built")


class Color(enum.Enum):
    """For values."""

    RED = 1
    BLUE = 2


@dataclass
class Config:
    """For values."""

    rate: int
    tags: frozenset


class Odd:
    """It raises whatever one does to it."""

    def __getattribute__(self, name):
        raise RuntimeError(name)


class Circle:
    """It holds itself."""

    def __init__(self):
        self.me = [self]


def value(held: object) -> str:
    return dict(describe(functools.partial(len, x=held)).parameters)["x"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (1.0, 1.5),
        ("a", "b"),
        (b"a", b"b"),
        ({1, 2}, {1, 3}),
        ({"a": 1}, {"a": 2}),
        ({(1, 2): 3}, {(1, 2): 4}),
        ({1: "a", "1": "b", None: 0}, {1: "a", "1": "c", None: 0}),
        (Path("a"), Path("b")),
        (Color.RED, Color.BLUE),
        (decimal.Decimal("1.0"), decimal.Decimal("1.00")),
        (complex(1, 2), complex(1, 3)),
        (range(3), range(4)),
        (Config(1, frozenset("ab")), Config(1, frozenset("ac"))),
        (collections.deque([1]), collections.deque([2])),
        (functools.partial(len, 1), functools.partial(len, 2)),
        ([Config(1, frozenset())], [Config(2, frozenset())]),
        (numpy.arange(3), numpy.arange(4)),
        (numpy.zeros(2, "f4"), numpy.zeros(1, "f8")),
        (numpy.zeros((2, 3)), numpy.zeros((3, 2))),
        (numpy.array(["a", None]), numpy.array(["b", None])),
        (numpy.array("2024-01-01", "M8[s]"), numpy.array("2024-01-02", "M8[s]")),
        (numpy.float32(1), numpy.float32(2)),
        (torch.zeros(2), torch.ones(2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.tensor(1, dtype=torch.bfloat16), torch.tensor(2, dtype=torch.bfloat16)),
        (torch.eye(2).to_sparse(), torch.ones(2, 2).to_sparse()),
        (torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 2, bias=False)),
        (["x" * 300], ["x" * 301]),
        (len, sum),
        ("\udcff", "\udcfe"),
    ],
    ids=repr,
)
def test_values_that_differ_are_told_apart_and_equal_ones_are_not(one, other):
    """Whatever a parameter holds; and no value is longer than a line or shows an address."""
    import copy

    assert value(one) == value(copy.deepcopy(one)) != value(other)
    assert len(value(one)) <= 200
    assert " at 0x" not in value(one)


def test_changed_weights_are_named():
    """Their hashes would say nothing; and what they are part of is not named beside them."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(1))
    before = describe(model)
    assert difference(before, describe(model)) == ""
    with torch.no_grad():
        model[0].bias += 1
        model[1].running_mean += 1
    shown = "the weights changed (0.bias, 1.running_mean)"
    assert difference(before, describe(model)) == shown
    model[1].eps = 1.0
    assert difference(before, describe(model)) == f"changed: _modules\n{shown}"
    many = [
        Fingerprint("", None, (), tuple((f"{k:02}", f"sha256:{n}") for k in range(30)))
        for n in (1, 2)
    ]
    assert difference(*many).endswith(", 06, 07 and 22 more")


def infer(model, batch):
    return model(batch)


class Inferring:
    def __init__(self, net):
        self.net = net

    def __call__(self, batch):
        return self.net(batch)


def closure_over(net):
    def call(batch):
        return net(batch)

    return call


def default_of(net):
    def call(batch, net=net):
        return net(batch)

    return call


@pytest.mark.parametrize(
    ("work", "shown"),
    [
        (Inferring, "net.bias"),
        (lambda net: functools.partial(infer, net), "model.bias"),
        (closure_over, "net.bias"),
        (default_of, "net.bias"),
    ],
    ids=["attribute", "partial", "closure", "default"],
)
def test_changed_weights_of_a_part_are_named(work, shown):
    """A model is often wrapped: in a class, a partial function or another function."""
    net = torch.nn.Linear(2, 1)
    before = describe(work(net))
    assert difference(before, describe(work(net))) == ""
    with torch.no_grad():
        net.bias += 1
    assert difference(before, describe(work(net))) == f"the weights changed ({shown})"


def test_a_mapped_array_is_its_file(tmp_path):
    """Reading a terabyte to start a run would be no service."""
    array = numpy.memmap(tmp_path / "a", "u1", "w+", shape=(8,))
    array.flush()
    before = value(array)
    os.truncate(tmp_path / "a", 16)
    assert value(numpy.memmap(tmp_path / "a", "u1", "r", shape=(8,))) != before


def test_odd_objects_fall_back_to_their_types_name():
    """A description never raises: at worst it sees less."""
    for odd in (Odd(), Circle(), threading.Lock(), (k for k in "a"), sys.stdout, object()):
        found = describe(odd)
        assert difference(found, Fingerprint.from_json(found.to_json())) == ""
        assert " at 0x" not in found.to_json()
        assert value(odd)
    assert value(Odd()) == f'"{Odd.__module__}.Odd"'
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert value(deep) == '"builtins.list"'
    while deep:  # or its end would overflow the stack
        deep = deep.pop()


# ---- between processes -------------------------------------------------------------------------

MAIN = """
import functools, json, sys
from dataclasses import dataclass
from pathlib import Path
from forebay.runs.fingerprint import describe

KINDS = frozenset({"wav", "flac", "mp3", "ogg"})

@dataclass
class Config:
    names: set

def work(source, out, kinds={"a", "b", "c", "d"}, config=None):
    return source in KINDS and source in {"x", "y", "z"}

class Words:
    def __init__(self):
        self.names = {"k" + str(n) for n in range(50)}
        self.table = {n: (n, {n}) for n in self.names}
        self.config = Config({Path("a"), Path("b"), (1, "c")})
    def __len__(self): return 1
    def __getitem__(self, k): return work(k, k)

exec("def hidden(s, o): return s in {'x', 'y', 'z', 'w'}")

if __name__ == "__main__":
    partial = functools.partial(work, config=Config({"p", "q", "r"}))
    print(json.dumps([describe(x).to_json() for x in (work, Words(), partial, hidden)]))
"""


def run_main(folder: Path, seed: str, *command: str) -> list[Fingerprint]:
    source = str(Path(forebay.__file__).parents[1])
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": source}
    command = command or ("script.py",)
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [Fingerprint.from_json(text) for text in json.loads(done.stdout)]


@pytest.mark.slow
def test_fingerprints_are_equal_whatever_the_hash_seed(tmp_path):
    """Sets have another order in every process."""
    (tmp_path / "script.py").write_text(MAIN)
    first = run_main(tmp_path, "1")
    assert first == run_main(tmp_path, "2")
    assert first[0].reference == f"{tmp_path / 'script.py'}:work"
    assert first[0].name == "script.py:work"
    assert [one.reference for one in first[1:3]] == [None, None]
    assert "__main__:hidden" in dict(first[3].code)


@pytest.mark.slow
def test_a_script_and_the_same_file_imported_are_the_same_work(tmp_path, load):
    """A run is begun from a script and continued from the command line."""
    (tmp_path / "script.py").write_text(MAIN)
    script = run_main(tmp_path, "1")
    module = load(MAIN, "script.py")
    assert difference(script[0], describe(module.work)) == ""
    assert difference(script[1], describe(module.Words())) == ""


@pytest.mark.slow
def test_a_module_of_a_package_is_referred_to_by_name(tmp_path):
    """Loaded by its path its relative imports would not work."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "inner.py").write_text(MAIN)
    found = run_main(tmp_path, "1", "-m", "package.inner")
    assert found[0].reference == "package.inner:work"
    assert found[0].name == "package/inner.py:work"


def test_a_reference_is_kept_only_where_it_leads_back(load):
    """A file loaded by its path is found by its path; a replaced name is not found at all."""
    module = load(SCRIPT, module="some_other_name")
    function = module.split_audio
    assert describe(function).reference == f"{module.__file__}:split_audio"
    module.split_audio = module.windows
    assert describe(function).reference is None
    del module.split_audio
    found = describe(function)
    assert (found.name, found.reference) == ("split.py:split_audio", None)


def test_modules_that_import_the_same_are_parsed_once(load, monkeypatch):
    """Hundreds of them may have what a function uses; each call of a verb would parse them all."""
    text = "from pathlib import Path\ndef work(source, out):\n    return Path(source)\n"
    for number in range(80):
        load(f"{text}# {number}\n", f"part{number}.py")
    work, parsed = load(text).work, []
    parse = ast.parse
    monkeypatch.setattr(ast, "parse", lambda *given: (parsed.append(given), parse(*given))[1])
    first = describe(work)
    del parsed[:]
    assert describe(work) == first
    assert parsed == []


# ---- the record --------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"code": 1, "parameters": []}'])
def test_a_damaged_fingerprint_is_a_ledger_error(text):
    """It comes from the ledger's file."""
    with pytest.raises(LedgerError, match="description of the work is damaged"):
        Fingerprint.from_json(text)
