"""What is pickled for another process: cached functions go by value; what cannot go is named."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
import threading

import pytest

from forebay.errors import OptionError
from forebay.pools.pickling import pickled

SCRIPT = textwrap.dedent(
    """
    import functools, sys
    from forebay.pools.pickling import pickled

    @functools.lru_cache(maxsize=3)
    def fibonacci(n):
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

    def work(n):
        return fibonacci(n), fibonacci.cache_parameters()["maxsize"], fibonacci.__name__

    sys.stdout.buffer.write(pickled(work))
    """
)
LOADER = (
    "import sys; from forebay.pools.job_loading import load_job; "
    "print(load_job(sys.stdin.buffer.read())(20))"
)


def test_a_cached_function_goes_by_value():
    """Another interpreter has it with its parameters and its name, and an empty cache."""
    made = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, check=True)
    loaded = subprocess.run(
        [sys.executable, "-c", LOADER], input=made.stdout, capture_output=True, check=True
    )
    assert loaded.stdout.decode().strip() == "(6765, 3, 'fibonacci')"


lock = threading.Lock()


def of_module(path):
    return lock


def of_global():
    namespace = {"lock": lock, "__name__": "__main__"}
    exec("def work(path):\n    return lock", namespace)
    return namespace["work"]


def of_closure():
    inner = lock

    def work(path):
        return inner

    return work


class Holder:
    def __init__(self):
        self.inside = {"a": [lock]}

    def __call__(self, path):
        return self.inside


CASES = {
    "global": (of_global(), "the global variable 'lock' of work is a lock"),
    "closure": (of_closure(), "the variable 'inner' of of_closure.<locals>.work is a lock"),
    "attribute": (Holder(), "the list, at '0', is a lock"),
    "partial": (functools.partial(of_module, lock), "the partial, at '1', is a lock"),
    "nested": (functools.partial(of_closure()), "'inner' of of_closure.<locals>.work is a lock"),
}


@pytest.mark.parametrize(("work", "words"), CASES.values(), ids=CASES)
def test_what_cannot_be_pickled_is_named_with_who_holds_it(work, words):
    """The innermost object, and the variable, attribute or element that it is."""
    with pytest.raises(OptionError, match="cannot be sent to other processes") as caught:
        pickled(work)
    assert words in str(caught.value).splitlines()[0]
