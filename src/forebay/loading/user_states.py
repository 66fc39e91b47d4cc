"""The states of users' objects: what `state_dict` returns, and the random generators they own.

parts_of(thing)         the datasets, samplers and generators that an object is made of
saved_state(thing)      what its `state_dict` returns, or why that is not known
saved_generators(thing) the states of its generators, JSON-serializable
"""

from __future__ import annotations

import base64
import random
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from forebay.base.datasets import defines
from forebay.base.generator_search import owner_of_state
from forebay.base.generators import generator_state, set_state
from forebay.errors import OptionError
from forebay.loading.snapshots import UnknownState

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
# Of a longer container, so many items are looked at; containers within containers so deep.
MOST_ITEMS, DEEPEST = 1000, 3

# What was saved, and the type of the object that is to be restored.
NO_STATE = (
    "the state includes that of a {0}, but {1} has no load_state_dict\n"
    "  Nothing was changed. Make the loader with the {0} that it was saved with."
)
UNKNOWN = (
    "no state can be made: {0}\n"
    "  It was called without arguments, as torchdata's loader calls it. Batches do not depend on "
    "it, and the iteration goes on.\n"
    "  Define state_dict(self) in a subclass, or set state_dict = None there: a stream is then "
    "read again up to where it was."
)


# ---- what an object is made of -------------------------------------------------------------------


def parts_of(thing: Any, *, with_samples: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield an object, and the datasets, samplers and generators within it, each once, with paths.

    Nothing is called: these are attributes, and items of lists, tuples and dicts in attributes.

    Args:
        with_samples: Whether to yield datasets whose samples have an index, and look into them.
    """
    seen, todo = {id(thing)}, [("", thing, 0)]
    while todo:
        path, value, depth = todo.pop(0)
        items: Iterator[tuple[Any, Any]] = iter(())
        if depth and type(value) in (list, tuple, dict):
            pairs = value.items() if type(value) is dict else enumerate(value)
            items = ((f"{path}[{name}]", each) for name, each in islice(pairs, MOST_ITEMS))
        else:
            yield path, value
            own = getattr(value, "__dict__", None)
            if type(own) is dict and not isinstance(value, GENERATORS):
                items, depth = ((f"{path}.{name}", each) for name, each in own.items()), 0
        for name, each in items:
            is_container = type(each) in (list, tuple, dict) and depth < DEEPEST
            if (is_container or _is_part(each, with_samples)) and id(each) not in seen:
                seen.add(id(each))
                todo.append((name, each, depth + 1))


def _is_part(value: Any, with_samples: bool) -> bool:
    if isinstance(value, GENERATORS):
        return True
    if isinstance(value, type) or type(value).__module__ in ("builtins", "numpy"):
        return False
    is_stream = isinstance(value, IterableDataset) or not defines(value, "__getitem__")
    if not (is_stream or with_samples):
        return False
    is_known = isinstance(value, Dataset | Sampler) or defines(value, "set_epoch")
    return is_known or defines(value, "__iter__" if is_stream else "__len__")


# ---- state_dict ----------------------------------------------------------------------------------


def has_state(thing: Any) -> bool:
    """Return whether an object has both `state_dict` and `load_state_dict`.

    That of a Hugging Face stream has no shuffle buffer, whose samples would be lost.
    """
    has_both = all(defines(thing, name) for name in ("state_dict", "load_state_dict"))
    return has_both and not has_shuffle_buffer(thing)


def has_shuffle_buffer(thing: Any) -> bool:
    """Return whether an object is a stream of Hugging Face's with a shuffle buffer."""
    if type(thing).__module__.partition(".")[0] != "datasets":
        return False
    todo = [getattr(thing, "_ex_iterable", None)]
    while todo:
        each = todo.pop()
        if type(each).__name__.startswith("BufferShuffled"):
            return True
        own = getattr(each, "__dict__", {})
        todo += [own[name] for name in ("ex_iterable", "_interleaved") if name in own]
        todo += own.get("ex_iterables", ())
    return False


def saved_state(thing: Any) -> Any:
    """Return what `state_dict` returns; an `UnknownState` if it raises."""
    try:
        return thing.state_dict()
    except Exception as error:  # noqa: BLE001 - the user's; it is raised if the state is asked for
        kind = f"{type(error).__name__}: {error}"
        return UnknownState(f"{type(thing).__name__}.state_dict() raised {kind}")


def check_known(state: Any) -> None:
    """Raise an error if the state of a loader has that of an object whose `state_dict` raised."""
    if isinstance(state, UnknownState):
        raise OptionError(UNKNOWN.format(state.why))
    if type(state) in (dict, list):
        for each in state.values() if type(state) is dict else state:
            check_known(each)


# ---- generators ----------------------------------------------------------------------------------


def state_of_generator(generator: torch.Generator) -> str:
    """Return the state of a generator of torch as a string."""
    return base64.b64encode(generator.get_state().numpy().tobytes()).decode("ascii")


def set_generator(generator: torch.Generator, state: str) -> None:
    """Set a generator to a state that `state_of_generator` returned."""
    numbers = np.frombuffer(base64.b64decode(state), dtype=np.uint8)
    generator.set_state(torch.from_numpy(numbers.copy()))


def generators_of(thing: Any) -> dict[str, Any]:
    """Return the random generators that a sampler or a stream owns, by their path from it."""
    found, known = {}, set[int]()
    for path, each in parts_of(thing, with_samples=False):
        if isinstance(each, GENERATORS) and id(owner := owner_of_state(each)) not in known:
            known.add(id(owner))
            found[path] = each
    return found


def saved_generators(thing: Any, but: Collection[int] = ()) -> dict[str, Any]:
    """Return the states of the generators that an object owns, by their path; JSON-serializable.

    Args:
        but: The IDs of generators to leave out.
    """
    found = generators_of(thing).items()
    return {path: _saved(each) for path, each in found if id(each) not in but}


def restore_generators(thing: Any, saved: Mapping[str, Any]) -> None:
    """Set the generators that an object owns to states that `saved_generators` returned.

    Raises:
        Exception: They are not of these generators.
    """
    found = generators_of(thing)
    for path, state in saved.items():
        _set(found[path], state)


def _saved(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return state_of_generator(generator)
    state = generator_state(generator)
    if isinstance(generator, random.Random):
        version, numbers, gauss = state
        return [version, list(numbers), gauss]
    return _plain(state)


def _set(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        set_generator(generator, state)
    elif isinstance(generator, random.Random):
        version, numbers, gauss = state
        set_state(generator, (version, tuple(numbers), gauss))
    else:
        set_state(generator, _arrays(state))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _arrays(each) for name, each in value.items()}
    return np.array(value, dtype=np.uint64) if isinstance(value, list) else value
