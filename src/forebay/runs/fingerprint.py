"""A description of the user's work, stored with a run so that the next one can tell a difference.

    work ──> code: hashes of the function's source and, recursively, of the user's code that it uses
         └─> parameters: defaults, partial's arguments, closures, a Dataset's attributes

The two are one walk, since each leads to the other: a parameter may be a function, and a function
brings parameters in its closure. `source_code.py` finds code and takes values apart.

Two processes describe equal work equally (no addresses, no order of sets, no line numbers).
No user code is called except pickling methods, and no exception is raised.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import textwrap
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from forebay.errors import LedgerError, is_credential, without_credentials
from forebay.runs.source_code import (
    HASH,
    PLAIN,
    Holder,
    class_source,
    code_label,
    definition_of,
    dotted_names,
    dumps,
    file_of,
    hash_of_array,
    is_declared_global,
    is_library,
    is_own,
    is_plain,
    module_name,
    name_of,
    namespace_of,
    place_of,
    reference_of,
    sha256_of,
    source_of,
    state_of,
    type_name,
    weights_of,
)

WEIGHTS = "weights."  # begins the names of an nn.Module's
_MOST_NAMED = 1000  # keys of a dict that may be names of credentials
_LONGEST_VALUE = 200  # characters; a longer one is shown as its hash
ASIDE = "(one for each sample)"
_CODE = (type, FunctionType)
_SCALARS = frozenset({str, int, float})  # checked first, since there may be a million of them
_FRAMEWORKS = frozenset({"torch", "forebay", "datasets"})  # whose classes are no code of the user's

Pairs = tuple[tuple[str, str], ...]
Extents = tuple[tuple[int, int], ...]


class Base(NamedTuple):
    """A Dataset that samples come from.

    Attributes:
        extents: Where an output folder numbers its samples: the first number and the count of each
            stretch. In the description of a call, its samples follow those of the Datasets before.
    """

    name: str
    code: Pairs
    parameters: Pairs
    extents: Extents


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A description of the user's work; compare two of them with `difference`.

    Attributes:
        reference: Where to find it again, "/there/split.py:split_audio" or
            "package.module:split_audio"; None if it has no importable name: a lambda, a local
            function, a partial, a Dataset or other object, a notebook's function.
        bases: The Datasets that samples come from; in a ledger also those of earlier calls, since
            another call may use them again.
    """

    name: str
    reference: str | None
    code: Pairs
    parameters: Pairs
    bases: tuple[Base, ...] = ()

    def to_json(self) -> str:
        """Return it as an ASCII string for the ledger."""
        codes = list(dict.fromkeys(each.code for each in self.bases))
        bases = [each._replace(code=codes.index(each.code)) for each in self.bases]  # type: ignore[arg-type]
        return json.dumps(asdict(replace(self, bases=())) | {"codes": codes, "bases": bases})

    @classmethod
    def from_json(cls, text: str) -> Fingerprint:
        """Return what `to_json` wrote."""
        try:
            found = json.loads(text)
            code, parameters, *codes = map(
                _pairs, (found["code"], found["parameters"], *found.get("codes", ()))
            )
            bases = []
            for name, number, given, stretches in found.get("bases", ()):
                extents = tuple((int(first), int(count)) for first, count in stretches)
                if any(not 0 <= first <= first + count < 1 << 62 for first, count in extents):
                    raise ValueError(f"the samples {extents}")
                bases.append(Base(str(name), codes[number], _pairs(given), extents))
            return cls(found["name"], found["reference"], code, parameters, tuple(bases))
        except (ValueError, ArithmeticError, LookupError, TypeError) as error:
            raise LedgerError(
                f"the ledger's description of the work is damaged: {error!r}\n"
                "  Start over with redo='*'."
            ) from error


def _pairs(found: Any) -> Pairs:
    return tuple((str(k), str(v)) for k, v in found)


def describe(work: object, aside: Collection[str] = ()) -> Fingerprint:
    """Describe a function, a callable object, or a map-style Dataset.

    The user's code is followed through globals and their definitions, closures, attributes and
    base classes, but not into the standard library, installed packages, or imports within a
    function. Comments count; the common indentation and trailing blanks do not. What `__getstate__`
    leaves out, such as a cache, does not count. Arrays are hashed, at about 1 GB/s.

    Args:
        aside: Attributes of the object whose values do not count.
    """
    walk, reference = _Walk(aside), None
    try:
        name = walk.add_work(work)
    except Exception:  # noqa: BLE001 - odd objects raise anything; what was found until then counts
        name = type_name(work)
        walk.code[name] = "(it cannot be inspected)"
    with suppress(Exception):
        reference = reference_of(work)
    code = tuple((label, _hashed(text)) for label, text in walk.code.items())
    return Fingerprint(name, reference, code, tuple(sorted(walk.parameters.items())))


def _hashed(text: str) -> str:
    return sha256_of(text.encode("utf-8", "backslashreplace"))


class _Walk:
    """One walk over the user's work."""

    def __init__(self, aside: Collection[str] = ()) -> None:
        self._aside = aside
        self.code: dict[str, str] = {}
        self.parameters: dict[str, str] = {}
        self._seen: dict[object, object] = {}  # by id; holds the objects, so that no id is reused

    def add_work(self, work: Any) -> str:
        """Add the work itself and return its name."""
        if isinstance(work, functools.partial):
            names = list(_signature(work.func))
            names += (f"argument {place + 1}" for place in range(len(names), len(work.args)))
            for name, value in (*zip(names, work.args, strict=False), *work.keywords.items()):
                self._add_parameter(name, value)
            return self.add_work(work.func)
        inner = inspect.unwrap(getattr(work, "__func__", work))
        if isinstance(inner, BuiltinFunctionType):
            self.code[code_label(inner)] = "(built in)"
            return code_label(inner)
        inner = inner if isinstance(inner, _CODE) else type(inner)
        self._add(inner, is_work=module_name(inner).partition(".")[0] not in _FRAMEWORKS)
        owner = getattr(work, "__self__", work)
        self._add(owner)  # of a method, its object; or what a decorator made
        if owner is not work or inner is type(work) or is_own(type(work)):
            self._add_weights("", owner)
            for name, value in _state_of(owner).items():
                self._add_parameter(name, ASIDE if name in self._aside else value)
        for name, parameter in _signature(work).items():
            if parameter.default is not parameter.empty and name not in self.parameters:
                self._add_parameter(name, parameter.default)
        return name_of(inner)

    def _add_parameter(self, name: str, value: Any) -> None:
        """Add a value by name, and each weight of it by its own name if it is an nn.Module."""
        with suppress(Exception):  # an object that raises when inspected
            self._add_weights(f"{name}.", value)
        self._put(self.parameters, name, self._text_of(value, name))

    def _add_weights(self, prefix: str, value: Any) -> None:
        for name, tensor in weights_of(value):
            if (WEIGHTS, id(tensor)) not in self._seen:
                self._put(self.parameters, f"{WEIGHTS}{prefix}{name}", self._text_of(tensor))
                self._seen[WEIGHTS, id(tensor)] = tensor

    def _add(self, value: Any, *, is_work: bool = False) -> bool:
        """Add a function or class of the user, or the work itself; return whether it was code.

        Of any other value, add its class, what a decorator wrapped, the functions in a container.
        """
        if not isinstance(value, _CODE) or not (is_work or is_own(value)):
            inside = [getattr(value, "__wrapped__", None)]
            if not isinstance(value, _CODE):
                inside.append(type(value))
            if isinstance(value, dict | list | tuple) and self._is_new(id(value), value):
                held = value.values() if isinstance(value, dict) else value
                # A function's results may have been added to a cache while it was used.
                inside += (x for x in held if "<locals>" not in getattr(x, "__qualname__", ""))
            for one in inside:
                if not isinstance(one, PLAIN):
                    self._add(one)
            return False
        if not self._is_new(id(value), value):
            return True
        if isinstance(value, FunctionType):
            self._put(self.code, code_label(value), source_of(value))
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                with suppress(ValueError):  # not filled yet
                    self._add_parameter(name, cell.cell_contents)
            self._add_names(value, value.__code__)
            return True
        text, code = class_source(value)
        self._put(self.code, code_label(value), text)
        if code is not None and value.__module__ in sys.modules:
            self._add_names(sys.modules[value.__module__], code)
            return True
        for member in vars(value).values():
            self._add(inspect.unwrap(getattr(member, "fget", member)))
        return False

    def _add_names(self, holder: Holder, code: CodeType) -> None:
        """Add what code refers to by names that start at a global of `holder`."""
        if not is_library(file_of(holder)):
            for names in dotted_names(code):
                self._add_name(holder, *names)

    def _add_name(self, holder: Holder, name: str, *rest: str) -> None:
        space, label = namespace_of(holder), f"{place_of(holder)}:{name}"
        if name not in space or (name.startswith("__") and name.endswith("__")):
            return  # __name__ and __file__ may differ for the same work
        value = space[name]
        if isinstance(value, ModuleType):
            if rest and is_own(value):
                self._add_name(value, *rest)
            return
        # The content of a container or a model changes while it is used; its definition does
        # not. Neither does the definition of a name that a function sets.
        is_set, is_data = is_declared_global(holder, name), is_plain(value)
        if (not is_set and self._add(value)) or not self._is_new(label):
            return
        if is_data and not is_set:
            self._put(self.code, label, f"{name} = {self._text_of(value, name)}")
            return
        homes: list[Holder] = [holder]
        if not is_data:  # it may be imported from one of the user's modules
            loaded: list[Any] = list(sys.modules.values())  # some are not modules
            modules = (one for one in loaded if isinstance(one, ModuleType))
            homes += (one for one in modules if vars(one).get(name) is value and is_own(one))
        for home in homes:
            text, code = definition_of(home, name)
            if text:
                self._put(self.code, f"{place_of(home)}:{name}", text)
                self._add_names(home, code)

    def _is_new(self, key: object, value: object = None) -> bool:
        if key in self._seen:
            return False
        self._seen[key] = value
        return True

    def _put(self, table: dict[str, str], label: str, text: str) -> None:
        """Store a string under a label; a number is added to a label that is taken."""
        lines = (line.rstrip() for line in textwrap.dedent(text).strip("\n").splitlines())
        # A renewed signature is no change.
        text, name, count = without_credentials("\n".join(lines).rstrip()), label, 1
        while table.get(name, text) != text:
            count += 1
            name = f"{label} ({count})"
        table[name] = text

    def _text_of(self, value: object, name: str = "") -> str:
        """Return a value as short JSON, or as a hash: a large one, or one that may be a secret."""
        try:
            text = without_credentials(dumps(_hidden(name, self._plain(value))))
        except Exception:  # noqa: BLE001 - a cycle, or an object that raises when inspected
            return json.dumps(type_name(value))
        if text.startswith(f'"{HASH}'):
            return text[1:-1]
        shown = text.encode("utf-8", "backslashreplace").decode()
        return _hashed(text) if len(text) > _LONGEST_VALUE else shown

    def _plain(self, value: Any) -> Any:
        """Return something for JSON that is equal, in every process, for equal values."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list | tuple):
            return [one if type(one) in _SCALARS else self._plain(one) for one in value]
        if isinstance(value, dict):
            if all(type(key) is str for key in value):
                plain = self._plain
                found = {k: v if type(v) in _SCALARS else plain(v) for k, v in value.items()}
                if len(found) > _MOST_NAMED:  # data
                    return found
                return {k: _hidden(k, v) for k, v in found.items()}
            return {"pairs": {dumps(self._plain(k)): self._plain(v) for k, v in value.items()}}
        if isinstance(value, set | frozenset):
            return {"set": sorted(map(self._plain, value), key=dumps)}
        if isinstance(value, PurePath | ModuleType):
            return str(value) if isinstance(value, PurePath) else value.__name__
        if isinstance(value, bytes | bytearray):
            return sha256_of(value)
        if hasattr(value, "isoformat") and not isinstance(value, type):
            return value.isoformat()
        if (WEIGHTS, id(value)) in self._seen:
            return "(weights)"  # each is a separate parameter
        if (array := hash_of_array(value)) is not None:
            return array
        self._add(value)
        if isinstance(value, (*_CODE, BuiltinFunctionType)):
            return code_label(value)
        state = _state_of(value, with_origins=True)
        return {code_label(type(value)): self._plain(state)} if state else type_name(value)


def _state_of(value: Any, *, with_origins: bool = False) -> dict[str, Any]:
    """Return an object's state; of one of forebay's readers, what its origins do not say."""
    from forebay.base.origins import digest_of_origins, origins_of

    if not (origins := origins_of(value)):
        return state_of(value)
    own = {name: getattr(value, name, None) for name in ("transform", "dataset")}
    kept = {name: each for name, each in own.items() if each is not None}
    return kept | {"origins": digest_of_origins(origins)} if with_origins else kept


def _hidden(name: str, plain: Any) -> Any:
    """Return a value, or its hash if it may be a password or a token."""
    if not isinstance(plain, str | list | dict) or not is_credential(name):
        return plain
    return _hashed(dumps(plain))


def _signature(work: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(work).parameters
    except (ValueError, TypeError):  # built in
        return {}


def describe_parts(parts: Mapping[str, Any]) -> Fingerprint:
    """Return the code and parameters of all parts, for change detection."""
    code: dict[str, str] = {}
    parameters: list[tuple[str, str]] = []
    name = ""
    for role, part in parts.items():
        found = describe(part)
        name = name or found.name
        code.update(found.code)
        parameters += [(f"{role}.{key}", value) for key, value in found.parameters]
    return Fingerprint(name, None, tuple(code.items()), tuple(parameters))


def text_of_part(value: Any) -> str:
    """Return an element of such an attribute as a short string, equal for equal elements."""
    return repr(value) if type(value) in (int, float, bool) else _Walk()._text_of(value)
