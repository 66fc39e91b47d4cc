"""How a cache is laid out: its files, the blocks in them, and the structure of its samples.

.forebay/cache.json    the index, written last: how samples are divided into shards
.forebay/blocks.bin    24 bytes for each block, in order of samples, little-endian

A block is a record batch, which is read, and checked, without the rest of its shard.
"""

from __future__ import annotations

import sys
import zlib
from bisect import bisect_left, bisect_right
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from forebay.base.output_names import PRIVATE
from forebay.errors import InputError, shortened

INDEX, BLOCKS = f"{PRIVATE}/cache.json", f"{PRIVATE}/blocks.bin"
# The most of an index that is read: more than a million shards take.
INDEX_BYTES = 64 << 20
# Exceptions of wrong types, missing keys and items, huge numbers and deep nesting.
DAMAGES = (LookupError, TypeError, ValueError, ArithmeticError, RecursionError)

BLOCK = np.dtype([("first", "<u8"), ("offset", "<u8"), ("length", "<u4"), ("crc32", "<u4")])
# A block has a little more than its values: its length has to fit in 32 bits.
MOST_BLOCK_BYTES = 4_000_000_000
LEAST_BLOCK_BYTES = 64  # Arrow's metadata alone has more
MOST_SHARD_BYTES = 1 << 62


class Blocks:
    """Where the blocks of a cache are, in order of samples; ValueError if that cannot be.

    Attributes:
        first: The index of each block's first sample.
        offset: Where its message begins in the file of its shard, in bytes.
        length: Bytes of the message, metadata and body.
        crc32: The CRC-32 of these bytes.
    """

    def __init__(
        self,
        data: bytes | memoryview,
        samples: int,
        per_shard: int,
        sizes: Sequence[int],
        known: tuple[int, int] | None = None,
    ) -> None:
        """Check the table: it may be anybody's.

        Args:
            data: The content of its file.
            samples: Of the whole cache.
            per_shard: Samples of each shard but the last.
            sizes: Bytes of each shard.
            known: How many blocks there are, and the CRC-32 of the file; None for any.
        """
        if known is not None and (len(data) // BLOCK.itemsize, zlib.crc32(data)) != known:
            raise ValueError("its checksum or size is not that of the index")
        table = np.frombuffer(data, BLOCK)
        self.first, self.offset = table["first"].view("<i8"), table["offset"].view("<i8")
        self.length, self.crc32 = table["length"], table["crc32"]
        self._samples, self._per_shard = samples, min(per_shard, samples)
        first, offset, length = self.first, self.offset, self.length.astype(np.int64)
        rows = np.diff(first, append=samples)
        shard = np.clip(first // self._per_shard, 0, len(sizes) - 1)
        size = np.array(sizes, np.int64)[shard]
        begins = np.flatnonzero(np.diff(shard, prepend=-1))
        starts = np.arange(len(sizes)) * self._per_shard
        if not np.array_equal(first[begins], starts):
            raise ValueError("not every shard begins with a block")
        is_next = np.diff(shard, prepend=-1) == 0
        for is_wrong, what in (
            ((first < 0) | (rows <= 0), "is not in order of samples"),
            ((offset < 0) | (length == 0) | (offset > size - length), "lies outside its shard"),
            (is_next & (offset < np.roll(offset + length, 1)), "overlaps the block before it"),
        ):
            if is_wrong.any():
                raise ValueError(f"block {int(is_wrong.argmax()):,} {what}")

    def __len__(self) -> int:
        return len(self.first)

    @property
    def mean_bytes(self) -> float:
        """Bytes of a block, on average."""
        return int(self.length.sum(dtype=np.int64)) / len(self)

    def block_of(self, sample: int) -> int:
        """Return the block that holds a sample."""
        return bisect_right(self.first, sample) - 1

    def rows(self, block: int) -> int:
        """Return how many samples a block holds."""
        end = self.first[block + 1] if block + 1 < len(self) else self._samples
        return int(end - self.first[block])

    def of_shard(self, number: int) -> slice:
        """Return which blocks a shard consists of."""
        ends = (self._per_shard * each for each in (number, number + 1))
        return slice(*(bisect_left(self.first, end) for end in ends))


def checksums(data: memoryview, places: Iterable[tuple[int, int]]) -> tuple[list[int], int]:
    """Return the CRC-32 of each block of a shard, and that of all bytes outside of them.

    Args:
        places: Offset and length of each block, in order.
    """
    found, outside, end = [], 0, 0
    for offset, length in places:
        outside, end = zlib.crc32(data[end:offset], outside), offset + length
        found.append(zlib.crc32(data[offset:end]))
    return found, zlib.crc32(data[end:], outside)


def shard_name(number: int) -> str:
    """Return the name of a shard's file."""
    return f"shard-{number:05}.arrow"


def is_shard(name: str) -> bool:
    """Return whether a file has the name of a shard."""
    return name.startswith("shard-") and name.endswith(".arrow") and "/" not in name


# ---- structure -----------------------------------------------------------------------------------
# Split a sample into leaves and a structure for the columns, and rebuild it.
#
#     {"image": tensor, "box": (1, 2)}  ──>  leaves   image, box.0, box.1
#                                       └─>  structure, JSON-serializable
#
# A structure never causes an import: a NamedTuple is made of the user's class only if this process
# has already imported that class.

_MAPPINGS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict}
_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple}
_CONTAINERS = _MAPPINGS | _SEQUENCES
_KEYS = (str, int, float, bool, type(None))

# Identifies a NamedTuple's class: its module, its qualified name and its fields.
Identity = tuple[str, str, tuple[str, ...]]
Classes = Mapping[Identity, type]


class MisfitError(ValueError):
    """A sample cannot be cached, or differs in structure from the others; names the part."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value that is not a container."""

    name: str


@dataclass(frozen=True, slots=True)
class Branch:
    """A container."""

    kind: str
    parts: tuple[Node, ...]
    keys: tuple[Any, ...] = ()
    home: tuple[str, str] = ("", "")

    @property
    def identity(self) -> Identity:
        """The identity of the NamedTuple's class."""
        return (*self.home, self.keys)


Node = Leaf | Branch


def structure_of(sample: Any) -> Node:
    """Return the structure of a sample; every leaf has a unique name."""
    node = _structure(sample, (), set())
    if not names_of(node):
        raise MisfitError(f"the sample is {sample!r}, which contains nothing to store")
    return node


def _structure(value: Any, path: tuple[str, ...], taken: set[str]) -> Node:
    kind = _kind_of(value, path)
    if kind is None:
        name = plain = ".".join(path) or "sample"
        count = 1
        while name in taken:  # the key "a.b" beside the key "b" of "a"
            count += 1
            name = f"{plain}~{count}"
        taken.add(name)
        return Leaf(name)
    keys: tuple[Any, ...] = ()
    home = ("", "")
    if kind in _MAPPINGS:
        keys = tuple(value)
        _check_keys(keys, path)
    elif kind == "namedtuple":
        module, name, keys = _identity(value)
        home = module, name
    values = value.values() if kind in _MAPPINGS else value
    names = keys or range(len(value))
    parts = [
        _structure(part, (*path, str(name)), taken)
        for name, part in zip(names, values, strict=True)
    ]
    return Branch(kind, tuple(parts), keys, home)


def _kind_of(value: Any, path: tuple[str, ...] = ()) -> str | None:
    """Return the kind of a container; None for a leaf."""
    kind = type(value).__name__
    if _CONTAINERS.get(kind) is type(value):
        return kind
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "namedtuple"
    if isinstance(value, Mapping | list | tuple) or hasattr(value, "__dataclass_fields__"):
        raise MisfitError(
            f"{shown(path)} is of type {type(value).__qualname__}, which a cache cannot restore; "
            "make it a dict, a list, a tuple or a NamedTuple"
        )
    return None


def _identity(value: Any) -> Identity:
    cls = type(value)
    return cls.__module__, cls.__qualname__, cls._fields


def _check_keys(keys: tuple[Any, ...], path: tuple[str, ...]) -> None:
    odd = [key for key in keys if type(key) not in _KEYS or key != key or not _is_unicode(key)]
    if odd:
        raise MisfitError(
            f"{shown(path)} has the key {odd[0]!r}, of type {type(odd[0]).__qualname__}; a cache "
            "can restore keys that are Unicode strings or numbers, but not NaN"
        )


def _is_unicode(key: Any) -> bool:
    """Return whether a key can be part of a column's name; a lone surrogate cannot."""
    return str(key).encode(errors="replace").decode() == str(key)


def shown(path: tuple[str, ...]) -> str:
    """Return a part of a sample for messages."""
    return repr(".".join(path)) if path else "the sample"


def leaves_of(node: Node, sample: Any) -> list[Any]:
    """Return the leaves of a sample, in the order of the structure."""
    leaves: list[Any] = []
    _collect(node, sample, (), leaves)
    return leaves


def _collect(node: Node, value: Any, path: tuple[str, ...], leaves: list[Any]) -> None:
    kind = _kind_of(value, path)
    if isinstance(node, Leaf):
        if kind is not None:
            raise MisfitError(f"{shown(path)} is a {kind} here, but not in other samples")
        leaves.append(value)
        return
    if kind != node.kind:
        found = kind or type(value).__qualname__
        raise MisfitError(f"{shown(path)} is a {found} here and a {node.kind} in other samples")
    if kind == "namedtuple":
        module, name, fields = _identity(value)
        if (module, name, fields) != node.identity:
            raise MisfitError(
                f"{shown(path)} is a {module}.{name} with the fields {list(fields)} here and a "
                f"{'.'.join(node.home)} with {list(node.keys)} in other samples"
            )
    elif kind in _MAPPINGS:
        keys = tuple(value)
        # To a dict, 1, 1.0 and True are the same key.
        if keys != node.keys or [*map(type, keys)] != [*map(type, node.keys)]:
            raise MisfitError(
                f"{shown(path)} has the keys {list(keys)} here and {list(node.keys)} in other "
                "samples; give all the same ones, in the same order, with None for what is missing"
            )
        value = value.values()
    elif len(value) != len(node.parts):
        raise MisfitError(
            f"{shown(path)} has {len(value)} items here and {len(node.parts)} in other samples; "
            "make a tensor or an array of what varies in length"
        )
    names = node.keys or range(len(node.parts))
    for name, part, item in zip(names, node.parts, value, strict=True):
        _collect(part, item, (*path, str(name)), leaves)


def names_of(node: Node) -> list[str]:
    """Return the names of the leaves, in order."""
    if isinstance(node, Leaf):
        return [node.name]
    return [name for part in node.parts for name in names_of(part)]


def namedtuples_of(node: Node) -> Iterator[Identity]:
    """Yield the NamedTuple classes of a structure."""
    if isinstance(node, Branch):
        if node.kind == "namedtuple":
            yield node.identity
        for part in node.parts:
            yield from namedtuples_of(part)


def classes_in(sample: Any) -> dict[Identity, type]:
    """Return the NamedTuple classes in a sample."""
    kind = _kind_of(sample)
    if kind is None:
        return {}
    found: dict[Identity, type] = {}
    if kind == "namedtuple":
        found[_identity(sample)] = type(sample)
    for part in sample.values() if kind in _MAPPINGS else sample:
        found |= classes_in(part)
    return found


def loaded_class(identity: Identity) -> type | None:
    """Return the class of a NamedTuple if this process has loaded it, with equal fields."""
    module, qualname, fields = identity
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    is_one = isinstance(found, type) and issubclass(found, tuple)
    return found if is_one and getattr(found, "_fields", None) == fields else None


@lru_cache
def stand_in(name: str, fields: tuple[str, ...]) -> type:
    """Return a substitute for a NamedTuple class that this process does not have."""
    try:
        # It checks that these are identifiers, so that no string of a file is ever executed.
        plain: type = namedtuple(name, fields)  # type: ignore[misc]
    except (ValueError, TypeError) as error:
        raise InputError(f"the structure of a cache is damaged: {error}") from error

    def reduce(self: Any) -> Any:
        return _remade, (name, fields, tuple(self))

    return type(name, (plain,), {"__slots__": (), "__reduce__": reduce})


def _remade(name: str, fields: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    return stand_in(name, fields)(*values)


def rebuilder(node: Node, classes: Classes) -> Callable[[Iterator[Any]], Any]:
    """Return a function that makes a sample of its leaves."""
    if isinstance(node, Leaf):
        return next
    parts = [rebuilder(part, classes) for part in node.parts]
    if node.kind in _MAPPINGS:
        make, keys = _MAPPINGS[node.kind], node.keys
        return lambda leaves: make(zip(keys, [part(leaves) for part in parts], strict=True))
    if node.kind == "namedtuple":
        cls = classes.get(node.identity) or loaded_class(node.identity)
        cls = cls or stand_in(node.home[1].rpartition(".")[2], node.keys)
        return lambda leaves: cls(*[part(leaves) for part in parts])
    if node.kind == "tuple":
        return lambda leaves: tuple([part(leaves) for part in parts])
    return lambda leaves: [part(leaves) for part in parts]


def to_json(node: Node) -> Any:
    """Return a structure as JSON values."""
    if isinstance(node, Leaf):
        return node.name
    described = {"kind": node.kind, "parts": [to_json(part) for part in node.parts]}
    if node.keys:
        described["keys"] = list(node.keys)
    if node.kind == "namedtuple":
        described["home"] = list(node.home)
    return described


def from_json(found: Any) -> Node:
    """Return the structure that `to_json` described."""
    if isinstance(found, str):
        return Leaf(found)
    parts = tuple(from_json(part) for part in found["parts"])
    keys, home = tuple(found.get("keys", ())), tuple(map(str, found.get("home", ("", ""))))
    kind = found["kind"]
    if kind not in (*_CONTAINERS, "namedtuple") or len(home) != 2:
        raise ValueError(f"a container of the kind {shortened(kind)}")
    if len(keys) != len(parts) * (kind not in _SEQUENCES) or not {*map(type, keys)} <= {*_KEYS}:
        raise ValueError(f"{kind} of {len(parts)} parts with the keys {shortened(keys)}")
    return Branch(kind, parts, keys, (home[0], home[1]))
