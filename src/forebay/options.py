"""The settings of loaders, runs and clusters as frozen records, checked at once."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, Literal, Self

from forebay.base import machine
from forebay.base.output_names import TABLE_FORMATS
from forebay.errors import OptionError

BACKENDS = ("process", "thread", "ray")
# About how large a shard of a cache is. A kill costs each worker the shard that it was writing.
SHARD_BYTES = 64 * 2**20
# The most workers, where the user names no number: waiting for storage takes more than cores.
MAX_WORKERS_FLOOR, MAX_WORKERS_CEILING = 8, 64
# Ray refuses these as names of custom resources.
_NOT_CUSTOM = ("CPU", "GPU", "memory", "object_store_memory")


def plain_number(value: Any) -> Any:
    """Return Python's number for one of NumPy's; anything else unchanged."""
    if isinstance(value, bool | int | float):  # subclasses, too, such as AutoWorkers
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) and hasattr(value, "dtype") else value


def _is_number(value: object) -> bool:
    """Return whether a value is a number that a float can hold; infinities and NaN are not."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_positive(value: object) -> bool:
    return _is_count(value) and value != 0


def _is_name(value: object) -> bool:
    return isinstance(value, str | os.PathLike) and bool(os.fspath(value))


def _names_in(value: Any) -> Iterable[Any]:
    """Return names that may be one or several; what is neither has none that is valid."""
    if isinstance(value, str | os.PathLike):
        return [value]
    return value if isinstance(value, list | tuple | set | frozenset) else [None]


def _check(fine: bool, name: str, value: object, allowed: str) -> None:
    if not fine:
        raise OptionError(f"{name}={value!r} is not valid; it must be {allowed}")


def checked_name(name: object) -> str:
    """Return the name of a loader."""
    _check(isinstance(name, str), "name", name, "a string, or None")
    return str(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ray:
    """Which Ray cluster to use, and the resources of one worker: for `backend=`.

    Attributes:
        address: The cluster's address, such as "10.0.0.1:6379", or "auto" for the one that this
            machine belongs to. None uses that one if there is one, and otherwise starts one on
            this machine only, with a note on stderr. A process that is connected to a cluster
            uses that; the address of another one is an error.
        num_cpus: CPUs for one worker.
        num_gpus: GPUs for one worker; may be a fraction below 1.
        resources: Ray's custom resources for one worker, by name.
        max_workers: The most workers to run; None for as many as there is room for, also on nodes
            that join later.
        runtime_env: Ray's runtime environment: what each node installs or sets first.

    Raises:
        OptionError: A setting is impossible.
    """

    address: str | None = None
    num_cpus: float = 1
    num_gpus: float = 0
    resources: Mapping[str, float] | None = None
    max_workers: int | None = None
    runtime_env: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Check each setting."""
        for each in fields(self):
            object.__setattr__(self, each.name, plain_number(getattr(self, each.name)))
        for name in ("num_cpus", "num_gpus"):
            value = getattr(self, name)
            _check(_is_number(value) and value >= 0, f"Ray({name}=)", value, "0 or more")
        _check(
            self.num_gpus <= 1 or float(self.num_gpus).is_integer(),
            "Ray(num_gpus=)",
            self.num_gpus,
            "at most 1, or a whole number",
        )
        _check(
            isinstance(self.resources, Mapping | None),
            "Ray(resources=)",
            self.resources,
            "a dict of names and amounts, or None",
        )
        resources: Mapping[Any, Any] = self.resources or {}
        for name, value in resources.items():
            _check(_is_number(value) and value >= 0, f"Ray(resources={name!r})", value, "0 or more")
            _check(
                isinstance(name, str) and name not in _NOT_CUSTOM,
                "a name in Ray(resources=)",
                name,
                "a string, and none of Ray's own: use num_cpus and num_gpus for those",
            )
        _check(
            bool(worker_resources(self)),
            "Ray(num_cpus=)",
            self.num_cpus,
            "above 0, unless GPUs or resources are given",
        )
        if self.max_workers is not None:
            check_positive("Ray(max_workers=)", self.max_workers, " or None")


# What the settings of `PreprocessOptions` may be, each by itself.
_ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_workers": (lambda value: value is None or _is_count(value), "0, 1, 2, …, 'auto' or None"),
    "retries": (lambda value: value is None or _is_count(value), "0, 1, 2, … or None"),
    "max_failures": (
        lambda value: value is None or _is_count(value) or (_is_number(value) and 0 <= value < 1),
        "a count (0, 1, 2, …), a fraction between 0 and 1, or None",
    ),
    "limit": (lambda value: value is None or _is_positive(value), "1, 2, 3, … or None"),
    "redo": (
        lambda value: value is None or (bool(value) and all(map(_is_name, _names_in(value)))),
        "a name or a pattern such as 'rec/*.wav', a list of these, or None",
    ),
    "metadata": (lambda value: value in TABLE_FORMATS, " or ".join(map(repr, TABLE_FORMATS))),
    "version": (
        lambda value: value is None or bool(str(value) == value and value),
        "a string such as '2', or None",
    ),
    "accept_changes": (lambda value: value in (True, False), "True or False"),
    "overwrite": (lambda value: value in (True, False), "True or False"),
    "shard_bytes": (_is_positive, "1, 2, 3, …"),
    "concurrency": (lambda value: value is None or _is_positive(value), "1, 2, 3, … or None"),
    "batch_size": (lambda value: value is None or _is_positive(value), "1, 2, 3, … or None"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessOptions:
    """The settings of `forebay.preprocess`, which documents each of them.

    The defaults are those of `forebay.preprocess`; `cache` and `predict` override some.
    """

    num_workers: int | None = None
    backend: str | Ray = "process"
    timeout: float | None = None
    retries: int | None = None
    max_failures: int | float | None = None
    limit: int | None = None
    redo: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None
    metadata: str = "parquet"
    version: str | None = None
    accept_changes: bool = False
    shard_bytes: int = SHARD_BYTES
    concurrency: int | None = None
    batch_size: int | None = None
    overwrite: bool = False
    progress: bool = True

    @classmethod
    def of(cls, arguments: Mapping[str, Any], **others: Any) -> Self:
        """Return the settings among the arguments of an entry point; `others` replace them."""
        given = {each.name: arguments[each.name] for each in fields(cls) if each.name in arguments}
        return cls(**given | others)

    def __post_init__(self) -> None:
        """Check each setting, then those that depend on each other."""
        for each in fields(self):
            object.__setattr__(self, each.name, plain_number(getattr(self, each.name)))
        check_backend(self.backend)
        check_timeout(self.timeout)
        wanted: Any = self.num_workers
        if isinstance(wanted, str):
            # On a cluster more of them than there is room for would only wait for room.
            as_many_as_fit = wanted == "auto" and cluster_of(self.backend) is not None
            object.__setattr__(
                self, "num_workers", None if as_many_as_fit else checked_workers(wanted)
            )
        for name, (is_fine, allowed) in _ALLOWED.items():
            value = getattr(self, name)
            _check(is_fine(value), name, value, allowed)
        if self.cluster is not None and self.num_workers == 0:
            raise OptionError(
                "num_workers=0 works in this process, and backend='ray' on a cluster\n"
                "  Nothing was started. Leave num_workers out for as many as the cluster has room "
                "for, or set it to 1 or more."
            )
        if self.accept_changes and self.redoes_all:
            raise OptionError(
                "accept_changes=True keeps what is done, and redo='*' makes all of it again\n"
                "  Nothing was started. Leave one of them out (--accept-changes or --redo '*')."
            )
        check_killable(self.timeout, self.num_workers)
        if (self.concurrency or 1) > 1 and (self.num_workers == 0 or self.backend == "thread"):
            where = "num_workers=0" if self.num_workers == 0 else "backend='thread'"
            raise OptionError(
                f"concurrency={self.concurrency} is for worker processes, and {where} has none\n"
                "  Nothing was started. Leave concurrency out; with backend='thread', num_workers "
                "is the number of inputs that are processed at once."
            )

    @property
    def at_once(self) -> int:
        """How many inputs each worker processes at once; a trial in this process, one."""
        return (self.concurrency or 1) if self.workers else 1

    @property
    def cluster(self) -> Ray | None:
        """The cluster to work on; None for this machine, where trials (`limit`) run."""
        if self.limit is not None and self.num_workers is None:
            return None
        return cluster_of(self.backend)

    @property
    def workers(self) -> int:
        """Number of workers on this machine; a trial (`limit`) runs in this process by default.

        A cluster without `num_workers` runs as many as it has room for instead.
        """
        if self.num_workers is not None:
            return self.num_workers
        if self.limit is not None:
            return 0 if self.timeout is None else 1
        return whole_cores()

    @property
    def redoes_all(self) -> bool:
        """Return whether everything is done again, from the beginning."""
        return self.redo is not None and not self.redone

    @property
    def redone(self) -> list[str]:
        """The names and patterns of inputs to be done again; none if all of them are."""
        names = [] if self.redo is None else [*map(os.fspath, _names_in(self.redo))]
        return [] if "*" in names else names

    def check_redo(self, *allowed: str) -> None:
        """Raise OptionError unless `redo` is one of these, or None."""
        fine = self.redo is None or self.redo in allowed
        _check(fine, "redo", self.redo, " or ".join([*map(repr, allowed), "None"]))

    @property
    def further_tries(self) -> int:
        """How often an input that failed is tried again."""
        if self.retries is None:
            return 0 if self.stops_at_first_failure else 1
        return self.retries

    @property
    def stops_at_first_failure(self) -> bool:
        """Return whether a failure ends the run; the default is True for a trial (`limit`)."""
        if self.max_failures is None:
            return self.limit is not None
        return self.max_failures == 0


class AutoWorkers(int):
    """`num_workers="auto"` with a limit of the user's choice: `num_workers=AutoWorkers(max=16)`.

    The loader starts with one worker per core, and adds or removes workers while it is iterated, so
    that training does not wait and no worker is idle. The ranks that torchrun starts on a machine
    share its cores equally. Its value as an integer is the largest number of workers, because other
    libraries read `loader.num_workers`. `preprocess`, `cache` and `predict` accept it, too.

    `max` is the largest number of workers, at least 1. None, the default, stands for twice the
    cores that this process may use, but at least 8 and at most 64.

    Raises:
        OptionError: `max` is not a positive integer.
    """

    def __new__(cls, max: int | None = None) -> Self:
        """Check the limit."""
        if max is None:
            max = sorted((MAX_WORKERS_FLOOR, 2 * whole_cores(), MAX_WORKERS_CEILING))[1]
        max = plain_number(max)
        if type(max) is not int or max < 1:
            raise OptionError(f"AutoWorkers(max={max!r}) is not valid; it must be 1, 2, 3, …")
        return super().__new__(cls, max)

    def __repr__(self) -> str:
        """Return the call that makes it."""
        return f"AutoWorkers(max={int(self)})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the limit."""
        return AutoWorkers, (int(self),)


def checked_workers(num_workers: Any) -> Any:
    """Return `AutoWorkers` for "auto", and any number unchanged, for torch to check."""
    if not isinstance(num_workers, str):
        return plain_number(num_workers)
    _check(num_workers == "auto", "num_workers", num_workers, "0, 1, 2, … or 'auto'")
    return AutoWorkers()


def check_positive(name: str, value: object, also: str = "") -> None:
    """Raise OptionError unless a value is 1, 2, 3, …; `also` ends the list of allowed values."""
    _check(_is_positive(value), name, value, f"1, 2, 3, …{also}")


def check_backend(backend: object) -> None:
    """Raise OptionError unless `backend` is the name of a backend, or a `Ray`."""
    names = " or ".join(map(repr, BACKENDS))
    _check(backend in BACKENDS or isinstance(backend, Ray), "backend", backend, names)


def check_timeout(timeout: object) -> None:
    """Raise OptionError unless `timeout` is a finite number of seconds above 0, or None."""
    fine = timeout is None or (_is_number(timeout) and timeout > 0)  # type: ignore[operator]
    _check(fine, "timeout", timeout, "a number of seconds above 0, or None")


def check_killable(timeout: float | None, num_workers: int | None) -> None:
    """Raise OptionError if there is a timeout, and no worker that could be killed."""
    if timeout and num_workers == 0:
        raise OptionError(
            f"timeout={timeout:g} needs a worker that can be killed, and num_workers=0 has none\n"
            "  Nothing was started. Set num_workers to 1 or more, or leave the timeout out."
        )


def cluster_of(backend: str | Ray) -> Ray | None:
    """Return the cluster of a backend; None for this machine."""
    if isinstance(backend, Ray):
        return backend
    return Ray() if backend == "ray" else None


def backend_name(
    backend: Literal["process", "thread", "ray"] | Ray,
) -> Literal["process", "thread", "ray"]:
    """Return the name of a backend."""
    return "ray" if isinstance(backend, Ray) else backend


def worker_resources(where: Ray) -> dict[str, float]:
    """Return the resources of one worker by Ray's names, without those that are 0."""
    amounts = {"CPU": where.num_cpus, "GPU": where.num_gpus, **(where.resources or {})}
    return {name: amount for name, amount in amounts.items() if amount > 0}


def whole_cores() -> int:
    """Return how many whole cores this process may use: at least 1."""
    return max(1, int(machine.usable_cores()))


def ranks_on_node(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks torchrun started on this machine, which share its memory."""
    count = environment.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(count)) if count.isdecimal() else 1


# Sizes of files and of memory are smaller on every system.
MOST_BYTES = 1 << 63

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*|%)\s*", re.ASCII)
_UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)},
}


def depth_in_forebay() -> int:
    """Return the `stacklevel` that makes a warning of the caller point to the user's code."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("forebay."):
        frame, depth = frame.f_back, depth + 1
    return depth


def parse_bytes(size: float | str, name: str = "buffer") -> int:
    """Return a number of bytes written as a number, or as a string such as "30GB" or "50%"."""
    value = -1.0
    size = plain_number(size)
    if isinstance(size, int | float) and not isinstance(size, bool):
        value = size if size % 1 == 0 else -1.0  # 30e9 is a whole number, too
    elif isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match and match[2] == "%":
            value = float(match[1]) / 100 * _memory_for(size, name) / ranks_on_node()
        elif match and match[2].upper() in _UNITS:
            value = float(match[1]) * _UNITS[match[2].upper()]
    if not 1 <= value < MOST_BYTES:
        raise OptionError(
            f"{name}={size!r} is not a size; it must be a whole number of bytes, or a string such "
            "as '800MB', '30GB', '30GiB' or '50%'"
        )
    return int(value)


def _memory_for(size: str, name: str) -> int:
    memory = machine.usable_memory()
    if memory is None:
        raise OptionError(
            f"{name}={size!r}: the system does not report how much memory it has\n"
            "  Give a size, such as '30GB'."
        )
    return memory
