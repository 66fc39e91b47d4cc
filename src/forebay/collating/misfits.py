"""Find the sample that does not fit its batch, and describe it in the error.

    samples ── find ──> the first place where one differs from most ── refusal ──> InputError

It runs only after collating failed, so it need not be fast. Samples are numbered from 0 within the
batch, as in the loader's note on the error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from forebay.errors import InputError

# The path to a value within a sample: keys, names and positions.
Path = tuple[Hashable, ...]

# The types that default_collate accepts besides containers.
_COLLATED = (torch.Tensor, np.ndarray, np.generic, float, int, str, bytes)
_TEXTS = (str, bytes)


class Misfit(NamedTuple):
    """Why a batch cannot be collated.

    Attributes:
        path: Where in the samples.
        number: Which sample of the batch, from 0; None if it is all of them.
        what: A description of its value there.
        others: A description of the other samples' values there; "" if that does not help.
    """

    path: Path
    number: int | None
    what: str
    others: str


def odd_one(path: Path, descriptions: Sequence[str]) -> Misfit | None:
    """Return the first sample whose description differs from most; None if all are equal."""
    counts = Counter(descriptions)
    if len(counts) < 2:
        return None
    # In a tie, the description that comes first in the batch counts as that of most.
    usual = counts.most_common(1)[0][0]
    number, what = next((at, one) for at, one in enumerate(descriptions) if one != usual)
    del counts[what]
    others = ", ".join(
        f"in {count} other{'s' * (count > 1)} it is {one}" for one, count in counts.most_common(3)
    )
    return Misfit(path, number, what, others + (", and more" if len(counts) > 3 else ""))


def refusal(misfit: Misfit, batch_size: int, advice: str) -> InputError:
    """Return the error that names a misfit; `advice` says what to do, in whole sentences."""
    field = f"field {shown(misfit.path)}" if misfit.path else ""
    if misfit.number is None:
        whose = f"{field} of every sample" if field else "every sample"
        first = f"a batch of {batch_size} cannot be made: {whose} is {misfit.what}"
        counting = ""
    else:
        first = (
            f"sample {misfit.number} of a batch of {batch_size} does not fit: {field or 'it'} is "
        )
        first += misfit.what + (f"; {misfit.others}" if misfit.others else "")
        counting = "  Samples count from 0, as in the list of samples that a loader adds below.\n"
    return InputError(f"{first}\n{counting}  The batch was not made. {advice}")


def shown(path: Path) -> str:
    """Return a path in the usual notation: `image`, `boxes.corners` or `[0]['left eye']`."""
    parts = [
        f".{part}" if isinstance(part, str) and part.isidentifier() else f"[{part!r}]"
        for part in path
    ]
    return "".join(parts).removeprefix(".")


def described(value: Any, exactly: bool = True) -> str:
    """Describe what decides whether a value can be collated with others: its shape, dtype or type.

    Args:
        value: Anything that a sample may hold.
        exactly: Distinguish dtypes, and numbers of different types.
    """
    if isinstance(value, torch.Tensor) and value.is_nested:
        return "a nested tensor"  # it has no shape
    if isinstance(value, torch.Tensor):
        dtype = f", {str(value.dtype).removeprefix('torch.')}" if exactly else ""
        device = "" if value.device.type == "cpu" else f", on {value.device}"
        layout = "" if value.layout is torch.strided else f", {value.layout}"
        return f"a tensor of shape {tuple(value.shape)}{dtype}{device}{layout}"
    if isinstance(value, np.ndarray):
        dtype = f", {value.dtype}" if exactly else ""
        return f"an array of shape {value.shape}{dtype}"
    if isinstance(value, Mapping):
        keys = ", ".join(repr(key) for key in value)
        return f"{named(value)} with {keys or 'no keys'}"
    if is_dataclass(value):
        return f"{named(value)}, a dataclass"
    if isinstance(value, int | float | np.number) and not exactly:
        return "a number"
    if isinstance(value, Sequence) and not isinstance(value, _TEXTS):
        return f"{named(value)} of {len(value)}"
    return "None" if value is None else named(value)


def named(value: Any) -> str:
    """Return the name of a value's type with its article: "a str", "an int"."""
    name = type(value).__name__
    return f"a{'n' * name.lower().startswith(tuple('aeiou'))} {name}"


def find(samples: Sequence[Any]) -> Misfit | None:
    """Return what makes default_collate fail on these samples, if it can be found."""
    return _find((), samples, exactly=False) or _find((), samples, exactly=True)


def _find(path: Path, values: Sequence[Any], exactly: bool) -> Misfit | None:
    first = values[0]
    misfit = odd_one(path, [described(_unordered(value), exactly) for value in values])
    if misfit is not None:
        return misfit
    if isinstance(first, Mapping):
        keys, get = list(first), _get
    elif isinstance(first, Sequence) and not isinstance(first, _TEXTS):
        names = getattr(first, "_fields", None)
        keys, get = list(names or range(len(first))), getattr if names else _get
    elif isinstance(first, _COLLATED) and _is_stacked(first):
        return None
    else:
        return Misfit(path, None, described(first), "")
    for key in keys:
        below = [get(value, key) for value in values]
        misfit = _find((*path, key), below, exactly)
        if misfit is not None:
            return misfit
    return None


def _is_stacked(value: Any) -> bool:
    """Whether default_collate can stack values of this type and dtype."""
    if isinstance(value, torch.Tensor):
        return value.layout is torch.strided and not value.is_nested
    if isinstance(value, np.ndarray | np.generic) and not isinstance(value, _TEXTS):
        try:
            torch.as_tensor(np.zeros(0, value.dtype))
        except (TypeError, ValueError):  # such as dates, and the other byte order
            return False
    return True


def _unordered(value: Any) -> Any:
    """Return a dict with its keys sorted, since dicts may differ only in their order."""
    return dict.fromkeys(sorted(value, key=repr)) if isinstance(value, Mapping) else value


_get: Callable[[Any, Any], Any] = lambda value, key: value[key]  # noqa: E731
