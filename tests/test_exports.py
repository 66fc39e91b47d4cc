"""The public names: sorted, there, documented, and nothing else."""

from __future__ import annotations

import importlib
import importlib.resources
import inspect
import pickle
import pkgutil
from types import ModuleType

import cloudpickle
import pytest

import forebay
import forebay.collate
import forebay.errors

DOORS = [forebay, forebay.collate]


def doors_with_names() -> list[tuple[ModuleType, str]]:
    return [(door, name) for door in DOORS for name in getattr(door, "__all__", ())]


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_names_are_sorted_and_unique(door: ModuleType) -> None:
    """`__all__` reads like an index."""
    names = list(getattr(door, "__all__", ()))
    assert names == sorted(set(names))


@pytest.mark.parametrize(
    ("door", "name"), doors_with_names(), ids=lambda value: getattr(value, "__name__", value)
)
def test_each_name_is_there_and_documented(door: ModuleType, name: str) -> None:
    """Every public name can be imported and has a docstring of its own."""
    thing = getattr(door, name)
    assert name in dir(door)
    if inspect.isroutine(thing) or inspect.isclass(thing):
        # `inspect.getdoc` would find a parent's; `__doc__` of a class is its own.
        own = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
        assert own, f"{door.__name__}.{name} has no docstring"
        assert own.strip().splitlines()[0].endswith("."), "the first line is a sentence"


def test_every_error_is_public() -> None:
    """Whatever forebay raises on purpose can be caught by a name from the front door."""
    errors = {
        name
        for name, thing in vars(forebay.errors).items()
        if inspect.isclass(thing) and issubclass(thing, forebay.errors.ForebayError)
    }
    assert errors <= set(forebay.__all__)
    assert {"ForebayError", "OptionError"} <= errors


def test_no_error_hides_in_a_room() -> None:
    """An error class outside `errors.py` belongs to the tree and is reachable, or is not public."""
    for found in pkgutil.walk_packages(forebay.__path__, "forebay."):
        # The last one needs a library that is no part of a development environment.
        if found.name.endswith(("__main__", ".ray", ".torchtitan")):
            continue
        module = importlib.import_module(found.name)
        for name, thing in vars(module).items():
            if inspect.isclass(thing) and issubclass(thing, forebay.ForebayError):
                assert thing.__module__ == "forebay.errors", f"{module.__name__}.{name}"


def test_the_package_is_typed() -> None:
    """Type checkers are told that the annotations are meant."""
    assert (importlib.resources.files(forebay) / "py.typed").is_file()


def test_the_package_can_be_pickled_by_name() -> None:
    """A function that uses `forebay` as a global name travels to other processes."""
    assert pickle.loads(cloudpickle.dumps(lambda: forebay))() is forebay
