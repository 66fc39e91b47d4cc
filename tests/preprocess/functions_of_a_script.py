"""A script with functions as scripts have them: each is called in a loop, and by `preprocess`.

    python functions_of_a_script.py FOLDER [GROUP] [kill]

It prints, as JSON, what each function returned in both. Nothing here knows forebay but `main`.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import enum
import functools
import io
import itertools
import json
import logging
import multiprocessing
import operator
import os
import queue
import re
import signal
import socket
import sqlite3
import string
import sys
import threading
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

try:
    import numpy
except ImportError:
    numpy = None

# ---- what another interpreter can be sent --------------------------------------------------------


@functools.cache
def model():
    """Load once in each worker."""
    return {"hello": "HELLO"}


@functools.lru_cache(maxsize=2)
def looked_up(word):
    return model().get(word, word)


@functools.cache
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


@functools.wraps(model)
def wrapped(path):
    return {"n": len(path)}


def decorated(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


@decorated
def with_decorator(path):
    return {"name": os.path.basename(path)}


@dataclasses.dataclass
class Point:
    x: int
    y: int = 2


class Color(enum.Enum):
    RED = "red"


class Named(collections.namedtuple("Named", "a b")):
    def total(self):
        return self.a + self.b


class Meta(type):
    def __call__(cls, *args):
        made = super().__call__(*args)
        made.made_by = cls.__name__
        return made


class Made(metaclass=Meta):
    pass


class Callable:
    def __init__(self, n):
        self.n = n

    def __call__(self, path):
        return {"n": self.n + 1}

    def method(self, path):
        return {"n": self.n}

    @classmethod
    def of_class(cls, path):
        return {"name": cls.__name__}

    @staticmethod
    def of_nothing(path):
        return {"n": len(path)}

    @functools.cached_property
    def slow(self):
        return self.n * 2

    def with_cached(self, path):
        return {"n": self.slow}


def closure(n):
    def inner(path):
        return {"n": n + len(os.path.basename(path))}

    return inner


def recursive(n):
    return 0 if not n else 1 + recursive(n - 1)


COUNTS = collections.Counter("abca")
DEFAULTS = collections.defaultdict(list, a=[1])
PATTERN = re.compile(r"\d+")
TEMPLATE = string.Template("$a-b")
instance = Callable(4)

BY_VALUE = {
    "cached": lambda path: {"word": model()["hello"]},
    "lru_cached": lambda path: {"word": looked_up("hello") + looked_up("other")},
    "cached and recursive": lambda path: {"n": fibonacci(20)},
    "wraps": wrapped,
    "decorator": with_decorator,
    "dataclass": lambda path: {"x": Point(1).x + Point(1).y},
    "enum": lambda path: {"color": Color.RED.value},
    "namedtuple": lambda path: {"n": Named(1, 2).total()},
    "metaclass": lambda path: {"by": Made().made_by},
    "callable": instance,
    "method": instance.method,
    "classmethod": Callable.of_class,
    "staticmethod": Callable.of_nothing,
    "cached_property": instance.with_cached,
    "closure": closure(3),
    "recursive": lambda path: {"n": recursive(9)},
    "partial": functools.partial(lambda n, path: {"n": n}, 5),
    "counter": lambda path: {"n": COUNTS["a"]},
    "defaultdict": lambda path: {"n": DEFAULTS["a"]},
    "pattern": lambda path: {"n": PATTERN.findall(os.path.basename(path))},
    "template": lambda path: {"s": TEMPLATE.substitute(a="x")},
    "str methods": lambda path: {"s": path.split("/")[-1] + ".json", "e": path.endswith(".txt")},
    "str slices": lambda path: {"s": path[-5:-4], "r": path.replace(".txt", ".npy")[-4:]},
    "generator": lambda path: ({"n": n} for n in range(3)),
    "operator": lambda path: {"n": operator.itemgetter(0)([7])},
    "logger": lambda path: {"n": logging.getLogger("x").level},
    "module alias": lambda path: {"n": contextlib.nullcontext(3).enter_result},
}

# ---- what only a fork has ------------------------------------------------------------------------


@functools.singledispatch
def kind_of(value):
    return "other"


@kind_of.register
def _(value: int):
    return "int"


lock, condition, event, local = (
    threading.Lock(),
    threading.Condition(),
    threading.Event(),
    threading.local(),
)
db = sqlite3.connect(":memory:", check_same_thread=False)
libc = ctypes.CDLL(None)
weak = weakref.WeakValueDictionary()
log_file = open(os.devnull, "a")  # noqa: SIM115 - as scripts do
numbers = (n for n in itertools.repeat(7))
pool = ThreadPoolExecutor(1)
tasks = queue.Queue()
pair = socket.socketpair()
buffer = io.BytesIO(b"abc")
view = memoryview(b"abc")
frozen = types.MappingProxyType({"a": 1})
mp_lock, mp_value = multiprocessing.Lock(), multiprocessing.Value("i", 3)
text = open(__file__, encoding="utf-8") if "__file__" in globals() else io.StringIO("x")  # noqa: SIM115


def lines_at(path):
    """Read a file that is open in the script, which each worker does by itself."""
    text.seek(0)
    return {"line": text.readline()}


class Holder:
    def __init__(self):
        self.lock = threading.RLock()

    def __call__(self, path):
        with self.lock:
            return {"n": 1}


def locked(path):
    with lock:
        return {"n": 1}


def in_closure():
    inner = threading.Lock()

    def work(path):
        with inner:
            return {"n": 2}

    return work


BY_FORK = {
    "singledispatch": lambda path: {"kind": kind_of(1) + kind_of("")},
    "lock": locked,
    "lock in a closure": in_closure(),
    "lock of an object": Holder(),
    "condition": lambda path: {"n": bool(condition.acquire()) and (condition.release() or 1)},
    "event": lambda path: {"n": event.is_set()},
    "thread local": lambda path: {"n": getattr(local, "x", 1)},
    "sqlite3": lambda path: {"n": db.execute("select 1").fetchone()[0]},
    "ctypes": lambda path: {"n": libc.abs(-3)},
    "weakref": lambda path: {"n": len(weak)},
    "log file": lambda path: {"n": log_file.write("x")},
    "open file": lines_at,
    "generator": lambda path: {"n": next(numbers)},
    "executor": lambda path: {"n": pool.submit(len, "abc").result()},
    "queue": lambda path: {"n": tasks.qsize()},
    "socket": lambda path: {"n": pair[0].fileno() > 0},
    "buffer": lambda path: {"n": len(buffer.getvalue())},
    "memoryview": lambda path: {"n": len(view)},
    "mapping proxy": lambda path: {"n": frozen["a"]},
    "multiprocessing lock": lambda path: {"n": mp_lock.acquire() and (mp_lock.release() or 1)},
    "multiprocessing value": lambda path: {"n": mp_value.value},
}
GROUPS = {"by value": BY_VALUE, "by fork": BY_FORK}


def main(folder, group, kill=""):
    import forebay

    functions = GROUPS[group]
    os.environ["DRIVER"] = str(os.getpid())
    paths = sorted(str(each) for each in Path(folder, "in").iterdir())

    def rows(returned):
        return [returned] if isinstance(returned, dict) else list(returned)

    def call(path):
        found = {name: rows(function(path)) for name, function in functions.items()}
        if kill and path == paths[1] and not os.path.exists(Path(folder, "killed")):
            Path(folder, "killed").touch()
            os.kill(int(os.environ["DRIVER"]), signal.SIGKILL)
        return {"found": json.dumps(found)}

    report = forebay.preprocess(
        call, paths, Path(folder, "out"), num_workers=1, retries=0, progress=False
    )
    made = [json.loads(each) for each in report.metadata["found"].to_pylist()]
    loop = [{name: rows(each(path)) for name, each in functions.items()} for path in paths]
    failures = [each.message for each in report.failures]
    print(json.dumps({"made": made, "loop": loop, "failures": failures}))


if __name__ == "__main__":
    main(*sys.argv[1:])
