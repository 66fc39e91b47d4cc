"""Find the many Python objects that a dataset holds, from a few samples of them.

Reading a Python object writes its reference count, so a forked worker copies the pages of a long
list as it reads its items. Loaded only when a loader is asked, and its workers have copied much.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from forebay.base.formatting import byte_size
from forebay.observe.measurements import WorkerMemory
from forebay.packed import PackedSequence

# Fewer objects take little. So many of them are looked at, and so many parts of each.
LEAST_ITEMS, SAMPLED, MOST_PARTS = 10_000, 64, 256
# Containers of at most so many are looked into, as are so many objects in all.
SMALL, MOST_VISITED = 256, 2_000

# The share of a worker's own memory that the objects take, before they are worth a sentence.
LEAST_SHARE = 0.25

_PLAIN = (str, bytes, bytearray, int, float, complex, type(None), torch.Tensor, PackedSequence)
_CODE = (type, ModuleType, FunctionType, MethodType)


class HeldObjects(NamedTuple):
    """Many Python objects that a dataset holds.

    Attributes:
        path: Where, such as "dataset.items".
        what: Such as "a list of 3,000,000 dicts".
        nbytes: What they take, about.
        packed_bytes: What they take in a `PackedSequence`, about; None if they cannot be pickled.
        remedy: What makes such a sequence of them, as code.
    """

    path: str
    what: str
    nbytes: int
    packed_bytes: int | None
    remedy: str


def note_on_memory(memory: WorkerMemory, objects: HeldObjects | None) -> str:
    """Return what of the dataset is copied into each worker, and what helps; "" if little."""
    if objects is None or not memory.is_large or objects.nbytes < LEAST_SHARE * memory.each:
        return ""
    grows = byte_size(max(memory.rate_each, 0.0))
    helps = "is shared by all workers"
    if objects.packed_bytes is not None:
        helps = f"takes {byte_size(objects.packed_bytes)}, once for all workers"
    return (
        f"Each worker has {byte_size(memory.each)} of memory of its own, {grows}/s more: reading "
        f"a Python object writes its reference count, which copies it. {objects.path} is "
        f"{objects.what}, about {byte_size(objects.nbytes)}; {objects.remedy} {helps}."
    )


def largest_objects(dataset: Any) -> HeldObjects | None:
    """Return the largest collection of objects that a dataset refers to; None if there is none."""
    found = max(_collections(dataset), key=lambda each: each.nbytes, default=None)
    return found if found is not None and found.nbytes else None


def _collections(dataset: Any) -> Iterator[HeldObjects]:
    """Yield the collections of many objects, breadth first."""
    waiting: deque[tuple[str, Any]] = deque([("dataset", dataset)])
    seen: set[int] = set()
    while waiting and len(seen) < MOST_VISITED:
        path, value = waiting.popleft()
        if id(value) in seen or isinstance(value, (*_PLAIN, *_CODE)):
            continue
        seen.add(id(value))
        with suppress(Exception):  # whatever a user's class does
            held, inner = _opened(path, value)
            yield from held
            waiting.extend(inner)


def _opened(path: str, value: Any) -> tuple[list[HeldObjects], list[tuple[str, Any]]]:
    """Return the collections that a value is, and the values to look into."""
    if _is_pandas(value):
        return _columns(path, value), []
    if isinstance(value, np.ndarray):
        is_many = value.dtype == object and value.size >= LEAST_ITEMS
        return ([_held(path, "array", value.reshape(-1), path)] if is_many else []), []
    if isinstance(value, dict):
        if len(value) >= LEAST_ITEMS:
            items = [*islice(value.items(), SAMPLED)]
            return [_held(path, "dict", items, f"{path}.items()", len(value), value)], []
        if len(value) <= SMALL:
            return [], [(f"{path}[{key!r}]", each) for key, each in value.items()]
        return [], []
    if isinstance(value, list | tuple | deque):
        if len(value) >= LEAST_ITEMS:
            return [_held(path, type(value).__name__, value, path)], []
        return [], [(f"{path}[{at}]", each) for at, each in enumerate(islice(value, SMALL))]
    if isinstance(value, set | frozenset):
        if len(value) >= LEAST_ITEMS:
            items = [*islice(value, SAMPLED)]
            return [_held(path, type(value).__name__, items, path, len(value), value)], []
        return [], []
    return [], [(f"{path}.{name}", each) for name, each in _attributes(value)]


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            with suppress(AttributeError):
                yield name, getattr(value, name)


def _is_pandas(value: Any) -> bool:
    kind = type(value)
    is_table = kind.__name__ in ("DataFrame", "Series", "Index")
    return is_table and kind.__module__.partition(".")[0] == "pandas"


def _columns(path: str, value: Any) -> list[HeldObjects]:
    """Return the columns of objects of a table of pandas."""
    if type(value).__name__ != "DataFrame":
        columns = [(path, value)]
    else:
        columns = [(f"{path}[{name!r}]", value[name]) for name in value.columns]
    return [
        _held(at, "column", column.to_numpy(), at)
        for at, column in columns
        if column.dtype == object and len(column) >= LEAST_ITEMS
    ]


def _held(
    path: str,
    kind: str,
    items: Any,
    packed: str,
    count: int | None = None,
    container: Any = None,
) -> HeldObjects:
    """Return a collection.

    Args:
        items: All items, or some of them, if `count` says how many there are.
        packed: What to pack, as code.
    """
    sampled = items
    if count is None:
        count, step = len(items), max(len(items) // SAMPLED, 1)
        sampled = [items[at] for at in range(0, count, step)][:SAMPLED]
    known: set[int] = set()
    share = sum(_size_of(each, known) for each in sampled) / len(sampled)
    of_container = sys.getsizeof(items if container is None else container)
    packed_bytes = None
    with suppress(Exception):  # what cannot be pickled
        packed_bytes = int(PackedSequence(sampled).nbytes * count / len(sampled))
    parts = [each[1] for each in sampled] if kind == "dict" else sampled
    ((name, most),) = Counter(type(each).__name__ for each in parts).most_common(1)
    noun = f"{name}s" if most == len(parts) else "objects"
    article = "an" if kind == "array" else "a"
    what = f"{article} {kind} of {count:,} {noun}"
    nbytes = int(share * count) + of_container if share else 0
    return HeldObjects(path, what, nbytes, packed_bytes, f"forebay.PackedSequence({packed})")


def _size_of(value: Any, known: set[int]) -> int:
    """Return the bytes of an object and its parts; what was seen before counts as shared."""
    waiting, total = [value], 0
    for _ in range(MOST_PARTS):
        if not waiting:
            break
        each = waiting.pop()
        if id(each) in known or isinstance(each, _CODE):
            continue
        known.add(id(each))
        total += sys.getsizeof(each, 0)
        if isinstance(each, dict):
            waiting += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set | frozenset):
            waiting += each
        elif not isinstance(each, _PLAIN):
            waiting += vars(each).values() if hasattr(each, "__dict__") else ()
    return total
