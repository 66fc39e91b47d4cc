"""Compare samples that are made twice, here and in workers: do they depend on the seed alone?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from forebay.errors import shortened
from forebay.trees import opened
from forebay.units import counted


@dataclass(frozen=True, slots=True)
class Difference:
    """A part of a sample that is not the same each time.

    Attributes:
        index: The sample.
        field: Where in the sample: `""` for all of it, or `["image"]`, `[0].boxes`, for example.
        between: Which two ways of making it differ.
    """

    index: Any
    field: str
    between: str


@dataclass(frozen=True, slots=True)
class SampleCheck:
    """What `DataLoader.check` found; false if samples differ.

    Attributes:
        samples: How many were compared.
        seed: The loader's seed; None if it has none.
        differences: The first difference of each sample and field.
    """

    samples: int
    seed: int | None
    differences: tuple[Difference, ...]

    def __bool__(self) -> bool:
        """Return whether all samples were the same each time."""
        return not self.differences

    def __str__(self) -> str:
        """Return the answer as sentences."""
        what = counted(self.samples, "sample")
        seed = "without a seed" if self.seed is None else f"with seed={self.seed}"
        if not self.differences:
            return f"{what}, made twice here and twice in workers {seed}, were the same each time."
        lines = [
            f"  sample {each.index!r}{each.field and ', ' + each.field}: {each.between} differ"
            for each in self.differences
        ]
        advice = (
            "Set seed= for samples that are functions of the seed."
            if self.seed is None
            else "They draw from a generator that forebay cannot reach, one made in __getitem__ "
            "for example, or depend on earlier samples, the time or the process."
        )
        heading = f"{what}, made twice here and twice in workers {seed}:"
        return "\n".join([heading, *lines, advice])


def spread(count: int, length: int) -> list[int]:
    """Return at most so many indices below `length`, from the first to the last."""
    count = max(min(count, length), 1)
    return [number * (length - 1) // max(count - 1, 1) for number in range(count)]


def compared(
    indices: Sequence[Any], made: Callable[[int], Sequence[Any]], seed: int | None
) -> SampleCheck:
    """Make samples in several ways, and compare them.

    Args:
        indices: Of the samples.
        made: Makes them with a number of workers, new ones each time.
        seed: The loader's seed.
    """
    here, again, worker, other = made(0), made(0), made(1), made(1)
    pairs = (
        ("two results in this process", here, again),
        ("two results in workers", worker, other),
        ("this process and a worker", here, worker),
    )
    found: dict[tuple[int, str], Difference] = {}
    for between, ones, twos in pairs:
        for number, (one, two) in enumerate(zip(ones, twos, strict=True)):
            for field in _differing(one, two, ""):
                difference = Difference(indices[number], field, between)
                found.setdefault((number, field), difference)
    return SampleCheck(len(indices), seed, tuple(found.values()))


def _differing(one: Any, two: Any, path: str) -> Iterator[str]:
    """Yield the paths at which two samples differ."""
    first, second = opened(one), opened(two)
    if first is None or second is None:
        if type(one) is not type(two) or not _is_equal(one, two):
            yield path
    elif type(one) is not type(two) or first.keys != second.keys:
        yield path
    else:
        is_field = first.kind in ("namedtuple", "fields")
        for key, left, right in zip(first.keys, first.values, second.values, strict=True):
            step = f".{key}" if is_field else f"[{shortened(key)}]"
            yield from _differing(left, right, path + step)


def _is_equal(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        if one.layout is not torch.strided or two.layout is not torch.strided:
            one, two = one.to_dense(), two.to_dense()
        is_alike = one.shape == two.shape and one.dtype == two.dtype
        return is_alike and bool(torch.all((one == two) | ((one != one) & (two != two))))
    if isinstance(one, np.ndarray | np.generic):
        is_alike = one.shape == two.shape and one.dtype == two.dtype
        return is_alike and bool(np.all((one == two) | ((one != one) & (two != two))))
    if hasattr(one, "tobytes"):  # an image
        return bool(one.tobytes() == two.tobytes())
    if getattr(type(one), "__eq__", None) == object.__eq__:  # it cannot be compared
        return True
    return bool(one == two) or (one != one and two != two)
