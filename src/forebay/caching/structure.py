"""The structure of samples: split one into leaves, which have a column each, and rebuild it.

    {"image": tensor, "box": (1, 2)}  ──>  leaves   image, box.0, box.1
                                      └─>  structure, JSON-serializable

Where samples differ in keys, a key is optional: a column says whether a sample has it. Where they
differ otherwise, as in the length of a list, the structure ends in a leaf, and its column holds
containers (see `base/value_types.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from forebay.base.value_classes import (
    CLASSES,
    MAPPINGS,
    MOST_DEPTH,
    Classes,
    Identity,
    class_identity,
    class_of,
    container_kind,
    is_unicode,
    items_of,
    with_fields,
)
from forebay.base.value_inference import are_in_order, joined_all, merged_keys, spec_of
from forebay.base.value_types import MOST_KEYS, WAS_MISSING, WAS_NONE, Nested, Spec
from forebay.errors import shortened

_BRANCHES = (*MAPPINGS, *CLASSES, "list", "tuple")
_KEYS = (str, int, float, bool, type(None))
# The value of a key that a sample does not have.
MISSING: Any = type("Missing", (), {"__slots__": ()})()


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value with a column of its own."""

    name: str


@dataclass(frozen=True, slots=True)
class Branch:
    """A container, or an "optional" value: a leaf that says whether there is one, and the value."""

    kind: str
    parts: tuple[Node, ...]
    keys: tuple[Any, ...] = ()
    home: tuple[str, str] = ("", "")

    @property
    def identity(self) -> Identity:
        """The identity of the class of a NamedTuple or a dataclass."""
        return (*self.home, self.keys)


Node = Leaf | Branch


def structure_of(sample: Any) -> Node:
    """Return the structure of a sample; every leaf has a unique name."""
    return _named(_structure(sample, 0), (), set())


def _structure(value: Any, depth: int) -> Node:
    kind = branch_kind(value)
    if kind is None or depth > MOST_DEPTH or (kind == "list" and _has_any_length(value)):
        return Leaf("")
    keys, values = items_of(value, kind)
    home = ("", "")
    if kind in MAPPINGS and not all(map(_is_key, keys)):
        return Leaf("")
    if kind in CLASSES:
        *names, fields = class_identity(value)
        if len(keys) < len(fields):  # some are not set
            return Leaf("")
        home = (str(names[0]), str(names[1]))
    parts = tuple(_structure(each, depth + 1) for each in values)
    return Branch(kind, parts, () if kind in ("list", "tuple") else tuple(keys), home)


def branch_kind(value: Any) -> str | None:
    """Return the kind of a container whose parts may have columns; None for anything else."""
    kind = container_kind(value)
    return kind if kind in _BRANCHES else None


def _has_any_length(value: list[Any]) -> bool:
    """Return whether the length of a list probably varies: it is empty, of strings, of records."""
    if {*map(type, value)} <= {str}:
        return True
    return all(container_kind(each) in (*MAPPINGS, *CLASSES) for each in value)


def _is_key(key: Any) -> bool:
    return type(key) in _KEYS and key == key and is_unicode(key)


def _named(node: Node, path: tuple[str, ...], taken: set[str]) -> Node:
    """Return a structure whose leaves have names."""
    if isinstance(node, Leaf):
        name = plain = ".".join(path) or "sample"
        count = 1
        while name in taken:  # the key "a.b" beside the key "b" of "a"
            count += 1
            name = f"{plain}~{count}"
        taken.add(name)
        return Leaf(name)
    if node.kind == "optional":
        own = (*path[:-1], f"{path[-1]}?")
        parts = _named(node.parts[0], own, taken), _named(node.parts[1], path, taken)
        return replace(node, parts=parts)
    names = node.keys or range(len(node.parts))
    pairs = zip(names, node.parts, strict=True)
    return replace(
        node, parts=tuple(_named(part, (*path, str(name)), taken) for name, part in pairs)
    )


def leaves_of(node: Node, sample: Any) -> list[Any] | None:
    """Return the leaves of a sample, in order of the structure; None if it has another one."""
    leaves: list[Any] = []
    return leaves if _collect(node, sample, leaves) else None


def _collect(node: Node, value: Any, leaves: list[Any]) -> bool:
    if isinstance(node, Leaf):
        leaves.append(value)
        return True
    if node.kind == "optional":
        leaves.append(value is not MISSING)
        if value is MISSING:
            leaves += [None] * len(names_of(node.parts[1]))
            return True
        return _collect(node.parts[1], value, leaves)
    if container_kind(value) != node.kind:
        return False
    if node.kind in MAPPINGS:
        # To a dict, 1, 1.0 and True are the same key.
        keys = tuple(value)
        if keys == node.keys and [*map(type, keys)] == [*map(type, node.keys)]:
            value = value.values()
        elif _is_held(node, keys):
            value = [value.get(key, MISSING) for key in node.keys]
        else:
            return False
    elif node.kind in CLASSES:
        if class_identity(value) != node.identity:
            return False
        _, value = items_of(value, node.kind)
    if len(value) != len(node.parts):
        return False
    return all(_collect(*pair, leaves) for pair in zip(node.parts, value, strict=True))


def _is_held(node: Branch, keys: tuple[Any, ...]) -> bool:
    """Return whether a mapping with these keys has no others, and all that are not optional."""
    known, given = _typed(node.keys), {*_typed(keys)}
    pairs = zip(known, node.parts, strict=True)
    needed = {each for each, part in pairs if not _is_optional(part)}
    is_ordered = node.kind == "dict" or are_in_order(node.keys, keys)
    return needed <= given <= {*known} and is_ordered


def _typed(keys: tuple[Any, ...]) -> list[tuple[type, Any]]:
    return [(type(key), key) for key in keys]


def _is_optional(node: Node) -> TypeGuard[Branch]:
    return isinstance(node, Branch) and node.kind == "optional"


def generalized(node: Node, sample: Any) -> Node:
    """Return the structure that holds a sample, too; its leaves have new names."""
    return _named(_generalized(node, sample), (), set())


def _generalized(node: Node, value: Any) -> Node:
    if isinstance(node, Leaf):
        return node
    if node.kind == "optional":
        if value is MISSING:
            return node
        return replace(node, parts=(node.parts[0], _generalized(node.parts[1], value)))
    kind = branch_kind(value)
    if kind != node.kind:
        return Leaf("")
    _, values = items_of(value, kind)
    if kind in MAPPINGS:
        return _merged(node, value)
    is_other = kind in CLASSES and class_identity(value) != node.identity
    if is_other or len(values) != len(node.parts):
        return Leaf("")
    parts = zip(node.parts, values, strict=True)
    return replace(node, parts=tuple(_generalized(*pair) for pair in parts))


def _merged(node: Branch, value: Any) -> Node:
    """Return the structure of mappings, some of which have keys that others have not."""
    given = tuple(value)
    keys = merged_keys(node.keys, given)
    typed = {*_typed(node.keys), *_typed(given)}
    is_new = len(keys) > len(node.keys)
    if (
        not all(map(_is_key, given))
        or len(typed) != len(keys)
        or (is_new and len(keys) > MOST_KEYS)
        or (node.kind == "OrderedDict" and not are_in_order(node.keys, given))
    ):
        return Leaf("")
    known, parts = dict(zip(node.keys, node.parts, strict=True)), []
    for key in keys:
        part = known.get(key) or Branch("optional", (Leaf(""), _structure(value[key], 1)))
        if key not in value and not _is_optional(part):
            part = Branch("optional", (Leaf(""), part))
        parts.append(_generalized(part, value.get(key, MISSING)))
    return replace(node, parts=tuple(parts), keys=keys)


def carried(node: Node, old: Node, specs: Iterator[Spec]) -> list[Spec]:
    """Return the types that the leaves of a structure have for samples of one that it generalizes.

    Args:
        specs: Of the leaves of the old one, in order.

    Raises:
        MisfitError: Parts that have one column now have no type in common.
    """
    if isinstance(node, Leaf):
        return [_spec_of_node(old, specs)]
    if node.kind == "optional":
        if _is_optional(old):
            return [next(specs), *carried(node.parts[1], old.parts[1], specs)]
        return [Spec("bool"), *carried(node.parts[1], old, specs)]
    assert isinstance(old, Branch), "a leaf is never divided"
    known = dict(zip(_typed(old.keys) or range(len(old.parts)), old.parts, strict=True))
    found: list[Spec] = []
    for key, part in zip(_typed(node.keys) or range(len(node.parts)), node.parts, strict=True):
        if key in known:
            found += carried(part, known[key], specs)
        else:
            found += [Spec("none")] * len(names_of(part))
    return found


def _spec_of_node(node: Node, specs: Iterator[Spec]) -> Spec:
    """Return the type of whole values, given those of their leaves."""
    if isinstance(node, Leaf):
        return next(specs)
    if node.kind == "optional":
        next(specs)
        return _spec_of_node(node.parts[1], specs)
    parts = tuple(_spec_of_node(part, specs) for part in node.parts)
    if node.kind == "list":
        return Nested("list", parts=(joined_all(parts),))
    is_mapping = node.kind in MAPPINGS
    if is_mapping and (len(parts) > MOST_KEYS or {*map(type, node.keys)} - {str}):
        keys = joined_all(map(spec_of, node.keys))
        return Nested("pairs", node.kind, parts=(keys, joined_all(parts)))
    names = tuple(map(str, node.keys or range(len(parts))))
    states = [
        WAS_NONE * (spec.kind == "none") | WAS_MISSING * _is_optional(part)
        for part, spec in zip(node.parts, parts, strict=True)
    ]
    has_states = is_mapping or node.kind == "fields"
    return Nested(
        node.kind, parts=parts, keys=names, home=node.home, states=tuple(states) * has_states
    )


def names_of(node: Node) -> list[str]:
    """Return the names of the leaves, in order."""
    if isinstance(node, Leaf):
        return [node.name]
    return [name for part in node.parts for name in names_of(part)]


def classes_of(node: Node) -> Iterator[tuple[Identity, bool]]:
    """Yield the classes of a structure, each with whether it is that of a NamedTuple."""
    if isinstance(node, Branch):
        if node.kind in CLASSES:
            yield node.identity, node.kind == "namedtuple"
        for part in node.parts:
            yield from classes_of(part)


def rebuilder(node: Node, classes: Classes) -> Callable[[Iterator[Any]], Any]:
    """Return a function that makes a sample of its leaves."""
    if isinstance(node, Leaf):
        return next
    parts = [rebuilder(part, classes) for part in node.parts]
    if node.kind == "optional":
        return lambda leaves: _if_given(*[part(leaves) for part in parts])
    if node.kind in MAPPINGS:
        make, keys = MAPPINGS[node.kind], node.keys
        if not any(map(_is_optional, node.parts)):
            return lambda leaves: make(zip(keys, [part(leaves) for part in parts], strict=True))
        return lambda leaves: make(_present(keys, [part(leaves) for part in parts]))
    if node.kind in CLASSES:
        cls: Any = class_of(node.identity, node.kind == "namedtuple", classes)
        if node.kind == "namedtuple":
            return lambda leaves: cls(*[part(leaves) for part in parts])
        names = node.keys
        return lambda leaves: with_fields(
            cls, zip(names, [part(leaves) for part in parts], strict=True)
        )
    if node.kind == "tuple":
        return lambda leaves: tuple([part(leaves) for part in parts])
    return lambda leaves: [part(leaves) for part in parts]


def _if_given(is_given: bool, value: Any) -> Any:
    return value if is_given else MISSING


def _present(keys: tuple[Any, ...], values: list[Any]) -> Iterator[tuple[Any, Any]]:
    pairs = zip(keys, values, strict=True)
    return ((key, value) for key, value in pairs if value is not MISSING)


def structure_to_json(node: Node) -> Any:
    """Return a structure as JSON values."""
    if isinstance(node, Leaf):
        return node.name
    described = {"kind": node.kind, "parts": [structure_to_json(part) for part in node.parts]}
    if node.keys:
        described["keys"] = list(node.keys)
    if node.kind in CLASSES:
        described["home"] = list(node.home)
    return described


def structure_from_json(found: Any) -> Node:
    """Return the structure that `structure_to_json` returned."""
    if isinstance(found, str):
        return Leaf(found)
    parts = tuple(structure_from_json(part) for part in found["parts"])
    keys, home = tuple(found.get("keys", ())), tuple(map(str, found.get("home", ("", ""))))
    kind = found["kind"]
    if kind == "optional" and len(parts) == 2 and isinstance(parts[0], Leaf):
        return Branch(kind, parts)
    if kind not in _BRANCHES or len(home) != 2:
        raise ValueError(f"a container of the kind {shortened(kind)}")
    is_keyed = kind not in ("list", "tuple")
    if len(keys) != len(parts) * is_keyed or not {*map(type, keys)} <= {*_KEYS}:
        raise ValueError(f"{kind} of {len(parts)} parts with the keys {shortened(keys)}")
    return Branch(kind, parts, keys, (home[0], home[1]))


def is_generalized(wide: Node, node: Node) -> bool:
    """Return whether a structure holds all samples of another one, but for its optional keys."""
    if _is_optional(wide) and not _is_optional(node):
        return is_generalized(wide.parts[1], node)
    if isinstance(wide, Leaf) or isinstance(node, Leaf):
        return isinstance(wide, Leaf)
    if (wide.kind, wide.home) != (node.kind, node.home):
        return False
    if wide.kind not in MAPPINGS:
        parts = zip(wide.parts, node.parts, strict=False)
        return len(wide.parts) == len(node.parts) and all(is_generalized(*pair) for pair in parts)
    known = dict(zip(_typed(wide.keys), wide.parts, strict=True))
    pairs = zip(_typed(node.keys), node.parts, strict=True)
    return all(key in known and is_generalized(known[key], part) for key, part in pairs)
